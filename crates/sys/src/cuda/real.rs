//! The driver of the machine: its library is looked for and its calls are found by name, when the
//! first device is opened.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::fork;

use super::{DeviceFacts, Driver, DriverError, Event, Stream, Way, code};

/// The oldest driver that this speaks to: CUDA 11.4.
const OLDEST_VERSION: u32 = 11_040;

type Context = *mut c_void;

/// The calls, each by the name that the driver's library has for it. All answer with a number: the
/// enumeration of the bindings would be undefined behaviour for one that a newer driver invents.
macro_rules! calls {
    ($($field:ident: $name:literal ($($argument:ty),*);)+) => {
        struct Calls { $($field: unsafe extern "C" fn($($argument),*) -> c_uint),+ }

        impl Calls {
            /// Finds every call, or names the first that is missing.
            fn find() -> Result<Self, &'static str> {
                // SAFETY: the library was found by `library`, and its initialisation is the
                // driver's own; each symbol has the type that the driver's documentation gives it.
                unsafe {
                    let library = sys::culib();
                    Ok(Self { $($field: *library.get($name.as_bytes()).map_err(|_| $name)?),+ })
                }
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

/// Numbers of the driver's interface.
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

/// What there is of CUDA on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inventory {
    /// There is no driver.
    NoDriver,
    /// There is one that cannot be used, and why.
    Unusable(String),
    /// These devices, with their memory.
    Devices(Vec<(DeviceFacts, usize)>),
}

/// Looks what there is. Loads the driver if it is there, which takes a good part of a second.
pub fn inventory() -> Inventory {
    let calls = match library() {
        Ok(calls) => calls,
        Err(None) => return Inventory::NoDriver,
        Err(Some(reason)) => return Inventory::Unusable(reason),
    };
    let devices = (0..calls.count()).filter_map(|ordinal| {
        let device = calls.device(ordinal).ok()?;
        let mut bytes = 0;
        // SAFETY: a valid device and a place for the answer.
        let answer = unsafe { (calls.device_bytes)(&raw mut bytes, device) };
        (answer == 0).then(|| (calls.facts(ordinal, device), bytes))
    });
    Inventory::Devices(devices.collect())
}

/// The calls of the driver, which is initialised. `Err(None)`: there is none; `Err(Some)`: why it
/// cannot be used.
fn library() -> Result<&'static Calls, Option<String>> {
    static CALLS: OnceLock<Result<Calls, Option<String>>> = OnceLock::new();
    let load = || {
        hold_library()?;
        let calls = Calls::find().map_err(|name| {
            Some(format!(
                "it has no call {name}: it is too old, install one for CUDA 11.4 or later"
            ))
        })?;
        // SAFETY: initialising twice is allowed; the version needs a place for the answer.
        unsafe {
            checked("cuInit", (calls.init)(0)).map_err(|error| Some(error.to_string()))?;
            let mut version = 0;
            let _ = (calls.version)(&raw mut version);
            let version = u32::try_from(version).unwrap_or(0);
            if version < OLDEST_VERSION {
                let (major, minor) = (version / 1000, version % 1000 / 10);
                return Err(Some(format!(
                    "it is for CUDA {major}.{minor}: install one for CUDA 11.4 or later"
                )));
            }
        }
        Ok(calls)
    };
    CALLS.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Loads the driver's library and never lets go of it: to look whether it is there by loading and
/// unloading it would unload it under threads that are being started meanwhile.
fn hold_library() -> Result<(), Option<String>> {
    // SAFETY: loading the driver runs its initialisation, which every program that uses CUDA runs;
    // the reason for a refusal is a string of the loader's that is read at once.
    unsafe {
        if !libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL).is_null() {
            return Ok(());
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

fn checked(call: &'static str, code: c_uint) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError { call, code }) }
}

impl Calls {
    fn count(&self) -> usize {
        let mut count = 0;
        // SAFETY: a place for the answer.
        let answer = unsafe { (self.device_count)(&raw mut count) };
        if answer == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    fn device(&self, ordinal: usize) -> Result<c_int, DriverError> {
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: a place for the answer; a number that is none is an error.
        checked("cuDeviceGet", unsafe { (self.device)(&raw mut device, number) })?;
        Ok(device)
    }

    fn facts(&self, ordinal: usize, device: c_int) -> DeviceFacts {
        let mut name = [0 as c_char; 256];
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: a valid device and a place for the answer.
            let answer = unsafe { (self.device_attribute)(&raw mut value, which, device) };
            if answer == 0 { value } else { 0 }
        };
        let mut version = 0;
        // SAFETY: places for the answers; the driver ends the name with a zero, and there is one
        // behind what it may write.
        let name = unsafe {
            let _ = (self.version)(&raw mut version);
            let _ = (self.device_name)(name.as_mut_ptr(), name.len() as c_int - 1, device);
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        };
        DeviceFacts {
            ordinal,
            name,
            driver_version: u32::try_from(version).unwrap_or(0),
            copy_engines: usize::try_from(attribute(number::ASYNC_ENGINE_COUNT)).unwrap_or(0),
            registers_read_only: attribute(number::READ_ONLY_HOST_REGISTER) != 0,
        }
    }
}

/// A device of the machine, with the context that all libraries of a process share.
pub struct Cuda {
    calls: &'static Calls,
    device: c_int,
    context: Context,
    facts: DeviceFacts,
    /// A forked child must not make any call: the driver's threads are the parent's.
    fork_generation: u64,
}

// SAFETY: the context is a name for something inside the driver, whose calls may come from any
// thread.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("facts", &self.facts).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens a device; says what is missing, and what would help, if it cannot.
    pub fn open(ordinal: usize) -> Result<Self, String> {
        let calls = library().map_err(|reason| match reason {
            None => "there is no NVIDIA driver (no libcuda.so.1 can be loaded): install it, or leave the GPU out"
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
            false => format!("there is no GPU {ordinal}: the last one is {}", count - 1),
        })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: a valid device and a place for the answer.
        checked("cuDevicePrimaryCtxRetain", unsafe {
            (calls.retain_context)(&raw mut context, device)
        })
        .map_err(|error| error.to_string())?;
        fork::watch();
        let (facts, fork_generation) = (calls.facts(ordinal, device), fork::generation());
        Ok(Self { calls, device, context, facts, fork_generation })
    }

    fn is_forked(&self) -> bool {
        fork::generation() != self.fork_generation
    }

    /// Puts a copy between two pieces of ordinary memory, registered or not, into a stream: the
    /// driver's own way, which finds out by itself where addresses are. For threads that
    /// [entered](Driver::enter). The driver may return before the copy is over.
    ///
    /// # Safety
    /// Both ranges must be ordinary memory that is valid until the stream has passed the copy, and
    /// nobody else may write to either, or read the target, until then.
    pub unsafe fn copy_host(
        &self,
        source: u64,
        target: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError> {
        // SAFETY: passed on; all addresses of the process are the driver's as well (unified
        // addressing, which every device has that a driver for CUDA 11.4 speaks to on 64 bits).
        let answer = unsafe {
            (self.calls.copy_anywhere)(target, source, bytes, stream.raw() as *mut c_void)
        };
        checked("cuMemcpyAsync", answer)
    }

    /// What the driver says of an address, or its error number. For attributes of one number.
    fn attribute(&self, which: c_int, address: u64) -> Result<c_uint, c_uint> {
        let mut value: c_uint = 0;
        let place = (&raw mut value).cast();
        // SAFETY: the attributes asked for are one number of 32 bits, for which there is a place; an
        // address that the driver does not know is an error.
        match unsafe { (self.calls.pointer_attribute)(place, which, address) } {
            0 => Ok(value),
            code => Err(code),
        }
    }

    /// Makes a call with the context of this device, whatever the thread's own is.
    fn inside<R>(
        &self,
        call: impl FnOnce(&Calls) -> Result<R, DriverError>,
    ) -> Result<R, DriverError> {
        if self.is_forked() {
            return Err(DriverError { call: "fork", code: code::DEINITIALIZED });
        }
        // SAFETY: the context lives as long as this does; what is pushed is popped.
        checked("cuCtxPushCurrent", unsafe { (self.calls.push_context)(self.context) })?;
        let result = call(self.calls);
        let mut before = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe { (self.calls.pop_context)(&raw mut before) };
        result
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if !self.is_forked() {
            // SAFETY: retained once, in `open`.
            unsafe { (self.calls.release_context)(self.device) };
        }
    }
}

// SAFETY: events and streams are the driver's, which promises what the trait asks for; each call is
// the driver's for what the method says.
unsafe impl Driver for Cuda {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn enter(&self) -> Result<(), DriverError> {
        if self.is_forked() {
            return Err(DriverError { call: "fork", code: code::DEINITIALIZED });
        }
        // SAFETY: the context lives at least as long as the threads that entered it: they hold this.
        checked("cuCtxSetCurrent", unsafe { (self.calls.set_context)(self.context) })
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        let (mut free, mut total) = (0, 0);
        self.inside(|calls| {
            // SAFETY: places for the answers.
            checked("cuMemGetInfo", unsafe { (calls.memory)(&raw mut free, &raw mut total) })
        })?;
        Ok((free, total))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut address = 0;
        self.inside(|calls| {
            // SAFETY: a place for the answer.
            checked("cuMemAlloc", unsafe { (calls.allocate)(&raw mut address, bytes) })
        })?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: passed on.
        let _ = self.inside(|calls| checked("cuMemFree", unsafe { (calls.free)(address) }));
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut address = std::ptr::null_mut();
        self.inside(|calls| {
            let flags = number::REGISTER_PORTABLE;
            // SAFETY: a place for the answer.
            let answer = unsafe { (calls.allocate_pinned)(&raw mut address, bytes, flags) };
            checked("cuMemHostAlloc", answer)
        })?;
        Ok(address as u64)
    }

    unsafe fn free_pinned(&self, address: u64) {
        // SAFETY: passed on.
        let answer = |calls: &Calls| unsafe { (calls.free_pinned)(address as *mut c_void) };
        let _ = self.inside(|calls| checked("cuMemFreeHost", answer(calls)));
    }

    fn register(&self, address: usize, bytes: usize, read_only: bool) -> Result<(), DriverError> {
        let read_only = if read_only { number::REGISTER_READ_ONLY } else { 0 };
        let flags = number::REGISTER_PORTABLE | read_only;
        // SAFETY: registering changes no byte; memory that is not there is an error.
        let answer =
            |calls: &Calls| unsafe { (calls.register)(address as *mut c_void, bytes, flags) };
        self.inside(|calls| checked("cuMemHostRegister", answer(calls)))
    }

    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError> {
        // SAFETY: passed on; what the driver did not register is an error.
        let answer = |calls: &Calls| unsafe { (calls.unregister)(address as *mut c_void) };
        self.inside(|calls| checked("cuMemHostUnregister", answer(calls)))
    }

    fn is_device(&self, address: u64) -> Option<bool> {
        if self.is_forked() {
            return None;
        }
        let kind = self.attribute(number::POINTER_MEMORY_TYPE, address).ok()?;
        Some(kind == number::MEMORY_OF_DEVICE)
    }

    fn reaches(&self, address: u64) -> bool {
        // What the driver does not answer here is answered by the copy.
        if self.is_forked() {
            return true;
        }
        match self.attribute(number::POINTER_MEMORY_TYPE, address) {
            Err(code) => code != code::INVALID_VALUE,
            Ok(number::MEMORY_OF_DEVICE) => {
                let ordinal = self.attribute(number::POINTER_DEVICE_ORDINAL, address);
                let ordinal = ordinal.ok().and_then(|ordinal| usize::try_from(ordinal as i32).ok());
                ordinal.is_none_or(|ordinal| ordinal == self.facts.ordinal)
            }
            Ok(_) => true,
        }
    }

    fn create_stream(&self) -> Result<Stream, DriverError> {
        let mut stream = std::ptr::null_mut();
        let flags = number::NON_BLOCKING_STREAM;
        // SAFETY: a place for the answer.
        checked("cuStreamCreate", unsafe { (self.calls.create_stream)(&raw mut stream, flags) })?;
        // SAFETY: the driver made it just now.
        Ok(unsafe { Stream::from_raw(stream as u64) })
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: the driver keeps what is in the stream until it is over.
        unsafe { (self.calls.destroy_stream)(stream.raw() as *mut c_void) };
    }

    fn create_event(&self) -> Result<Event, DriverError> {
        let mut event = std::ptr::null_mut();
        let flags = number::EVENT_WITHOUT_TIMING;
        // SAFETY: a place for the answer.
        checked("cuEventCreate", unsafe { (self.calls.create_event)(&raw mut event, flags) })?;
        // SAFETY: the driver made it just now.
        Ok(unsafe { Event::from_raw(event as u64) })
    }

    fn destroy_event(&self, event: Event) {
        // SAFETY: the driver keeps an event until the device is past it.
        unsafe { (self.calls.destroy_event)(event.raw() as *mut c_void) };
    }

    unsafe fn copy(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError> {
        let (calls, stream) = (self.calls, stream.raw() as *mut c_void);
        // SAFETY: passed on.
        unsafe {
            match way {
                Way::In => {
                    let answer = (calls.copy_in)(target, source as *const c_void, bytes, stream);
                    checked("cuMemcpyHtoDAsync", answer)
                }
                Way::Out => {
                    let answer = (calls.copy_out)(target as *mut c_void, source, bytes, stream);
                    checked("cuMemcpyDtoHAsync", answer)
                }
                Way::Within => {
                    let answer = (calls.copy_within)(target, source, bytes, stream);
                    checked("cuMemcpyDtoDAsync", answer)
                }
            }
        }
    }

    unsafe fn copy_now(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let calls = self.calls;
        // SAFETY: passed on.
        unsafe {
            match way {
                Way::In => {
                    let answer = (calls.copy_in_now)(target, source as *const c_void, bytes);
                    checked("cuMemcpyHtoD", answer)
                }
                Way::Out => {
                    let answer = (calls.copy_out_now)(target as *mut c_void, source, bytes);
                    checked("cuMemcpyDtoH", answer)
                }
                Way::Within => {
                    checked("cuMemcpyDtoD", (calls.copy_within_now)(target, source, bytes))
                }
            }
        }
    }

    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError> {
        // SAFETY: passed on.
        let answer =
            unsafe { (self.calls.fill)(target, value, bytes, stream.raw() as *mut c_void) };
        checked("cuMemsetD8Async", answer)
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError> {
        let (event, stream) = (event.raw() as *mut c_void, stream.raw() as *mut c_void);
        // SAFETY: both are the driver's own.
        checked("cuEventRecord", unsafe { (self.calls.record)(event, stream) })
    }

    fn await_event(&self, stream: Stream, event: Event) -> Result<(), DriverError> {
        let (event, stream) = (event.raw() as *mut c_void, stream.raw() as *mut c_void);
        // SAFETY: both are the driver's own.
        checked("cuStreamWaitEvent", unsafe { (self.calls.await_event)(stream, event, 0) })
    }

    fn drain(&self, stream: Stream) {
        // SAFETY: the stream is the driver's own.
        unsafe { (self.calls.drain)(stream.raw() as *mut c_void) };
    }

    fn is_reached(&self, event: Event) -> Result<bool, DriverError> {
        // SAFETY: the event is the driver's own.
        match unsafe { (self.calls.query)(event.raw() as *mut c_void) } {
            code::NOT_READY => Ok(false),
            code => checked("cuEventQuery", code).map(|()| true),
        }
    }
}
