//! The thread of a channel: cuts descriptors into pieces, keeps the device busy with them, and
//! reports what is over, in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::{Access, PinError};
use memferry_sys::clock;
use memferry_sys::cuda::{DriverError, Event, Stream, Way, code};
use memferry_sys::sync::spin_hint;

use super::Device;
use super::flight::{Flight, Open, Step};
use super::passage::Passage;
use super::slots::{Slots, Wish};
use crate::contract::{
    ChannelOptions, Direction, ExecutionError, MemoryKind, OpenError, Operation, Scope, Sequence,
};
use crate::threaded::{Inside, ThreadedChannel};
use crate::{Kernel, execute};

/// Pieces that a channel has under way at most: enough that the device does not run out of work
/// while the channel sleeps.
const MOST_FLIGHTS: usize = 16;
/// The largest piece.
pub(super) const PIECE_BYTES: u64 = 32 << 20;
/// Memory of the device that copies between ordinary memory pass through.
const PASSAGE_BYTES: u64 = 4 * PIECE_BYTES;
/// A slot of the ring: each costs the device a few microseconds, and small ones stay in the cache.
pub(super) const RING_SLOT_BYTES: u64 = 2 << 20;
const RING_SLOTS: usize = 3;

/// Opens a channel.
pub(super) fn open(
    device: &Arc<Device>,
    options: &ChannelOptions,
    default_capacity: usize,
) -> Result<ThreadedChannel, OpenError> {
    let device = device.clone();
    ThreadedChannel::open("cuda", options, default_capacity, move |inside| {
        let refused = |error: DriverError| {
            let reason = format!("no stream could be opened: {error}");
            OpenError::System { engine: "cuda".into(), reason }
        };
        clock::sharpen_timers();
        let worker = Worker::new(inside, device).map_err(refused)?;
        Ok(move || worker.run())
    })
}

/// The thread of a channel.
struct Worker {
    inside: Arc<Inside>,
    device: Arc<Device>,
    /// Into the device, and inside it.
    inward: Stream,
    /// Out of the device.
    outward: Stream,
    events: Vec<Event>,
    passage: Passage,
    ring: Slots,
    /// Taken and not over, in order.
    open: VecDeque<Open>,
    /// Begun and not over, in order.
    flights: VecDeque<Flight>,
    taken: Sequence,
    /// When each stream should be through with what it has.
    busy_until_ns: [u64; 2],
    /// How much later than expected the device has been of late.
    lag_ns: u64,
    /// The device was later than that, and was looked for again.
    was_late: bool,
}

/// What became of the wish to begin a piece.
enum Begun {
    /// It is under way.
    Yes,
    /// Nothing was left of the descriptor.
    Nothing,
    /// There is no slot for it now.
    NoRoom,
}

/// Why a side of a copy is not registered.
enum Unregistered {
    /// It shall not be, or cannot be.
    Refused,
    /// It is not there.
    Missing { address: u64 },
}

impl Worker {
    fn new(inside: Arc<Inside>, device: Arc<Device>) -> Result<Self, DriverError> {
        let driver = &device.driver;
        driver.enter()?;
        let inward = driver.create_stream()?;
        let outward = driver.create_stream().inspect_err(|_| driver.destroy_stream(inward))?;
        let passage = Passage::new(driver.clone(), PASSAGE_BYTES);
        let mut ring = Slots::new(driver.clone(), RING_SLOT_BYTES as usize, RING_SLOTS);
        ring.prepare();
        Ok(Self {
            inside,
            inward,
            outward,
            events: Vec::new(),
            passage,
            ring,
            device,
            open: VecDeque::new(),
            flights: VecDeque::new(),
            taken: 0,
            busy_until_ns: [0; 2],
            lag_ns: 0,
            was_late: false,
        })
    }

    fn run(mut self) {
        loop {
            let mut room = true;
            let mut moved = false;
            while room {
                room = match self.begin_next() {
                    Begun::Yes => true,
                    Begun::Nothing | Begun::NoRoom => false,
                };
                moved |= room;
                moved |= self.report();
            }
            if moved {
                continue;
            }
            if !self.flights.is_empty() {
                self.wait_for_device();
            } else if !self.wait_for_work() {
                return;
            }
        }
    }

