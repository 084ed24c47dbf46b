//! One copy, by the receiver alone: the sender publishes the address of a message, and the receiver
//! reads it from there by a system call. Most message libraries do this with large messages.

use std::hint::black_box;

use anyhow::{bail, ensure};
use memferry_sys::cross_memory::{self, IoVec, denial_reason};

use super::shared_ring::{RingShape, Rings};
use super::{Connect, Link, PeerSocket};

/// Shape of the ring: more slots than a window has messages.
const SHAPE: RingShape = RingShape { slots: 128, payload_bytes: 0 };

pub(crate) struct CrossMemory {
    rings: Rings,
    peer_pid: u32,
}

/// A word that the peer reads to check that it can read from this process.
static READABLE: u64 = 0x6D65_6D66_6572_7279;

impl Connect for CrossMemory {
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self> {
        let other = meeting.peer_credentials()?;
        let rings = Rings::connect(meeting, SHAPE)?;
        let carrier = Self { rings, peer_pid: other.pid };
        let own_word = black_box(&raw const READABLE) as u64;
        carrier.rings.socket().send(&own_word.to_le_bytes(), &[])?;
        let mut address = [0; 8];
        let [] = carrier.rings.socket().receive(&mut address)?;
        let mut word = [0; 8];
        if let Err(error) = carrier.read(u64::from_le_bytes(address), &mut word) {
            bail!("{}", denial_reason(other.pid, other.uid, &error));
        }
        ensure!(u64::from_le_bytes(word) == READABLE, "another process was read");
        Ok(carrier)
    }
}

impl CrossMemory {
    /// Reads from an address of the peer process until `target` is full.
    fn read(&self, address: u64, target: &mut [u8]) -> std::io::Result<()> {
        let mut done = 0;
        while done < target.len() {
            let rest = &mut target[done..];
            let local = [IoVec { address: rest.as_mut_ptr() as usize, length: rest.len() }];
            let remote = [IoVec { address: address as usize + done, length: rest.len() }];
            // SAFETY: the local range is a slice that is borrowed for writing.
            match unsafe { cross_memory::read(self.peer_pid, &remote, &local) }? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }

    fn announce(&mut self, message: &[u8]) -> anyhow::Result<()> {
        self.rings.writer.claim()?;
        self.rings.writer.publish([message.as_ptr() as u64, message.len() as u64]);
        Ok(())
    }
}

impl Link for CrossMemory {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        self.send_repeated(message, 1)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        let ([address, length], _) = self.rings.reader.next()?;
        ensure!(length == message.len() as u64, "a message of {length} bytes arrived");
        self.read(address, message)?;
        self.rings.reader.release();
        Ok(())
    }

    /// Publishes all messages before it waits for the first.
    fn send_repeated(&mut self, message: &[u8], times: usize) -> anyhow::Result<()> {
        for _ in 0..times {
            self.announce(message)?;
        }
        self.rings.writer.wait_until_read()
    }
}
