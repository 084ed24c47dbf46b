//! The functions of MPI that this library replaces. Each executes a call, or passes it on.
//!
//! The forms for large counts (`_c`) exist in every program that loads this library, also if its MPI
//! library does not have them: then they are passed on as the forms for small counts.

#![allow(non_snake_case, reason = "the names of MPI")]

use std::ffi::{c_int, c_void};

use crate::communicator::Context;
use crate::handles::Handles;
use crate::library::{Handle, Library};
use crate::moves::{self, Source, Target};
use crate::reductions::{self, Reduction};
use crate::team;

/// Passes a call with large counts on. Without such a form in the MPI library, all counts must fit into
/// an `int`.
macro_rules! pass_on_large {
    ($library:expr, $comm:expr, $large:expr, [$($count:ident),+], $small:expr) => {
        match $large {
            Some(large) => large,
            None => {
                $(let Ok($count) = c_int::try_from($count) else {
                    return too_large($library, $comm);
                };)+
                return $small;
            }
        }
    };
}

/// Reports a count that the MPI library cannot express.
#[cold]
fn too_large(library: &Library, comm: Handle) -> c_int {
    let Some(handles) = Handles::get(library) else { return 1 };
    // SAFETY: MPI checks the communicator.
    unsafe { (library.functions.comm_call_errhandler)(comm, handles.error_count) };
    handles.error_count
}

/// The number of collectives that this library has executed in this process. Programs can ask for it, as
/// a weak symbol, to find out whether the library is in use.
#[unsafe(no_mangle)]
pub extern "C" fn memferry_coll_executed() -> u64 {
    team::executed()
}

/// `MPI_Barrier`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Barrier(comm: Handle) -> c_int {
    let library = Library::get();
    match Context::of(library, comm) {
        Some(context) => team::run(&context, team::HostTeam::barrier).err().unwrap_or(0),
        // SAFETY: the arguments are those of the caller.
        None => unsafe { (library.functions.barrier)(comm) },
    }
}

/// `MPI_Bcast`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Bcast(
    buffer: *mut c_void,
    count: c_int,
    datatype: Handle,
    root: c_int,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let data = Target { start: buffer, count: count.into(), datatype };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        moves::broadcast(library, data, root, comm)
            .unwrap_or_else(|| (library.functions.bcast)(buffer, count, datatype, root, comm))
    }
}

/// `MPI_Bcast_c`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Bcast_c(
    buffer: *mut c_void,
    count: i64,
    datatype: Handle,
    root: c_int,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let functions = &library.functions;
    let data = Target { start: buffer, count, datatype };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        if let Some(code) = moves::broadcast(library, data, root, comm) {
            return code;
        }
        let large = pass_on_large!(library, comm, functions.bcast_c, [count], {
            (functions.bcast)(buffer, count, datatype, root, comm)
        });
        large(buffer, count, datatype, root, comm)
    }
}

/// `MPI_Reduce`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Reduce(
    from: *const c_void,
    to: *mut c_void,
    count: c_int,
    datatype: Handle,
    operation: Handle,
    root: c_int,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let call = Reduction { from, to, count: count.into(), datatype, operation };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        reductions::reduce(library, call, root, comm).unwrap_or_else(|| {
            (library.functions.reduce)(from, to, count, datatype, operation, root, comm)
        })
    }
}

/// `MPI_Reduce_c`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Reduce_c(
    from: *const c_void,
    to: *mut c_void,
    count: i64,
    datatype: Handle,
    operation: Handle,
    root: c_int,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let functions = &library.functions;
    let call = Reduction { from, to, count, datatype, operation };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        if let Some(code) = reductions::reduce(library, call, root, comm) {
            return code;
        }
        let large = pass_on_large!(library, comm, functions.reduce_c, [count], {
            (functions.reduce)(from, to, count, datatype, operation, root, comm)
        });
        large(from, to, count, datatype, operation, root, comm)
    }
}

/// `MPI_Allreduce`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Allreduce(
    from: *const c_void,
    to: *mut c_void,
    count: c_int,
    datatype: Handle,
    operation: Handle,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let call = Reduction { from, to, count: count.into(), datatype, operation };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        reductions::allreduce(library, call, comm).unwrap_or_else(|| {
            (library.functions.allreduce)(from, to, count, datatype, operation, comm)
        })
    }
}

