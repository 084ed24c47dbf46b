//! A device of the machine's CUDA driver.

use std::ffi::{c_int, c_uint, c_void};

use super::library::{Calls, Context, check, library, number};
use super::{CudaDeviceInfo, CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind, code};
use crate::fork::OwnerProcess;

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
        let _pop = PopContext(self.calls);
        call(self.calls)
    }
}

/// Restores the context of the thread, also when a call panics.
struct PopContext<'a>(&'a Calls);

impl Drop for PopContext<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the value is made after the context was pushed.
        unsafe { (self.0.pop_context)(&raw mut popped) };
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

    fn with_current(&self, work: &mut dyn FnMut()) -> Result<(), DriverError> {
        self.with_context(|_| {
            work();
            Ok(())
        })
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
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        // The driver's own synchronous call returns when pageable memory is in its staging buffer,
        // and waits for the default stream: a stream that is drained does neither.
        // SAFETY: the caller meets the same conditions; for this call the driver stages memory that
        // is not registered.
        unsafe { self.copy(kind, source, target, bytes, stream)? };
        // SAFETY: the stream is a handle of the driver.
        let status = unsafe { (self.calls.drain)(stream.raw() as *mut c_void) };
        check("cuStreamSynchronize", status)
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
