//! The thread of a channel: follows the chain, one descriptor after the other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memferry_sys::clock;
use memferry_sys::sync::lock;

use super::super::descriptor::{DESCRIPTOR_BYTES, Descriptor, Task};
use super::super::registers::error;
use super::Shared;
use super::channel::{Job, Place, Registers};
use super::faults::Fate;
use super::memory::{Hold, Miss};

/// How work on a descriptor ended.
enum Outcome {
    Finished(Descriptor),
    Failed(u32),
    Stalled,
    /// Given up: nobody wants to know.
    Dropped,
}

impl Shared {
    /// What the thread of a channel does.
    pub(super) fn run(&self, number: usize) {
        clock::sharpen_timers();
        let channel = &self.channels[number];
        while let Some(job) = channel.next_job() {
            let outcome = self.work(number, job);
            let Some(mut registers) = channel.end_job(job) else { continue };
            match outcome {
                Outcome::Finished(descriptor) => {
                    self.finish(&mut registers, job.place.address, &descriptor);
                }
                Outcome::Failed(error) => self.halt(&mut registers, error),
                Outcome::Stalled => registers.stall(),
                Outcome::Dropped => (),
            }
        }
    }

    /// Works on one descriptor, without the lock of its channel.
    fn work(&self, number: usize, job: Job) -> Outcome {
        let descriptor = match self.fetch(job.place) {
            Ok(descriptor) => descriptor,
            Err(error) => return Outcome::Failed(error),
        };
        let delay = match lock(&self.script).next_descriptor() {
            Fate::Runs { delay } => delay,
            Fate::Halts { error } => return Outcome::Failed(error),
            Fate::Stalls => return Outcome::Stalled,
        };
        match self.carry_out(number, job, &descriptor, delay) {
            Ok(true) => Outcome::Finished(descriptor),
            Ok(false) => Outcome::Dropped,
            Err(error) => Outcome::Failed(error),
        }
    }

    fn fetch(&self, place: Place) -> Result<Descriptor, u32> {
        let Place { address, is_first } = place;
        if address % DESCRIPTOR_BYTES as u64 != 0 {
            return Err(if is_first { error::CHAIN_ADDRESS } else { error::DESCRIPTOR });
        }
        let hold = self.memory.hold(address, DESCRIPTOR_BYTES as u64, false);
        let missing = if is_first { error::CHAIN_ADDRESS } else { error::NEXT_ADDRESS };
        let hold = hold.map_err(|_| missing)?;
        let words = std::array::from_fn(|index| {
            // SAFETY: the memory is mapped for the device, aligned to 64 bytes as pages are, and
            // held; its owner vouches for it until it is unmapped.
            let word = unsafe { AtomicU64::from_ptr((hold.host as *mut u64).add(index)) };
            u64::from_le(word.load(Ordering::Relaxed))
        });
        Ok(Descriptor::from_words(words))
    }

    /// Does what a descriptor says, and says whether that is still wanted.
    fn carry_out(
        &self,
        number: usize,
        job: Job,
        descriptor: &Descriptor,
        delay: Duration,
    ) -> Result<bool, u32> {
        let task = descriptor.task().ok_or(error::CONTROL)?;
        if matches!(task, Task::Fill { .. }) && !self.options.fills {
            return Err(error::CONTROL);
        }
        let bytes = u64::from(descriptor.bytes());
        if bytes == 0 || bytes > self.largest_transfer_bytes {
            return Err(error::LENGTH);
        }
        let wait = || self.channels[number].pause(job, delay);
        // Memory is held from the first look to the last byte.
        match task {
            Task::Null => Ok(wait()),
            Task::Copy { source, target } => {
                let source = self.memory.hold(source, bytes, false);
                let source = source.map_err(|_| error::SOURCE_ADDRESS)?;
                let target = self.hold_target(target, bytes)?;
                let is_wanted = wait();
                if is_wanted {
                    let (from, to) = (source.host as *const u8, target.host as *mut u8);
                    // SAFETY: both are mapped for the device for this many bytes and held; their
                    // owner vouches for them until they are unmapped, and lets nobody else use them
                    // while the descriptor is in the chain.
                    unsafe { std::ptr::copy(from, to, bytes as usize) };
                }
                Ok(is_wanted)
            }
            Task::Fill { pattern, target } => {
                let target = self.hold_target(target, bytes)?;
                let is_wanted = wait();
                if is_wanted {
                    // SAFETY: as above.
                    unsafe { fill(target.host as *mut u8, bytes as usize, pattern) };
                }
                Ok(is_wanted)
            }
        }
    }

    fn hold_target(&self, address: u64, bytes: u64) -> Result<Hold<'_>, u32> {
        self.memory.hold(address, bytes, true).map_err(|miss| match miss {
            Miss::NotMapped => error::TARGET_ADDRESS,
            Miss::ReadOnly => error::WRITE_DATA,
        })
    }

    fn finish(&self, registers: &mut Registers, address: u64, descriptor: &Descriptor) {
        let bytes = match descriptor.task() {
            Some(Task::Copy { .. } | Task::Fill { .. }) => u64::from(descriptor.bytes()),
            _ => 0,
        };
        registers.finish(address, descriptor.next(), bytes);
        if descriptor.writes_back() && !self.write_back(registers) {
            // There is no word to say it in.
            registers.halt(error::COMPLETION_ADDRESS);
        }
    }

    fn halt(&self, registers: &mut Registers, error: u32) {
        if registers.halt(error) && !self.write_back(registers) {
            registers.add_error(error::COMPLETION_ADDRESS);
        }
    }

    /// Writes the status to the completion word, and says whether there is one.
    fn write_back(&self, registers: &mut Registers) -> bool {
        let address = registers.completion;
        if !address.is_multiple_of(size_of::<u64>() as u64) {
            return false;
        }
        let Ok(hold) = self.memory.hold(address, size_of::<u64>() as u64, true) else {
            return false;
        };
        if !lock(&self.script).loses_write_back() {
            registers.counters.write_backs += 1;
            // SAFETY: the word is mapped for the device, aligned and held; its owner vouches for it
            // until it is unmapped, and looks at it by atomic loads only.
            let word = unsafe { AtomicU64::from_ptr(hold.host as *mut u64) };
            // Whoever sees the word sees what was moved before it.
            word.store(registers.status().to_le(), Ordering::Release);
        }
        true
    }
}

/// Writes a pattern again and again, beginning with its lowest byte.
///
/// # Safety
/// The memory must be writable for `bytes` bytes, and nobody else's meanwhile.
unsafe fn fill(target: *mut u8, bytes: usize, pattern: u64) {
    let pattern = pattern.to_le_bytes();
    for done in (0..bytes).step_by(pattern.len()) {
        let part = pattern.len().min(bytes - done);
        // SAFETY: inside the memory that the caller vouches for.
        unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), target.add(done), part) };
    }
}