    /// Begins the next piece of the oldest descriptor of which something is left.
    fn begin_next(&mut self) -> Begun {
        if self.flights.len() >= MOST_FLIGHTS {
            return Begun::NoRoom;
        }
        loop {
            if self.open.back().is_none_or(|open| open.is_begun) && !self.take() {
                return Begun::Nothing;
            }
            match self.begin_piece() {
                Begun::Nothing => self.report(),
                other => return other,
            };
        }
    }

    /// Takes the next descriptor, if there is one.
    fn take(&mut self) -> bool {
        // SAFETY: this thread is the only consumer, and counts what it takes.
        let Some(descriptor) = (unsafe { self.inside.ring.take(self.taken) }) else {
            return false;
        };
        self.taken += 1;
        let is_cancelled = descriptor.scope() != Scope::Chunks && descriptor.is_cancelled();
        let mut open = Open::new(descriptor, self.taken);
        if is_cancelled {
            open.failure = Some(ExecutionError::Cancelled { done_bytes: 0 });
            (open.window, open.is_begun) = (0..0, true);
        }
        self.open.push_back(open);
        true
    }

    /// Begins a piece of the newest descriptor.
    fn begin_piece(&mut self) -> Begun {
        let Some(open) = self.open.back_mut() else { return Begun::Nothing };
        let descriptor = &open.descriptor;
        let (operation, kinds) = (descriptor.operation(), descriptor.memory_kinds());
        let most = open.next_piece_bytes();
        if open.is_begun || !open.has_more(most) {
            return Begun::Nothing;
        }
        if self.device.is_lost() {
            return self.over(u64::MAX, Err(failed("the GPU is lost")));
        }
        use MemoryKind::{Device, Host};
        match (operation, kinds) {
            (Operation::Copy, (Host, Device)) => self.begin_inward(most),
            (Operation::Copy, (Device, Host)) => self.begin_outward(most),
            (Operation::Copy, (Device, Device)) => self.begin_within(),
            (Operation::Copy, (Host, Host)) => self.begin_through(most),
            (Operation::Fill, (_, Device)) => self.begin_fill(),
            (Operation::Fill, (_, Host)) => self.begin_fill_outward(most),
            (Operation::Move, (Device, Device)) => self.begin_move(),
            (Operation::Move | Operation::Compare, (Host, Host)) => self.run_here(u64::MAX),
            // Memory of two kinds never overlaps.
            (Operation::Move, _) => self.over(u64::MAX, Err(failed("nothing to move within"))),
            (Operation::Compare, _) => self.compare(),
        }
    }

    /// From ordinary memory to the device.
    fn begin_inward(&mut self, most: u64) -> Begun {
        let (source, target) = self.addresses();
        let (lease, length) = match self.lease(0, source, most, Access::Read) {
            Ok(registered) => registered,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            Err(Unregistered::Refused) => return self.begin_staged_inward(source, target, most),
        };
        let expected_ns =
            self.expect(0, Direction::new(MemoryKind::Host, MemoryKind::Device), length);
        let stream = self.inward;
        // SAFETY: whoever made the descriptor vouches for its memory until it is reported, which
        // happens after the event; the lease keeps this range registered, in one piece.
        match unsafe { self.copy(Way::In, source, target, length, stream) } {
            Err(error) if error.code == code::INVALID_VALUE => self.distrust(),
            copied => {
                let step = copied.map(|end| Step::Direct { end });
                self.begun(length, step, expected_ns, [Some(lease), None])
            }
        }
    }

