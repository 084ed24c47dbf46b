//! Fills, moves and comparisons, as far as a device and its memory have a part in them.

use memferry_memory::pinning::Access;
use memferry_sys::cuda::{DriverError, Way};

use super::channel::{Begun, PIECE_BYTES, RING_SLOT_BYTES, Unregistered, Worker, failed};
use super::flight::Step;
use super::slots::Wish;
use crate::contract::{Direction, MemoryKind, Operation};
use crate::{Kernel, execute};

impl Worker {
    /// Sets memory of the device.
    pub(super) fn begin_fill(&mut self) -> Begun {
        let ((_, target), length) = (self.addresses(), self.left());
        let Some(value) = self.open.back().map(|open| open.descriptor.fill_value()) else {
            return Begun::Nothing;
        };
        let direction = Direction::IN_DEVICE;
        let (stream, expected_ns) = (self.inward, self.expect(0, direction, length));
        // SAFETY: the memory is vouched for until the descriptor is reported, after the event.
        let filled = unsafe { self.device.driver.fill(target, value, length as usize, stream) }
            .and_then(|()| self.mark(stream));
        let step = filled.map(|end| Step::Direct { end });
        self.begun(length, step, expected_ns, [None, None])
    }

    /// Sets ordinary memory, from a slot that the device has set.
    pub(super) fn begin_fill_outward(&mut self, most: u64) -> Begun {
        let (_, target) = self.addresses();
        let Some(value) = self.open.back().map(|open| open.descriptor.fill_value()) else {
            return Begun::Nothing;
        };
        let (lease, length) = match self.hold(1, target, most, Access::Write) {
            Ok(registered) => registered,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            Err(Unregistered::Refused) => return self.run_here(RING_SLOT_BYTES),
        };
        let slot = match self.passage.take(length) {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.run_here(RING_SLOT_BYTES),
        };
        let expected_ns = self.expect(1, Direction::FROM_DEVICE, length);
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
    pub(super) fn begin_move(&mut self) -> Begun {
        let ((source, target), length) = (self.addresses(), self.left());
        let slot = match self.passage.take(length.min(PIECE_BYTES)) {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => {
                return self
                    .over(u64::MAX, Err(failed("there is no memory of the device to move by")));
            }
        };
        let direction = Direction::IN_DEVICE;
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
    pub(super) fn compare(&mut self) -> Begun {
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
    pub(super) fn bring(
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
        let reached = self.wait_for(end).inspect_err(|_| self.device.driver.drain(stream));
        self.events.push(end);
        reached.map(|()| slot)
    }
}
