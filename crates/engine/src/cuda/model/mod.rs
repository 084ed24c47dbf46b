//! A model of a GPU and its driver, for machines without one.
//!
//! It does what the driver's documentation says, and is as strict as it may be: memory of the device
//! lies at addresses that no processor can touch; ordinary memory must be registered, each byte once,
//! and a copy must lie inside one registration; streams run on threads of their own, in order, and
//! wait for each other only where they are told to. [`Faults`] makes it fail as devices do. What it
//! saw is in [`Sightings`].
//!
//! [`ModelDevice::copy_by_other`] plays another user of the device in the same process: as the driver
//! does, it takes memory that is registered or is not, and refuses what crosses the edge of a piece that
//! is, whoever has registered it.

mod streams;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use memferry_memory::pinning::PageRange;
use memferry_sys::cuda::{DeviceFacts, Driver, DriverError, Event, Stream, Way, code};
use memferry_sys::pages::Reserved;
use memferry_sys::sync::lock;
use memferry_sys::{Pages, residency};

use streams::{Order, Orders, Queue};

/// How the model misbehaves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// There is no memory of the device beyond so many bytes.
    pub most_device_bytes: Option<usize>,
    /// There is no registered memory to be had from the driver.
    pub no_pinned_memory: bool,
    /// One registration in so many is refused.
    pub refuses_registrations: Option<u64>,
    /// The copy of this number, counted from 1, finds memory that is not there, and with it the
    /// device is lost.
    pub lost_at_copy: Option<u64>,
    /// The copy of this number, counted from 1, is refused.
    pub refused_copy: Option<u64>,
    /// Every copy takes so much longer.
    pub delay: Duration,
}

/// What the model has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sightings {
    /// Registrations that were made.
    pub registrations: u64,
    /// Registrations that are over.
    pub unregistrations: u64,
    /// Memory that was unregistered, or memory of the device that was given back, while a copy was under
    /// way there. The worst that can happen.
    pub torn_copies: u64,
    /// Copies of memory that was not registered, or not in one piece.
    pub stray_copies: u64,
    /// Copies that ended well.
    pub copies: u64,
    /// Bytes of the device that are taken now.
    pub device_bytes: u64,
}

/// A model of a device.
#[derive(Debug)]
pub struct ModelDevice {
    facts: DeviceFacts,
    shared: Arc<Shared>,
    streams: Mutex<HashMap<u64, Queue>>,
}

#[derive(Debug)]
struct Shared {
    faults: Faults,
    state: Mutex<State>,
    /// Rung when an event is reached.
    reached: Condvar,
    is_lost: AtomicBool,
    copies: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Memory of the device: where no processor reaches it, and where the model keeps it.
    allocations: BTreeMap<u64, Allocation>,
    pinned: HashMap<u64, Pages>,
    /// Registered memory: first address and end, and whether it may be written.
    registered: BTreeMap<usize, (usize, bool)>,
    /// Ordinary memory that copies are under way on.
    in_flight: Vec<(usize, usize)>,
    /// The same for memory of the device, where the model keeps it.
    in_flight_inside: Vec<(u64, u64)>,
    /// How often each event was recorded, and how often it was reached.
    events: HashMap<u64, (u64, u64)>,
    /// How many copies were begun, and how many may be.
    copies_begun: u64,
    most_copies: Option<u64>,
    registrations_asked: u64,
    copies_asked: u64,
    last_name: u64,
    sightings: Sightings,
}

#[derive(Debug)]
struct Allocation {
    bytes: usize,
    /// Reserves the addresses, and lets nobody touch them.
    _addresses: Reserved,
    contents: Pages,
}

impl ModelDevice {
    /// A device that works.
    pub fn new() -> Arc<Self> {
        Self::with_faults(Faults::default())
    }

