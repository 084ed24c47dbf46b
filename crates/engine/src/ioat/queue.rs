//! The queue of a channel: a ring of descriptors in memory, chained to each other, that the channel
//! follows as far as it is told.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_memory::device_pages::DevicePages;
use memferry_memory::lookup::Route;
use memferry_sys::device::Device;
use memferry_sys::pages::page_bytes;

use super::descriptor::{DESCRIPTOR_BYTES, Descriptor as Hard};
use super::registers::{self as r, ChannelState};
use crate::contract::{Descriptor, Notice, Operation, PinnedAt};
use crate::device::{Ended, Hardware, Posted, Region, Seat, SharedMemory, until};

/// The count of descriptors that a channel is told has 16 bits.
const LONGEST_RING: usize = 1 << 15;
/// How long a channel may take to obey a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(1);
/// A descriptor takes microseconds. A channel that has finished none for so long stands still.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// If it does so again and again, it is given up.
const MOST_STALLS: u32 = 2;
/// Without news in memory for so long, the registers are asked.
const ASK_AFTER: Duration = Duration::from_millis(1);

const BROKEN: &str = "the channel of the copy engine is out of order";
const STALLED: &str = "the copy engine stood still";

/// What a device has done so far.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) descriptors: AtomicU64,
    pub(super) recoveries: AtomicU64,
}

/// What a queue must know of its device.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) largest_bytes: u64,
    pub(super) fills: bool,
    pub(super) pages: Arc<DevicePages>,
    pub(super) counters: Arc<Counters>,
}

/// The queue. Descriptors have running numbers; that of a number is at its remainder in the ring.
#[derive(Debug)]
pub(super) struct Queue {
    device: Arc<dyn Device>,
    /// Where the registers of the channel are.
    registers: usize,
    memory: SharedMemory,
    ring: Region,
    /// How many descriptors the ring has, a power of two. One is always free.
    size: u64,
    /// Where the channel writes how far it is.
    word: usize,
    /// The number of the next descriptor to be written, of the next that the channel was not told
    /// of, and of the oldest that is not over.
    head: u64,
    told: u64,
    tail: u64,
    /// The number of the first descriptor of the chain, since the channel was last started.
    first: u64,
    /// What the status register said when the channel was started: that is of an earlier chain.
    stale: u64,
    /// How often the channel stood still without having finished anything in between.
    stalls: u32,
    /// When something was finished, or was begun in an empty queue; and when registers were asked.
    moved: Instant,
    asked: Instant,
    facts: Facts,
    is_broken: bool,
    /// Last: another queue is made for the channel when this one has stopped it.
    _seat: Seat,
}

/// How a channel is found to be.
enum Found {
    /// It has finished everything before this number.
    Up(u64),
    /// It has too, and does not go on.
    Halted(u64, &'static str),
}

impl Queue {
    /// Brings a channel up, with room for so many descriptors.
    pub(super) fn new(
        device: Arc<dyn Device>,
        channel: usize,
        capacity: usize,
        facts: Facts,
        seat: Seat,
    ) -> io::Result<Self> {
        let size = (capacity.min(LONGEST_RING - 1) + 1).next_power_of_two().max(2);
        let ring_bytes = (size * DESCRIPTOR_BYTES).next_multiple_of(page_bytes());
        let memory = SharedMemory::new(device.clone(), ring_bytes + page_bytes())?;
        let mut queue = Self {
            device,
            registers: r::channel_base(channel),
            memory,
            ring: Region::new(0, DESCRIPTOR_BYTES),
            size: size as u64,
            word: ring_bytes,
            head: 0,
            told: 0,
            tail: 0,
            first: 0,
            stale: 0,
            stalls: 0,
            moved: Instant::now(),
            asked: Instant::now(),
            facts,
            is_broken: false,
            _seat: seat,
        };
        queue.start()?;
        queue.try_out()?;
        Ok(queue)
    }

    fn status(&self) -> u64 {
        self.device.read64(self.registers + r::CHANSTS)
    }

    /// Starts the channel at the oldest descriptor that is not over.
    fn start(&mut self) -> io::Result<()> {
        stop(&*self.device, self.registers)?;
        let (device, at) = (&*self.device, self.registers);
        self.memory.store64(self.word, &[0]);
        (self.first, self.told) = (self.tail, self.tail);
        let control = r::CHANCTRL_ANY_ERROR_ABORT | r::CHANCTRL_ERROR_COMPLETION;
        // SAFETY: the channel is this queue's alone (promised to `IoatEngine::over`) and was just
        // stopped; it takes orders from its own ring, which names only memory of descriptors that
        // are in flight, and reports to its own word.
        let write = |register: usize, address: u64| unsafe {
            // In halves: not all devices take these in one.
            device.write32(at + register, address as u32);
            device.write32(at + register + 4, (address >> 32) as u32);
        };
        // SAFETY: as above.
        unsafe { device.write16(at + r::CHANCTRL, control) };
        write(r::CHANCMP, self.memory.address(self.word));
        write(r::CHAINADDR, self.address(self.tail));
        self.stale = self.status() & r::CHANSTS_COMPLETED;
        self.tell();
        Ok(())
    }

