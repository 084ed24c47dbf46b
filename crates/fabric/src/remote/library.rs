//! The functions of libfabric's core that open another provider, found in the library that the
//! program has loaded.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::abi::{FabricAttr, FidFabric, Info};
use crate::core::{self, Found};

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
    /// Those of the library that is loaded, if one is.
    pub(super) fn find() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<Library>> = OnceLock::new();
        FOUND.get_or_init(Self::look).as_ref()
    }

    fn look() -> Option<Self> {
        let library = core::loaded_library().unwrap_or(libc::RTLD_DEFAULT);
        let found = |name| core::function(library, name);
        // SAFETY: these are the types that libfabric's headers give these functions.
        unsafe {
            Some(Self {
                getinfo: std::mem::transmute::<Found, GetInfo>(found(c"fi_getinfo")?),
                freeinfo: std::mem::transmute::<Found, FreeInfo>(found(c"fi_freeinfo")?),
                dupinfo: std::mem::transmute::<Found, DupInfo>(found(c"fi_dupinfo")?),
                fabric: std::mem::transmute::<Found, Fabric>(found(c"fi_fabric")?),
            })
        }
    }
}

/// Loads a libfabric for tests: that of the environment's choice, or the installed one. Whether there
/// is one.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn load() -> bool {
    let name = std::env::var("MEMFERRY_TEST_LIBFABRIC").unwrap_or("libfabric.so.1".into());
    let name = std::ffi::CString::new(name).expect("a path");
    // SAFETY: it is libfabric; what it runs when it is loaded has no conditions.
    let opened = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    !opened.is_null()
}