    /// From ordinary memory to the device, by a slot of the ring.
    fn begin_staged_inward(&mut self, source: u64, target: u64, most: u64) -> Begun {
        let length = self.left().min(most).min(RING_SLOT_BYTES);
        let slot = match self.ring.take() {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.copy_now(Way::In),
        };
        // SAFETY: the source is vouched for, and the slot is ours and large enough.
        unsafe { execute::run(Operation::Copy, Kernel::Cached, source, slot, length, 0) };
        let expected_ns =
            self.expect(0, Direction::new(MemoryKind::Host, MemoryKind::Device), length);
        let stream = self.inward;
        // SAFETY: the target is vouched for, and the slot stays taken, until the event.
        let copied = unsafe { self.copy(Way::In, slot, target, length, stream) };
        if copied.is_err() {
            self.ring.give_back(slot);
        }
        let step = copied.map(|end| Step::StagedIn { slot, end });
        self.begun(length, step, expected_ns, [None, None])
    }

    /// From the device to ordinary memory.
    fn begin_outward(&mut self, most: u64) -> Begun {
        let (source, target) = self.addresses();
        let (lease, length) = match self.lease(1, target, most, Access::Write) {
            Ok(registered) => registered,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            Err(Unregistered::Refused) => return self.begin_staged_outward(source, most),
        };
        let expected_ns =
            self.expect(1, Direction::new(MemoryKind::Device, MemoryKind::Host), length);
        let stream = self.outward;
        // SAFETY: as in `begin_inward`.
        match unsafe { self.copy(Way::Out, source, target, length, stream) } {
            Err(error) if error.code == code::INVALID_VALUE => self.distrust(),
            copied => {
                let step = copied.map(|end| Step::Direct { end });
                self.begun(length, step, expected_ns, [None, Some(lease)])
            }
        }
    }

    /// From the device to ordinary memory, by a slot of the ring; `finish` does the second half.
    fn begin_staged_outward(&mut self, source: u64, most: u64) -> Begun {
        let length = self.left().min(most).min(RING_SLOT_BYTES);
        let slot = match self.ring.take() {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.copy_now(Way::Out),
        };
        let expected_ns =
            self.expect(1, Direction::new(MemoryKind::Device, MemoryKind::Host), length);
        let stream = self.outward;
        // SAFETY: the source is vouched for, and the slot stays taken, until the event.
        let copied = unsafe { self.copy(Way::Out, source, slot, length, stream) };
        if copied.is_err() {
            self.ring.give_back(slot);
        }
        let step = copied.map(|end| Step::StagedOut { slot, end });
        self.begun(length, step, expected_ns, [None, None])
    }

    /// Inside the device.
    fn begin_within(&mut self) -> Begun {
        let ((source, target), length) = (self.addresses(), self.left());
        let direction = Direction::new(MemoryKind::Device, MemoryKind::Device);
        let (stream, expected_ns) = (self.inward, self.expect(0, direction, length));
        // SAFETY: the memory is vouched for until the descriptor is reported, after the event.
        let copied = unsafe { self.copy(Way::Within, source, target, length, stream) };
        let step = copied.map(|end| Step::Direct { end });
        self.begun(length, step, expected_ns, [None, None])
    }

    /// From ordinary memory to ordinary memory: in by one stream, out by the other.
    fn begin_through(&mut self, most: u64) -> Begun {
        let (source, target) = self.addresses();
        let sides = self.lease(0, source, most, Access::Read).and_then(|(from, length)| {
            let (to, length) = self.lease(1, target, length, Access::Write)?;
            Ok((from, to, length))
        });
        let (from, to, length) = match sides {
            Ok(sides) => sides,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            // A copy into the ring and out of it is more work than the copy itself.
            Err(Unregistered::Refused) => return self.run_here(RING_SLOT_BYTES),
        };
        let slot = match self.passage.take(length) {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.run_here(RING_SLOT_BYTES),
        };
        let in_ns = self.expect(0, Direction::new(MemoryKind::Host, MemoryKind::Device), length);
        self.busy_until_ns[1] = self.busy_until_ns[1].max(in_ns);
        let expected_ns = self.expect(1, Direction::HOST_TO_HOST, length);
        // SAFETY: as in `begin_inward`, for both sides; the slot stays taken until the last event,
        // and the second stream reads it after the first has written it.
        match unsafe { self.copy_through(source, slot, target, length) } {
            Ok((middle, end)) => {
                let step = Ok(Step::Through { slot, middle, end });
                self.begun(length, step, expected_ns, [Some(from), Some(to)])
            }
            Err(error) => {
                // The first half may be on its way: the slot is used again only by the same stream.
                self.passage.give_back(slot);
                if error.code == code::INVALID_VALUE {
                    return self.distrust();
                }
                self.begun(length, Err(error), expected_ns, [Some(from), Some(to)])
            }
        }
    }

