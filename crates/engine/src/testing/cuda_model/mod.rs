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

mod streams;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use memferry_memory::pinning::PageRange;
use memferry_sys::cuda::{
    CudaDeviceInfo, CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind, code,
};
use memferry_sys::pages::ReservedRange;
use memferry_sys::sync::lock;
use memferry_sys::{Pages, residency};

use streams::{StreamCommand, StreamQueue, StreamThread};

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

#[derive(Debug, Default)]
struct CudaModelState {
    /// Device memory, by its address, which no processor can access.
    allocations: BTreeMap<u64, Allocation>,
    pinned: HashMap<u64, Pages>,
    /// Registered memory: start address, end, and whether it is writable.
    registered: BTreeMap<usize, (usize, bool)>,
    /// Host memory that copies in flight use.
    in_flight: Vec<(usize, usize)>,
    /// Device memory that copies in flight use, by the address of its contents.
    in_flight_inside: Vec<(u64, u64)>,
    /// The number of records of each event, and the number reached.
    events: HashMap<u64, (u64, u64)>,
    /// The number of copies that started, and its limit.
    copies_started: u64,
    max_copies: Option<u64>,
    registration_calls: u64,
    copy_calls: u64,
    last_id: u64,
    stats: CudaModelStats,
}

#[derive(Debug)]
struct Allocation {
    bytes: usize,
    /// Reserves the addresses without access.
    _addresses: ReservedRange,
    contents: Pages,
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
        unsafe { self.copy_sync(kind, source, target, bytes) }
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

impl CudaModelState {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The contents of device memory.
    fn contents(&mut self, address: u64, length: usize) -> Option<(&mut Pages, usize)> {
        let (start, allocation) = self.allocations.range_mut(..=address).next_back()?;
        let at = (address - start) as usize;
        (at + length <= allocation.bytes).then_some((&mut allocation.contents, at))
    }

    fn model_address(&mut self, address: u64, length: usize) -> Result<u64, DriverError> {
        let contents = self.contents(address, length);
        let (contents, at) = contents.ok_or(error("device memory", code::INVALID_VALUE))?;
        Ok(contents.as_ptr() as u64 + at as u64)
    }

    /// Whether host memory lies inside one registration that allows the access.
    fn is_registered(&self, address: u64, length: usize, writes: bool) -> bool {
        let end = address as usize + length;
        let registered = self.registered.range(..=address as usize).next_back();
        let pinned = self.pinned.values().any(|pages| {
            let start = pages.as_ptr() as usize;
            start <= address as usize && end <= start + pages.len()
        });
        pinned
            || registered.is_some_and(|(_, (to, may_write))| end <= *to && (*may_write || !writes))
    }

    /// Whether the range overlaps a registration and does not lie inside one.
    fn crosses_registration(&self, address: u64, length: usize) -> bool {
        let (start, end) = (address as usize, address as usize + length);
        self.overlaps_registered(start, end) && !self.is_registered(address, length, false)
    }

