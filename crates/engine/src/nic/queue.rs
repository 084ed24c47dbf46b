//! The queue of a card: cuts descriptors into frames, sends the frames and waits for them, and
//! retransmits lost ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_memory::dma_mappings::DmaMappings;
use memferry_memory::pinning::DmaSegment;
use memferry_sys::clock::CoarseInstant;
use memferry_sys::pages::page_bytes;

use super::e1000e::{E1000e, RxStatus};
use super::frame::{BUFFER_BYTES, Frame, MAX_FRAGMENTS, Payload, TxFragment, checksum};
use crate::contract::{Descriptor, Kernel, NotificationWrite, Opcode, PinnedLocation};
use crate::pci::{ChannelSlot, HardwareQueue, HwStatus, PostResult};
use crate::runtime::execute::{self, Operands};

/// The length in bytes below which the processor copies: the header of a frame would be longer.
const SHORT_BYTES: u64 = 128;
/// The maximum number of frames that have not arrived. A descriptor makes about thirty.
const MAX_FRAMES: usize = 256;
/// The number of frames after which an interrupt is requested: half of a ring.
const INTERRUPT_FRAMES: u64 = 64;
/// The number of losses of a frame after which the processor takes over.
const MAX_RETRANSMITS: u32 = 4;
/// The oldest frame counts as lost after this part of the patience with a card: 20 ms, where a frame takes
/// 70 µs at 1 Gb/s.
const RETRANSMITS_PER_PATIENCE: u32 = 50;

/// The counters of a card.
#[derive(Debug, Default)]
pub(super) struct NicAtomicCounters {
    pub(super) frames: AtomicU64,
    pub(super) bytes_by_card: AtomicU64,
    pub(super) bytes_by_processor: AtomicU64,
    pub(super) retransmits: AtomicU64,
    pub(super) cpu_fallbacks: AtomicU64,
    pub(super) notification_writes: AtomicU64,
    pub(super) segments_found: AtomicU64,
    pub(super) segments_missing: AtomicU64,
}

/// The queue.
#[derive(Debug)]
pub(super) struct NicQueue {
    /// Before the pages: its drop stops everything in flight.
    card: E1000e,
    pages: Arc<DmaMappings>,
    counters: Arc<NicAtomicCounters>,
    /// Whether payloads are checksummed before they are sent and after they arrive.
    verify_checksums: bool,
    /// Frames that have not arrived, in order: first those in the rings, then the pending ones.
    frames: VecDeque<Frame>,
    in_rings: usize,
    /// The number of the next frame.
    next: u64,
    posted: VecDeque<PostedTransfer>,
    /// The time of the last arrival, or of the first frame in empty rings.
    last_progress: CoarseInstant,
    /// After a loss, only one frame at a time is in the rings until one has arrived.
    single_frame_mode: bool,
    /// A frame is late, lost or corrupted, and the card is not recovered yet.
    needs_recovery: bool,
    /// The card has failed for good.
    is_broken: bool,
    /// Dropped last: the next channel may be opened only after the card has stopped.
    _slot: ChannelSlot,
}

/// A descriptor that was posted.
#[derive(Debug, Clone, Copy)]
struct PostedTransfer {
    /// The number of its last frame.
    last: u64,
    /// Whether that frame is a notification write.
    has_notification: bool,
}

const BROKEN: &str = "the network card does not respond";
const LOST: &str = "frames were lost or corrupted repeatedly";

impl NicQueue {
    pub(super) fn new(
        card: E1000e,
        pages: Arc<DmaMappings>,
        counters: Arc<NicAtomicCounters>,
        verify_checksums: bool,
        slot: ChannelSlot,
    ) -> Self {
        Self {
            card,
            pages,
            counters,
            verify_checksums,
            frames: VecDeque::new(),
            in_rings: 0,
            next: 1,
            posted: VecDeque::new(),
            last_progress: CoarseInstant::now(),
            single_frame_mode: false,
            needs_recovery: false,
            is_broken: false,
            _slot: slot,
        }
    }

