//! The queue of a card: descriptors cut into frames, frames sent and awaited, lost ones sent again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_memory::device_pages::DevicePages;
use memferry_memory::lookup::Route;
use memferry_sys::pages::page_bytes;

use super::card::{Arrival, Card};
use super::frame::{BUFFER_BYTES, Frame, MOST_PIECES, Payload, Piece, sum_of};
use crate::contract::{Descriptor, Kernel, Notice, Operation, PinnedAt};
use crate::device::{Ended, Hardware, Posted, Seat};
use crate::execute;

/// What is shorter than the head of a frame is not worth one: the processor copies it.
const SHORT_BYTES: u64 = 128;
/// Frames that were made and have not arrived. A descriptor makes about thirty.
const MOST_FRAMES: usize = 256;
/// How often a frame may be lost before the processor takes over.
const MOST_TIMES: u32 = 4;
/// A frame takes 70 µs at 1 Gb/s. If none has arrived for so long, the oldest is lost.
const LOST_AFTER: Duration = Duration::from_millis(20);

/// What a card has done so far.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) frames: AtomicU64,
    pub(super) bytes_by_card: AtomicU64,
    pub(super) bytes_by_processor: AtomicU64,
    pub(super) sent_again: AtomicU64,
    pub(super) given_up: AtomicU64,
    pub(super) notices: AtomicU64,
}

/// The queue.
#[derive(Debug)]
pub(super) struct Queue {
    /// Before the pages: its end is the end of everything that is under way.
    card: Card,
    pages: Arc<DevicePages>,
    counters: Arc<Counters>,
    /// Whether payloads are summed up, before and behind.
    checks: bool,
    /// Frames that have not arrived, in order: first those that are in the rings, then the rest.
    frames: VecDeque<Frame>,
    in_rings: usize,
    /// The number of the next frame.
    next: u64,
    orders: VecDeque<Order>,
    /// When something arrived, or was first sent.
    moved: Instant,
    /// After a loss frames go alone until one has arrived.
    goes_alone: bool,
    /// The card is out of order for good.
    is_broken: bool,
    /// Last: the next channel is opened when the card has stopped.
    _seat: Seat,
}

/// A descriptor that was posted.
#[derive(Debug, Clone, Copy)]
struct Order {
    /// The number of its last frame.
    last: u64,
    /// Whether that is the frame of a notice.
    is_noticed: bool,
}

const BROKEN: &str = "the network card does not answer any more";
const LOST: &str = "frames were lost or damaged again and again";

impl Queue {
    pub(super) fn new(
        card: Card,
        pages: Arc<DevicePages>,
        counters: Arc<Counters>,
        checks: bool,
        seat: Seat,
    ) -> Self {
        Self {
            card,
            pages,
            counters,
            checks,
            frames: VecDeque::new(),
            in_rings: 0,
            next: 1,
            orders: VecDeque::new(),
            moved: Instant::now(),
            goes_alone: false,
            is_broken: false,
            _seat: seat,
        }
    }

