//! The thread of a channel: cuts descriptors into pieces, keeps the device busy with them, and
//! reports what is over, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry_sys::clock;
use memferry_sys::cuda::{DriverError, Event, Stream};

use super::Device;
use super::flight::{Flight, Open, Step};
use super::passage::Passage;
use super::slots::Slots;
use crate::contract::{ChannelOptions, ExecutionError, OpenError, Operation, Scope, Sequence};
use crate::execute;
use crate::threaded::{Inside, ThreadedChannel};

/// Pieces that a channel has under way at most: enough that the device does not run out of work
/// while the channel sleeps.
pub(super) const MOST_FLIGHTS: usize = 16;
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
pub(super) struct Worker {
    pub(super) inside: Arc<Inside>,
    pub(super) device: Arc<Device>,
    /// Into the device, and inside it.
    pub(super) inward: Stream,
    /// Out of the device.
    pub(super) outward: Stream,
    pub(super) events: Vec<Event>,
    pub(super) passage: Passage,
    pub(super) ring: Slots,
    /// Taken and not over, in order.
    pub(super) open: VecDeque<Open>,
    /// Begun and not over, in order.
    pub(super) flights: VecDeque<Flight>,
    pub(super) taken: Sequence,
    /// When each stream should be through with what it has.
    pub(super) busy_until_ns: [u64; 2],
    /// How much later than expected the device has been of late.
    pub(super) lag_ns: u64,
    /// The device was later than that, and was looked for again.
    pub(super) was_late: bool,
}

/// What became of the wish to begin a piece.
pub(super) enum Begun {
    /// It is under way.
    Yes,
    /// Nothing was left of the descriptor.
    Nothing,
    /// There is no slot for it now.
    NoRoom,
}

/// Why a side of a copy is not registered.
pub(super) enum Unregistered {
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
            self.inside.tell_waiters(self.inside.ring.completed());
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

    /// Reports everything that is over, in order; says whether anything was.
    fn report(&mut self) -> bool {
        let mut moved = false;
        while let Some(flight) = self.flights.front() {
            if self.is_early(flight) {
                break;
            }
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

    /// Ends a piece.
    fn finish(&mut self, flight: Flight, ended: Result<Option<u64>, ExecutionError>) {
        let Flight { sequence, piece, step, holdings, .. } = flight;
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
        drop(holdings);
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
}

impl Drop for Worker {
    fn drop(&mut self) {
        let driver = &self.device.driver;
        self.events.iter().for_each(|event| driver.destroy_event(*event));
        driver.destroy_stream(self.inward);
        driver.destroy_stream(self.outward);
    }
}

pub(super) fn failed(reason: &'static str) -> ExecutionError {
    ExecutionError::Engine { done_bytes: 0, reason }
}