/// `MPI_Allreduce_c`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Allreduce_c(
    from: *const c_void,
    to: *mut c_void,
    count: i64,
    datatype: Handle,
    operation: Handle,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let functions = &library.functions;
    let call = Reduction { from, to, count, datatype, operation };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        if let Some(code) = reductions::allreduce(library, call, comm) {
            return code;
        }
        let large = pass_on_large!(library, comm, functions.allreduce_c, [count], {
            (functions.allreduce)(from, to, count, datatype, operation, comm)
        });
        large(from, to, count, datatype, operation, comm)
    }
}

/// `MPI_Gather`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Gather(
    from: *const c_void,
    sent: c_int,
    sent_type: Handle,
    to: *mut c_void,
    received: c_int,
    received_type: Handle,
    root: c_int,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let gather = library.functions.gather;
    let source = Source { start: from, count: sent.into(), datatype: sent_type };
    let target = Target { start: to, count: received.into(), datatype: received_type };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        moves::gather(library, source, target, root, comm).unwrap_or_else(|| {
            gather(from, sent, sent_type, to, received, received_type, root, comm)
        })
    }
}

/// `MPI_Gather_c`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Gather_c(
    from: *const c_void,
    sent: i64,
    sent_type: Handle,
    to: *mut c_void,
    received: i64,
    received_type: Handle,
    root: c_int,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let functions = &library.functions;
    let source = Source { start: from, count: sent, datatype: sent_type };
    let target = Target { start: to, count: received, datatype: received_type };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        if let Some(code) = moves::gather(library, source, target, root, comm) {
            return code;
        }
        let large = pass_on_large!(library, comm, functions.gather_c, [sent, received], {
            (functions.gather)(from, sent, sent_type, to, received, received_type, root, comm)
        });
        large(from, sent, sent_type, to, received, received_type, root, comm)
    }
}

/// `MPI_Allgather`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Allgather(
    from: *const c_void,
    sent: c_int,
    sent_type: Handle,
    to: *mut c_void,
    received: c_int,
    received_type: Handle,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let source = Source { start: from, count: sent.into(), datatype: sent_type };
    let target = Target { start: to, count: received.into(), datatype: received_type };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        moves::allgather(library, source, target, comm).unwrap_or_else(|| {
            (library.functions.allgather)(from, sent, sent_type, to, received, received_type, comm)
        })
    }
}

/// `MPI_Allgather_c`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Allgather_c(
    from: *const c_void,
    sent: i64,
    sent_type: Handle,
    to: *mut c_void,
    received: i64,
    received_type: Handle,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let functions = &library.functions;
    let source = Source { start: from, count: sent, datatype: sent_type };
    let target = Target { start: to, count: received, datatype: received_type };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        if let Some(code) = moves::allgather(library, source, target, comm) {
            return code;
        }
        let large = pass_on_large!(library, comm, functions.allgather_c, [sent, received], {
            (functions.allgather)(from, sent, sent_type, to, received, received_type, comm)
        });
        large(from, sent, sent_type, to, received, received_type, comm)
    }
}

/// `MPI_Alltoall`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Alltoall(
    from: *const c_void,
    sent: c_int,
    sent_type: Handle,
    to: *mut c_void,
    received: c_int,
    received_type: Handle,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let source = Source { start: from, count: sent.into(), datatype: sent_type };
    let target = Target { start: to, count: received.into(), datatype: received_type };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        moves::alltoall(library, source, target, comm).unwrap_or_else(|| {
            (library.functions.alltoall)(from, sent, sent_type, to, received, received_type, comm)
        })
    }
}

/// `MPI_Alltoall_c`.
///
/// # Safety
///
/// As MPI says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Alltoall_c(
    from: *const c_void,
    sent: i64,
    sent_type: Handle,
    to: *mut c_void,
    received: i64,
    received_type: Handle,
    comm: Handle,
) -> c_int {
    let library = Library::get();
    let functions = &library.functions;
    let source = Source { start: from, count: sent, datatype: sent_type };
    let target = Target { start: to, count: received, datatype: received_type };
    // SAFETY: the arguments are those of the caller.
    unsafe {
        if let Some(code) = moves::alltoall(library, source, target, comm) {
            return code;
        }
        let large = pass_on_large!(library, comm, functions.alltoall_c, [sent, received], {
            (functions.alltoall)(from, sent, sent_type, to, received, received_type, comm)
        });
        large(from, sent, sent_type, to, received, received_type, comm)
    }
}
