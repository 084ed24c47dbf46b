//! The library of the machine's CUDA driver: it is loaded, and its functions are looked up by name,
//! when the first device is opened.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use super::{CudaDeviceInfo, DriverError};
use crate::fork::ForkSafe;

/// The oldest supported driver: CUDA 11.4.
const MIN_VERSION: u32 = 11_040;

/// A context of the driver.
pub(super) type Context = *mut c_void;

/// The functions, each with its symbol name. All return a number and not an enumeration, for which a
/// code that a newer driver adds would be undefined behaviour.
macro_rules! calls {
    ($($field:ident: $name:literal ($($argument:ty),*);)+) => {
        pub(super) struct Calls { $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_uint),+ }

        impl Calls {
            /// Looks up all functions, or returns the name of the first that is missing.
            fn find(library: NonNull<c_void>) -> Result<Self, &'static str> {
                let symbol = |name: &'static str| {
                    let terminated = CStr::from_bytes_with_nul(name.as_bytes()).expect("ends with a zero");
                    // SAFETY: the library stays loaded, and the name is a C string.
                    let address = unsafe { libc::dlsym(library.as_ptr(), terminated.as_ptr()) };
                    NonNull::new(address).ok_or(name.trim_end_matches('\0'))
                };
                $(
                    let address = symbol(concat!($name, "\0"))?.as_ptr();
                    // SAFETY: the symbol is a function with the parameters of the driver's
                    // documentation, and the library is never unloaded.
                    let $field = unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) -> c_uint,
                        >(address)
                    };
                )+
                Ok(Self { $($field),+ })
            }
        }
    };
}

calls! {
    init: "cuInit" (c_uint);
    version: "cuDriverGetVersion" (*mut c_int);
    device_count: "cuDeviceGetCount" (*mut c_int);
    device: "cuDeviceGet" (*mut c_int, c_int);
    device_name: "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    device_bytes: "cuDeviceTotalMem_v2" (*mut usize, c_int);
    retain_context: "cuDevicePrimaryCtxRetain" (*mut Context, c_int);
    release_context: "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_context: "cuCtxSetCurrent" (Context);
    push_context: "cuCtxPushCurrent_v2" (Context);
    pop_context: "cuCtxPopCurrent_v2" (*mut Context);
    memory: "cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate: "cuMemAlloc_v2" (*mut u64, usize);
    free: "cuMemFree_v2" (u64);
    allocate_pinned: "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    free_pinned: "cuMemFreeHost" (*mut c_void);
    register: "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unregister: "cuMemHostUnregister" (*mut c_void);
    pointer_attribute: "cuPointerGetAttribute" (*mut c_void, c_int, u64);
    create_stream: "cuStreamCreate" (*mut *mut c_void, c_uint);
    destroy_stream: "cuStreamDestroy_v2" (*mut c_void);
    create_event: "cuEventCreate" (*mut *mut c_void, c_uint);
    destroy_event: "cuEventDestroy_v2" (*mut c_void);
    drain: "cuStreamSynchronize" (*mut c_void);
    record: "cuEventRecord" (*mut c_void, *mut c_void);
    query: "cuEventQuery" (*mut c_void);
    await_event: "cuStreamWaitEvent" (*mut c_void, *mut c_void, c_uint);
    copy_in: "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, *mut c_void);
    copy_out: "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, *mut c_void);
    copy_within: "cuMemcpyDtoDAsync_v2" (u64, u64, usize, *mut c_void);
    copy_anywhere: "cuMemcpyAsync" (u64, u64, usize, *mut c_void);
    fill: "cuMemsetD8Async" (u64, u8, usize, *mut c_void);
}

/// Constants of the driver's interface.
pub(super) mod number {
    use std::ffi::{c_int, c_uint};

    pub(in crate::cuda) const PCI_BUS: c_int = 33;
    pub(in crate::cuda) const PCI_SLOT: c_int = 34;
    pub(in crate::cuda) const PCI_DOMAIN: c_int = 50;
    pub(in crate::cuda) const ASYNC_ENGINE_COUNT: c_int = 40;
    pub(in crate::cuda) const READ_ONLY_HOST_REGISTER: c_int = 113;
    pub(in crate::cuda) const POINTER_MEMORY_TYPE: c_int = 2;
    pub(in crate::cuda) const POINTER_DEVICE_ORDINAL: c_int = 9;
    pub(in crate::cuda) const MEMORY_OF_DEVICE: c_uint = 2;
    pub(in crate::cuda) const REGISTER_PORTABLE: c_uint = 1;
    pub(in crate::cuda) const REGISTER_READ_ONLY: c_uint = 8;
    pub(in crate::cuda) const NON_BLOCKING_STREAM: c_uint = 1;
    pub(in crate::cuda) const EVENT_WITHOUT_TIMING: c_uint = 2;
}

