//! Beginning a piece: which way it takes, and the ways of copies.

use memferry_memory::pinning::Access;
use memferry_sys::cuda::{DriverError, Event, Way, code};

use super::channel::{Begun, RING_SLOT_BYTES, Unregistered, Worker, failed};
use super::flight::Step;
use super::slots::Wish;
use crate::contract::{Direction, MemoryKind, Operation};
use crate::{Kernel, execute};

impl Worker {
    /// Begins a piece of the newest descriptor.
    pub(super) fn begin_piece(&mut self) -> Begun {
        let Some(open) = self.open.back_mut() else { return Begun::Nothing };
        let descriptor = &open.descriptor;
        let (operation, kinds) = (descriptor.operation(), descriptor.memory_kinds());
        let most = open.next_piece_bytes();
        if !open.is_begun && open.is_busy() {
            return Begun::NoRoom;
        }
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
    pub(super) fn begin_inward(&mut self, most: u64) -> Begun {
        let (source, target) = self.addresses();
        let (lease, length) = match self.hold(0, source, most, Access::Read) {
            Ok(registered) => registered,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            Err(Unregistered::Refused) => return self.begin_staged_inward(source, target, most),
        };
        let expected_ns = self.expect(0, Direction::TO_DEVICE, length);
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
    pub(super) fn begin_staged_inward(&mut self, source: u64, target: u64, most: u64) -> Begun {
        let length = self.left().min(most).min(RING_SLOT_BYTES);
        let slot = match self.ring.take() {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.copy_now(Way::In),
        };
        // SAFETY: the source is vouched for, and the slot is ours and large enough.
        unsafe { execute::run(Operation::Copy, Kernel::Cached, source, slot, length, 0) };
        let expected_ns = self.expect(0, Direction::TO_DEVICE, length);
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
    pub(super) fn begin_outward(&mut self, most: u64) -> Begun {
        let (source, target) = self.addresses();
        let (lease, length) = match self.hold(1, target, most, Access::Write) {
            Ok(registered) => registered,
            Err(Unregistered::Missing { address }) => return self.missing(address),
            Err(Unregistered::Refused) => return self.begin_staged_outward(source, most),
        };
        let expected_ns = self.expect(1, Direction::FROM_DEVICE, length);
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
    pub(super) fn begin_staged_outward(&mut self, source: u64, most: u64) -> Begun {
        let length = self.left().min(most).min(RING_SLOT_BYTES);
        let slot = match self.ring.take() {
            Wish::Slot(slot) => slot,
            Wish::Busy => return Begun::NoRoom,
            Wish::Refused => return self.copy_now(Way::Out),
        };
        let expected_ns = self.expect(1, Direction::FROM_DEVICE, length);
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
    pub(super) fn begin_within(&mut self) -> Begun {
        let ((source, target), length) = (self.addresses(), self.left());
        let direction = Direction::IN_DEVICE;
        let (stream, expected_ns) = (self.inward, self.expect(0, direction, length));
        // SAFETY: the memory is vouched for until the descriptor is reported, after the event.
        let copied = unsafe { self.copy(Way::Within, source, target, length, stream) };
        let step = copied.map(|end| Step::Direct { end });
        self.begun(length, step, expected_ns, [None, None])
    }

    /// From ordinary memory to ordinary memory: in by one stream, out by the other.
    pub(super) fn begin_through(&mut self, most: u64) -> Begun {
        let (source, target) = self.addresses();
        let sides = self.hold(0, source, most, Access::Read).and_then(|(from, length)| {
            let (to, length) = self.hold(1, target, length, Access::Write)?;
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
        let in_ns = self.expect(0, Direction::TO_DEVICE, length);
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
                // Nothing of it is on its way any more.
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
    pub(super) unsafe fn copy_through(
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
}
