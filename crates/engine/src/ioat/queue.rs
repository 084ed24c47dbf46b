//! The driver of a channel: a ring of chained descriptors in memory that the channel follows up to
//! the published count.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_memory::dma_mappings::DmaMappings;
use memferry_sys::device::DmaDevice;
use memferry_sys::pages::page_bytes;

use super::descriptor::{DESCRIPTOR_BYTES, IoatDescriptor as Hard};
use super::device::IoatDevice;
use super::registers::{self as r, ChannelState};
use crate::contract::{Descriptor, NotificationWrite, Opcode, PinnedLocation};
use crate::pci::{
    ChannelSlot, CoherentMemory, DmaArray, HardwareQueue, HwStatus, PostResult, poll_until,
};

/// The maximum size of the ring: the count of descriptors has 16 bits.
const MAX_RING: usize = 1 << 15;
/// The maximum time of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1);
/// The time without a finished descriptor after which a channel counts as stalled. A descriptor
/// takes microseconds.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of stalls in a row after which the channel is not used any more.
const MAX_STALLS: u32 = 2;
/// The time without progress in memory after which the driver reads the registers.
const REGISTER_READ_INTERVAL: Duration = Duration::from_millis(1);

const BROKEN: &str = "the channel of the copy engine has failed";
const STALLED: &str = "the copy engine stalled";
const WAS_RESET: &str = "the copy engine was reset for another channel";

/// The counters of a device.
#[derive(Debug, Default)]
pub(super) struct IoatAtomicCounters {
    pub(super) descriptors: AtomicU64,
    pub(super) recoveries: AtomicU64,
}

/// The properties of the device that a queue needs.
#[derive(Debug, Clone)]
pub(super) struct IoatQueueConfig {
    pub(super) max_bytes: u64,
    pub(super) supports_fill: bool,
    pub(super) pages: Arc<DmaMappings>,
    pub(super) counters: Arc<IoatAtomicCounters>,
}

/// The queue. Descriptors have running numbers; the slot of a descriptor is its number modulo the
/// ring size.
#[derive(Debug)]
pub(super) struct IoatQueue {
    shared: Arc<IoatDevice>,
    device: Arc<dyn DmaDevice>,
    /// The offset of the channel's registers.
    registers: usize,
    memory: CoherentMemory,
    ring: DmaArray,
    /// The number of slots of the ring, a power of two. One is always free.
    size: u64,
    /// The offset of the completion word.
    word: usize,
    /// The number of the next descriptor to be written, of the next to be published to the channel,
    /// and of the oldest that is not complete.
    head: u64,
    published: u64,
    tail: u64,
    /// The number of the first descriptor of the chain since the channel was last started.
    first: u64,
    /// The address in the status register when the channel was started: it belongs to an earlier
    /// chain, until the channel has finished a descriptor of this one.
    stale: u64,
    /// Why the channel has stopped, until it is recovered.
    stop: Option<&'static str>,
    /// The resets of the device when the channel was started.
    resets: u64,
    /// The number of stalls without a finished descriptor between them.
    stalls: u32,
    /// The time of the last finished descriptor, or of the first one in an empty queue; and of the
    /// last register read.
    last_progress: Instant,
    last_register_read: Instant,
    config: IoatQueueConfig,
    is_broken: bool,
    /// Dropped last: another queue may use the channel only after this one has stopped it.
    _slot: ChannelSlot,
}

/// The progress of a channel.
enum RingStatus {
    /// It has finished everything before this number.
    CompletedUpTo(u64),
    /// The same, and it has stopped for this reason.
    Halted(u64, &'static str),
}

impl IoatQueue {
    /// Starts a channel with space for `capacity` descriptors.
    pub(super) fn new(
        shared: Arc<IoatDevice>,
        channel: usize,
        capacity: usize,
        config: IoatQueueConfig,
        slot: ChannelSlot,
    ) -> io::Result<Self> {
        let size = (capacity.min(MAX_RING - 1) + 1).next_power_of_two().max(2);
        let ring_bytes = (size * DESCRIPTOR_BYTES).next_multiple_of(page_bytes());
        let device = shared.hardware().clone();
        let memory = CoherentMemory::new(device.clone(), ring_bytes + page_bytes())?;
        let mut queue = Self {
            shared,
            device,
            registers: r::channel_base(channel),
            memory,
            ring: DmaArray::new(0, DESCRIPTOR_BYTES),
            size: size as u64,
            word: ring_bytes,
            head: 0,
            published: 0,
            tail: 0,
            first: 0,
            stale: 0,
            stop: None,
            resets: 0,
            stalls: 0,
            last_progress: Instant::now(),
            last_register_read: Instant::now(),
            config,
            is_broken: false,
            _slot: slot,
        };
        queue.start()?;
        queue.self_test()?;
        Ok(queue)
    }

