//! One copy, by the receiver alone: the sender says where a message lies, the receiver has the kernel
//! read it from there. What most message libraries do with large messages.

use std::hint::black_box;

use anyhow::{bail, ensure};
use memferry_sys::cross_memory::{self, Stretch, why_denied};

use super::shared_ring::{Rings, Shape};
use super::{Connect, Link, Meeting};

/// More notices than a window has messages.
const SHAPE: Shape = Shape { slots: 128, payload_bytes: 0 };

pub(in crate::bench::group) struct CrossMemory {
    rings: Rings,
    other: u32,
}

/// A word for the other to try whether it can read from here.
static READABLE: u64 = 0x6D65_6D66_6572_7279;

impl Connect for CrossMemory {
    fn connect(meeting: Meeting) -> anyhow::Result<Self> {
        let other = meeting.other()?;
        let rings = Rings::connect(meeting, SHAPE)?;
        let carrier = Self { rings, other: other.pid };
        let own_word = black_box(&raw const READABLE) as u64;
        carrier.rings.meeting().give(&own_word.to_le_bytes(), &[])?;
        let mut address = [0; 8];
        let [] = carrier.rings.meeting().take(&mut address)?;
        let mut word = [0; 8];
        if let Err(error) = carrier.read(u64::from_le_bytes(address), &mut word) {
            bail!("{}", why_denied(other.pid, other.uid, &error));
        }
        ensure!(u64::from_le_bytes(word) == READABLE, "another process was read");
        Ok(carrier)
    }
}

impl CrossMemory {
    /// Reads all that lies at an address of the other process.
    fn read(&self, address: u64, target: &mut [u8]) -> std::io::Result<()> {
        let mut done = 0;
        while done < target.len() {
            let rest = &mut target[done..];
            let local = [Stretch { address: rest.as_mut_ptr() as usize, length: rest.len() }];
            let remote = [Stretch { address: address as usize + done, length: rest.len() }];
            // SAFETY: the local stretch is a slice that is borrowed for writing.
            match unsafe { cross_memory::read(self.other, &remote, &local) }? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    fn announce(&mut self, message: &[u8]) -> anyhow::Result<()> {
        self.rings.outgoing.claim()?;
        self.rings.outgoing.publish([message.as_ptr() as u64, message.len() as u64]);
        Ok(())
    }
}

impl Link for CrossMemory {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        self.send_often(message, 1)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let ([address, length], _) = self.rings.incoming.next()?;
        ensure!(length == message.len() as u64, "a message of {length} bytes arrived");
        self.read(address, message)?;
        self.rings.incoming.give_back();
        Ok(())
    }

    /// All are announced before the first is waited for.
    fn send_often(&mut self, message: &[u8], times: usize) -> anyhow::Result<()> {
        for _ in 0..times {
            self.announce(message)?;
        }
        self.rings.outgoing.wait_until_read()
    }
}