    /// Has the channel do nothing, once, to see that it does.
    fn try_out(&mut self) -> io::Result<()> {
        self.put(Hard::null());
        self.tell();
        until(COMMAND_LIMIT, || !matches!(self.ask(), Found::Up(0)));
        match self.ask() {
            Found::Up(0) => Err(io::Error::other("the channel does not start")),
            Found::Halted(_, reason) => Err(io::Error::other(reason)),
            Found::Up(_) => {
                self.tail = self.head;
                Ok(())
            }
        }
    }

    /// What the device calls the descriptor of a number.
    fn address(&self, number: u64) -> u64 {
        self.memory.address(self.ring.offset((number % self.size) as usize))
    }

    fn put(&mut self, descriptor: Hard) {
        let next = self.address(self.head + 1);
        let words = descriptor.with_write_back().with_next(next).words();
        self.memory.store64(self.ring.offset((self.head % self.size) as usize), &words);
        self.head += 1;
    }

    /// Tells the channel of all descriptors.
    fn tell(&mut self) {
        if self.told < self.head {
            if self.told == self.tail {
                self.moved = Instant::now();
            }
            self.told = self.head;
            let count = (self.head - self.first) as u16;
            // SAFETY: as in `start`; all descriptors up to this count are written.
            unsafe { self.device.write16(self.registers + r::DMACOUNT, count) };
        }
    }

    /// How far the channel is, by what it wrote to memory and, now and then, by its registers.
    fn look_closely(&mut self) -> Found {
        let found = self.find();
        if !matches!(found, Found::Up(number) if number == self.tail) || self.tail == self.told {
            return found;
        }
        if self.asked.elapsed() < ASK_AFTER || self.moved.elapsed() < ASK_AFTER {
            return found;
        }
        self.asked = Instant::now();
        match self.ask() {
            Found::Up(number) if number == self.tail && self.moved.elapsed() > STALLED_AFTER => {
                Found::Halted(number, STALLED)
            }
            found => found,
        }
    }

    /// How far the channel is by its registers. An address that was there when it was started says
    /// nothing.
    fn ask(&self) -> Found {
        let status = self.status();
        let is_stale = status & r::CHANSTS_COMPLETED == self.stale;
        self.meaning(if is_stale { status & r::CHANSTS_STATE } else { status })
    }

    fn find(&self) -> Found {
        match self.memory.load64(self.word) {
            // Nothing was written since the channel was started.
            0 => Found::Up(self.tail),
            status => self.meaning(status),
        }
    }

    /// What a status says, if it can be believed.
    fn meaning(&self, status: u64) -> Found {
        let number = self.finished_before(status & r::CHANSTS_COMPLETED);
        match (ChannelState::of(status), number) {
            (None, _) => Found::Halted(self.tail, "the copy engine does not answer"),
            (Some(ChannelState::Halted), number) => {
                let number = number.unwrap_or(self.tail);
                match self.device.read32(self.registers + r::CHANERR) {
                    // It has not begun yet.
                    0 => Found::Up(number),
                    errors => Found::Halted(number, r::error_reason(errors)),
                }
            }
            (Some(_), number) => Found::Up(number.unwrap_or(self.tail)),
        }
    }

    /// The number behind that of the last finished descriptor, if its address is that of one which
    /// the channel was told of.
    fn finished_before(&self, address: u64) -> Option<u64> {
        let place = self.ring.index(self.memory.offset(address)?)? as u64;
        let ahead = (place + self.size - self.tail % self.size) % self.size;
        let number = self.tail + ahead + 1;
        (place < self.size && number <= self.told).then_some(number)
    }

    /// The channel does not go on: the oldest descriptor is taken for the one that stopped it, and
    /// the channel is started behind that.
    fn recover(&mut self, ended: &mut Vec<Ended>, reason: &'static str) {
        tracing::debug!(device = self.device.name(), reason, "a channel stopped");
        self.facts.counters.recoveries.fetch_add(1, Ordering::Relaxed);
        let has_one = self.tail < self.told;
        self.tail += u64::from(has_one);
        self.stalls += u32::from(reason == STALLED);
        if self.stalls >= MOST_STALLS && stop(&*self.device, self.registers).is_ok() {
            self.is_broken = true;
        } else if self.start().is_err() && (self.device.reset().is_err() || self.start().is_err()) {
            tracing::warn!(device = self.device.name(), reason, "a channel is not used any more");
            // It may still be writing: then the memory is taken away from it.
            self.facts.pages.cut_off();
            self.is_broken = true;
        }
        ended.extend(has_one.then_some(Ended::Failed(reason)));
        if self.is_broken {
            ended.extend((self.tail..self.head).map(|_| Ended::Failed(BROKEN)));
            (self.tail, self.told) = (self.head, self.head);
        }
    }