    fn status(&self) -> u64 {
        self.device.read64(self.registers + r::CHANSTS)
    }

    /// Starts the channel at the oldest descriptor that is not complete.
    fn start(&mut self) -> io::Result<()> {
        let shared = self.shared.clone();
        let resets = shared.hold();
        stop(&*self.device, self.registers)?;
        self.resets = *resets;
        let (device, at) = (&*self.device, self.registers);
        self.memory.store64(self.word, &[0]);
        (self.first, self.published) = (self.tail, self.tail);
        let control = r::CHANCTRL_ANY_ERROR_ABORT | r::CHANCTRL_ERROR_COMPLETION;
        // SAFETY: the channel is this queue's alone (guaranteed to `IoatEngine::over`) and was just
        // stopped; it reads descriptors from its own ring, which names only memory of descriptors
        // that are in flight, and reports to its own word.
        let write = |register: usize, address: u64| unsafe {
            // In halves: not all devices support 64-bit writes to these registers.
            device.write32(at + register, address as u32);
            device.write32(at + register + 4, (address >> 32) as u32);
        };
        // SAFETY: as above.
        unsafe { device.write16(at + r::CHANCTRL, control) };
        write(r::CHANCMP, self.memory.address(self.word));
        write(r::CHAINADDR, self.address(self.tail));
        self.stale = self.status() & r::CHANSTS_COMPLETED;
        self.publish_held();
        Ok(())
    }

    /// Runs one null descriptor, to check that the channel works.
    fn self_test(&mut self) -> io::Result<()> {
        self.put(Hard::null());
        self.publish();
        poll_until(COMMAND_TIMEOUT * self.device.patience(), || {
            !matches!(self.read_status_register(), RingStatus::CompletedUpTo(0))
        });
        match self.read_status_register() {
            RingStatus::CompletedUpTo(0) => Err(io::Error::other("the channel does not start")),
            RingStatus::Halted(_, reason) => Err(io::Error::other(reason)),
            RingStatus::CompletedUpTo(_) => {
                self.tail = self.head;
                Ok(())
            }
        }
    }

    /// The IOVA of the descriptor with a number.
    fn address(&self, number: u64) -> u64 {
        self.memory.address(self.ring.offset((number % self.size) as usize))
    }

    fn put(&mut self, descriptor: Hard) {
        let next = self.address(self.head + 1);
        let words = descriptor.with_write_back().with_next(next).words();
        self.memory.store64(self.ring.offset((self.head % self.size) as usize), &words);
        self.head += 1;
    }

    /// Publishes all written descriptors to the channel. While the device is being reset, and until
    /// the channel is started again after that, they wait.
    fn publish(&mut self) {
        let shared = self.shared.clone();
        // Held until the register is written.
        let resets = shared.try_hold();
        if resets.as_ref().is_some_and(|resets| **resets == self.resets) {
            self.publish_held();
        }
    }

    /// Publishes while the device cannot be reset.
    fn publish_held(&mut self) {
        if self.published < self.head {
            if self.published == self.tail {
                self.last_progress = Instant::now();
            }
            self.published = self.head;
            let count = (self.head - self.first) as u16;
            // SAFETY: as in `start`; all descriptors up to this count are written.
            unsafe { self.device.write16(self.registers + r::DMACOUNT, count) };
        }
    }

    /// The progress of the channel: from the completion word and, at intervals, from its registers.
    fn poll_status(&mut self) -> RingStatus {
        let status = self.read_completion_word();
        if !matches!(status, RingStatus::CompletedUpTo(number) if number == self.tail)
            || self.tail == self.published
        {
            return status;
        }
        if self.last_register_read.elapsed() < REGISTER_READ_INTERVAL
            || self.last_progress.elapsed() < REGISTER_READ_INTERVAL
        {
            return status;
        }
        self.last_register_read = Instant::now();
        let timeout = STALL_TIMEOUT * self.device.patience();
        match self.read_status_register() {
            RingStatus::CompletedUpTo(number)
                if number == self.tail && self.last_progress.elapsed() > timeout =>
            {
                RingStatus::Halted(number, STALLED)
            }
            status @ (RingStatus::CompletedUpTo(number) | RingStatus::Halted(number, _))
                if number > self.tail =>
            {
                // A write-back was lost. When the channel comes to the slot in the word again, the
                // word must not say that it has finished it.
                self.memory.store64(self.word, &[0]);
                status
            }
            status => status,
        }
    }

