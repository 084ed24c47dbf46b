//! The MPI library of this process: its family, and the functions of its profiling interface.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::report;

/// A handle of MPI: a pointer in Open MPI and in the standard ABI, a number of 32 bits in MPICH.
pub(crate) type Handle = usize;

/// What handles and constants of an MPI library look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Predefined handles are addresses of variables of the library.
    OpenMpi,
    /// Predefined handles are numbers of 32 bits. MPICH, and what is built from it.
    Mpich,
    /// Predefined handles are small numbers in the form of pointers.
    StandardAbi,
}

/// The function with which MPI copies an attribute.
pub(crate) type CopyAttribute =
    unsafe extern "C" fn(Handle, c_int, *mut c_void, *mut c_void, *mut c_void, *mut c_int) -> c_int;
/// The function with which MPI deletes an attribute.
pub(crate) type DeleteAttribute =
    unsafe extern "C" fn(Handle, c_int, *mut c_void, *mut c_void) -> c_int;

/// The functions with which MPI asks a generalized request for its status, frees it, and cancels it.
pub(crate) type QueryRequest = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
pub(crate) type FreeRequest = unsafe extern "C" fn(*mut c_void) -> c_int;
pub(crate) type CancelRequest = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;

/// Names the functions of the profiling interface once, with their signatures.
macro_rules! functions {
    (
        required { $($name:ident: $symbol:literal ($($type:ty),*);)* }
        optional { $($late:ident: $late_symbol:literal ($($late_type:ty),*);)* }
    ) => {
        /// Functions of the MPI library. Those for large counts are missing in older libraries.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
            $(pub(crate) $late: Option<unsafe extern "C" fn($($late_type),*) -> c_int>,)*
        }

        impl Functions {
            fn find(symbols: &Symbols) -> Result<Self, &'static CStr> {
                Ok(Self {
                    $($name: {
                        let found = symbols.find($symbol).ok_or($symbol)?;
                        // SAFETY: the MPI standard fixes the signature; handles fit into `usize`
                        // registers in every family.
                        unsafe { std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($type),*) -> c_int,
                        >(found) }
                    },)*
                    $($late: symbols.find($late_symbol).map(|found| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($late_type),*) -> c_int,
                        >(found) }
                    }),)*
                })
            }
        }
    };
}

type Const = *const c_void;
type Mut = *mut c_void;
type Int = c_int;
type Count = i64;

functions! {
    required {
        barrier: c"PMPI_Barrier" (Handle);
        bcast: c"PMPI_Bcast" (Mut, Int, Handle, Int, Handle);
        reduce: c"PMPI_Reduce" (Const, Mut, Int, Handle, Handle, Int, Handle);
        allreduce: c"PMPI_Allreduce" (Const, Mut, Int, Handle, Handle, Handle);
        gather: c"PMPI_Gather" (Const, Int, Handle, Mut, Int, Handle, Int, Handle);
        allgather: c"PMPI_Allgather" (Const, Int, Handle, Mut, Int, Handle, Handle);
        alltoall: c"PMPI_Alltoall" (Const, Int, Handle, Mut, Int, Handle, Handle);
        initialized: c"PMPI_Initialized" (*mut Int);
        finalized: c"PMPI_Finalized" (*mut Int);
        comm_test_inter: c"PMPI_Comm_test_inter" (Handle, *mut Int);
        comm_rank: c"PMPI_Comm_rank" (Handle, *mut Int);
        comm_size: c"PMPI_Comm_size" (Handle, *mut Int);
        comm_create_keyval: c"PMPI_Comm_create_keyval" (CopyAttribute, DeleteAttribute, *mut Int, Mut);
        comm_get_attr: c"PMPI_Comm_get_attr" (Handle, Int, Mut, *mut Int);
        comm_set_attr: c"PMPI_Comm_set_attr" (Handle, Int, Mut);
        comm_call_errhandler: c"PMPI_Comm_call_errhandler" (Handle, Int);
        type_size: c"PMPI_Type_size" (Handle, *mut Int);
        pack: c"PMPI_Pack" (Const, Int, Handle, Mut, Int, *mut Int, Handle);
        unpack: c"PMPI_Unpack" (Const, Int, *mut Int, Mut, Int, Handle, Handle);
        grequest_start: c"PMPI_Grequest_start" (QueryRequest, FreeRequest, CancelRequest, Mut, *mut Handle);
        test: c"PMPI_Test" (*mut Handle, *mut Int, Mut);
        get_library_version: c"PMPI_Get_library_version" (*mut c_char, *mut Int);
    }
    optional {
        bcast_c: c"PMPI_Bcast_c" (Mut, Count, Handle, Int, Handle);
        reduce_c: c"PMPI_Reduce_c" (Const, Mut, Count, Handle, Handle, Int, Handle);
        allreduce_c: c"PMPI_Allreduce_c" (Const, Mut, Count, Handle, Handle, Handle);
        gather_c: c"PMPI_Gather_c" (Const, Count, Handle, Mut, Count, Handle, Int, Handle);
        allgather_c: c"PMPI_Allgather_c" (Const, Count, Handle, Mut, Count, Handle, Handle);
        alltoall_c: c"PMPI_Alltoall_c" (Const, Count, Handle, Mut, Count, Handle, Handle);
    }
}

