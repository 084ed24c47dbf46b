//! The thread of a channel: executes the descriptors of the chain in order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memferry_sys::clock;
use memferry_sys::sync::lock;

use super::IoatModelShared;
use super::channel::{ChannelRegisters, DescriptorRef, ModelStep};
use super::faults::InjectedFault;
use crate::ioat::descriptor::{DESCRIPTOR_BYTES, IoatDescriptor, IoatOperation};
use crate::ioat::registers::error;
use crate::testing::iova_memory::{DmaFault, DmaHold};

/// The outcome of a step.
enum StepOutcome {
    Finished(IoatDescriptor),
    Failed(u32),
    Stalled,
    /// Cancelled: the result is dropped.
    Dropped,
}

impl IoatModelShared {
    /// Runs the thread of a channel.
    pub(super) fn run(&self, number: usize) {
        clock::minimize_timer_slack();
        let channel = &self.channels[number];
        while let Some(step) = channel.next_step() {
            let outcome = self.run_step(number, step);
            let Some(mut registers) = channel.end_step(step) else { continue };
            match outcome {
                StepOutcome::Finished(descriptor) => {
                    self.finish(&mut registers, step.descriptor.address, &descriptor);
                    if descriptor.raises_interrupt() && !self.interrupts.is_early() {
                        self.raise(&mut registers, number);
                    }
                }
                StepOutcome::Failed(error) => {
                    self.halt(&mut registers, error);
                    if registers.has_error_interrupt() {
                        self.raise(&mut registers, number);
                    }
                }
                StepOutcome::Stalled => registers.stall(),
                StepOutcome::Dropped => (),
            }
        }
    }

    /// Raises the interrupt of a channel, if the driver has enabled it.
    fn raise(&self, registers: &mut ChannelRegisters, number: usize) {
        if self.has_interrupts() && registers.takes_interrupt() && !self.interrupts.raise(number) {
            self.record_violation(format!("the interrupt of channel {number} is not connected"));
        }
    }

    /// Executes one descriptor, without the lock of its channel.
    fn run_step(&self, number: usize, step: ModelStep) -> StepOutcome {
        let descriptor = match self.fetch(step.descriptor) {
            Ok(descriptor) => descriptor,
            Err(error) => return StepOutcome::Failed(error),
        };
        if descriptor.raises_interrupt() && self.interrupts.is_early() {
            self.channels[number].with_registers(|registers| self.raise(registers, number));
        }
        let delay = match lock(&self.script).next_descriptor() {
            InjectedFault::Runs { delay } => delay,
            InjectedFault::Halts { error } => return StepOutcome::Failed(error),
            InjectedFault::Stalls => return StepOutcome::Stalled,
        };
        match self.execute(number, step, &descriptor, delay) {
            Ok(true) => StepOutcome::Finished(descriptor),
            Ok(false) => StepOutcome::Dropped,
            Err(error) => StepOutcome::Failed(error),
        }
    }

    fn fetch(&self, descriptor: DescriptorRef) -> Result<IoatDescriptor, u32> {
        let DescriptorRef { address, is_first } = descriptor;
        if address % DESCRIPTOR_BYTES as u64 != 0 {
            return Err(if is_first { error::CHAIN_ADDRESS } else { error::DESCRIPTOR });
        }
        let hold = self.memory.hold(address, DESCRIPTOR_BYTES as u64, false);
        let missing = if is_first { error::CHAIN_ADDRESS } else { error::NEXT_ADDRESS };
        let hold = hold.map_err(|_| missing)?;
        let words = std::array::from_fn(|index| {
            // SAFETY: the memory is mapped for the device, aligned to 64 bytes as pages are, and
            // held; its owner guarantees it until it is unmapped.
            let word = unsafe { AtomicU64::from_ptr((hold.host as *mut u64).add(index)) };
            u64::from_le(word.load(Ordering::Relaxed))
        });
        Ok(IoatDescriptor::from_words(words))
    }