    /// # Safety
    /// As for [`Driver::copy`](memferry_sys::cuda::Driver::copy), for both halves.
    unsafe fn copy_through(
        &mut self,
        source: u64,
        slot: u64,
        target: u64,
        length: u64,
    ) -> Result<(Event, Event), DriverError> {
        let (inward, outward) = (self.inward, self.outward);
        // SAFETY: passed on.
        let middle = unsafe { self.copy(Way::In, source, slot, length, inward) }?;
        let rest = self.device.driver.await_event(outward, middle).and_then(|()| {
            // SAFETY: passed on.
            unsafe { self.copy(Way::Out, slot, target, length, outward) }
        });
        match rest {
            Ok(end) => Ok((middle, end)),
            Err(error) => {
                // The source must not be given back while it is read.
                self.device.driver.drain(inward);
                self.events.push(middle);
                Err(error)
            }
        }
    }

    /// Sets memory of the device.
    fn begin_fill(&mut self) -> Begun {
        let ((_, target), length) = (self.addresses(), self.left());
        let Some(value) = self.open.back().map(|open| open.descriptor.fill_value()) else {
            return Begun::Nothing;
        };
        let direction = Direction::new(MemoryKind::Device, MemoryKind::Device);
        let (stream, expected_ns) = (self.inward, self.expect(0, direction, length));
        // SAFETY: the memory is vouched for until the descriptor is reported, after the event.
        let filled = unsafe { self.device.driver.fill(target, value, length as usize, stream) }
            .and_then(|()| self.mark(stream));
        let step = filled.map(|end| Step::Direct { end });
        self.begun(length, step, expected_ns, [None, None])
    }

    /// Sets ordinary memory, from a slot that the device has set.
    fn begin_fill_outward(&mut self, most: u64) -> Begun {
        let (_, target) = self.addresses();
        let Some(value) = self.open.back().map(|open| open.descriptor.fill_value()) else {
            return Begun::Nothing;
        };
        let (lease, length) = match self.lease(1, target, most, Access::Write) {
            Ok(registered) => registered,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            Err(Unregistered::Refused) => return self.run_here(RING_SLOT_BYTES),
        };
        let slot = match self.passage.take(length) {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.run_here(RING_SLOT_BYTES),
        };
        let expected_ns =
            self.expect(1, Direction::new(MemoryKind::Device, MemoryKind::Host), length);
        let stream = self.outward;
        // SAFETY: the slot is ours until the event, and large enough; the target as ever.
        let filled = unsafe {
            let set = self.device.driver.fill(slot, value, length as usize, stream);
            set.and_then(|()| self.copy(Way::Out, slot, target, length, stream))
        };
        match filled {
            Ok(end) => {
                let middle = end;
                let step = Ok(Step::Through { slot, middle, end });
                self.begun(length, step, expected_ns, [None, Some(lease)])
            }
            Err(error) => {
                // The slot may be on its way to be set, and is written by the other stream next.
                self.device.driver.drain(stream);
                self.passage.give_back(slot);
                self.begun(length, Err(error), expected_ns, [None, Some(lease)])
            }
        }
    }

