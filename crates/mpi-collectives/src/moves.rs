//! Collectives that move bytes: broadcast, gather, allgather, alltoall.
//!
//! Every function returns `None` if the call is to be passed on. This depends only on the bytes of a
//! block, which MPI requires to be equal at all ranks, and on arguments that are wrong.

use std::ffi::{c_int, c_void};

use crate::communicator::Context;
use crate::library::{Handle, Library};
use crate::packing::{Elements, ReceiveBytes, SendBytes};
use crate::report;
use crate::team::{self, TeamError};

/// Address, count and datatype of data that a call reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) start: *const c_void,
    pub(crate) count: i64,
    pub(crate) datatype: Handle,
}

/// Address, count and datatype of data that a call writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) start: *mut c_void,
    pub(crate) count: i64,
    pub(crate) datatype: Handle,
}

impl Source {
    fn is_in_place(self, context: &Context) -> bool {
        self.start == context.handles.in_place
    }

    fn elements(self, context: &Context) -> Option<Elements> {
        let elements = Elements::of(context, self.count, self.datatype)?;
        is_given(self.start, elements).then_some(elements)
    }
}

impl Target {
    fn elements(self, context: &Context) -> Option<Elements> {
        let elements = Elements::of(context, self.count, self.datatype)?;
        is_given(self.start, elements).then_some(elements)
    }
}

/// Whether there is memory: only datatypes with absolute addresses have none.
fn is_given(start: *const c_void, elements: Elements) -> bool {
    !start.is_null() || elements.plain.is_none()
}

/// The rank of a root; `None` if there is no such rank, which the MPI library reports.
pub(crate) fn root_of(context: &Context, root: c_int) -> Option<usize> {
    usize::try_from(root).ok().filter(|&root| root < context.communicator.size)
}

/// The code that a call returns.
fn code(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// # Safety
///
/// The arguments are those of a call of `MPI_Bcast`.
#[inline]
pub(crate) unsafe fn broadcast(
    library: &'static Library,
    data: Target,
    root: c_int,
    comm: Handle,
) -> Option<c_int> {
    let context = &Context::of(library, comm)?;
    let root = root_of(context, root)?;
    let elements = data.elements(context)?;
    // SAFETY: the program passes memory for its elements, which the root reads and the others write.
    let done = unsafe {
        if context.communicator.rank == root {
            let sent = SendBytes::new(context, data.start, elements);
            team::prepared(context, sent).and_then(|bytes| {
                let start = bytes.as_ptr().cast_mut();
                team::run(context, |team| team.broadcast(root, start, elements.bytes))
            })
        } else {
            let mut bytes = ReceiveBytes::new(data.start, elements);
            let start = bytes.as_mut_ptr();
            let result = team::run(context, |team| team.broadcast(root, start, elements.bytes));
            bytes.finish(context, result)
        }
    };
    Some(code(done))
}

/// # Safety
///
/// The arguments are those of a call of `MPI_Gather`.
pub(crate) unsafe fn gather(
    library: &'static Library,
    source: Source,
    target: Target,
    root: c_int,
    comm: Handle,
) -> Option<c_int> {
    let context = &Context::of(library, comm)?;
    let root = root_of(context, root)?;
    let (rank, size) = (context.communicator.rank, context.communicator.size);
    if rank != root {
        let block = source.elements(context)?;
        block.times(size)?;
        // SAFETY: the program passes memory for its elements.
        let done = unsafe {
            let sent = SendBytes::new(context, source.start, block);
            team::prepared(context, sent).and_then(|bytes| {
                team::run(context, |team| {
                    team.gather(root, bytes.as_ptr(), block.bytes, std::ptr::null_mut())
                })
            })
        };
        return Some(code(done));
    }
    let block = target.elements(context)?;
    let all = block.times(size)?;
    // SAFETY: the program passes memory for the blocks of all ranks.
    let done = unsafe {
        receive_blocks(context, source, target, block, all, |team, from, to| {
            team.gather(root, from, block.bytes, to)
        })
    };
    Some(code(done))
}

/// # Safety
///
/// The arguments are those of a call of `MPI_Allgather`.
pub(crate) unsafe fn allgather(
    library: &'static Library,
    source: Source,
    target: Target,
    comm: Handle,
) -> Option<c_int> {
    let context = &Context::of(library, comm)?;
    let block = target.elements(context)?;
    let all = block.times(context.communicator.size)?;
    // SAFETY: the program passes memory for the blocks of all ranks.
    let done = unsafe {
        receive_blocks(context, source, target, block, all, |team, from, to| {
            team.allgather(from, block.bytes, to)
        })
    };
    Some(code(done))
}

/// Runs a collective that receives a block of every rank, and sends the own block, which may be in its
/// place already.
///
/// # Safety
///
/// Source and target are memory of the program for the elements.
unsafe fn receive_blocks(
    context: &Context,
    source: Source,
    target: Target,
    block: Elements,
    all: Elements,
    run: impl FnOnce(&mut team::HostTeam, *const u8, *mut u8) -> Result<(), TeamError>,
) -> Result<(), c_int> {
    let own_offset = context.communicator.rank * block.bytes;
    // SAFETY: as the caller promises; the own block lies within the blocks of all ranks.
    unsafe {
        let mut received = ReceiveBytes::new(target.start, all);
        let to = received.as_mut_ptr();
        let sent = if !source.is_in_place(context) {
            let own = own_elements(context, source, 1, block)
                .and_then(|own| SendBytes::new(context, source.start, own));
            team::prepared(context, own)?
        } else if all.plain.is_some() {
            SendBytes::Plain(to.add(own_offset))
        } else {
            // The own block is somewhere within the elements of the target.
            let packed = SendBytes::new(context, target.start, all);
            let packed = team::prepared(context, packed)?;
            std::ptr::copy_nonoverlapping(
                packed.as_ptr().add(own_offset),
                to.add(own_offset),
                block.bytes,
            );
            SendBytes::Plain(to.add(own_offset))
        };
        let result = team::run(context, |team| run(team, sent.as_ptr(), to));
        received.finish(context, result)
    }
}

/// The elements that a rank sends in a call that receives `expected`. MPI requires equal bytes.
fn own_elements(
    context: &Context,
    source: Source,
    times: usize,
    expected: Elements,
) -> Result<Elements, c_int> {
    let own = source.elements(context).and_then(|own| own.times(times));
    own.filter(|own| own.bytes == expected.bytes).ok_or_else(|| {
        report::fail(context, "a collective sends other blocks than it receives from its own rank")
    })
}

/// # Safety
///
/// The arguments are those of a call of `MPI_Alltoall`.
pub(crate) unsafe fn alltoall(
    library: &'static Library,
    source: Source,
    target: Target,
    comm: Handle,
) -> Option<c_int> {
    let context = &Context::of(library, comm)?;
    let size = context.communicator.size;
    let block = target.elements(context)?;
    let all = block.times(size)?;
    // SAFETY: the program passes memory for a block of every rank, to send and to receive.
    let done = unsafe {
        let sent = if source.is_in_place(context) {
            SendBytes::new(context, target.start, all)
        } else {
            own_elements(context, source, size, all)
                .and_then(|own| SendBytes::new(context, source.start, own))
        };
        team::prepared(context, sent).and_then(|sent| {
            let mut received = ReceiveBytes::new(target.start, all);
            let to = received.as_mut_ptr();
            let result = team::run(context, |team| team.alltoall(sent.as_ptr(), block.bytes, to));
            received.finish(context, result)
        })
    };
    Some(code(done))
}