    /// Executes a descriptor; returns whether the step is still wanted.
    fn execute(
        &self,
        number: usize,
        step: ModelStep,
        descriptor: &IoatDescriptor,
        delay: Duration,
    ) -> Result<bool, u32> {
        let operation = descriptor.operation().ok_or(error::CONTROL)?;
        if matches!(operation, IoatOperation::Fill { .. }) && !self.options.fills {
            return Err(error::CONTROL);
        }
        let bytes = u64::from(descriptor.bytes());
        if bytes == 0 || bytes > self.max_transfer_bytes {
            return Err(error::LENGTH);
        }
        let channel = &self.channels[number];
        let wait = || channel.pause(step, delay, bytes);
        // Memory is held from the address check to the last byte.
        match operation {
            IoatOperation::Null => Ok(wait()),
            IoatOperation::Copy { source, target } => {
                let source = self.memory.hold(source, bytes, false);
                let source = source.map_err(|_| error::SOURCE_ADDRESS)?;
                let target = self.hold_target(target, bytes)?;
                let is_wanted = wait();
                if is_wanted {
                    let (from, to) = (source.host as *const u8, target.host as *mut u8);
                    // SAFETY: both are mapped for the device for this many bytes and held; their
                    // owner guarantees them until they are unmapped, and lets no other code use
                    // them while the descriptor is in the chain.
                    unsafe { std::ptr::copy(from, to, bytes as usize) };
                    channel.finish_pause(step, delay);
                }
                Ok(is_wanted)
            }
            IoatOperation::Fill { pattern, target } => {
                let target = self.hold_target(target, bytes)?;
                let is_wanted = wait();
                if is_wanted {
                    // SAFETY: as above.
                    unsafe { fill(target.host as *mut u8, bytes as usize, pattern) };
                    channel.finish_pause(step, delay);
                }
                Ok(is_wanted)
            }
        }
    }

    fn hold_target(&self, address: u64, bytes: u64) -> Result<DmaHold<'_>, u32> {
        self.memory.hold(address, bytes, true).map_err(|fault| match fault {
            DmaFault::NotMapped => error::TARGET_ADDRESS,
            DmaFault::ReadOnly => error::WRITE_DATA,
        })
    }

    fn finish(&self, registers: &mut ChannelRegisters, address: u64, descriptor: &IoatDescriptor) {
        let bytes = match descriptor.operation() {
            Some(IoatOperation::Copy { .. } | IoatOperation::Fill { .. }) => {
                u64::from(descriptor.bytes())
            }
            _ => 0,
        };
        registers.finish(address, descriptor.next(), bytes);
        if descriptor.writes_back() && !self.write_back(registers) {
            // There is no valid completion word.
            registers.halt(error::COMPLETION_ADDRESS);
        }
    }

    fn halt(&self, registers: &mut ChannelRegisters, error: u32) {
        if registers.halt(error) && !self.write_back(registers) {
            registers.add_error(error::COMPLETION_ADDRESS);
        }
    }

    /// Writes the status to the completion word; returns whether its address is valid.
    fn write_back(&self, registers: &mut ChannelRegisters) -> bool {
        let address = registers.completion;
        if !address.is_multiple_of(size_of::<u64>() as u64) {
            return false;
        }
        let Ok(hold) = self.memory.hold(address, size_of::<u64>() as u64, true) else {
            return false;
        };
        if !lock(&self.script).loses_write_back() {
            registers.counters.write_backs += 1;
            // SAFETY: the word is mapped for the device, aligned and held; its owner guarantees it
            // until it is unmapped, and reads it by atomic loads only.
            let word = unsafe { AtomicU64::from_ptr(hold.host as *mut u64) };
            // Release: a reader of the word sees the data that was copied before it.
            word.store(registers.status().to_le(), Ordering::Release);
        }
        true
    }
}

/// Repeats a pattern, starting with its lowest byte.
///
/// # Safety
/// The memory must be writable for `bytes` bytes, and not be accessed by other code during the
/// call.
unsafe fn fill(target: *mut u8, bytes: usize, pattern: u64) {
    let pattern = pattern.to_le_bytes();
    for done in (0..bytes).step_by(pattern.len()) {
        let part = pattern.len().min(bytes - done);
        // SAFETY: inside the memory that the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), target.add(done), part) };
    }
}
