//! A model of a GPU and its driver, for machines without one.
//!
//! It follows the driver's documentation in its strictest reading: device memory is at addresses
//! that no processor can access; host memory must be registered, each byte once, and a copy must
//! lie inside one registration; streams run on threads of their own, in order, and wait for each
//! other only at explicit events. [`CudaFaults`] injects the failures of devices.
//! [`CudaModelStats`] counts what the model observed.
//!
//! [`CudaModel::copy_by_other`] acts as another user of the device in the same process: like the
//! driver, it accepts memory that is registered or not, and rejects a copy that crosses the edge of
//! a registration, by any registrant.

mod driver;
mod state;
mod streams;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use memferry_sys::cuda::{CudaDeviceInfo, CudaDriver, CudaStream, DriverError, MemcpyKind, code};
use memferry_sys::sync::lock;

use state::CudaModelState;
use streams::{StreamCommand, StreamThread};

/// The injected faults.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaFaults {
    /// The limit of device memory in bytes.
    pub max_device_bytes: Option<usize>,
    /// The driver has no pinned memory.
    pub no_pinned_memory: bool,
    /// The driver rejects every n-th registration.
    pub refuses_registrations: Option<u64>,
    /// The copy of this number, counted from 1, accesses unmapped memory, and the device is lost.
    pub lost_at_copy: Option<u64>,
    /// The driver rejects the copy of this number, counted from 1.
    pub refused_copy: Option<u64>,
    /// The additional time of every copy.
    pub delay: Duration,
}

/// Counters of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CudaModelStats {
    /// Registrations.
    pub registrations: u64,
    /// Ended registrations.
    pub unregistrations: u64,
    /// Ranges that were unregistered, or device memory that was freed, while a copy in flight used
    /// them. Always an error of the engine.
    pub unregistered_in_flight: u64,
    /// Copies of memory that was not registered, or not in one registration.
    pub outside_registration: u64,
    /// Successful copies.
    pub copies: u64,
    /// Bytes of device memory that are allocated.
    pub device_bytes: u64,
}

/// A model of a device.
#[derive(Debug)]
pub struct CudaModel {
    info: CudaDeviceInfo,
    shared: Arc<CudaModelShared>,
    streams: Mutex<HashMap<u64, StreamThread>>,
}

#[derive(Debug)]
struct CudaModelShared {
    faults: CudaFaults,
    state: Mutex<CudaModelState>,
    /// Notified when an event is reached.
    event_reached: Condvar,
    is_lost: AtomicBool,
    copies: AtomicU64,
}

impl CudaModel {
    /// Creates a device without faults.
    pub fn new() -> Arc<Self> {
        Self::with_faults(CudaFaults::default())
    }

    /// Creates a device with injected faults.
    pub fn with_faults(faults: CudaFaults) -> Arc<Self> {
        let info = CudaDeviceInfo {
            ordinal: 0,
            name: "a model of a GPU".into(),
            address: None,
            driver_version: 13_000,
            copy_engines: 2,
            registers_read_only: true,
        };
        let shared = Arc::new(CudaModelShared {
            faults,
            state: Mutex::default(),
            event_reached: Condvar::new(),
            is_lost: AtomicBool::new(false),
            copies: AtomicU64::new(0),
        });
        Arc::new(Self { info, shared, streams: Mutex::default() })
    }

    /// The counters.
    pub fn stats(&self) -> CudaModelStats {
        let state = lock(&self.shared.state);
        let device_bytes = state.allocations.values().map(|each| each.bytes as u64).sum();
        CudaModelStats { device_bytes, ..state.stats }
    }

    /// Loses the device: every call fails from now on.
    pub fn lose(&self) {
        self.shared.lose();
    }

    /// Sets the number of copies, counted from the creation of the model, that the device executes;
    /// the others wait until the limit is raised or the device is lost. `None` removes the limit.
    pub fn hold_after(&self, copies: Option<u64>) {
        lock(&self.shared.state).max_copies = copies;
        self.shared.event_reached.notify_all();
    }

    /// Writes to device memory without a copy, for tests.
    ///
    /// # Panics
    /// If the address is not device memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let mut state = lock(&self.shared.state);
        let (contents, at) = state.contents(address, bytes.len()).expect("memory of the device");
        contents.as_mut_slice()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads device memory without a copy, for tests.
    ///
    /// # Panics
    /// If the address is not device memory.
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut state = lock(&self.shared.state);
        let (contents, at) = state.contents(address, length).expect("memory of the device");
        contents.as_slice()[at..at + length].to_vec()
    }

    /// Copies as another user of the device does: host memory inside one registration, or not
    /// registered at all.
    ///
    /// # Safety
    /// As for [`CudaDriver::copy_sync`].
    pub unsafe fn copy_by_other(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's guarantee.
        unsafe { self.copy_sync(kind, source, target, bytes, CudaStream::from_raw(0)) }
    }

    /// The start address and length of each registration.
    pub fn registered(&self) -> Vec<(usize, usize)> {
        let state = lock(&self.shared.state);
        state.registered.iter().map(|(start, (end, _))| (*start, end - start)).collect()
    }

    fn enqueue(&self, stream: CudaStream, command: StreamCommand) -> Result<(), DriverError> {
        let streams = lock(&self.streams);
        let queue = &streams.get(&stream.raw()).ok_or(error("stream", code::INVALID_VALUE))?.queue;
        lock(&queue.state).commands.push_back(command);
        queue.doorbell.notify_one();
        Ok(())
    }

    fn check(&self, call: &'static str) -> Result<(), DriverError> {
        match self.shared.is_lost.load(Ordering::SeqCst) {
            true => Err(error(call, code::ILLEGAL_ADDRESS)),
            false => Ok(()),
        }
    }
}

fn error(call: &'static str, code: u32) -> DriverError {
    DriverError { call, code }
}