    /// The progress of the channel by its registers. The address that was there at the start is
    /// ignored while nothing of the chain is known to be finished; later the channel has come to it
    /// again.
    fn read_status_register(&self) -> RingStatus {
        let status = self.status();
        let is_stale = self.tail == self.first && status & r::CHANSTS_COMPLETED == self.stale;
        self.decode_status(if is_stale { status & r::CHANSTS_STATE } else { status })
    }

    fn read_completion_word(&self) -> RingStatus {
        match self.memory.load64(self.word) {
            // Nothing was written since the channel was started.
            0 => RingStatus::CompletedUpTo(self.tail),
            status => self.decode_status(status),
        }
    }

    /// Decodes and validates a status.
    fn decode_status(&self, status: u64) -> RingStatus {
        let number = self.finished_before(status & r::CHANSTS_COMPLETED);
        match (ChannelState::of(status), number) {
            (None, _) => RingStatus::Halted(self.tail, "the copy engine does not respond"),
            (Some(ChannelState::Halted), number) => {
                let number = number.unwrap_or(self.tail);
                match self.device.read32(self.registers + r::CHANERR) {
                    // The channel has not started yet.
                    0 => RingStatus::CompletedUpTo(number),
                    errors => RingStatus::Halted(number, r::error_reason(errors)),
                }
            }
            (Some(_), number) => RingStatus::CompletedUpTo(number.unwrap_or(self.tail)),
        }
    }

    /// The number after the last finished descriptor, if the address is that of a published one.
    fn finished_before(&self, address: u64) -> Option<u64> {
        let slot = self.ring.index(self.memory.offset(address)?)? as u64;
        let ahead = (slot + self.size - self.tail % self.size) % self.size;
        let number = self.tail + ahead + 1;
        (slot < self.size && number <= self.published).then_some(number)
    }

    /// Restarts a channel that stopped behind the oldest descriptor, which counts as the one that
    /// stopped it and fails; or at the oldest one, if the device was reset for another channel.
    fn restart(&mut self, ended: &mut Vec<HwStatus>, reason: &'static str) {
        tracing::debug!(
            device = self.device.name(),
            reason,
            "a channel of the copy engine stopped"
        );
        self.config.counters.recoveries.fetch_add(1, Ordering::Relaxed);
        let has_failed_one = self.tail < self.published && reason != WAS_RESET;
        self.tail += u64::from(has_failed_one);
        self.stalls += u32::from(reason == STALLED);
        if self.stalls >= MAX_STALLS && stop(&*self.device, self.registers).is_ok() {
            self.is_broken = true;
        } else if self.start().is_err() && (self.shared.reset().is_err() || self.start().is_err()) {
            tracing::warn!(
                device = self.device.name(),
                reason,
                "disabling a channel of the copy engine that cannot be restarted"
            );
            // The channel may still write, so the device loses its access to the memory.
            self.config.pages.revoke_access();
            self.is_broken = true;
        }
        ended.extend(has_failed_one.then_some(HwStatus::Failed(reason)));
        if self.is_broken {
            ended.extend((self.tail..self.head).map(|_| HwStatus::Failed(BROKEN)));
            (self.tail, self.published) = (self.head, self.head);
        }
    }

    /// Whether the device was reset since the channel was started, or is being reset.
    fn was_reset(&self) -> bool {
        self.shared.try_hold().is_none_or(|resets| *resets != self.resets)
    }

    fn reject_reason(&self, descriptor: &Descriptor) -> Option<&'static str> {
        let is_supported = match descriptor.operation() {
            Opcode::Copy => true,
            Opcode::Fill => self.config.supports_fill,
            Opcode::Move | Opcode::Compare | Opcode::Crc | Opcode::CopyCrc | Opcode::Dualcast => {
                false
            }
        };
        if self.is_broken || self.config.pages.is_revoked() {
            Some(BROKEN)
        } else if !is_supported {
            Some("the copy engine does not support this operation")
        } else if !descriptor.is_host_only() {
            Some("the copy engine cannot access device memory")
        } else if descriptor.length() > self.config.max_bytes {
            Some("the descriptor exceeds the maximum of the copy engine")
        } else {
            None
        }
    }
}