    /// Why the card cannot do a descriptor, if it cannot.
    fn objection(&self, descriptor: &Descriptor) -> Option<&'static str> {
        if self.is_broken {
            Some(BROKEN)
        } else if descriptor.operation() != Operation::Copy {
            Some("a network card only copies")
        } else if !descriptor.is_host_only() {
            Some("device memory is out of reach")
        } else {
            None
        }
    }

    /// Puts a descriptor into frames. What is odd, short, or has no address for the card, the
    /// processor copies at once.
    fn make_frames(&mut self, descriptor: &Descriptor, source: PinnedAt, target: PinnedAt) {
        let length = descriptor.length();
        let mut done = self.join_last(descriptor, source, target);
        while done < length {
            let left = length - done;
            let is_odd = (descriptor.target() + done) % 2 == 1;
            done += if left < SHORT_BYTES {
                self.by_processor(descriptor, done, left)
            } else if is_odd {
                self.by_processor(descriptor, done, 1)
            } else {
                match self.make_frame(descriptor, source, target, done) {
                    0 => self.by_processor(descriptor, done, left),
                    gathered => gathered,
                }
            };
        }
    }

    /// Makes a frame of the bytes from `done` on, which go to an even address. Returns how many it
    /// carries.
    fn make_frame(
        &mut self,
        descriptor: &Descriptor,
        source: PinnedAt,
        target: PinnedAt,
        done: u64,
    ) -> u64 {
        let left = descriptor.length() - done;
        let find = |behind: u64, most: u64| {
            let at = target.offset_bytes + done + behind;
            self.pages.find(target.token, at, most.min(BUFFER_BYTES), Route::Receive)
        };
        let Some(first) = find(0, left) else { return 0 };
        // The second buffer is used only behind a full first one.
        let is_full = first.bytes == BUFFER_BYTES && left > BUFFER_BYTES;
        let second = if is_full { find(BUFFER_BYTES, left - BUFFER_BYTES) } else { None };
        let mut frame = Frame {
            number: self.next,
            payload: Payload::Pieces(Vec::new()),
            bytes: 0,
            targets: (first.address, second.map(|second| second.address)),
            lands_at: descriptor.target() + done,
            sum: u64::from(self.checks),
            lost: 0,
        };
        let room = first.bytes + second.map_or(0, |second| second.bytes);
        let gathered = self.gather(&mut frame, descriptor, source, done, room);
        if gathered > 0 {
            self.next += 1;
            self.frames.push_back(frame);
        }
        gathered
    }

    /// The processor copies some bytes of a descriptor.
    fn by_processor(&self, descriptor: &Descriptor, from: u64, bytes: u64) -> u64 {
        let (source, target) = (descriptor.source() + from, descriptor.target() + from);
        // SAFETY: whoever made the descriptor vouched for its memory until it is finished, and it is
        // the host's and does not overlap: `objection` looked. No frame has these bytes.
        unsafe { execute::run(Operation::Copy, Kernel::Cached, source, target, bytes, 0) };
        self.counters.bytes_by_processor.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// Adds pieces of a descriptor's source to a frame, from `offset` on and at most `room` bytes.
    /// No piece crosses a page. Returns how many bytes it added.
    fn gather(
        &self,
        frame: &mut Frame,
        descriptor: &Descriptor,
        source: PinnedAt,
        offset: u64,
        room: u64,
    ) -> u64 {
        let Payload::Pieces(pieces) = &mut frame.payload else { return 0 };
        let page = page_bytes() as u64;
        let most = room.min(descriptor.length() - offset);
        let mut added = 0;
        while added < most && pieces.len() < MOST_PIECES {
            let at = source.offset_bytes + offset + added;
            let Some(found) = self.pages.find(source.token, at, most - added, Route::Send) else {
                break;
            };
            let bytes = found.bytes.min(page - found.address % page).min(BUFFER_BYTES);
            pieces.push(Piece { address: found.address, bytes: bytes as u16 });
            if self.checks {
                let at = descriptor.source() + offset + added;
                // SAFETY: whoever made the descriptor vouched for its source until it is finished.
                frame.sum = unsafe { sum_of(at, bytes, frame.sum) };
            }
            added += bytes;
        }
        frame.bytes += added;
        added
    }

    /// Adds the beginning of a descriptor to the last frame, if that is not in the rings yet and ends
    /// where the descriptor's target begins: many small pieces for one target go together. Returns
    /// how many bytes it added.
    fn join_last(&mut self, descriptor: &Descriptor, source: PinnedAt, target: PinnedAt) -> u64 {
        let ends_there = |frame: &Frame| {
            matches!(frame.payload, Payload::Pieces(_))
                && frame.lands_at + frame.bytes == descriptor.target()
        };
        if self.frames.len() == self.in_rings || !self.frames.back().is_some_and(ends_there) {
            return 0;
        }
        let Some(mut frame) = self.frames.pop_back() else { return 0 };
        let mut added = 0;
        while added < descriptor.length() {
            let (at, left) = (target.offset_bytes + added, descriptor.length() - added);
            let found = self.pages.find(target.token, at, left.min(BUFFER_BYTES), Route::Receive);
            let room = found.map_or(0, |found| frame.room_at(found.address).min(found.bytes));
            let gathered = self.gather(&mut frame, descriptor, source, added, room);
            if gathered == 0 {
                break;
            }
            added += gathered;
        }
        self.frames.push_back(frame);
        added
    }

    fn add_notice(&mut self, notice: Notice) -> bool {
        const WORD: u64 = size_of::<u64>() as u64;
        let Notice { at, value } = notice;
        let found = self.pages.find(at.token, at.offset_bytes, WORD, Route::Receive);
        let Some(found) = found.filter(|found| found.bytes == WORD) else { return false };
        self.frames.push_back(Frame {
            number: self.next,
            payload: Payload::Value(value),
            bytes: WORD,
            targets: (found.address, None),
            lands_at: 0,
            sum: 0,
            lost: 0,
        });
        self.next += 1;
        true
    }

    /// Puts frames into the rings. A frame never follows a shorter one there: if that were lost, the
    /// longer would land in its place, and beyond its end. And none follows the frame of a value: if
    /// that were lost, something else would land in the variable.
    fn fill_rings(&mut self) {
        let before = self.in_rings;
        while self.in_rings < self.frames.len() {
            if self.goes_alone && self.in_rings > 0 {
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
                self.moved = Instant::now();
            }
            self.card.ring();
        }
    }

    /// Takes the frames that have arrived out of the rings. `false` if one of them is not right.
    fn take_arrived(&mut self) -> bool {
        while self.in_rings > 0 {
            let frame = &self.frames[0];
            match self.card.arrival(frame) {
                Arrival::None => return true,
                Arrival::Right if self.is_intact(frame) => {}
                Arrival::Right | Arrival::Wrong => return false,
            }
            self.card.take(frame);
            let (counter, count) = match frame.payload {
                Payload::Pieces(_) => (&self.counters.bytes_by_card, frame.bytes),
                Payload::Value(_) => (&self.counters.notices, 1),
            };
            counter.fetch_add(count, Ordering::Relaxed);
            self.counters.frames.fetch_add(1, Ordering::Relaxed);
            self.frames.pop_front();
            self.in_rings -= 1;
            (self.moved, self.goes_alone) = (Instant::now(), false);
        }
        true
    }

    /// Sums up what has landed, piece by piece as it was sent.
    fn is_intact(&self, frame: &Frame) -> bool {
        let Payload::Pieces(pieces) = &frame.payload else { return true };
        let (mut at, mut sum) = (frame.lands_at, 1);
        for piece in pieces.iter().filter(|_| self.checks) {
            // SAFETY: whoever made the descriptor vouched for its target until it is finished; the
            // card has written it, and will not again.
            sum = unsafe { sum_of(at, piece.bytes.into(), sum) };
            at += u64::from(piece.bytes);
        }
        !self.checks || sum == frame.sum
    }

    /// Something seems to be lost: stops the card, and begins anew with the oldest frame. If that was
    /// lost often enough, or the card does not stop, drops all frames and says why.
    fn recover(&mut self, ended: &mut Vec<Ended>) -> Option<&'static str> {
        let stopped = self.card.stop();
        // What has landed until now was only late. It must not be sent again: its owner may know of
        // it, by the value behind it, and use the memory for something else.
        let _ = self.take_arrived();
        self.end_arrived(ended);
        match stopped {
            Ok(()) => self.card.set_up(),
            Err(error) => {
                tracing::warn!(%error, "the network card is not used any more");
                // It may still be writing: then the memory is taken away from it.
                self.pages.cut_off();
                self.is_broken = true;
            }
        }
        let is_late = self.in_rings == 0;
        self.in_rings = 0;
        let times = self.frames.front_mut().map_or(0, |frame| {
            frame.lost += u32::from(!is_late);
            frame.lost
        });
        tracing::debug!(times, is_late, "a frame was late, lost or damaged");
        if !self.is_broken && times < MOST_TIMES {
            self.counters.sent_again.fetch_add(u64::from(!is_late), Ordering::Relaxed);
            self.goes_alone = !is_late;
            self.fill_rings();
            return None;
        }
        self.counters.given_up.fetch_add(1, Ordering::Relaxed);
        self.frames.clear();
        Some(if self.is_broken { BROKEN } else { LOST })
    }

    /// Ends the orders of which all frames have arrived.
    fn end_arrived(&mut self, ended: &mut Vec<Ended>) {
        let oldest = self.frames.front().map_or(self.next, |frame| frame.number);
        let over = self.orders.iter().take_while(|order| order.last < oldest).count();
        let end = |order: Order| if order.is_noticed { Ended::Noticed } else { Ended::Well };
        ended.extend(self.orders.drain(..over).map(end));
    }
}