    fn overlaps_registered(&self, start: usize, end: usize) -> bool {
        let before = self.registered.range(..end).next_back();
        before.is_some_and(|(_, (to, _))| *to > start)
    }
}

// SAFETY: a stream is one thread that executes its commands in order, and an event is reached when
// its command is executed.
unsafe impl CudaDriver for CudaModel {
    fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    fn make_current(&self) -> Result<(), DriverError> {
        Ok(())
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        let total = self.shared.faults.max_device_bytes.unwrap_or(1 << 30);
        let allocated = self.stats().device_bytes as usize;
        Ok((total.saturating_sub(allocated), total))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        self.check("allocate")?;
        let none = error("allocate", code::OUT_OF_MEMORY);
        if self.memory()?.0 < bytes || bytes == 0 {
            return Err(none);
        }
        let addresses = ReservedRange::new(bytes).map_err(|_| none)?;
        let contents = Pages::new(bytes).map_err(|_| none)?;
        let address = addresses.address() as u64;
        let allocation = Allocation { bytes, _addresses: addresses, contents };
        lock(&self.shared.state).allocations.insert(address, allocation);
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        let mut state = lock(&self.shared.state);
        let Some(allocation) = state.allocations.remove(&address) else { return };
        let start = allocation.contents.as_ptr() as u64;
        let end = start + allocation.bytes as u64;
        let is_in_flight =
            state.in_flight_inside.iter().any(|(from, to)| *from < end && start < *to);
        if is_in_flight {
            state.stats.unregistered_in_flight += 1;
            // The copy continues: it must not write to the next user of the memory.
            std::mem::forget(allocation);
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64, DriverError> {
        self.check("allocate_pinned")?;
        let none = error("allocate_pinned", code::OUT_OF_MEMORY);
        if self.shared.faults.no_pinned_memory {
            return Err(none);
        }
        let pages = Pages::new(bytes).map_err(|_| none)?;
        let address = pages.as_ptr() as u64;
        lock(&self.shared.state).pinned.insert(address, pages);
        Ok(address)
    }

    unsafe fn free_pinned(&self, address: u64) {
        lock(&self.shared.state).pinned.remove(&address);
    }

    fn register(&self, address: usize, bytes: usize, read_only: bool) -> Result<(), DriverError> {
        self.check("register")?;
        let mut state = lock(&self.shared.state);
        state.registration_calls += 1;
        let calls = state.registration_calls;
        let rejected = self.shared.faults.refuses_registrations;
        if rejected.is_some_and(|every| calls.is_multiple_of(every)) {
            return Err(error("register", code::NOT_SUPPORTED));
        }
        // Registering prefaults pages, as pinning does. Whole pages are pinned; bytes are
        // registered.
        let populate = match read_only {
            true => residency::populate_read,
            false => residency::populate_write,
        };
        let pages = PageRange::covering(address, bytes);
        if !pages.is_ok_and(|pages| populate(pages.start(), pages.bytes()).is_ok()) {
            return Err(error("register", code::INVALID_VALUE));
        }
        if state.overlaps_registered(address, address + bytes) {
            return Err(error("register", code::ALREADY_REGISTERED));
        }
        state.registered.insert(address, (address + bytes, !read_only));
        state.stats.registrations += 1;
        Ok(())
    }

    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError> {
        let mut state = lock(&self.shared.state);
        let removed = state.registered.remove(&address);
        let (end, _) = removed.ok_or(error("unregister", code::INVALID_VALUE))?;
        let in_flight = state.in_flight.iter().filter(|(from, to)| *from < end && address < *to);
        let in_flight = in_flight.count() as u64;
        state.stats.unregistered_in_flight += in_flight;
        state.stats.unregistrations += 1;
        Ok(())
    }

    fn is_device(&self, address: u64) -> Option<bool> {
        let mut state = lock(&self.shared.state);
        if state.contents(address, 1).is_some() {
            return Some(true);
        }
        state.is_registered(address, 1, false).then_some(false)
    }

    fn can_access(&self, address: u64) -> bool {
        let mut state = lock(&self.shared.state);
        state.contents(address, 1).is_some() || state.is_registered(address, 1, false)
    }

    fn create_stream(&self) -> Result<CudaStream, DriverError> {
        self.check("create_stream")?;
        let id = lock(&self.shared.state).next_id();
        let queue = Arc::new(StreamQueue::default());
        let (shared, own_queue) = (self.shared.clone(), queue.clone());
        let thread = std::thread::Builder::new()
            .name(format!("model-stream-{id}"))
            .spawn(move || shared.run(&own_queue))
            .map_err(|_| error("create_stream", code::OUT_OF_MEMORY))?;
        lock(&self.streams).insert(id, StreamThread { queue, thread: Some(thread) });
        // SAFETY: the id of a stream that was created above.
        Ok(unsafe { CudaStream::from_raw(id) })
    }

    fn destroy_stream(&self, stream: CudaStream) {
        let queue = lock(&self.streams).remove(&stream.raw());
        drop(queue);
    }

    fn create_event(&self) -> Result<CudaEvent, DriverError> {
        self.check("create_event")?;
        let mut state = lock(&self.shared.state);
        let id = state.next_id();
        state.events.insert(id, (0, 0));
        // SAFETY: the id of an event that was created above.
        Ok(unsafe { CudaEvent::from_raw(id) })
    }

    fn destroy_event(&self, event: CudaEvent) {
        lock(&self.shared.state).events.remove(&event.raw());
    }

    unsafe fn copy(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        self.check("copy")?;
        let command = {
            let mut state = lock(&self.shared.state);
            state.copy_calls += 1;
            if self.shared.faults.refused_copy == Some(state.copy_calls) {
                return Err(error("copy", code::NOT_SUPPORTED));
            }
            let (host, writes) = match kind {
                MemcpyKind::HostToDevice => (Some(source), false),
                MemcpyKind::DeviceToHost => (Some(target), true),
                MemcpyKind::DeviceToDevice => (None, false),
            };
            if let Some(address) = host
                && !state.is_registered(address, bytes, writes)
            {
                state.stats.outside_registration += 1;
                return Err(error("copy", code::INVALID_VALUE));
            }
            let host = host.map(|address| (address as usize, address as usize + bytes));
            let source = if kind == MemcpyKind::HostToDevice {
                source
            } else {
                state.model_address(source, bytes)?
            };
            let target = if kind == MemcpyKind::DeviceToHost {
                target
            } else {
                state.model_address(target, bytes)?
            };
            state.in_flight.extend(host);
            let inside = match kind {
                MemcpyKind::HostToDevice => [Some(target), None],
                MemcpyKind::DeviceToHost => [Some(source), None],
                MemcpyKind::DeviceToDevice => [Some(source), Some(target)],
            };
            let inside = inside.map(|at| at.map(|at| (at, at + bytes as u64)));
            state.in_flight_inside.extend(inside.into_iter().flatten());
            StreamCommand::Copy { source, target, bytes, host, inside }
        };
        self.enqueue(stream, command)
    }

    unsafe fn copy_sync(
        &self,
        kind: MemcpyKind,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        self.check("copy_sync")?;
        let mut state = lock(&self.shared.state);
        let host = match kind {
            MemcpyKind::HostToDevice => Some(source),
            MemcpyKind::DeviceToHost => Some(target),
            MemcpyKind::DeviceToDevice => None,
        };
        if host.is_some_and(|address| state.crosses_registration(address, bytes)) {
            return Err(error("copy_sync", code::INVALID_VALUE));
        }
        let source = if kind == MemcpyKind::HostToDevice {
            source
        } else {
            state.model_address(source, bytes)?
        };
        let target = if kind == MemcpyKind::DeviceToHost {
            target
        } else {
            state.model_address(target, bytes)?
        };
        state.stats.copies += 1;
        // SAFETY: the caller guarantees host memory; device memory was checked.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: CudaStream,
    ) -> Result<(), DriverError> {
        self.check("fill")?;
        let target = lock(&self.shared.state).model_address(target, bytes)?;
        self.enqueue(stream, StreamCommand::Fill { target, value, bytes })
    }

    fn record_event(&self, event: CudaEvent, stream: CudaStream) -> Result<(), DriverError> {
        self.check("record")?;
        let generation = {
            let mut state = lock(&self.shared.state);
            let known = state.events.get_mut(&event.raw());
            let (recorded, _) = known.ok_or(error("record", code::INVALID_VALUE))?;
            *recorded += 1;
            *recorded
        };
        self.enqueue(stream, StreamCommand::Record { event: event.raw(), generation })
    }

    fn stream_wait_event(&self, stream: CudaStream, event: CudaEvent) -> Result<(), DriverError> {
        self.check("stream_wait_event")?;
        let generation = {
            let state = lock(&self.shared.state);
            state.events.get(&event.raw()).ok_or(error("stream_wait_event", code::INVALID_VALUE))?.0
        };
        self.enqueue(stream, StreamCommand::WaitEvent { event: event.raw(), generation })
    }

    fn synchronize(&self, stream: CudaStream) {
        let streams = lock(&self.streams);
        let Some(queue) = streams.get(&stream.raw()).map(|stream| stream.queue.clone()) else {
            return;
        };
        drop(streams);
        let mut state = lock(&queue.state);
        while state.is_busy || !state.commands.is_empty() {
            state = queue.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_complete(&self, event: CudaEvent) -> Result<bool, DriverError> {
        self.check("is_complete")?;
        let state = lock(&self.shared.state);
        let (recorded, reached) =
            state.events.get(&event.raw()).ok_or(error("is_complete", code::INVALID_VALUE))?;
        Ok(reached >= recorded)
    }
}