/// The IOVA of memory, if it is contiguous for the device.
fn device_address(at: Option<PinnedLocation>, length: u64) -> Option<u64> {
    let segment = at?.segment(0, length)?;
    (segment.bytes == length).then_some(segment.address)
}

// SAFETY: a descriptor succeeds when the channel reports that it is finished, and is not executed
// again; it fails when the channel was stopped, and is restarted after it, or the device has lost
// its access to the memory. The channel is stopped before the value is dropped.
unsafe impl HardwareQueue for IoatQueue {
    fn post(
        &mut self,
        descriptor: &Descriptor,
        _notification: Option<NotificationWrite>,
    ) -> PostResult {
        if let Some(reason) = self.reject_reason(descriptor) {
            return PostResult::Completed(HwStatus::Failed(reason));
        }
        let length = descriptor.length();
        let target = device_address(descriptor.pinned_target(), length);
        let source = match descriptor.operation() {
            Opcode::Fill => Some(0),
            _ => device_address(descriptor.pinned_source(), length),
        };
        let (Some(source), Some(target)) = (source, target) else {
            let reason = "memory is not pinned for the copy engine, or crosses its pages";
            return PostResult::Completed(HwStatus::Failed(reason));
        };
        if self.head - self.tail + 1 >= self.size {
            return PostResult::Full;
        }
        self.put(match descriptor.operation() {
            Opcode::Fill => {
                let pattern = u64::from_ne_bytes([descriptor.fill_value(); 8]);
                Hard::fill(pattern, target, length as u32)
            }
            _ => Hard::copy(source, target, length as u32),
        });
        self.config.counters.descriptors.fetch_add(1, Ordering::Relaxed);
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {
        // A channel that has stopped gets nothing before it is recovered.
        if self.stop.is_none() {
            self.publish();
        }
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        if self.tail == self.head {
            return;
        }
        // Before the look at memory: what the channel finished before the reset is there.
        let was_reset = self.was_reset();
        let status = if was_reset { self.read_completion_word() } else { self.poll_status() };
        let (RingStatus::CompletedUpTo(number) | RingStatus::Halted(number, _)) = status;
        if number > self.tail {
            ended.extend((self.tail..number).map(|_| HwStatus::Ok));
            (self.tail, self.last_progress, self.stalls) = (number, Instant::now(), 0);
            // The device went on before anybody recovered it.
            self.stop.take_if(|reason| *reason == STALLED);
        }
        // What this poll finds may be seen again only after a while, and a later one recovers.
        match status {
            _ if was_reset => self.stop = Some(WAS_RESET),
            RingStatus::Halted(_, reason) => self.stop = Some(reason),
            RingStatus::CompletedUpTo(_) => {}
        }
        if self.stop.is_none() {
            self.publish();
        }
    }

    fn recover(&mut self, ended: &mut Vec<HwStatus>) {
        if let Some(reason) = self.stop.take() {
            self.restart(ended, reason);
        }
    }
}

impl Drop for IoatQueue {
    fn drop(&mut self) {
        if stop(&*self.device, self.registers).is_err() && self.shared.reset().is_err() {
            tracing::warn!(
                device = self.device.name(),
                "a channel of the copy engine could not be stopped"
            );
            // It must not write to memory that its owner gets back.
            self.config.pages.revoke_access();
        }
    }
}

/// Stops the channel with these registers in any state, and clears its errors.
pub(super) fn stop(device: &dyn DmaDevice, at: usize) -> io::Result<()> {
    let timeout = COMMAND_TIMEOUT * device.patience();
    let status = || device.read64(at + r::CHANSTS);
    let is_running = |status| {
        let state = ChannelState::of(status);
        matches!(state, Some(ChannelState::Active | ChannelState::Idle | ChannelState::Armed))
    };
    if is_running(status()) {
        // SAFETY: a channel that stops accesses no memory.
        unsafe { device.write8(at + r::CHANCMD, r::CHANCMD_SUSPEND) };
        // A channel that ignores the command is reset all the same.
        let _ = poll_until(timeout, || !is_running(status()));
    }
    let errors = device.read32(at + r::CHANERR);
    // SAFETY: as above.
    unsafe {
        device.write32(at + r::CHANERR, errors);
        device.write8(at + r::CHANCMD, r::CHANCMD_RESET);
    }
    let is_reset_done = || device.read8(at + r::CHANCMD) & r::CHANCMD_RESET == 0;
    match poll_until(timeout, is_reset_done) {
        true => Ok(()),
        false => Err(io::Error::other("the channel cannot be reset")),
    }
}
