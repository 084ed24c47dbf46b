//! The driver of a channel: a ring of chained descriptors in memory that the channel follows up to
//! the published count.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memferry_sys::clock::CoarseInstant;
use memferry_sys::device::DmaDevice;
use memferry_sys::pages::page_bytes;

use super::config::IoatQueueConfig;
use super::descriptor::{DESCRIPTOR_BYTES, IoatDescriptor as Hard};
use super::device::{IoatDevice, stop};
use super::registers::{self as r, ChannelState};
use crate::contract::{Descriptor, NotificationWrite, Opcode, PinnedLocation};
use crate::pci::{
    ChannelSlot, CoherentMemory, DmaArray, HardwareQueue, HwStatus, PostResult, poll_until,
};

/// The maximum size of the ring: the count of descriptors has 16 bits.
const MAX_RING: usize = 1 << 15;
/// The number of stalls in a row after which the channel is not used any more.
const MAX_STALLS: u32 = 2;
/// The time without progress in memory after which the driver reads the registers.
const REGISTER_READ_INTERVAL: Duration = Duration::from_millis(1);

/// How far ahead of the descriptor that is written the line of a later one is requested: the device
/// has it since it read the last descriptor there.
const REQUESTED_AHEAD: u64 = 8;

const BROKEN: &str = "the channel of the copy engine has failed";
const STALLED: &str = "the copy engine stalled";
const WAS_RESET: &str = "the copy engine was reset for another channel";