    /// Moves within the device, between ranges that overlap: piece after piece through one slot, in
    /// one stream, from the end that is not overwritten first.
    fn begin_move(&mut self) -> Begun {
        let ((source, target), length) = (self.addresses(), self.left());
        let slot = match self.passage.take(length.min(PIECE_BYTES)) {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => {
                return self
                    .over(u64::MAX, Err(failed("there is no memory of the device to move by")));
            }
        };
        let direction = Direction::new(MemoryKind::Device, MemoryKind::Device);
        let (stream, expected_ns) = (self.inward, self.expect(0, direction, 2 * length));
        let count = length.div_ceil(PIECE_BYTES);
        let moved = (0..count).try_for_each(|turn| {
            let index = if target < source { turn } else { count - 1 - turn };
            let at = index * PIECE_BYTES;
            let bytes = (length - at).min(PIECE_BYTES) as usize;
            let driver = &self.device.driver;
            // SAFETY: the memory is vouched for and the slot is ours until the event; the stream
            // keeps the order.
            unsafe {
                driver.copy(Way::Within, source + at, slot, bytes, stream)?;
                driver.copy(Way::Within, slot, target + at, bytes, stream)
            }
        });
        match moved.and_then(|()| self.mark(stream)) {
            Ok(end) => {
                let step = Ok(Step::Through { slot, middle: end, end });
                self.begun(length, step, expected_ns, [None, None])
            }
            Err(error) => {
                // A part may be on its way.
                self.device.driver.drain(stream);
                self.passage.give_back(slot);
                self.begun(length, Err(error), expected_ns, [None, None])
            }
        }
    }

    /// Compares memory of which at least one side is the device's: brings it into the ring, piece by
    /// piece, and looks. Returns when it is over.
    fn compare(&mut self) -> Begun {
        let ((left, right), length) = (self.addresses(), self.left());
        let kinds = self.open.back().map(|open| open.descriptor.memory_kinds());
        let Some((left_kind, right_kind)) = kinds else { return Begun::Nothing };
        let slots = [self.ring.take(), self.ring.take()];
        let [Wish::Slot(first), Wish::Slot(second)] = slots else {
            slots.into_iter().for_each(|wish| {
                if let Wish::Slot(slot) = wish {
                    self.ring.give_back(slot);
                }
            });
            if slots.contains(&Wish::Busy) && !slots.contains(&Wish::Refused) {
                return Begun::NoRoom;
            }
            return self.over(u64::MAX, Err(failed("there is no pinned memory to compare in")));
        };
        let (mut at, mut outcome) = (0, Ok(None));
        while at < length && outcome == Ok(None) {
            let bytes = (length - at).min(RING_SLOT_BYTES);
            let sides = self
                .bring(left + at, left_kind, first, bytes)
                .and_then(|left| Ok((left, self.bring(right + at, right_kind, second, bytes)?)));
            outcome = sides.map(|(left, right)| {
                // SAFETY: both are ordinary memory of this length: the ring, or vouched for.
                let found = unsafe {
                    execute::run(Operation::Compare, Kernel::Cached, left, right, bytes, 0)
                };
                found.map(|difference| at + difference)
            });
            at += bytes;
        }
        self.ring.give_back(first);
        self.ring.give_back(second);
        let result = outcome.map_err(|error| self.failure(error));
        self.over(u64::MAX, result)
    }

    /// The address at which bytes can be looked at: their own, or that of a slot they are brought to.
    fn bring(
        &mut self,
        address: u64,
        kind: MemoryKind,
        slot: u64,
        bytes: u64,
    ) -> Result<u64, DriverError> {
        if kind == MemoryKind::Host {
            return Ok(address);
        }
        let stream = self.outward;
        // SAFETY: the memory is vouched for, the slot is ours, and the event is waited for.
        let end = unsafe { self.copy(Way::Out, address, slot, bytes, stream) }?;
        let reached = self.wait_for(end);
        self.events.push(end);
        reached.map(|()| slot)
    }

    /// Carries out what a processor can, here and now.
    fn run_here(&mut self, most: u64) -> Begun {
        let length = self.left().min(most);
        let (source, target) = self.addresses();
        let Some(open) = self.open.back() else { return Begun::Nothing };
        let (operation, value) = (open.descriptor.operation(), open.descriptor.fill_value());
        // SAFETY: the memory is vouched for until the descriptor is reported, and it is ordinary.
        let difference =
            unsafe { execute::run(operation, Kernel::Cached, source, target, length, value) };
        self.over(length, Ok(difference))
    }