    fn objection(&self, descriptor: &Descriptor) -> Option<&'static str> {
        let is_known = match descriptor.operation() {
            Operation::Copy => true,
            Operation::Fill => self.facts.fills,
            Operation::Move | Operation::Compare => false,
        };
        if self.is_broken {
            Some(BROKEN)
        } else if !is_known {
            Some("the copy engine does not know this operation")
        } else if !descriptor.is_host_only() {
            Some("device memory is out of reach")
        } else if descriptor.length() > self.facts.largest_bytes {
            Some("the descriptor is longer than the copy engine takes")
        } else {
            None
        }
    }

    /// Where the device finds memory, if it does so in one stretch.
    fn find_memory(&self, at: Option<PinnedAt>, length: u64, route: Route) -> Option<u64> {
        let at = at?;
        let found = self.facts.pages.find(at.token, at.offset_bytes, length, route)?;
        (found.bytes == length).then_some(found.address)
    }
}

// SAFETY: a descriptor ends well when the channel says that it is finished, and is not worked on
// again; badly, when the channel was stopped, and is started behind it, or its memory was taken away
// from the device. The channel is stopped before the value is gone.
unsafe impl Hardware for Queue {
    fn post(&mut self, descriptor: &Descriptor, _notice: Option<Notice>) -> Posted {
        if let Some(reason) = self.objection(descriptor) {
            return Posted::Over(Ended::Failed(reason));
        }
        let length = descriptor.length();
        let target = self.find_memory(descriptor.pinned_target(), length, Route::Receive);
        let source = match descriptor.operation() {
            Operation::Fill => Some(0),
            _ => self.find_memory(descriptor.pinned_source(), length, Route::Send),
        };
        let (Some(source), Some(target)) = (source, target) else {
            let reason = "memory is not pinned for the copy engine, or crosses its pages";
            return Posted::Over(Ended::Failed(reason));
        };
        if self.head - self.tail + 1 >= self.size {
            return Posted::Full;
        }
        self.put(match descriptor.operation() {
            Operation::Fill => {
                let pattern = u64::from_ne_bytes([descriptor.fill_value(); 8]);
                Hard::fill(pattern, target, length as u32)
            }
            _ => Hard::copy(source, target, length as u32),
        });
        self.facts.counters.descriptors.fetch_add(1, Ordering::Relaxed);
        Posted::Taken
    }

    fn ring(&mut self) {
        self.tell();
    }

    fn look(&mut self, ended: &mut Vec<Ended>) {
        if self.tail == self.head {
            return;
        }
        let found = self.look_closely();
        let (Found::Up(number) | Found::Halted(number, _)) = found;
        if number > self.tail {
            ended.extend((self.tail..number).map(|_| Ended::Well));
            (self.tail, self.moved, self.stalls) = (number, Instant::now(), 0);
        }
        if let Found::Halted(_, reason) = found {
            self.recover(ended, reason);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if stop(&*self.device, self.registers).is_err() && self.device.reset().is_err() {
            tracing::warn!(device = self.device.name(), "a channel could not be stopped");
        }
    }
}

/// Stops the channel with these registers, whatever it does, and clears its errors.
pub(super) fn stop(device: &dyn Device, at: usize) -> io::Result<()> {
    let status = || device.read64(at + r::CHANSTS);
    let runs = |status| {
        let state = ChannelState::of(status);
        matches!(state, Some(ChannelState::Active | ChannelState::Idle | ChannelState::Armed))
    };
    if runs(status()) {
        // SAFETY: a channel that stops touches no memory.
        unsafe { device.write8(at + r::CHANCMD, r::CHANCMD_SUSPEND) };
        // One that does not obey is reset all the same.
        let _ = until(COMMAND_LIMIT, || !runs(status()));
    }
    let errors = device.read32(at + r::CHANERR);
    // SAFETY: as above.
    unsafe {
        device.write32(at + r::CHANERR, errors);
        device.write8(at + r::CHANCMD, r::CHANCMD_RESET);
    }
    let is_over = || device.read8(at + r::CHANCMD) & r::CHANCMD_RESET == 0;
    match until(COMMAND_LIMIT, is_over) {
        true => Ok(()),
        false => Err(io::Error::other("the channel cannot be reset")),
    }
}