/// The MPI library of this process.
#[derive(Debug)]
pub(crate) struct Library {
    /// `None` for a library whose handles are unknown: every call is passed on.
    pub(crate) family: Option<Family>,
    pub(crate) functions: Functions,
    pub(crate) symbols: Symbols,
}

impl Library {
    /// The library that the program has loaded. Ends the program if there is none: there is nothing to
    /// which a call could be passed on.
    #[inline]
    pub(crate) fn get() -> &'static Self {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        LIBRARY.get_or_init(|| {
            Self::find().unwrap_or_else(|reason| {
                report::line(&reason);
                std::process::abort()
            })
        })
    }

    fn find() -> Result<Self, String> {
        let symbols = Symbols::of_this_process();
        let functions = Functions::find(&symbols).map_err(|name| {
            format!("no MPI library of this program has {}", name.to_string_lossy())
        })?;
        let family = family(&symbols, &functions);
        Ok(Self { family, functions, symbols })
    }

    /// The part of a register that is a handle: the callers of MPICH leave the upper half undefined.
    #[inline]
    pub(crate) fn handle(&self, register: Handle) -> Handle {
        match self.family {
            Some(Family::Mpich) => register as u32 as usize,
            _ => register,
        }
    }
}

fn family(symbols: &Symbols, functions: &Functions) -> Option<Family> {
    if symbols.find(c"ompi_mpi_comm_world").is_some() {
        return Some(Family::OpenMpi);
    }
    // MPICH has its own handles in one library, and those of the standard ABI in another.
    let file = file_of(functions.barrier as *const c_void);
    if file.as_deref().is_some_and(|file| file.contains("libmpi_abi")) {
        return Some(Family::StandardAbi);
    }
    let text = version_text(functions);
    let relatives = ["MPICH", "Intel(R) MPI", "MVAPICH", "CRAY MPI", "ParaStationMPI"];
    relatives.iter().any(|name| text.contains(name)).then_some(Family::Mpich)
}

fn version_text(functions: &Functions) -> String {
    // Longer than the longest text of any library.
    let mut text = vec![0u8; 16 << 10];
    let mut length: c_int = 0;
    // SAFETY: the call may be made at any time, and writes at most 8192 bytes and the length.
    let code = unsafe { (functions.get_library_version)(text.as_mut_ptr().cast(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    if code == 0 { String::from_utf8_lossy(&text[..length]).into_owned() } else { String::new() }
}

fn file_of(address: *const c_void) -> Option<String> {
    // SAFETY: zeros are a value of the structure, which has only pointers.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is valid for writes, and the name belongs to a loaded library.
    unsafe {
        let is_known = libc::dladdr(address, &mut found) != 0 && !found.dli_fname.is_null();
        is_known.then(|| CStr::from_ptr(found.dli_fname).to_string_lossy().into_owned())
    }
}

/// Where symbols of the MPI library are found.
#[derive(Debug)]
pub(crate) struct Symbols {
    /// The library, if its symbols are not among those of the whole program: a Python extension, for
    /// example, loads it for itself alone.
    own: Option<usize>,
}

impl Symbols {
    fn of_this_process() -> Self {
        let global = Self { own: None };
        match global.find(c"PMPI_Barrier") {
            Some(_) => global,
            None => Self { own: loaded_library() },
        }
    }

    /// The address of a symbol. The scope of the whole program comes first: a program may have copies of
    /// the variables of its libraries, and then all use the copies.
    pub(crate) fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let handle = self.own.map_or(libc::RTLD_DEFAULT, |own| own as *mut c_void);
        // SAFETY: the handle is that of a library that stays loaded, or stands for the program.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

/// Handle of the loaded library that has the functions of MPI.
fn loaded_library() -> Option<usize> {
    unsafe extern "C" fn add_name(
        object: *mut libc::dl_phdr_info,
        _size: usize,
        names: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid object, and `names` is the list of the caller below.
        unsafe {
            if !(*object).dlpi_name.is_null() {
                let names = &mut *names.cast::<Vec<CString>>();
                names.push(CStr::from_ptr((*object).dlpi_name).to_owned());
            }
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the function has the required signature, and its argument is the list that it expects.
    unsafe { libc::dl_iterate_phdr(Some(add_name), (&raw mut names).cast()) };
    names.iter().filter(|name| name.to_string_lossy().contains("libmpi")).find_map(|name| {
        // SAFETY: the library is loaded already, so that no initialiser runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        let symbols = Symbols { own: (!handle.is_null()).then_some(handle as usize) };
        symbols.own.filter(|_| symbols.find(c"PMPI_Barrier").is_some())
    })
}