    /// The reason why the card cannot execute a descriptor, if there is one.
    fn reject_reason(&self, descriptor: &Descriptor) -> Option<&'static str> {
        if self.is_broken || self.pages.is_revoked() {
            Some(BROKEN)
        } else if descriptor.operation() != Opcode::Copy {
            Some("a network card supports only copies")
        } else if !descriptor.is_host_only() {
            Some("a network card cannot access device memory")
        } else {
            None
        }
    }

    /// Cuts a descriptor into frames. The processor copies bytes to odd addresses, short ends, and
    /// bytes that are not mapped for the card.
    fn make_frames(
        &mut self,
        descriptor: &Descriptor,
        source: &PinnedLocation<'_>,
        target: &PinnedLocation<'_>,
    ) {
        let length = descriptor.length();
        let mut done = self.join_last(descriptor, source, target);
        while done < length {
            let left = length - done;
            let is_odd = (descriptor.target() + done) % 2 == 1;
            done += if left < SHORT_BYTES {
                self.copy_by_cpu(descriptor, done, left)
            } else if is_odd {
                self.copy_by_cpu(descriptor, done, 1)
            } else {
                match self.make_frame(descriptor, source, target, done) {
                    0 => self.copy_by_cpu(descriptor, done, left),
                    gathered => gathered,
                }
            };
        }
    }

    /// Makes a frame of the bytes from `done` on, which go to an even address. Returns the length
    /// of its payload.
    fn make_frame(
        &mut self,
        descriptor: &Descriptor,
        source: &PinnedLocation<'_>,
        target: &PinnedLocation<'_>,
        done: u64,
    ) -> u64 {
        let left = descriptor.length() - done;
        let find = |offset: u64, max_bytes: u64| {
            self.segment(target, done + offset, max_bytes.min(BUFFER_BYTES))
        };
        let Some(first) = find(0, left) else { return 0 };
        // The card uses the second buffer only after a full first one.
        let is_full = first.bytes == BUFFER_BYTES && left > BUFFER_BYTES;
        let second = if is_full { find(BUFFER_BYTES, left - BUFFER_BYTES) } else { None };
        let mut frame = Frame {
            number: self.next,
            payload: Payload::Fragments(Vec::new()),
            bytes: 0,
            targets: (first.address, second.map(|second| second.address)),
            target_address: descriptor.target() + done,
            checksum: u64::from(self.verify_checksums),
            losses: 0,
            raises_interrupt: false,
        };
        let free = first.bytes + second.map_or(0, |second| second.bytes);
        let gathered = self.gather(&mut frame, descriptor, source, done, free);
        if gathered > 0 {
            self.next += 1;
            self.frames.push_back(frame);
        }
        gathered
    }

    /// The card's address of pinned memory, counted.
    fn segment(&self, at: &PinnedLocation<'_>, offset: u64, max_bytes: u64) -> Option<DmaSegment> {
        let segment = at.segment(offset, max_bytes);
        let NicAtomicCounters { segments_found, segments_missing, .. } = &*self.counters;
        let counter = if segment.is_some() { segments_found } else { segments_missing };
        counter.fetch_add(1, Ordering::Relaxed);
        segment
    }

    /// Copies bytes of a descriptor by the processor.
    fn copy_by_cpu(&self, descriptor: &Descriptor, from: u64, bytes: u64) -> u64 {
        let (source, target) = (descriptor.source() + from, descriptor.target() + from);
        // SAFETY: the creator of the descriptor guarantees its memory until it is finished; it is
        // host memory and does not overlap, which `reject_reason` checked. No frame has these
        // bytes.
        unsafe {
            execute::run(Opcode::Copy, Kernel::Cached, Operands::new(source, target), bytes, 0)
        };
        self.counters.bytes_by_processor.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// Adds fragments of a descriptor's source to a frame, from `offset` on and at most `max_bytes`
    /// bytes. No fragment crosses a page. Returns the number of bytes added.
    fn gather(
        &self,
        frame: &mut Frame,
        descriptor: &Descriptor,
        source: &PinnedLocation<'_>,
        offset: u64,
        max_bytes: u64,
    ) -> u64 {
        let Payload::Fragments(fragments) = &mut frame.payload else { return 0 };
        let page = page_bytes() as u64;
        let length = max_bytes.min(descriptor.length() - offset);
        let mut added = 0;
        while added < length && fragments.len() < MAX_FRAGMENTS {
            let Some(mapping) = self.segment(source, offset + added, length - added) else { break };
            let bytes = mapping.bytes.min(page - mapping.address % page).min(BUFFER_BYTES);
            fragments.push(TxFragment { address: mapping.address, bytes: bytes as u16 });
            if self.verify_checksums {
                let at = descriptor.source() + offset + added;
                // SAFETY: the creator of the descriptor guarantees its source until it is finished.
                frame.checksum = unsafe { checksum(at, bytes, frame.checksum) };
            }
            added += bytes;
        }
        frame.bytes += added;
        added
    }

    /// Adds the start of a descriptor to the last frame, if that is not in the rings yet and ends
    /// where the descriptor's target starts: small segments for one target share a frame. Returns
    /// the number of bytes added.
    fn join_last(
        &mut self,
        descriptor: &Descriptor,
        source: &PinnedLocation<'_>,
        target: &PinnedLocation<'_>,
    ) -> u64 {
        let ends_at_target = |frame: &Frame| {
            matches!(frame.payload, Payload::Fragments(_))
                && frame.target_address + frame.bytes == descriptor.target()
        };
        if self.frames.len() == self.in_rings || !self.frames.back().is_some_and(ends_at_target) {
            return 0;
        }
        let Some(mut frame) = self.frames.pop_back() else { return 0 };
        let mut added = 0;
        while added < descriptor.length() {
            let left = descriptor.length() - added;
            let mapping = self.segment(target, added, left.min(BUFFER_BYTES));
            let free =
                mapping.map_or(0, |mapping| frame.space_at(mapping.address).min(mapping.bytes));
            let gathered = self.gather(&mut frame, descriptor, source, added, free);
            if gathered == 0 {
                break;
            }
            added += gathered;
        }
        self.frames.push_back(frame);
        added
    }

    fn add_notification_write(&mut self, notification: NotificationWrite<'_>) -> bool {
        const WORD: u64 = size_of::<u64>() as u64;
        let NotificationWrite { location: at, value } = notification;
        let mapping = self.segment(&at, 0, WORD);
        let Some(mapping) = mapping.filter(|mapping| mapping.bytes == WORD) else { return false };
        self.frames.push_back(Frame {
            number: self.next,
            payload: Payload::Value(value),
            bytes: WORD,
            targets: (mapping.address, None),
            target_address: 0,
            checksum: 0,
            losses: 0,
            raises_interrupt: false,
        });
        self.next += 1;
        true
    }

    /// Puts frames into the rings. A frame never follows a shorter one there: if the shorter one
    /// were lost, the longer would land in its buffers, and past their end. No frame follows a
    /// notification write: if that were lost, other data would land in the variable.
    fn fill_rings(&mut self) {
        let before = self.in_rings;
        while self.in_rings < self.frames.len() {
            if self.single_frame_mode && self.in_rings > 0 {
                break;
            }
            let before = self.in_rings.checked_sub(1).map(|last| &self.frames[last]);
            let frame = &self.frames[self.in_rings];
            if !before.is_none_or(|before| before.may_precede(frame)) || !self.card.put(frame) {
                break;
            }
            self.in_rings += 1;
        }
        if self.in_rings > before {
            if before == 0 {
                self.last_progress = CoarseInstant::now();
            }
            self.card.ring_doorbell();
        }
    }

    /// Removes the frames that have arrived from the rings. `false` if one of them is not as
    /// expected.
    fn take_arrived(&mut self) -> bool {
        while self.in_rings > 0 {
            let frame = &self.frames[0];
            match self.card.rx_status(frame) {
                RxStatus::Empty => return true,
                RxStatus::Expected if self.is_intact(frame) => {}
                RxStatus::Expected | RxStatus::Mismatch => return false,
            }
            self.card.take(frame);
            let (counter, count) = match frame.payload {
                Payload::Fragments(_) => (&self.counters.bytes_by_card, frame.bytes),
                Payload::Value(_) => (&self.counters.notification_writes, 1),
            };
            counter.fetch_add(count, Ordering::Relaxed);
            self.counters.frames.fetch_add(1, Ordering::Relaxed);
            self.frames.pop_front();
            self.in_rings -= 1;
            (self.last_progress, self.single_frame_mode) = (CoarseInstant::now(), false);
        }
        true
    }

    /// Checks the checksum of the payload in memory, fragment by fragment as it was sent.
    fn is_intact(&self, frame: &Frame) -> bool {
        let Payload::Fragments(fragments) = &frame.payload else { return true };
        let (mut at, mut sum) = (frame.target_address, 1);
        for fragment in fragments.iter().filter(|_| self.verify_checksums) {
            // SAFETY: the creator of the descriptor guarantees its target until it is finished; the
            // card has written it, and will not again.
            sum = unsafe { checksum(at, fragment.bytes.into(), sum) };
            at += u64::from(fragment.bytes);
        }
        !self.verify_checksums || sum == frame.checksum
    }

    /// Recovers from a loss: stops the card, and restarts with the oldest frame. If that frame was
    /// lost too often, or the card does not stop, drops all frames and returns the reason.
    fn restart(&mut self, ended: &mut Vec<HwStatus>) -> Option<&'static str> {
        let stopped = self.card.stop();
        // Frames that have arrived by now were only late. They must not be retransmitted: a later
        // notification write may have reported them, and their owner may use the memory for other
        // data.
        let _ = self.take_arrived();
        self.end_arrived(ended);
        match stopped {
            Ok(()) => self.card.set_up(),
            Err(error) => {
                // The card may still write, so it loses its access to the memory. First of all: the log may panic.
                self.pages.revoke_access();
                self.is_broken = true;
                tracing::warn!(%error, "disabling the network card: it cannot be stopped");
            }
        }
        let is_late = self.in_rings == 0;
        self.in_rings = 0;
        let losses = self.frames.front_mut().map_or(0, |frame| {
            frame.losses += u32::from(!is_late);
            frame.losses
        });
        tracing::debug!(losses, is_late, "a frame was late, lost or corrupted");
        if !self.is_broken && losses < MAX_RETRANSMITS {
            self.counters.retransmits.fetch_add(u64::from(!is_late), Ordering::Relaxed);
            self.single_frame_mode = !is_late;
            self.fill_rings();
            return None;
        }
        self.counters.cpu_fallbacks.fetch_add(1, Ordering::Relaxed);
        self.frames.clear();
        Some(if self.is_broken { BROKEN } else { LOST })
    }

    /// Completes the transfers of which all frames have arrived.
    fn end_arrived(&mut self, ended: &mut Vec<HwStatus>) {
        let oldest = self.frames.front().map_or(self.next, |frame| frame.number);
        let complete = self.posted.iter().take_while(|transfer| transfer.last < oldest).count();
        let end = |transfer: PostedTransfer| {
            if transfer.has_notification { HwStatus::OkNotified } else { HwStatus::Ok }
        };
        ended.extend(self.posted.drain(..complete).map(end));
    }
}

