//! The CUDA driver of the machine. Its library is loaded, and its functions are looked up by name,
//! when the first device is opened.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::fork::OwnerProcess;

use super::{CudaDeviceInfo, CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind, code};

/// The oldest supported driver: CUDA 11.4.
const MIN_VERSION: u32 = 11_040;

type Context = *mut c_void;

/// The functions, each with its symbol name. All return a number and not an enumeration, for which a
/// code that a newer driver adds would be undefined behaviour.
macro_rules! calls {
    ($($field:ident: $name:literal ($($argument:ty),*);)+) => {
        struct Calls { $($field: unsafe extern "C" fn($($argument),*) -> c_uint),+ }

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
    copy_in_now: "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    copy_out_now: "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    copy_within_now: "cuMemcpyDtoD_v2" (u64, u64, usize);
    fill: "cuMemsetD8Async" (u64, u8, usize, *mut c_void);
}

/// Constants of the driver's interface.
mod number {
    use std::ffi::{c_int, c_uint};

    pub(super) const ASYNC_ENGINE_COUNT: c_int = 40;
    pub(super) const READ_ONLY_HOST_REGISTER: c_int = 113;
    pub(super) const POINTER_MEMORY_TYPE: c_int = 2;
    pub(super) const POINTER_DEVICE_ORDINAL: c_int = 9;
    pub(super) const MEMORY_OF_DEVICE: c_uint = 2;
    pub(super) const REGISTER_PORTABLE: c_uint = 1;
    pub(super) const REGISTER_READ_ONLY: c_uint = 8;
    pub(super) const NON_BLOCKING_STREAM: c_uint = 1;
    pub(super) const EVENT_WITHOUT_TIMING: c_uint = 2;
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
fn library() -> Result<&'static Calls, Option<String>> {
    static CALLS: OnceLock<Result<Calls, Option<String>>> = OnceLock::new();
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

fn check(call: &'static str, code: c_uint) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError { call, code }) }
}

impl Calls {
    fn count(&self) -> usize {
        let mut count = 0;
        // SAFETY: the result is a local variable.
        let status = unsafe { (self.device_count)(&raw mut count) };
        if status == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    fn device(&self, ordinal: usize) -> Result<c_int, DriverError> {
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the result is a local variable; an invalid index is an error.
        check("cuDeviceGet", unsafe { (self.device)(&raw mut device, number) })?;
        Ok(device)
    }

    fn device_info(&self, ordinal: usize, device: c_int) -> CudaDeviceInfo {
        let mut name = [0 as c_char; 256];
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the device is valid, and the result is a local variable.
            let status = unsafe { (self.device_attribute)(&raw mut value, which, device) };
            if status == 0 { value } else { 0 }
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
            driver_version: u32::try_from(version).unwrap_or(0),
            copy_engines: usize::try_from(attribute(number::ASYNC_ENGINE_COUNT)).unwrap_or(0),
            registers_read_only: attribute(number::READ_ONLY_HOST_REGISTER) != 0,
        }
    }
}

/// A device of the machine, with the primary context that all libraries of a process share.
pub struct Cuda {
    calls: &'static Calls,
    device: c_int,
    context: Context,
    info: CudaDeviceInfo,
    /// The process that opened it. A forked child must not make any call: the driver's threads
    /// exist only in the parent.
    owner: OwnerProcess,
}

// SAFETY: the context is a handle of the driver, whose functions may be called from any thread.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens a device. The error states what is missing and how to fix it.
    pub fn open(ordinal: usize) -> Result<Self, String> {
        let calls = library().map_err(|reason| match reason {
            None => "no NVIDIA driver is installed (libcuda.so.1 cannot be loaded): install it, or disable the GPU engine"
                .to_owned(),
            Some(reason) => format!("the NVIDIA driver cannot be used: {reason}"),
        })?;
        let count = calls.count();
        if count == 0 {
            let error = DriverError { call: "cuDeviceGetCount", code: code::NO_DEVICE };
            return Err(error.to_string());
        }
        let device = calls.device(ordinal).map_err(|error| match ordinal < count {
            true => format!("GPU {ordinal} cannot be used: {error}"),
            false => format!("GPU {ordinal} does not exist: the last one is {}", count - 1),
        })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the device is valid, and the result is a local variable.
        check("cuDevicePrimaryCtxRetain", unsafe {
            (calls.retain_context)(&raw mut context, device)
        })
        .map_err(|error| error.to_string())?;
        let (info, owner) = (calls.device_info(ordinal, device), OwnerProcess::current());
        Ok(Self { calls, device, context, info, owner })
    }

    fn is_forked(&self) -> bool {
        !self.owner.is_current()
    }

    /// Enqueues a copy between two ranges of host memory, registered or not, in a stream. The
    /// driver determines the kind of the addresses. Needs a thread on which the context is
    /// [current](CudaDriver::make_current). The call may return before the copy is complete.
    ///
    /// # Safety
    /// Both ranges must be host memory that is valid until the copy is complete, and until then no
    /// other code may write to either or read the target.
    pub unsafe fn copy_host(
        &self,
        source: u64,
        target: u64,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller guarantees the ranges. All addresses of the process are valid for the
        // driver too (unified addressing, which every 64-bit device of a driver for CUDA 11.4 or
        // later has).
        let status = unsafe {
            (self.calls.copy_anywhere)(target, source, bytes, stream.raw() as *mut c_void)
        };
        check("cuMemcpyAsync", status)
    }

    /// A 32-bit attribute of an address, or the driver's error code.
    fn attribute(&self, which: c_int, address: u64) -> Result<c_uint, c_uint> {
        let mut value: c_uint = 0;
        let result = (&raw mut value).cast();
        // SAFETY: the queried attributes are numbers of 32 bits, the size of the result; an address
        // that the driver does not know is an error.
        match unsafe { (self.calls.pointer_attribute)(result, which, address) } {
            0 => Ok(value),
            code => Err(code),
        }
    }

    /// Makes a call with the context of this device, and restores the context of the thread
    /// afterwards.
    fn with_context<R>(
        &self,
        call: impl FnOnce(&Calls) -> Result<R, DriverError>,
    ) -> Result<R, DriverError> {
        if self.is_forked() {
            return Err(DriverError { call: "fork", code: code::DEINITIALIZED });
        }
        // SAFETY: the context lives as long as this value, and the pushed context is popped below.
        check("cuCtxPushCurrent", unsafe { (self.calls.push_context)(self.context) })?;
        let result = call(self.calls);
        let mut popped = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe { (self.calls.pop_context)(&raw mut popped) };
        result
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if !self.is_forked() {
            // SAFETY: `open` has retained the context once.
            unsafe { (self.calls.release_context)(self.device) };
        }
    }
}

// SAFETY: events and streams are those of the driver, which guarantees what the trait requires;
// each method calls the driver's function for its operation.
unsafe impl CudaDriver for Cuda {
    fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    fn make_current(&self) -> Result<(), DriverError> {
        if self.is_forked() {
            return Err(DriverError { call: "fork", code: code::DEINITIALIZED });
        }
        // SAFETY: threads that use the context hold this value, so the context outlives them.
        check("cuCtxSetCurrent", unsafe { (self.calls.set_context)(self.context) })
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        let (mut free, mut total) = (0, 0);
        self.with_context(|calls| {
            // SAFETY: the results are local variables.
            check("cuMemGetInfo", unsafe { (calls.memory)(&raw mut free, &raw mut total) })
        })?;
        Ok((free, total))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut address = 0;
        self.with_context(|calls| {
            // SAFETY: the result is a local variable.
            check("cuMemAlloc", unsafe { (calls.allocate)(&raw mut address, bytes) })
        })?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller meets the same conditions.
        let _ = self.with_context(|calls| check("cuMemFree", unsafe { (calls.free)(address) }));
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut address = std::ptr::null_mut();
        self.with_context(|calls| {
            let flags = number::REGISTER_PORTABLE;
            // SAFETY: the result is a local variable.
            let status = unsafe { (calls.allocate_pinned)(&raw mut address, bytes, flags) };
            check("cuMemHostAlloc", status)
        })?;
        Ok(address as u64)
    }

    unsafe fn free_pinned(&self, address: u64) {
        // SAFETY: the caller meets the same conditions.
        let status = |calls: &Calls| unsafe { (calls.free_pinned)(address as *mut c_void) };
        let _ = self.with_context(|calls| check("cuMemFreeHost", status(calls)));
    }

    fn register(&self, address: usize, bytes: usize, read_only: bool) -> Result<(), DriverError> {
        let read_only = if read_only { number::REGISTER_READ_ONLY } else { 0 };
        let flags = number::REGISTER_PORTABLE | read_only;
        // SAFETY: registration changes no byte; unmapped memory is an error.
        let status =
            |calls: &Calls| unsafe { (calls.register)(address as *mut c_void, bytes, flags) };
        self.with_context(|calls| check("cuMemHostRegister", status(calls)))
    }

    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError> {
        // SAFETY: the caller meets the same conditions; a range that the driver has not registered
        // is an error.
        let status = |calls: &Calls| unsafe { (calls.unregister)(address as *mut c_void) };
        self.with_context(|calls| check("cuMemHostUnregister", status(calls)))
    }

    fn is_device(&self, address: u64) -> Option<bool> {
        if self.is_forked() {
            return None;
        }
        let kind = self.attribute(number::POINTER_MEMORY_TYPE, address).ok()?;
        Some(kind == number::MEMORY_OF_DEVICE)
    }

    fn can_access(&self, address: u64) -> bool {
        // An address that the driver cannot classify is left to the copy, which then fails.
        if self.is_forked() {
            return true;
        }
        match self.attribute(number::POINTER_MEMORY_TYPE, address) {
            Err(code) => code != code::INVALID_VALUE,
            Ok(number::MEMORY_OF_DEVICE) => {
                let ordinal = self.attribute(number::POINTER_DEVICE_ORDINAL, address);
                let ordinal = ordinal.ok().and_then(|ordinal| usize::try_from(ordinal as i32).ok());
                ordinal.is_none_or(|ordinal| ordinal == self.info.ordinal)
            }
            Ok(_) => true,
        }
    }

    fn create_stream(&self) -> Result<CudaStream, DriverError> {
        let mut stream = std::ptr::null_mut();
        let flags = number::NON_BLOCKING_STREAM;
        // SAFETY: the result is a local variable.
        check("cuStreamCreate", unsafe { (self.calls.create_stream)(&raw mut stream, flags) })?;
        // SAFETY: the driver has just created the handle.
        Ok(unsafe { CudaStream::from_raw(stream as u64) })
    }

    fn destroy_stream(&self, stream: CudaStream) {
        // SAFETY: the driver keeps a destroyed stream until its work is complete.
        unsafe { (self.calls.destroy_stream)(stream.raw() as *mut c_void) };
    }

    fn create_event(&self) -> Result<CudaEvent, DriverError> {
        let mut event = std::ptr::null_mut();
        let flags = number::EVENT_WITHOUT_TIMING;
        // SAFETY: the result is a local variable.
        check("cuEventCreate", unsafe { (self.calls.create_event)(&raw mut event, flags) })?;
        // SAFETY: the driver has just created the handle.
        Ok(unsafe { CudaEvent::from_raw(event as u64) })
    }

    fn destroy_event(&self, event: CudaEvent) {
        // SAFETY: the driver keeps a destroyed event until the device has passed it.
        unsafe { (self.calls.destroy_event)(event.raw() as *mut c_void) };
    }

    unsafe fn copy(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        let (calls, stream) = (self.calls, stream.raw() as *mut c_void);
        // SAFETY: the caller meets the same conditions.
        unsafe {
            match kind {
                MemcpyKind::HostToDevice => {
                    let status = (calls.copy_in)(target, source as *const c_void, bytes, stream);
                    check("cuMemcpyHtoDAsync", status)
                }
                MemcpyKind::DeviceToHost => {
                    let status = (calls.copy_out)(target as *mut c_void, source, bytes, stream);
                    check("cuMemcpyDtoHAsync", status)
                }
                MemcpyKind::DeviceToDevice => {
                    let status = (calls.copy_within)(target, source, bytes, stream);
                    check("cuMemcpyDtoDAsync", status)
                }
            }
        }
    }

    unsafe fn copy_sync(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let calls = self.calls;
        // SAFETY: the caller meets the same conditions.
        unsafe {
            match kind {
                MemcpyKind::HostToDevice => {
                    let status = (calls.copy_in_now)(target, source as *const c_void, bytes);
                    check("cuMemcpyHtoD", status)
                }
                MemcpyKind::DeviceToHost => {
                    let status = (calls.copy_out_now)(target as *mut c_void, source, bytes);
                    check("cuMemcpyDtoH", status)
                }
                MemcpyKind::DeviceToDevice => {
                    check("cuMemcpyDtoD", (calls.copy_within_now)(target, source, bytes))
                }
            }
        }
    }

    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller meets the same conditions.
        let status =
            unsafe { (self.calls.fill)(target, value, bytes, stream.raw() as *mut c_void) };
        check("cuMemsetD8Async", status)
    }

    fn record_event(&self, event: CudaEvent, stream: CudaStream) -> Result<(), DriverError> {
        let (event, stream) = (event.raw() as *mut c_void, stream.raw() as *mut c_void);
        // SAFETY: both are handles of the driver.
        check("cuEventRecord", unsafe { (self.calls.record)(event, stream) })
    }

    fn stream_wait_event(&self, stream: CudaStream, event: CudaEvent) -> Result<(), DriverError> {
        let (event, stream) = (event.raw() as *mut c_void, stream.raw() as *mut c_void);
        // SAFETY: both are handles of the driver.
        check("cuStreamWaitEvent", unsafe { (self.calls.await_event)(stream, event, 0) })
    }

    fn synchronize(&self, stream: CudaStream) {
        // SAFETY: the stream is a handle of the driver.
        unsafe { (self.calls.drain)(stream.raw() as *mut c_void) };
    }

    fn is_complete(&self, event: CudaEvent) -> Result<bool, DriverError> {
        // SAFETY: the event is a handle of the driver.
        match unsafe { (self.calls.query)(event.raw() as *mut c_void) } {
            code::NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }
}
