//! The thread of the model: takes frames from the transmit ring and puts them into the receive ring.

use memferry_sys::sync::lock;

use super::{Shared, State};
use crate::nic::registers::{self as r, receive, transmit};

/// What the card sends at most, with long frames and without.
const LONGEST: [usize; 2] = [9018 - 4, 1518 - 4];

impl Shared {
    pub(super) fn run(&self) {
        let mut state = lock(&self.state);
        while !state.is_ending {
            let can_send = !state.faults.stalls && !state.faults.gone;
            if can_send && state.send_one() {
                // Others get at the registers between two frames.
                drop(state);
                std::thread::yield_now();
                state = lock(&self.state);
            } else {
                state = self.bell.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
        }
    }
}

impl State {
    /// Sends the next frame, if there is a whole one; `false` if not.
    fn send_one(&mut self) -> bool {
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
        loop {
            let at = ring + u64::from(head) * transmit::BYTES as u64;
            let Some(order) = self.memory.read(at, transmit::BYTES) else {
                self.mistake(format!("a transmit descriptor at {at:#x}, which is not mapped"));
                self.set(r::TCTL, 0);
                return false;
            };
            let word = |at: usize| u64::from_le_bytes(order[at..at + 8].try_into().expect("8"));
            let (address, bytes) = (word(0), (word(8) & 0xFFFF) as usize);
            match self.memory.read(address, bytes) {
                Some(piece) => frame.extend(piece),
                None => is_readable = false,
            }
            head = (head + 1) % count;
            if word(8) & transmit::END != 0 {
                break;
            }
            if head == tail {
                self.mistake("a frame without an end".into());
                return false;
            }
        }
        self.set(r::TDH, head);
        self.sightings.frames += 1;
        if is_readable {
            self.loop_back(frame);
        } else {
            self.mistake("a frame from memory that is not mapped, or across a page".into());
        }
        true
    }

    fn loop_back(&mut self, mut frame: Vec<u8>) {
        let (control, number) = (self.get(r::RCTL), self.sightings.frames);
        let is_turn = |every: Option<u64>| every.is_some_and(|every| number.is_multiple_of(every));
        let is_long = control & r::RCTL_LONG_FRAMES != 0;
        if control & r::RCTL_LOOPBACK == 0
            || control & r::RCTL_ENABLE == 0
            || control & r::RCTL_PROMISCUOUS != r::RCTL_PROMISCUOUS
            || frame.len() > LONGEST[usize::from(!is_long)]
            || is_turn(self.faults.lose_every)
        {
            return;
        }
        if frame.len() < 60 {
            frame.resize(60, 0);
        }
        if is_turn(self.faults.damage_every) && frame.len() > 128 {
            let at = 128 + number as usize % (frame.len() - 128);
            frame[at] ^= 0x10;
        }
        self.receive(&frame);
    }

    fn receive(&mut self, frame: &[u8]) {
        let (head, tail) = (self.get(r::RDH), self.get(r::RDT));
        if head == tail {
            // No place for it: it is lost.
            return;
        }
        if self.get(r::RCTL) & r::RCTL_PACKET_SPLIT == 0
            || self.get(r::RFCTL) & r::RFCTL_EXTENDED == 0
        {
            self.mistake("the model knows descriptors with several buffers only".into());
            return;
        }
        let ring = u64::from(self.get(r::RDBAH)) << 32 | u64::from(self.get(r::RDBAL));
        let at = ring + u64::from(head) * 16;
        let Some(order) = self.memory.read(at, receive::BYTES) else {
            self.mistake(format!("a receive descriptor at {at:#x}, which is not mapped"));
            return;
        };
        let sizes = self.get(r::PSRCTL);
        let kib = |shift: u32| ((sizes >> shift & 0x3F) << 10) as usize;
        let rooms = [(sizes & 0x7F) as usize * 128, kib(8), kib(16), kib(24)];
        let (mut rest, mut lengths) = (frame, [0u64; 4]);
        for (index, room) in rooms.into_iter().enumerate() {
            let (part, behind) = rest.split_at(rest.len().min(room));
            let word = order[8 * index..8 * index + 8].try_into().expect("8 bytes");
            if !self.write_part(u64::from_le_bytes(word), part) {
                self.mistake("a frame for memory that is not mapped for writing".into());
            }
            lengths[index] = part.len() as u64;
            rest = behind;
        }
        if !rest.is_empty() {
            self.mistake("a frame that is longer than its buffers".into());
        }
        let status = u64::from(receive::DONE | receive::END) | lengths[0] << 32;
        let others = lengths[1] << 16 | lengths[2] << 32 | lengths[3] << 48;
        // The status last: whoever sees it sees everything.
        let written = self.memory.write(at + 16, &others.to_le_bytes()).is_some()
            && self.memory.write(at + 8, &status.to_le_bytes()).is_some();
        if !written {
            self.mistake("a receive ring that is not mapped for writing".into());
        }
        let halves = (receive::BYTES / 16) as u32;
        self.set(r::RDH, (head + halves) % (self.get(r::RDLEN) / 16));
    }

    /// Writes page by page: where pages lie is for the driver to know, and each must be mapped.
    fn write_part(&self, address: u64, part: &[u8]) -> bool {
        part.is_empty() || self.memory.write(address, part).is_some()
    }
}
