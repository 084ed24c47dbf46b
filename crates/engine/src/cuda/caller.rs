//! Copies that the calling thread makes by itself: short blocking ones, and those of a
//! [`DeviceStream`].
//!
//! A channel's thread must be woken, and wakes the caller in turn: 35 µs, four times as long as the
//! driver takes for a few bytes. So the caller makes a short copy itself, in a stream of its own. To
//! the device it lets the driver stage, which is as fast as any staging by one thread (91 and 99 µs
//! for 1 MiB); from the device it stages through a small ring, which is faster (93 and 105 µs). The
//! context of the calling thread is restored.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use memferry_memory::pinning::PageRange;
use memferry_sys::cuda::{CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind};
use memferry_sys::sync::{lock, spin_hint};
use memferry_sys::{copy, residency};

use super::CudaContext;
use crate::contract::{DEVICE_STREAM_MARKS, DeviceStream, ExecutionError};

/// Copies up to these lengths are made by the caller: longer ones are faster by several channels.
pub(super) const MAX_BYTES_IN: usize = 4 << 20;
pub(super) const MAX_BYTES_OUT: usize = 2 << 20;
/// The parts of a copy: all slots together stay in a core's cache, and few calls are made.
const SLOT_BYTES: usize = 256 << 10;
/// Targets from this length on are used without staging if their owner has registered them. Asking the
/// driver takes a microsecond; sources are left to the driver, which knows by itself.
const STRAIGHT_BYTES: usize = 256 << 10;
/// How many idle streams are kept.
const MAX_IDLE: usize = 16;

/// A stream, events and a ring of pinned memory.
#[derive(Debug)]
pub(super) struct CallerStream {
    driver: Arc<dyn CudaDriver>,
    stream: CudaStream,
    marks: [CudaEvent; DEVICE_STREAM_MARKS],
    /// The ring of [`DEVICE_STREAM_MARKS`] slots; 0 if it was not needed yet.
    ring: u64,
    /// What the driver said when something failed.
    error: Option<DriverError>,
    /// Learns of errors.
    device: Weak<CudaContext>,
}

/// One host and one device range of equal length.
#[derive(Clone, Copy)]
pub(super) struct CallerCopy {
    pub(super) kind: MemcpyKind,
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) bytes: usize,
}

impl CallerCopy {
    fn host(&self) -> u64 {
        if self.kind == MemcpyKind::HostToDevice { self.source } else { self.target }
    }
}

/// Copies on the calling thread; `None` if the copy is too long or the device cannot do it so.
///
/// # Safety
/// Both ranges must be valid, and no other code may write to either or read the target.
pub(super) unsafe fn copy_now(
    device: &Arc<CudaContext>,
    copy: CallerCopy,
) -> Option<Result<(), ExecutionError>> {
    // Memory that is not there is left to the channels, which report it.
    let is_there = || {
        PageRange::covering(copy.host() as usize, copy.bytes)
            .is_ok_and(|range| residency::is_mapped(range.start(), range.bytes()))
    };
    let is_inward = copy.kind == MemcpyKind::HostToDevice;
    let max_bytes = if is_inward { MAX_BYTES_IN } else { MAX_BYTES_OUT };
    if copy.bytes > max_bytes || device.is_lost() || !is_there() {
        return None;
    }
    let mut outcome = None;
    let entered = device.driver.with_current(&mut || {
        let idle = lock(&device.idle_streams).pop();
        let open = || CallerStream::open(device);
        let Ok(mut stream) = idle.map_or_else(open, Ok) else { return };
        // SAFETY: the caller upholds the contract.
        outcome = unsafe { stream.run(copy) };
        let is_whole = stream.error.is_none();
        let mut idle = lock(&device.idle_streams);
        if idle.len() < MAX_IDLE && is_whole {
            idle.push(stream);
        }
    });
    entered.ok().and(outcome)
}

impl CallerStream {
    /// Creates the stream. The context must be current.
    pub(super) fn open(device: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let driver = device.driver.clone();
        let stream = driver.create_stream()?;
        let mut marks = Vec::new();
        for _ in 0..DEVICE_STREAM_MARKS {
            match driver.create_event() {
                Ok(event) => marks.push(event),
                Err(error) => {
                    marks.into_iter().for_each(|event| driver.destroy_event(event));
                    driver.destroy_stream(stream);
                    return Err(error);
                }
            }
        }
        let marks = marks.try_into().expect("as many as there are marks");
        Ok(Self { driver, stream, marks, ring: 0, error: None, device: Arc::downgrade(device) })
    }