    /// A device that misbehaves.
    pub fn with_faults(faults: Faults) -> Arc<Self> {
        let facts = DeviceFacts {
            ordinal: 0,
            name: "a model of a GPU".into(),
            driver_version: 13_000,
            copy_engines: 2,
            registers_read_only: true,
        };
        let shared = Arc::new(Shared {
            faults,
            state: Mutex::default(),
            reached: Condvar::new(),
            is_lost: AtomicBool::new(false),
            copies: AtomicU64::new(0),
        });
        Arc::new(Self { facts, shared, streams: Mutex::default() })
    }

    /// What it has seen so far.
    pub fn sightings(&self) -> Sightings {
        let state = lock(&self.shared.state);
        let device_bytes = state.allocations.values().map(|each| each.bytes as u64).sum();
        Sightings { device_bytes, ..state.sightings }
    }

    /// Takes the device away: everything fails from now on.
    pub fn lose(&self) {
        self.shared.lose();
    }

    /// Lets the device carry out so many copies, counted from its beginning, and hold the others back
    /// until it may go on or is lost. `None`: all it gets.
    pub fn hold_after(&self, copies: Option<u64>) {
        lock(&self.shared.state).most_copies = copies;
        self.shared.reached.notify_all();
    }

    /// Writes to memory of the device without a copy, for tests.
    ///
    /// # Panics
    /// If it is not the device's.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let mut state = lock(&self.shared.state);
        let (contents, at) = state.contents(address, bytes.len()).expect("memory of the device");
        contents.as_mut_slice()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads memory of the device without a copy, for tests.
    ///
    /// # Panics
    /// If it is not the device's.
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut state = lock(&self.shared.state);
        let (contents, at) = state.contents(address, length).expect("memory of the device");
        contents.as_slice()[at..at + length].to_vec()
    }

    /// A copy by another user of the device: of ordinary memory that is registered, in one piece, or not
    /// at all.
    ///
    /// # Safety
    /// As for [`Driver::copy_now`].
    pub unsafe fn copy_by_other(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: passed on.
        unsafe { self.copy_now(way, source, target, bytes) }
    }

    /// What is registered now, with the first address and the length of each piece.
    pub fn registered(&self) -> Vec<(usize, usize)> {
        let state = lock(&self.shared.state);
        state.registered.iter().map(|(start, (end, _))| (*start, end - start)).collect()
    }

    fn put(&self, stream: Stream, order: Order) -> Result<(), DriverError> {
        let streams = lock(&self.streams);
        let orders =
            &streams.get(&stream.raw()).ok_or(error("stream", code::INVALID_VALUE))?.orders;
        lock(&orders.inbox).queue.push_back(order);
        orders.rung.notify_one();
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

impl State {
    fn name(&mut self) -> u64 {
        self.last_name += 1;
        self.last_name
    }

    /// Where memory of the device really is.
    fn contents(&mut self, address: u64, length: usize) -> Option<(&mut Pages, usize)> {
        let (start, allocation) = self.allocations.range_mut(..=address).next_back()?;
        let at = (address - start) as usize;
        (at + length <= allocation.bytes).then_some((&mut allocation.contents, at))
    }

    fn real(&mut self, address: u64, length: usize) -> Result<u64, DriverError> {
        let contents = self.contents(address, length);
        let (contents, at) = contents.ok_or(error("device memory", code::INVALID_VALUE))?;
        Ok(contents.as_ptr() as u64 + at as u64)
    }

    /// Whether ordinary memory lies inside one registration that allows the access.
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

    /// Whether some of the bytes are registered and others are not, or are in another piece.
    fn crosses_an_edge(&self, address: u64, length: usize) -> bool {
        let (start, end) = (address as usize, address as usize + length);
        self.overlaps_registered(start, end) && !self.is_registered(address, length, false)
    }

    fn overlaps_registered(&self, start: usize, end: usize) -> bool {
        let before = self.registered.range(..end).next_back();
        before.is_some_and(|(_, (to, _))| *to > start)
    }
}

// SAFETY: a stream is one thread that does one order after the other, and an event is reached when
// its order's turn comes.
unsafe impl Driver for ModelDevice {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn enter(&self) -> Result<(), DriverError> {
        Ok(())
    }

    fn memory(&self) -> Result<(usize, usize), DriverError> {
        let total = self.shared.faults.most_device_bytes.unwrap_or(1 << 30);
        let taken = self.sightings().device_bytes as usize;
        Ok((total.saturating_sub(taken), total))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        self.check("allocate")?;
        let none = error("allocate", code::OUT_OF_MEMORY);
        if self.memory()?.0 < bytes || bytes == 0 {
            return Err(none);
        }
        let addresses = Reserved::new(bytes).map_err(|_| none)?;
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
        let torn = state.in_flight_inside.iter().any(|(from, to)| *from < end && start < *to);
        if torn {
            state.sightings.torn_copies += 1;
            // The copy goes on: it must not hit what gets the memory next.
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
        state.registrations_asked += 1;
        let asked = state.registrations_asked;
        let refused = self.shared.faults.refuses_registrations;
        if refused.is_some_and(|every| asked.is_multiple_of(every)) {
            return Err(error("register", code::NOT_SUPPORTED));
        }
        // As pinning does, this brings pages in. Pages are pinned whole; bytes are what is registered.
        let populate = match read_only {
            true => residency::populate_for_reading,
            false => residency::populate_for_writing,
        };
        let pages = PageRange::covering(address, bytes);
        if !pages.is_ok_and(|pages| populate(pages.start(), pages.bytes()).is_ok()) {
            return Err(error("register", code::INVALID_VALUE));
        }
        if state.overlaps_registered(address, address + bytes) {
            return Err(error("register", code::ALREADY_REGISTERED));
        }
        state.registered.insert(address, (address + bytes, !read_only));
        state.sightings.registrations += 1;
        Ok(())
    }

    unsafe fn unregister(&self, address: usize) -> Result<(), DriverError> {
        let mut state = lock(&self.shared.state);
        let removed = state.registered.remove(&address);
        let (end, _) = removed.ok_or(error("unregister", code::INVALID_VALUE))?;
        let torn = state.in_flight.iter().filter(|(from, to)| *from < end && address < *to);
        let torn = torn.count() as u64;
        state.sightings.torn_copies += torn;
        state.sightings.unregistrations += 1;
        Ok(())
    }

    fn is_device(&self, address: u64) -> Option<bool> {
        let mut state = lock(&self.shared.state);
        if state.contents(address, 1).is_some() {
            return Some(true);
        }
        state.is_registered(address, 1, false).then_some(false)
    }

    fn reaches(&self, address: u64) -> bool {
        let mut state = lock(&self.shared.state);
        state.contents(address, 1).is_some() || state.is_registered(address, 1, false)
    }

    fn create_stream(&self) -> Result<Stream, DriverError> {
        self.check("create_stream")?;
        let name = lock(&self.shared.state).name();
        let orders = Arc::new(Orders::default());
        let (shared, own) = (self.shared.clone(), orders.clone());
        let thread = std::thread::Builder::new()
            .name(format!("model-stream-{name}"))
            .spawn(move || shared.run(&own))
            .map_err(|_| error("create_stream", code::OUT_OF_MEMORY))?;
        lock(&self.streams).insert(name, Queue { orders, thread: Some(thread) });
        // SAFETY: the name of a stream that was made just now.
        Ok(unsafe { Stream::from_raw(name) })
    }

    fn destroy_stream(&self, stream: Stream) {
        let queue = lock(&self.streams).remove(&stream.raw());
        drop(queue);
    }

    fn create_event(&self) -> Result<Event, DriverError> {
        self.check("create_event")?;
        let mut state = lock(&self.shared.state);
        let name = state.name();
        state.events.insert(name, (0, 0));
        // SAFETY: the name of an event that was made just now.
        Ok(unsafe { Event::from_raw(name) })
    }

    fn destroy_event(&self, event: Event) {
        lock(&self.shared.state).events.remove(&event.raw());
    }

    unsafe fn copy(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError> {
        self.check("copy")?;
        let order = {
            let mut state = lock(&self.shared.state);
            state.copies_asked += 1;
            if self.shared.faults.refused_copy == Some(state.copies_asked) {
                return Err(error("copy", code::NOT_SUPPORTED));
            }
            let (host, writes) = match way {
                Way::In => (Some(source), false),
                Way::Out => (Some(target), true),
                Way::Within => (None, false),
            };
            if let Some(address) = host
                && !state.is_registered(address, bytes, writes)
            {
                state.sightings.stray_copies += 1;
                return Err(error("copy", code::INVALID_VALUE));
            }
            let host = host.map(|address| (address as usize, address as usize + bytes));
            let source = if way == Way::In { source } else { state.real(source, bytes)? };
            let target = if way == Way::Out { target } else { state.real(target, bytes)? };
            state.in_flight.extend(host);
            let inside = match way {
                Way::In => [Some(target), None],
                Way::Out => [Some(source), None],
                Way::Within => [Some(source), Some(target)],
            };
            let inside = inside.map(|at| at.map(|at| (at, at + bytes as u64)));
            state.in_flight_inside.extend(inside.into_iter().flatten());
            Order::Copy { source, target, bytes, host, inside }
        };
        self.put(stream, order)
    }

    unsafe fn copy_now(
        &self,
        way: Way,
        source: u64,
        target: u64,
        bytes: usize,
    ) -> Result<(), DriverError> {
        self.check("copy_now")?;
        let mut state = lock(&self.shared.state);
        let host = match way {
            Way::In => Some(source),
            Way::Out => Some(target),
            Way::Within => None,
        };
        if host.is_some_and(|address| state.crosses_an_edge(address, bytes)) {
            return Err(error("copy_now", code::INVALID_VALUE));
        }
        let source = if way == Way::In { source } else { state.real(source, bytes)? };
        let target = if way == Way::Out { target } else { state.real(target, bytes)? };
        state.sightings.copies += 1;
        // SAFETY: the caller vouches for ordinary memory; the device's was checked.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn fill(
        &self,
        target: u64,
        value: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), DriverError> {
        self.check("fill")?;
        let target = lock(&self.shared.state).real(target, bytes)?;
        self.put(stream, Order::Fill { target, value, bytes })
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError> {
        self.check("record")?;
        let turn = {
            let mut state = lock(&self.shared.state);
            let known = state.events.get_mut(&event.raw());
            let (recorded, _) = known.ok_or(error("record", code::INVALID_VALUE))?;
            *recorded += 1;
            *recorded
        };
        self.put(stream, Order::Record { event: event.raw(), turn })
    }

    fn await_event(&self, stream: Stream, event: Event) -> Result<(), DriverError> {
        self.check("await_event")?;
        let turn = {
            let state = lock(&self.shared.state);
            state.events.get(&event.raw()).ok_or(error("await_event", code::INVALID_VALUE))?.0
        };
        self.put(stream, Order::Await { event: event.raw(), turn })
    }

    fn drain(&self, stream: Stream) {
        let streams = lock(&self.streams);
        let Some(orders) = streams.get(&stream.raw()).map(|queue| queue.orders.clone()) else {
            return;
        };
        drop(streams);
        let mut inbox = lock(&orders.inbox);
        while inbox.is_busy || !inbox.queue.is_empty() {
            inbox = orders.idle.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_reached(&self, event: Event) -> Result<bool, DriverError> {
        self.check("is_reached")?;
        let state = lock(&self.shared.state);
        let (recorded, reached) =
            state.events.get(&event.raw()).ok_or(error("is_reached", code::INVALID_VALUE))?;
        Ok(reached >= recorded)
    }
}
