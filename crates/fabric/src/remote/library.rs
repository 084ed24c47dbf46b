//! The functions of libfabric's core that open another provider, from the library that the program
//! has loaded.

use std::ffi::{c_char, c_int, c_void};

use memferry_sys::fork::ForkSafe;

use crate::abi::{FabricAttr, FidFabric, Info};
use crate::core::{self, CFunction};

type GetInfo = unsafe extern "C" fn(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    info: *mut *mut Info,
) -> c_int;
type FreeInfo = unsafe extern "C" fn(*mut Info);
type DupInfo = unsafe extern "C" fn(*const Info) -> *mut Info;
type Fabric = unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, *mut c_void) -> c_int;

/// The functions.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) getinfo: GetInfo,
    pub(super) freeinfo: FreeInfo,
    pub(super) dupinfo: DupInfo,
    pub(super) fabric: Fabric,
}

impl Library {
    /// The functions of the loaded library, if there is one.
    pub(super) fn find() -> Option<&'static Self> {
        static FOUND: ForkSafe<Option<Library>> = ForkSafe::new();
        FOUND.get_or_init(Self::resolve).as_ref()
    }

    fn resolve() -> Option<Self> {
        let library = core::loaded_library().unwrap_or(libc::RTLD_DEFAULT);
        let found = |name| core::function(library, name);
        // SAFETY: these are the types that libfabric's headers give these functions.
        unsafe {
            Some(Self {
                getinfo: std::mem::transmute::<CFunction, GetInfo>(found(c"fi_getinfo")?),
                freeinfo: std::mem::transmute::<CFunction, FreeInfo>(found(c"fi_freeinfo")?),
                dupinfo: std::mem::transmute::<CFunction, DupInfo>(found(c"fi_dupinfo")?),
                fabric: std::mem::transmute::<CFunction, Fabric>(found(c"fi_fabric")?),
            })
        }
    }
}

/// Loads libfabric for tests: that of `MEMFERRY_TEST_LIBFABRIC`, or the installed one. Returns
/// whether there is one.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn load() -> bool {
    let name = std::env::var("MEMFERRY_TEST_LIBFABRIC").unwrap_or("libfabric.so.1".into());
    let name = std::ffi::CString::new(name).expect("a path");
    // SAFETY: it is libfabric, whose initialisers have no preconditions.
    let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    !opened.is_null()
}