/// The queue. Descriptors have running numbers; the slot of a descriptor is its number modulo the
/// ring size.
#[derive(Debug)]
pub(super) struct IoatQueue {
    shared: Arc<IoatDevice>,
    device: Arc<dyn DmaDevice>,
    /// The number of the channel on its device, and the offset of its registers.
    channel: usize,
    registers: usize,
    /// Whether the channel has an interrupt.
    has_interrupt: bool,
    memory: CoherentMemory,
    ring: DmaArray,
    /// The number of slots of the ring, a power of two. One is always free.
    size: u64,
    /// The offset of the completion word, and its value at the last look; 0 since it was cleared.
    word: usize,
    seen_word: u64,
    /// The number of the next descriptor to be written, of the next to be published to the channel,
    /// and of the oldest that is not complete.
    head: u64,
    published: u64,
    tail: u64,
    /// The number after the last descriptor that raises an interrupt.
    raises_before: u64,
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
    /// The time of the first poll without progress since the last finished descriptor, or since the
    /// first one in an empty queue; and of the last register read.
    idle_since: Option<CoarseInstant>,
    last_register_read: CoarseInstant,
    config: IoatQueueConfig,
    is_broken: bool,
    /// Dropped last: another queue may use the channel only after this one has stopped it.
    slot: ChannelSlot,
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
            has_interrupt: shared.interrupt(channel).is_some(),
            shared,
            device,
            channel,
            registers: r::channel_base(channel),
            memory,
            ring: DmaArray::new(0, DESCRIPTOR_BYTES),
            size: size as u64,
            word: ring_bytes,
            seen_word: 0,
            head: 0,
            published: 0,
            tail: 0,
            raises_before: 0,
            first: 0,
            stale: 0,
            stop: None,
            resets: 0,
            stalls: 0,
            idle_since: None,
            last_register_read: CoarseInstant::now(),
            config,
            is_broken: false,
            slot,
        };
        queue.link();
        queue.start()?;
        queue.self_test()?;
        Ok(queue)
    }

    /// Writes a chain of all slots to the ring. Only the commands change later.
    fn link(&self) {
        for number in 0..self.size {
            let slot = Hard::null().with_next(self.address(number + 1));
            self.memory.store64(self.offset(number), &slot.words());
        }
    }

    fn status(&self) -> u64 {
        self.device.read64(self.registers + r::CHANSTS)
    }

    /// Starts the channel at the oldest descriptor that is not complete.
    fn start(&mut self) -> io::Result<()> {
        let shared = self.shared.clone();
        let (_held, resets) = shared.guard.hold();
        stop(&*self.device, self.registers)?;
        self.resets = resets;
        self.clear_word();
        let (device, at) = (&*self.device, self.registers);
        (self.first, self.published) = (self.tail, self.tail);
        // SAFETY: the channel is this queue's alone (guaranteed to `IoatEngine::over`) and was just
        // stopped; it reads descriptors from its own ring, which names only memory of descriptors
        // that are in flight, and reports to its own word.
        let write = |register: usize, address: u64| unsafe {
            // In halves: not all devices support 64-bit writes to these registers.
            device.write32(at + register, address as u32);
            device.write32(at + register + 4, (address >> 32) as u32);
        };
        // SAFETY: as above; interrupts access no memory of this process.
        unsafe {
            if self.has_interrupt {
                device.write8(r::INTRCTRL, r::INTRCTRL_ENABLE | r::INTRCTRL_MSIX_VECTORS);
            }
            device.write16(at + r::CHANCTRL, self.control());
        }
        write(r::CHANCMP, self.memory.address(self.word));
        write(r::CHAINADDR, self.address(self.tail));
        self.stale = self.status() & r::CHANSTS_COMPLETED;
        if self.head > self.tail {
            self.idle_since = None;
            self.published = self.head;
            self.write_count();
        }
        Ok(())
    }

    /// Clears the completion word.
    fn clear_word(&mut self) {
        self.memory.store64(self.word, &[0]);
        self.seen_word = 0;
    }

    /// The value of the control register. Writing it enables the next interrupt, where there are any.
    fn control(&self) -> u16 {
        let rearm = if self.has_interrupt {
            r::CHANCTRL_INTERRUPT_REARM | r::CHANCTRL_ERROR_INTERRUPT
        } else {
            0
        };
        r::CHANCTRL_ANY_ERROR_ABORT | r::CHANCTRL_ERROR_COMPLETION | rearm
    }

    /// Runs one null descriptor, to check that the channel works.
    fn self_test(&mut self) -> io::Result<()> {
        self.put(Hard::null());
        self.publish();
        poll_until(self.device.patience(), || {
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

    /// The offset of the descriptor with a number.
    fn offset(&self, number: u64) -> usize {
        self.ring.offset((number & (self.size - 1)) as usize)
    }

    /// The IOVA of the descriptor with a number.
    fn address(&self, number: u64) -> u64 {
        self.memory.address(self.offset(number))
    }

    fn put(&mut self, descriptor: Hard) {
        let words = descriptor.with_write_back().command_words();
        self.memory.store64(self.offset(self.head), &words);
        self.memory.request(self.offset(self.head + REQUESTED_AHEAD));
        self.head += 1;
    }

    /// Publishes all written descriptors to the channel. While the device is being reset, and until
    /// the channel is started again after that, they wait.
    fn publish(&mut self) {
        if self.published == self.head {
            return;
        }
        let has_rung = self.shared.guard.ring(self.channel, self.resets, || self.write_count());
        if has_rung {
            if self.published == self.tail {
                self.idle_since = None;
            }
            self.published = self.head;
        }
    }

    /// Tells the channel of all written descriptors, while the device cannot be reset.
    fn write_count(&self) {
        let count = (self.head - self.first) as u16;
        // SAFETY: as in `start`; all descriptors up to this count are written.
        unsafe { self.device.write16(self.registers + r::DMACOUNT, count) };
    }

    /// The progress of the channel: from the completion word and, at intervals, from its registers.
    fn poll_status(&mut self) -> RingStatus {
        let status = self.read_completion_word();
        if !matches!(status, RingStatus::CompletedUpTo(number) if number == self.tail)
            || self.tail == self.published
        {
            return status;
        }
        let now = CoarseInstant::now();
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle.min(now - self.last_register_read) < REGISTER_READ_INTERVAL {
            return status;
        }
        self.last_register_read = now;
        let timeout = self.device.patience();
        match self.read_status_register() {
            RingStatus::CompletedUpTo(number) if number == self.tail && idle > timeout => {
                RingStatus::Halted(number, STALLED)
            }
            status @ (RingStatus::CompletedUpTo(number) | RingStatus::Halted(number, _))
                if number > self.tail =>
            {
                // A write-back was lost. When the channel comes to the slot in the word again, the
                // word must not say that it has finished it.
                self.clear_word();
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

    fn read_completion_word(&mut self) -> RingStatus {
        let status = self.memory.load64(self.word);
        // Nothing was written since the channel was started, or since the last look: the ring is never
        // full, so the channel cannot have come to the same slot again. It may have halted there.
        if status == 0 || (status == self.seen_word && !is_halted(status)) {
            return RingStatus::CompletedUpTo(self.tail);
        }
        self.seen_word = status;
        self.decode_status(status)
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
        // What is finished now is near what was finished last.
        let near = self.offset(self.tail);
        let slot = self.ring.index(self.memory.offset(address, near)?)? as u64;
        let ahead = slot.wrapping_sub(self.tail) & (self.size - 1);
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
        self.shared.guard.resets() != self.resets
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

/// Whether a status is that of a channel that has halted or is gone.
fn is_halted(status: u64) -> bool {
    matches!(ChannelState::of(status), None | Some(ChannelState::Halted))
}

// SAFETY: a descriptor succeeds when the channel reports that it is finished, and is not executed
// again; it fails when the channel was stopped, and is restarted after it, or the device has lost
// its access to the memory. The channel is stopped before the value is dropped.
unsafe impl HardwareQueue for IoatQueue {
    fn post(
        &mut self,
        descriptor: &Descriptor,
        _notification: Option<NotificationWrite<'_>>,
    ) -> PostResult {
        if let Some(reason) = self.reject_reason(descriptor) {
            return PostResult::Completed(HwStatus::Failed(reason));
        }
        let length = descriptor.length();
        let address = |pinned: Option<PinnedLocation<'_>>| pinned?.contiguous(length);
        let target = address(descriptor.pinned_target());
        let source = match descriptor.operation() {
            Opcode::Fill => Some(0),
            _ => address(descriptor.pinned_source()),
        };
        let (Some(source), Some(target)) = (source, target) else {
            let reason = "memory is not pinned for the copy engine, or crosses its pages";
            return PostResult::Completed(HwStatus::Failed(reason));
        };
        if self.is_full() {
            return PostResult::Full;
        }
        self.put(match descriptor.operation() {
            Opcode::Fill => {
                let pattern = u64::from_ne_bytes([descriptor.fill_value(); 8]);
                Hard::fill(pattern, target, length as u32)
            }
            _ => Hard::copy(source, target, length as u32),
        });
        // The counter has no other writer.
        let counter = &self.config.counters.descriptors[self.slot.number()];
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        PostResult::Accepted
    }

    fn request_interrupt(&mut self) {
        // It is not published yet.
        let last = self.ring.offset(((self.head - 1) % self.size) as usize);
        let words = std::array::from_fn(|word| self.memory.load64(last + 8 * word));
        self.memory.store64(last, &Hard::from_words(words).with_interrupt().words());
        self.raises_before = self.head;
    }

    fn arm_interrupt(&mut self) {
        // While the device is reset it is not written to; the channel is armed when it starts again.
        if self.stop.is_none() {
            self.shared.guard.ring(self.channel, self.resets, || {
                // SAFETY: as in `start`.
                unsafe { self.device.write16(self.registers + r::CHANCTRL, self.control()) };
            });
        }
    }

    fn is_full(&self) -> bool {
        self.head - self.tail + 1 >= self.size
    }

    fn needs_poll(&self) -> bool {
        // A doorbell is refused while the device is reset.
        self.published < self.head || self.tail < self.head && self.raises_before <= self.tail
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
            (self.tail, self.idle_since, self.stalls) = (number, None, 0);
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

    fn needs_recovery(&self) -> bool {
        self.stop.is_some()
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