    /// The driver's own way with memory that is not registered, where there is no ring.
    fn copy_now(&mut self, way: Way) -> Begun {
        let ((source, target), length) = (self.addresses(), self.left());
        // SAFETY: the memory is vouched for until the descriptor is reported.
        let copied = unsafe { self.device.driver.copy_now(way, source, target, length as usize) };
        let result = copied.map(|()| None).map_err(|error| self.failure(error));
        self.over(length, result)
    }

    /// Memory that is not there.
    fn missing(&mut self, address: u64) -> Begun {
        self.over(u64::MAX, Err(ExecutionError::BadMemory { address, done_bytes: 0 }))
    }

    /// The driver does not take registered memory for what it is: do without.
    fn distrust(&mut self) -> Begun {
        match self.open.back_mut() {
            Some(open) if !open.distrusts_registrations => {
                open.distrusts_registrations = true;
                self.begin_piece()
            }
            _ => self.over(u64::MAX, Err(failed("the driver refuses the addresses"))),
        }
    }

    /// The addresses at which the next piece begins.
    fn addresses(&self) -> (u64, u64) {
        self.open.back().map_or((0, 0), |open| {
            let (descriptor, at) = (&open.descriptor, open.window.start);
            (descriptor.source().wrapping_add(at), descriptor.target().wrapping_add(at))
        })
    }

    /// How much is left of what was claimed.
    fn left(&self) -> u64 {
        self.open.back().map_or(0, |open| open.window.end - open.window.start)
    }

    /// Finds or makes a registration for one side of the next piece; says how long it is.
    fn lease(
        &mut self,
        side: usize,
        address: u64,
        most: u64,
        access: Access,
    ) -> Result<(Lease, u64), Unregistered> {
        let left = self.left().min(most).min(PIECE_BYTES);
        let Some(open) = self.open.back_mut().filter(|open| !open.distrusts_registrations) else {
            return Err(Unregistered::Refused);
        };
        let registry = &self.device.registry;
        let lease = match registry.find(address, access) {
            Some(lease) => lease,
            None if open.descriptor.is_passing() => return Err(Unregistered::Refused),
            None => {
                let length = left.min(open.growth[side]);
                open.growth[side] = (2 * open.growth[side]).min(PIECE_BYTES);
                registry.acquire(address, length, access).map_err(|error| match error {
                    PinError::BadMemory { range } => {
                        Unregistered::Missing { address: address.max(range.start() as u64) }
                    }
                    _ => Unregistered::Refused,
                })?
            }
        };
        let registered = lease.range().end() as u64;
        let end = self.device.registrar.piece_end(address).unwrap_or(address).min(registered);
        if end <= address {
            Err(Unregistered::Refused)
        } else {
            Ok((lease, left.min(end - address)))
        }
    }

    /// Puts a copy and an event behind it into a stream.
    ///
    /// # Safety
    /// As for [`Driver::copy`](memferry_sys::cuda::Driver::copy).
    unsafe fn copy(
        &mut self,
        way: Way,
        source: u64,
        target: u64,
        length: u64,
        stream: Stream,
    ) -> Result<Event, DriverError> {
        // SAFETY: passed on.
        unsafe { self.device.driver.copy(way, source, target, length as usize, stream) }?;
        self.mark(stream)
    }

    /// Puts an event into a stream. Without one nobody would know when what is in the stream is
    /// over: then this waits until it is, and fails.
    fn mark(&mut self, stream: Stream) -> Result<Event, DriverError> {
        let driver = &self.device.driver;
        let event = self.events.pop().map_or_else(|| driver.create_event(), Ok);
        let marked = event.and_then(|event| driver.record(event, stream).map(|()| event));
        marked.inspect_err(|_| driver.drain(stream))
    }

    /// Waits until the device has come to an event, by asking again and again.
    fn wait_for(&self, event: Event) -> Result<(), DriverError> {
        while !self.device.driver.is_reached(event)? {
            spin_hint();
        }
        Ok(())
    }