// SAFETY: a transfer succeeds when its frames have arrived, in order, after which the card has
// nothing more of it; it fails after the card was stopped, or lost its access to the memory. The
// card is stopped before it is dropped.
unsafe impl HardwareQueue for NicQueue {
    fn post(
        &mut self,
        descriptor: &Descriptor,
        notification: Option<NotificationWrite<'_>>,
    ) -> PostResult {
        if let Some(reason) = self.reject_reason(descriptor) {
            return PostResult::Completed(HwStatus::Failed(reason));
        }
        let (source, target) = (descriptor.pinned_source(), descriptor.pinned_target());
        let (Some(source), Some(target)) = (source, target) else {
            return PostResult::Completed(HwStatus::Failed(
                "memory is not pinned for the network card",
            ));
        };
        if self.is_full() {
            return PostResult::Full;
        }
        let bytes_before: u64 = self.frames.back().map_or(0, |frame| frame.bytes);
        let before = (self.frames.len(), bytes_before);
        self.make_frames(descriptor, &source, &target);
        // With checksums, data is known to be intact only after the processor has checked it.
        let has_notification = !self.verify_checksums
            && notification.is_some_and(|notification| self.add_notification_write(notification));
        if before == (self.frames.len(), self.frames.back().map_or(0, |frame| frame.bytes)) {
            return PostResult::Completed(HwStatus::Ok);
        }
        self.posted.push_back(PostedTransfer { last: self.next - 1, has_notification });
        PostResult::Accepted
    }