/// The CUDA driver and devices of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaInventory {
    /// No driver is installed.
    NoDriver,
    /// The driver cannot be used, with the reason.
    Unusable(String),
    /// The devices, each with its memory in bytes.
    Devices(Vec<(CudaDeviceInfo, usize)>),
}

/// Queries the driver and devices. Loads the driver if it is installed, which can take several
/// hundred milliseconds.
pub fn inventory() -> CudaInventory {
    let calls = match library() {
        Ok(calls) => calls,
        Err(None) => return CudaInventory::NoDriver,
        Err(Some(reason)) => return CudaInventory::Unusable(reason),
    };
    let devices = (0..calls.count()).filter_map(|ordinal| {
        let device = calls.device(ordinal).ok()?;
        let mut bytes = 0;
        // SAFETY: the device is valid, and the result is a local variable.
        let status = unsafe { (calls.device_bytes)(&raw mut bytes, device) };
        (status == 0).then(|| (calls.device_info(ordinal, device), bytes))
    });
    CudaInventory::Devices(devices.collect())
}

/// The functions of the initialised driver. `Err(None)`: no driver is installed; `Err(Some)`: why
/// it cannot be used.
pub(super) fn library() -> Result<&'static Calls, Option<String>> {
    static CALLS: ForkSafe<Result<Calls, Option<String>>> = ForkSafe::new();
    let load = || {
        let calls = Calls::find(load_library()?).map_err(|name| {
            Some(format!(
                "it is too old (it has no function {name}): install a driver for CUDA 11.4 or later"
            ))
        })?;
        // SAFETY: repeated initialisation is allowed, and the version is written to a local
        // variable.
        unsafe {
            check("cuInit", (calls.init)(0)).map_err(|error| Some(error.to_string()))?;
            let mut version = 0;
            let _ = (calls.version)(&raw mut version);
            let version = u32::try_from(version).unwrap_or(0);
            if version < MIN_VERSION {
                let (major, minor) = (version / 1000, version % 1000 / 10);
                return Err(Some(format!(
                    "it supports only CUDA {major}.{minor}: install a driver for CUDA 11.4 or later"
                )));
            }
        }
        Ok(calls)
    };
    CALLS.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Loads the driver's library and never unloads it: loading and unloading it as a test would unload
/// it under threads that are being started at the same time.
fn load_library() -> Result<NonNull<c_void>, Option<String>> {
    // SAFETY: loading the driver runs its initialisation, as in every program that uses CUDA; the
    // error text is a string of the loader that is copied at once.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if let Some(library) = NonNull::new(library) {
            return Ok(library);
        }
        let reason = libc::dlerror();
        if reason.is_null() {
            return Err(None);
        }
        let reason = CStr::from_ptr(reason).to_string_lossy().into_owned();
        let is_absent = reason.starts_with("libcuda.so.1: cannot open shared object file");
        Err((!is_absent).then(|| format!("it cannot be loaded: {reason}")))
    }
}

/// The result of a call.
pub(super) fn check(call: &'static str, code: c_uint) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError { call, code }) }
}

impl Calls {
    /// The number of devices.
    pub(super) fn count(&self) -> usize {
        let mut count = 0;
        // SAFETY: the result is a local variable.
        let status = unsafe { (self.device_count)(&raw mut count) };
        if status == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    /// A device by its index.
    pub(super) fn device(&self, ordinal: usize) -> Result<c_int, DriverError> {
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the result is a local variable; an invalid index is an error.
        check("cuDeviceGet", unsafe { (self.device)(&raw mut device, number) })?;
        Ok(device)
    }

    /// What is known of a device.
    pub(super) fn device_info(&self, ordinal: usize, device: c_int) -> CudaDeviceInfo {
        let mut name = [0 as c_char; 256];
        let known = |which| {
            let mut value = 0;
            // SAFETY: the device is valid, and the result is a local variable.
            let status = unsafe { (self.device_attribute)(&raw mut value, which, device) };
            (status == 0).then_some(value)
        };
        let attribute = |which| known(which).unwrap_or(0);
        let place = [number::PCI_DOMAIN, number::PCI_BUS, number::PCI_SLOT].map(known);
        let address = match place {
            [Some(domain), Some(bus), Some(slot)] => {
                Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
            }
            _ => None,
        };
        let mut version = 0;
        // SAFETY: the results are local variables; the driver ends the name with a zero byte, and
        // the array has one more byte than the driver may write.
        let name = unsafe {
            let _ = (self.version)(&raw mut version);
            let _ = (self.device_name)(name.as_mut_ptr(), name.len() as c_int - 1, device);
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        CudaDeviceInfo {
            ordinal,
            name,
            address,
            driver_version: u32::try_from(version).unwrap_or(0),
            copy_engines: usize::try_from(attribute(number::ASYNC_ENGINE_COUNT)).unwrap_or(0),
            registers_read_only: attribute(number::READ_ONLY_HOST_REGISTER) != 0,
        }
    }
}