    /// When a stream should be through with so many more bytes.
    fn expect(&mut self, stream: usize, direction: Direction, length: u64) -> u64 {
        let (rates, line) = (&self.device.rates, self.device.rates.cost(direction));
        let busy = &mut self.busy_until_ns[stream];
        let begins = (*busy).max(clock::now_ns() + rates.startup_ns as u64);
        *busy = begins + (line.ns_per_byte * length as f64) as u64;
        *busy
    }

    /// A piece was handed to the device, or was not taken.
    fn begun(
        &mut self,
        length: u64,
        step: Result<Step, DriverError>,
        expected_ns: u64,
        leases: [Option<Lease>; 2],
    ) -> Begun {
        let step = step.unwrap_or_else(|error| Step::Over(Err(self.failure(error))));
        let Some(open) = self.open.back_mut() else { return Begun::Nothing };
        let (sequence, piece) = (open.sequence, open.begin(length));
        self.flights.push_back(Flight { sequence, piece, step, expected_ns, leases });
        Begun::Yes
    }

    /// A piece of at most `most` bytes is over before the device has seen it.
    fn over(&mut self, most: u64, result: Result<Option<u64>, ExecutionError>) -> Begun {
        let length = self.left().min(most);
        let Some(open) = self.open.back_mut() else { return Begun::Nothing };
        let (sequence, piece) = (open.sequence, open.begin(length));
        let (step, leases) = (Step::Over(result), [None, None]);
        self.flights.push_back(Flight { sequence, piece, step, expected_ns: 0, leases });
        Begun::Yes
    }

    /// What a driver said, as the error of a piece.
    fn failure(&self, error: DriverError) -> ExecutionError {
        self.device.heard(error);
        failed(error.meaning())
    }

    /// Reports everything that is over, in order; says whether anything was.
    fn report(&mut self) -> bool {
        let mut moved = false;
        while let Some(flight) = self.flights.front() {
            let ended = match &flight.step {
                Step::Over(result) => result.clone(),
                Step::Direct { end }
                | Step::Through { end, .. }
                | Step::StagedIn { end, .. }
                | Step::StagedOut { end, .. } => match self.device.driver.is_reached(*end) {
                    Ok(false) => break,
                    Ok(true) => Ok(None),
                    Err(error) => {
                        // Nothing may write to memory any more when its owner is told.
                        self.device.driver.drain(self.inward);
                        self.device.driver.drain(self.outward);
                        Err(self.failure(error))
                    }
                },
            };
            if let Some(flight) = self.flights.pop_front() {
                self.learn(&flight);
                self.finish(flight, ended);
                moved = true;
            }
        }
        moved | self.complete()
    }

    /// Learns from a piece that is over how far the device is behind. Nothing is known of when it
    /// came to one that was done at the first look: then it may be less.
    fn learn(&mut self, flight: &Flight) {
        if self.flights.is_empty() {
            (self.lag_ns, self.busy_until_ns) = (0, [0; 2]);
        } else if self.was_late {
            self.lag_ns = clock::now_ns().saturating_sub(flight.expected_ns);
        } else {
            self.lag_ns -= self.lag_ns / 8;
        }
        self.was_late = false;
    }

    /// Ends a piece.
    fn finish(&mut self, flight: Flight, ended: Result<Option<u64>, ExecutionError>) {
        let Flight { sequence, piece, step, leases, .. } = flight;
        let first = self.open.front().map_or(sequence, |open| open.sequence);
        let Some(open) = self.open.get_mut((sequence - first) as usize) else { return };
        match step {
            Step::Over(_) => {}
            Step::Direct { end } => self.events.push(end),
            Step::Through { slot, middle, end } => {
                self.passage.give_back(slot);
                self.events.push(end);
                if middle != end {
                    self.events.push(middle);
                }
            }
            Step::StagedIn { slot, end } => {
                self.ring.give_back(slot);
                self.events.push(end);
            }
            Step::StagedOut { slot, end } => {
                if ended.is_ok() {
                    let target = open.descriptor.target().wrapping_add(piece.offset);
                    let kernel = open.descriptor.processor_kernel();
                    // SAFETY: the target is vouched for until the descriptor is reported, and the
                    // device has written the slot.
                    unsafe { execute::run(Operation::Copy, kernel, slot, target, piece.length, 0) };
                }
                self.ring.give_back(slot);
                self.events.push(end);
            }
        }
        // Before the report: memory that was given back may be unmapped at once.
        drop(leases);
        if ended.is_ok() {
            self.inside.count_moved(piece.length);
        }
        open.end(piece, ended);
    }

