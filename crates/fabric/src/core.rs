//! The functions of libfabric's core that the provider calls, found at run time.
//!
//! The provider is not linked to libfabric: a program may load one under any file name, with
//! symbols that are not visible to other libraries. Without libfabric (in tests), this module
//! provides replacements.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use memferry_sys::fork::ForkSafe;

use crate::abi::{DomainAttr, EpAttr, FabricAttr, Info, RxAttr, TxAttr};

/// The version without a core: that of the structures in `abi`.
const OWN_VERSION: u32 = (1 << 16) | 17;

#[derive(Debug)]
pub(crate) struct Core {
    dupinfo: Option<unsafe extern "C" fn(*const Info) -> *mut Info>,
    version: Option<unsafe extern "C" fn() -> u32>,
    strerror: Option<unsafe extern "C" fn(c_int) -> *const c_char>,
}

/// The core of this process.
pub(crate) fn core() -> &'static Core {
    static CORE: ForkSafe<Core> = ForkSafe::new();
    CORE.get_or_init(|| {
        let library = loaded_library().unwrap_or(libc::RTLD_DEFAULT);
        // SAFETY: these are the types that libfabric's headers give these functions.
        unsafe {
            Core {
                dupinfo: function(library, c"fi_dupinfo").map(|f| std::mem::transmute(f)),
                version: function(library, c"fi_version").map(|f| std::mem::transmute(f)),
                strerror: function(library, c"fi_strerror").map(|f| std::mem::transmute(f)),
            }
        }
    })
}

impl Core {
    /// Creates an empty info with all its attributes, for the core or [`libc::free`] to free.
    pub(crate) fn new_info(&self) -> *mut Info {
        match self.dupinfo {
            // SAFETY: without an info to copy, the function creates an empty one.
            Some(dupinfo) => unsafe { dupinfo(std::ptr::null()) },
            None => own_info(),
        }
    }

    pub(crate) fn version(&self) -> u32 {
        // SAFETY: the function has no preconditions.
        self.version.map_or(OWN_VERSION, |version| unsafe { version() })
    }

    /// The text of an error code.
    pub(crate) fn error_text(&self, code: c_int) -> *const c_char {
        match self.strerror {
            // SAFETY: the function accepts any number.
            Some(strerror) => unsafe { strerror(code) },
            None => c"an error of the provider".as_ptr(),
        }
    }
}

/// The type of a function from `dlsym`.
pub(crate) type CFunction = unsafe extern "C" fn();

pub(crate) fn function(library: *mut c_void, name: &CStr) -> Option<CFunction> {
    // SAFETY: the library is open or one of the special ones, the name is a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: a symbol of this name is a function.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, CFunction>(found) })
}

/// The first loaded library that is called libfabric and has its functions.
pub(crate) fn loaded_library() -> Option<*mut c_void> {
    let mut paths: Vec<CString> = Vec::new();
    // SAFETY: the visitor gets this pointer while this function runs, and uses it with its type.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut paths).cast()) };
    // After the visits: the linker holds a lock during them, and `dlopen` takes others.
    paths.iter().find_map(|path| {
        // SAFETY: the library is loaded already, so no code runs.
        let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if opened.is_null() {
            return None;
        }
        if function(opened, c"fi_dupinfo").is_none() {
            // SAFETY: it was opened just above, and nothing of it is used.
            unsafe { libc::dlclose(opened) };
            return None;
        }
        Some(opened)
    })
}

/// Records the path of an object that may be libfabric.
unsafe extern "C" fn visit(object: *mut libc::dl_phdr_info, _: usize, paths: *mut c_void) -> c_int {
    // SAFETY: the linker passes a description of an object that is loaded.
    let path = unsafe { (*object).dlpi_name };
    if path.is_null() {
        return 0;
    }
    // SAFETY: as above: a C string.
    let path = unsafe { CStr::from_ptr(path) };
    let bytes = path.to_bytes();
    let file = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or(bytes);
    if file.windows(9).any(|part| part == b"libfabric") {
        // SAFETY: `loaded_library` passes such a list.
        unsafe { (*paths.cast::<Vec<CString>>()).push(path.to_owned()) };
    }
    0
}

/// As the core's, for tests. The attributes have space for what later versions add.
fn own_info() -> *mut Info {
    fn zeroed<T>() -> *mut T {
        // SAFETY: the call has no preconditions; zero is valid for all fields of these structures.
        unsafe { libc::calloc(1, size_of::<T>() + 128).cast() }
    }
    let info: *mut Info = zeroed();
    if !info.is_null() {
        // SAFETY: it was just allocated.
        let info = unsafe { &mut *info };
        info.tx_attr = zeroed::<TxAttr>();
        info.rx_attr = zeroed::<RxAttr>();
        info.ep_attr = zeroed::<EpAttr>();
        info.domain_attr = zeroed::<DomainAttr>();
        info.fabric_attr = zeroed::<FabricAttr>();
    }
    info
}