    /// Makes a copy, and returns when it is complete; `None` if there is no pinned memory.
    ///
    /// # Safety
    /// As for [`copy_now`]; the context must be current.
    unsafe fn run(&mut self, copy: CallerCopy) -> Option<Result<(), ExecutionError>> {
        let driver = self.driver.clone();
        if copy.kind == MemcpyKind::HostToDevice {
            // SAFETY: the caller upholds the contract.
            return unsafe { self.copy_in(copy) };
        }
        if copy.bytes >= STRAIGHT_BYTES && driver.is_device(copy.host()) == Some(false) {
            let CallerCopy { kind, source, target, bytes } = copy;
            // SAFETY: the caller upholds the contract, and the host memory is registered; a range
            // that is not inside one registration is refused, and staged below.
            let straight = unsafe { driver.copy(kind, source, target, bytes, self.stream) };
            if straight.is_ok() {
                return Some(self.mark(0).and_then(|()| self.wait(0)));
            }
        }
        if self.ring == 0 {
            self.ring = driver.allocate_pinned(SLOT_BYTES * DEVICE_STREAM_MARKS).ok()?;
        }
        // SAFETY: the caller upholds the contract.
        Some(unsafe { self.stage_out(copy) })
    }

    /// Lets the driver stage the memory. `None` if the driver refuses memory that crosses
    /// the edge of a registration, which channels stage.
    ///
    /// # Safety
    /// As for [`CallerStream::run`], for a copy to the device.
    unsafe fn copy_in(&mut self, copy: CallerCopy) -> Option<Result<(), ExecutionError>> {
        let CallerCopy { kind, source, target, bytes } = copy;
        // SAFETY: the caller upholds the contract.
        match unsafe { self.driver.copy_sync(kind, source, target, bytes, self.stream) } {
            Ok(()) => Some(Ok(())),
            Err(error) if error.is_device_lost() => Some(Err(self.fail(error))),
            Err(_) => None,
        }
    }

    /// # Safety
    /// As for [`CallerStream::run`], for a copy from the device.
    unsafe fn stage_out(&mut self, copy: CallerCopy) -> Result<(), ExecutionError> {
        let parts = copy.bytes.div_ceil(SLOT_BYTES);
        let length = |part: usize| SLOT_BYTES.min(copy.bytes - part * SLOT_BYTES);
        let buffer = |part: usize| self.ring + (part % DEVICE_STREAM_MARKS * SLOT_BYTES) as u64;
        let buffers: Vec<u64> = (0..parts).map(buffer).collect();
        let enqueue = |this: &mut Self, part: usize| {
            let source = copy.source + (part * SLOT_BYTES) as u64;
            // SAFETY: the slot is pinned; what the part before it left there was copied out.
            let enqueued = unsafe {
                let driver = &this.driver;
                driver.copy(copy.kind, source, buffers[part], length(part), this.stream)
            };
            enqueued.map_err(|error| this.fail(error))?;
            this.mark(part % DEVICE_STREAM_MARKS)
        };
        for part in 0..parts.min(DEVICE_STREAM_MARKS) {
            enqueue(self, part)?;
        }
        for (part, &slot) in buffers.iter().enumerate() {
            self.wait(part % DEVICE_STREAM_MARKS)?;
            let target = (copy.target + (part * SLOT_BYTES) as u64) as *mut u8;
            // SAFETY: the part lies inside the target; the device has written the slot and is done
            // with it.
            unsafe { copy::cached(target, slot as *const u8, length(part)) };
            if part + DEVICE_STREAM_MARKS < parts {
                enqueue(self, part + DEVICE_STREAM_MARKS)?;
            }
        }
        Ok(())
    }

    /// Drains the stream, so that nothing is in flight when an error is reported.
    fn fail(&mut self, error: DriverError) -> ExecutionError {
        self.error = Some(error);
        if let Some(device) = self.device.upgrade() {
            device.record_error(error);
        }
        self.driver.synchronize(self.stream);
        ExecutionError::Engine { done_bytes: 0, reason: error.description() }
    }
}

impl DeviceStream for CallerStream {
    unsafe fn copy_to_device(
        &mut self,
        source: *const u8,
        target: u64,
        bytes: usize,
    ) -> Result<(), ExecutionError> {
        // SAFETY: the caller upholds the contract.
        let enqueued = unsafe {
            let (driver, kind) = (&self.driver, MemcpyKind::HostToDevice);
            driver.copy(kind, source as u64, target, bytes, self.stream)
        };
        enqueued.map_err(|error| self.fail(error))
    }

    fn mark(&mut self, number: usize) -> Result<(), ExecutionError> {
        let marked = self.driver.record_event(self.marks[number], self.stream);
        marked.map_err(|error| self.fail(error))
    }

    fn wait(&mut self, number: usize) -> Result<(), ExecutionError> {
        // A device that is this late has other work: the core is left to others.
        const PATIENCE: Duration = Duration::from_micros(200);
        const PAUSE: Duration = Duration::from_micros(20);
        let started = Instant::now();
        loop {
            match self.driver.is_complete(self.marks[number]) {
                Ok(true) => return Ok(()),
                Ok(false) if started.elapsed() > PATIENCE => std::thread::sleep(PAUSE),
                Ok(false) => spin_hint(),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }
}

impl Drop for CallerStream {
    fn drop(&mut self) {
        let Self { driver, stream, marks, ring, .. } = self;
        let _ = driver.with_current(&mut || {
            driver.synchronize(*stream);
            marks.iter().for_each(|&event| driver.destroy_event(event));
            driver.destroy_stream(*stream);
            if *ring != 0 {
                // SAFETY: it is from the matching call, and the stream was drained.
                unsafe { driver.free_pinned(*ring) };
            }
        });
    }
}