    /// Reports descriptors that are over; says whether there were any.
    fn complete(&mut self) -> bool {
        let mut moved = false;
        while self.open.front().is_some_and(Open::is_over)
            && let Some(open) = self.open.pop_front()
        {
            let (sequence, bytes) = (open.sequence, open.descriptor.length());
            let outcome = open.outcome();
            if let Err(error) = &outcome {
                self.inside.count_failure(sequence, error.clone());
            }
            open.descriptor.finish(outcome);
            // SAFETY: this thread is the channel, everything before it is over, and the descriptor
            // is gone.
            unsafe { self.inside.complete(sequence, bytes) };
            moved = true;
        }
        moved
    }

    /// Sleeps until about half of the pieces that are under way should be done; there are enough of
    /// them to keep the device busy meanwhile. The end of the last one is looked for without a pause.
    /// New descriptors end the sleep if there is room for them.
    fn wait_for_device(&mut self) {
        const SHORT_NS: u64 = 20_000;
        const LATE_NS: u64 = 20_000;
        const LATE_STAGED_NS: u64 = 200_000;
        const NAP_NS: u64 = 20_000;
        const LONGEST_NAP_NS: u64 = 50_000;
        const LONGEST: Duration = Duration::from_millis(2);
        let (Some(first), Some(last)) = (self.flights.front(), self.flights.back()) else { return };
        let awaited = (self.flights.len() - 1) / 2;
        let expected_ns = self.flights[awaited].expected_ns + self.lag_ns;
        // A nap is short beside what the device still has to do.
        let rest_ns = last.expected_ns.saturating_sub(first.expected_ns);
        let nap = Duration::from_nanos((rest_ns / 8).clamp(NAP_NS, LONGEST_NAP_NS));
        // Nor is there time to sleep where this thread is what the device waits for.
        let is_staged = matches!(first.step, Step::StagedIn { .. } | Step::StagedOut { .. });
        let is_urgent = is_staged || self.flights.len() == 1;
        let late_ns = if is_staged { LATE_STAGED_NS } else { LATE_NS };
        let now = clock::now_ns();
        let is_waiting = self.open.back().is_some_and(|open| !open.is_begun);
        let ready = || {
            !is_waiting
                && self.flights.len() < MOST_FLIGHTS
                && self.inside.ring.has_next(self.taken)
        };
        let left = expected_ns.saturating_sub(now);
        if left > SHORT_NS && !is_staged {
            let left = Duration::from_nanos(left - SHORT_NS / 2).min(LONGEST);
            self.inside.sleep(Some(left), ready);
        } else if !is_urgent || now > expected_ns + late_ns {
            self.was_late = true;
            self.inside.sleep(Some(nap), ready);
        } else {
            for _ in 0..64 {
                spin_hint();
            }
        }
    }

    /// Waits until there is work (`true`), or the channel is closed and empty.
    fn wait_for_work(&self) -> bool {
        let ring = &self.inside.ring;
        let over = || ring.is_closed() && ring.submitted() == self.taken;
        loop {
            if ring.has_next(self.taken) {
                return true;
            }
            if over() {
                return false;
            }
            self.inside.sleep(None, || ring.has_next(self.taken) || over());
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let driver = &self.device.driver;
        self.events.iter().for_each(|event| driver.destroy_event(*event));
        driver.destroy_stream(self.inward);
        driver.destroy_stream(self.outward);
    }
}

fn failed(reason: &'static str) -> ExecutionError {
    ExecutionError::Engine { done_bytes: 0, reason }
}