// SAFETY: an order ends well when its frames have arrived, in order, behind which the card has
// nothing more of it; and badly after the card was stopped, or its memory was taken away. The card is
// stopped before it is dropped.
unsafe impl Hardware for Queue {
    fn post(&mut self, descriptor: &Descriptor, notice: Option<Notice>) -> Posted {
        if let Some(reason) = self.objection(descriptor) {
            return Posted::Over(Ended::Failed(reason));
        }
        let (source, target) = (descriptor.pinned_source(), descriptor.pinned_target());
        let (Some(source), Some(target)) = (source, target) else {
            return Posted::Over(Ended::Failed("memory is not pinned for the network card"));
        };
        if self.frames.len() >= MOST_FRAMES {
            return Posted::Full;
        }
        let bytes_before: u64 = self.frames.back().map_or(0, |frame| frame.bytes);
        let before = (self.frames.len(), bytes_before);
        self.make_frames(descriptor, source, target);
        // With sums, data is known to be right only when the processor has looked at it.
        let is_noticed = !self.checks && notice.is_some_and(|notice| self.add_notice(notice));
        if before == (self.frames.len(), self.frames.back().map_or(0, |frame| frame.bytes)) {
            return Posted::Over(Ended::Well);
        }
        self.orders.push_back(Order { last: self.next - 1, is_noticed });
        Posted::Taken
    }

    fn ring(&mut self) {
        self.fill_rings();
    }

    fn look(&mut self, ended: &mut Vec<Ended>) {
        let is_right = self.take_arrived();
        self.end_arrived(ended);
        let is_late = self.in_rings > 0 && self.moved.elapsed() > LOST_AFTER;
        if is_right && !is_late {
            return self.fill_rings();
        }
        if let Some(reason) = self.recover(ended) {
            ended.extend(self.orders.drain(..).map(|_| Ended::Failed(reason)));
        }
    }
}