    fn request_interrupt(&mut self) {
        // In loopback a frame that is sent arrives at once. Also after half of the rings, and where
        // the next frame has to wait: whoever wakes up puts more into the rings.
        for index in self.in_rings..self.frames.len() {
            let frame = &self.frames[index];
            let next = self.frames.get(index + 1);
            let is_half = frame.number.is_multiple_of(INTERRUPT_FRAMES);
            if is_half || next.is_none_or(|next| !frame.may_precede(next)) {
                self.frames[index].raises_interrupt = true;
            }
        }
    }

    fn arm_interrupt(&mut self) {
        if !self.needs_recovery && !self.is_broken {
            self.card.arm_interrupt();
        }
    }

    fn is_full(&self) -> bool {
        self.frames.len() >= MAX_FRAMES
    }

    fn needs_poll(&self) -> bool {
        // After a loss one frame at a time is in the rings, and frames of many fragments fill the transmit
        // ring before one of them raises an interrupt.
        let mut in_rings = self.frames.range(..self.in_rings);
        !self.frames.is_empty() && !in_rings.any(|frame| frame.raises_interrupt)
    }

    fn ring_doorbell(&mut self) {
        if !self.needs_recovery {
            self.fill_rings();
        }
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        let is_expected = self.take_arrived();
        self.end_arrived(ended);
        let timeout = self.card.patience() / RETRANSMITS_PER_PATIENCE;
        let is_late = self.in_rings > 0 && self.last_progress.elapsed() > timeout;
        self.needs_recovery = !is_expected || is_late;
        if !self.needs_recovery {
            self.fill_rings();
        }
    }

    fn needs_recovery(&self) -> bool {
        self.needs_recovery
    }

    fn recover(&mut self, ended: &mut Vec<HwStatus>) {
        if !std::mem::take(&mut self.needs_recovery) {
            return;
        }
        if let Some(reason) = self.restart(ended) {
            ended.extend(self.posted.drain(..).map(|_| HwStatus::Failed(reason)));
        }
    }
}
