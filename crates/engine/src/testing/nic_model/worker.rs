//! The thread of the model: moves frames from the transmit ring to the receive ring.

use memferry_sys::sync::lock;

use super::ModelInterrupts;
use super::{NicModelShared, NicModelState};
use crate::nic::registers::{self as r, receive, transmit};

/// The maximum frame of the card in bytes, with long frames and without.
const MAX_FRAME_BYTES: [usize; 2] = [9018 - 4, 1518 - 4];

impl NicModelShared {
    pub(super) fn run(&self) {
        let mut state = lock(&self.state);
        while !state.is_ending {
            let can_send = !state.faults.stalls && !state.faults.is_removed;
            if can_send && state.send_one(&self.interrupts) {
                // Other threads get the lock between two frames.
                drop(state);
                std::thread::yield_now();
                state = lock(&self.state);
            } else {
                state =
                    self.doorbell.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
        }
    }
}

impl NicModelState {
    /// Sends the next frame, if it is complete; `false` if not.
    fn send_one(&mut self, interrupts: &ModelInterrupts) -> bool {
        if self.get(r::TCTL) & r::TCTL_ENABLE == 0 {
            return false;
        }
        let (mut head, tail) = (self.get(r::TDH), self.get(r::TDT));
        let count = self.get(r::TDLEN) / transmit::BYTES as u32;
        if head == tail || count == 0 || tail >= count {
            return false;
        }
        let ring = u64::from(self.get(r::TDBAH)) << 32 | u64::from(self.get(r::TDBAL));
        let (mut frame, mut is_readable) = (Vec::new(), true);
        let reports = loop {
            let at = ring + u64::from(head) * transmit::BYTES as u64;
            let Some(descriptor) = self.memory.read(at, transmit::BYTES) else {
                self.record_violation(format!("the transmit descriptor at {at:#x} is not mapped"));
                self.set(r::TCTL, 0);
                return false;
            };
            let word =
                |at: usize| u64::from_le_bytes(descriptor[at..at + 8].try_into().expect("8"));
            let (address, bytes) = (word(0), (word(8) & 0xFFFF) as usize);
            match self.memory.read(address, bytes) {
                Some(fragment) => frame.extend(fragment),
                None => is_readable = false,
            }
            head = (head + 1) % count;
            if word(8) & transmit::END != 0 {
                break word(8) & transmit::REPORT != 0;
            }
            if head == tail {
                self.record_violation("a frame without an end descriptor".into());
                return false;
            }
        };
        let raises_early = reports && interrupts.is_early() && self.takes_interrupt();
        self.set(r::TDH, head);
        self.stats.frames += 1;
        if is_readable {
            self.loop_back(frame);
        } else {
            self.record_violation("a fragment that is not mapped, or crosses a page".into());
        }
        if (raises_early || reports && self.takes_interrupt()) && !interrupts.raise(0) {
            self.record_violation("the interrupt is not connected".into());
        }
        true
    }

    fn loop_back(&mut self, mut frame: Vec<u8>) {
        let (control, number) = (self.get(r::RCTL), self.stats.frames);
        let is_selected =
            |every: Option<u64>| every.is_some_and(|every| number.is_multiple_of(every));
        let is_long = control & r::RCTL_LONG_FRAMES != 0;
        if control & r::RCTL_LOOPBACK == 0
            || control & r::RCTL_ENABLE == 0
            || control & r::RCTL_PROMISCUOUS != r::RCTL_PROMISCUOUS
            || frame.len() > MAX_FRAME_BYTES[usize::from(!is_long)]
            || is_selected(self.faults.lose_every)
        {
            return;
        }
        if frame.len() < 60 {
            frame.resize(60, 0);
        }
        if is_selected(self.faults.damage_every) && frame.len() > 128 {
            let at = 128 + number as usize % (frame.len() - 128);
            frame[at] ^= 0x10;
        }
        self.receive(&frame);
    }

    fn receive(&mut self, frame: &[u8]) {
        let (head, tail) = (self.get(r::RDH), self.get(r::RDT));
        if head == tail {
            // No receive descriptor is free: the frame is lost.
            return;
        }
        if self.get(r::RCTL) & r::RCTL_PACKET_SPLIT == 0
            || self.get(r::RFCTL) & r::RFCTL_EXTENDED == 0
        {
            self.record_violation("the model supports only packet-split descriptors".into());
            return;
        }
        let ring = u64::from(self.get(r::RDBAH)) << 32 | u64::from(self.get(r::RDBAL));
        let at = ring + u64::from(head) * 16;
        let Some(descriptor) = self.memory.read(at, receive::BYTES) else {
            self.record_violation(format!("the receive descriptor at {at:#x} is not mapped"));
            return;
        };
        let sizes = self.get(r::PSRCTL);
        let kib = |shift: u32| ((sizes >> shift & 0x3F) << 10) as usize;
        let capacities = [(sizes & 0x7F) as usize * 128, kib(8), kib(16), kib(24)];
        let (mut rest, mut lengths) = (frame, [0u64; 4]);
        for (index, capacity) in capacities.into_iter().enumerate() {
            let (part, tail_bytes) = rest.split_at(rest.len().min(capacity));
            let word = descriptor[8 * index..8 * index + 8].try_into().expect("8 bytes");
            if !self.write_part(u64::from_le_bytes(word), part) {
                self.record_violation("a receive buffer that is not mapped for writing".into());
            }
            lengths[index] = part.len() as u64;
            rest = tail_bytes;
        }
        if !rest.is_empty() {
            self.record_violation("a frame that exceeds its buffers".into());
        }
        let status = u64::from(receive::DONE | receive::END) | lengths[0] << 32;
        let others = lengths[1] << 16 | lengths[2] << 32 | lengths[3] << 48;
        // The status last: a thread that sees it sees everything.
        let written = self.memory.write(at + 16, &others.to_le_bytes()).is_some()
            && self.memory.write(at + 8, &status.to_le_bytes()).is_some();
        if !written {
            self.record_violation("the receive ring is not mapped for writing".into());
        }
        let halves = (receive::BYTES / 16) as u32;
        self.set(r::RDH, (head + halves) % (self.get(r::RDLEN) / 16));
    }

    /// Writes a part of a frame into its buffer, which must be mapped.
    fn write_part(&self, address: u64, part: &[u8]) -> bool {
        part.is_empty() || self.memory.write(address, part).is_some()
    }
}
