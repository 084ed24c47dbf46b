//! The engines of the device: threads that execute descriptors of the queues, in any order.

use memferry_sys::clock;
use memferry_sys::sync::lock;

use super::DsaModelShared;
use super::crc::crc32c;
use super::faults::InjectedFault;
use super::memory::{AccessFault, left_in_page};
use super::state::ModelStep;
use crate::dsa::descriptor::{
    DESCRIPTOR_BYTES, DsaDescriptor, DsaOperation, flag, has_dualcast_offsets,
};
use crate::dsa::record::{CompletionRecord, RECORD_BYTES, status};
use crate::dsa::registers as r;

/// The size of the engine's buffer: at most a page at a time.
const BUFFER_BYTES: usize = 4096;
/// The size of a cache line.
const LINE_BYTES: u64 = 64;

/// Why a descriptor has no record.
enum NoRecord {
    Halted,
    Stalled,
    /// The queue was reset.
    Cancelled,
}

/// What was executed before the end: bytes, and the record's result.
struct Progress {
    done: u64,
    result: u8,
    value: u32,
}

impl DsaModelShared {
    /// Runs the thread of an engine.
    pub(super) fn run(&self, thread: usize) {
        clock::minimize_timer_slack();
        while let Some(step) = self.state.next_step(thread) {
            let descriptor = DsaDescriptor::from_words(step.words);
            if self.interrupts.is_early() {
                self.raise_interrupt(&descriptor);
            }
            let ended = match descriptor.operation() {
                // A fence is reserved outside of a batch.
                _ if descriptor.flags() & flag::FENCE != 0 => {
                    self.reject(&step, &descriptor, status::INVALID_FLAGS)
                }
                Some(DsaOperation::Batch { list }) => self.run_batch(&step, &descriptor, list),
                _ => self.run_one(&step, &descriptor),
            };
            if ended.is_ok() && !self.interrupts.is_early() {
                self.raise_interrupt(&descriptor);
            }
            self.state.end_step(&step, |device| match ended {
                Ok(_) | Err(NoRecord::Cancelled) => (),
                Err(NoRecord::Halted) => {
                    device.queues[step.queue].counters.halts += 1;
                    device.halt();
                }
                Err(NoRecord::Stalled) => device.stall(&step),
            });
        }
    }

    /// Raises the interrupt that a descriptor requests.
    fn raise_interrupt(&self, descriptor: &DsaDescriptor) {
        if let Some(handle) = descriptor.interrupt()
            && !self.interrupts.raise(handle.into())
        {
            self.record_violation(format!("there is no interrupt with the handle {handle}"));
        }
    }

    fn count(&self, step: &ModelStep, count: impl FnOnce(&mut super::DsaModelCounters)) {
        count(&mut self.state.lock().queues[step.queue].counters);
    }

    /// Executes the descriptors of a batch: every other batch from its end, except that one with a fence
    /// comes after all before it. A fence after one that did not succeed ends the batch.
    fn run_batch(
        &self,
        step: &ModelStep,
        batch: &DsaDescriptor,
        list: u64,
    ) -> Result<u8, NoRecord> {
        let count = u64::from(batch.size());
        let is_countable = (2..=1 << step.config.batch_shift).contains(&count);
        let wrong = if !is_countable {
            Some(status::DESCRIPTOR_COUNT)
        } else if !list.is_multiple_of(DESCRIPTOR_BYTES as u64) {
            Some(status::LIST_ALIGNMENT)
        } else {
            self.find_mistake(step, batch)
        };
        if let Some(code) = wrong {
            return self.reject(step, batch, code);
        }
        if lock(&self.script).loses_list() {
            let record = CompletionRecord::new(status::BATCH_PAGE_FAULT, 0, 0, list, 0);
            return self.report(step, batch, record);
        }
        let mut descriptors = Vec::new();
        for index in 0..count {
            let mut bytes = [0; DESCRIPTOR_BYTES];
            let address = list + index * DESCRIPTOR_BYTES as u64;
            if let Err(AccessFault { address, .. }) = self.memory.read(address, &mut bytes) {
                let done = index as u32;
                let record = CompletionRecord::new(status::BATCH_PAGE_FAULT, 0, done, address, 0);
                return self.report(step, batch, record);
            }
            let word =
                |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap());
            descriptors.push(DsaDescriptor::from_words(std::array::from_fn(word)));
        }
        let has_fence = |index: &usize| descriptors[*index].flags() & flag::FENCE != 0;
        let mut order: Vec<_> = (0..descriptors.len()).collect();
        let batches = {
            let counters = &mut self.state.lock().queues[step.queue].counters;
            counters.batches += 1;
            counters.fences += order.iter().filter(|index| has_fence(index)).count() as u64;
            counters.batches
        };
        if batches % 2 == 0 {
            // Nothing holds up one without a fence, also behind one with a fence.
            let (fenced, free): (Vec<_>, Vec<_>) = order.into_iter().partition(has_fence);
            order = free.into_iter().rev().chain(fenced).collect();
        }
        let (mut first_failed, mut done) = (usize::MAX, 0);
        for &index in &order {
            let descriptor = &descriptors[index];
            if has_fence(&index) && first_failed < index {
                self.count(step, |counters| counters.abandoned += count - u64::from(done));
                break;
            }
            let is_nested = matches!(descriptor.operation(), Some(DsaOperation::Batch { .. }));
            let ended = if is_nested {
                self.reject(step, descriptor, status::BAD_OPCODE)?
            } else {
                self.run_one(step, descriptor)?
            };
            done += 1;
            if ended != status::SUCCESS {
                first_failed = first_failed.min(index);
            }
        }
        let code = if first_failed == usize::MAX { status::SUCCESS } else { status::BATCH_FAILED };
        self.report(step, batch, CompletionRecord::new(code, 0, done, 0, 0))
    }

    /// Executes one descriptor; returns its status.
    fn run_one(&self, step: &ModelStep, descriptor: &DsaDescriptor) -> Result<u8, NoRecord> {
        if let Some(code) = self.find_mistake(step, descriptor) {
            return self.reject(step, descriptor, code);
        }
        let injected = match descriptor.operation() {
            // What only tests the queue meets no fault.
            Some(DsaOperation::Noop | DsaOperation::Drain) => {
                InjectedFault::Runs { delay: std::time::Duration::ZERO }
            }
            Some(operation) => {
                let (address, is_write) = operation.first_write();
                let is_aligned = !is_write || address.is_multiple_of(LINE_BYTES);
                lock(&self.script).next_descriptor(is_aligned)
            }
            None => return self.reject(step, descriptor, status::BAD_OPCODE),
        };
        let (delay, limit) = match injected {
            InjectedFault::Runs { delay } => (delay, u64::MAX),
            InjectedFault::StopsHalfWay => {
                (std::time::Duration::ZERO, u64::from(descriptor.size()) / 2)
            }
            InjectedFault::Halts => return Err(NoRecord::Halted),
            InjectedFault::Stalls => return Err(NoRecord::Stalled),
            InjectedFault::Fails { status } => {
                return self.report(step, descriptor, CompletionRecord::new(status, 0, 0, 0, 0));
            }
        };
        if !self.state.pause(step, delay) {
            return Err(NoRecord::Cancelled);
        }
        let mut progress = Progress { done: 0, result: 0, value: 0 };
        let record = match self.execute(descriptor, limit, &mut progress) {
            Ok(()) => {
                self.count(step, |counters| {
                    counters.descriptors += 1;
                    counters.bytes += progress.done;
                });
                let Progress { done, result, value } = progress;
                let completed = if result == 0 { 0 } else { done as u32 };
                CompletionRecord::new(status::SUCCESS, result, completed, 0, value)
            }
            Err(AccessFault { address, is_write }) => {
                self.count(step, |counters| {
                    counters.page_faults += 1;
                    counters.bytes += progress.done;
                });
                let code = status::PAGE_FAULT | if is_write { status::WRITE } else { 0 };
                CompletionRecord::new(code, 0, progress.done as u32, address, progress.value)
            }
        };
        self.report(step, descriptor, record)
    }

    /// The status with which a device rejects a descriptor, if it does.
    fn find_mistake(&self, step: &ModelStep, descriptor: &DsaDescriptor) -> Option<u8> {
        let Some(operation) = descriptor.operation() else { return Some(status::BAD_OPCODE) };
        let configured = if self.options.op_config { step.opcodes } else { u64::MAX };
        if self.options.opcodes & configured & (1 << descriptor.opcode()) == 0 {
            return Some(status::BAD_OPCODE);
        }
        let block = if step.config.block_on_fault { flag::BLOCK_ON_FAULT } else { 0 };
        let valid = operation.valid_flags() & !(flag::BLOCK_ON_FAULT & !block);
        if descriptor.flags() & !valid != 0 {
            return Some(status::INVALID_FLAGS);
        }
        if !descriptor.has_clean_reserved_fields() {
            return Some(status::RESERVED_FIELD);
        }
        if descriptor.record().is_none_or(|record| !record.is_multiple_of(RECORD_BYTES as u64)) {
            return Some(status::RECORD_ALIGNMENT);
        }
        let size = u64::from(descriptor.size());
        let needs_bytes = !matches!(
            operation,
            DsaOperation::Noop | DsaOperation::Drain | DsaOperation::Batch { .. }
        );
        if needs_bytes && !(1..=1 << step.config.transfer_shift).contains(&size) {
            return Some(status::TRANSFER_SIZE);
        }
        let overlaps = |a: u64, b: u64| a < b + size && b < a + size;
        match operation {
            DsaOperation::Copy { source, target }
            | DsaOperation::CopyCrc { source, target, .. }
                if overlaps(source, target) =>
            {
                Some(status::OVERLAP)
            }
            DsaOperation::Dualcast { target, second, .. }
                if !has_dualcast_offsets(target, second) =>
            {
                Some(status::DUALCAST_OFFSETS)
            }
            DsaOperation::Dualcast { source, target, second }
                if overlaps(source, target)
                    || overlaps(source, second)
                    || overlaps(target, second) =>
            {
                Some(status::OVERLAP)
            }
            _ => None,
        }
    }

    /// Records a mistake of the driver, and reports it as the device does.
    fn reject(
        &self,
        step: &ModelStep,
        descriptor: &DsaDescriptor,
        code: u8,
    ) -> Result<u8, NoRecord> {
        let reason = crate::dsa::record::status_reason(code);
        self.record_violation(format!("queue {}: {reason}: {descriptor:?}", step.queue));
        self.report(step, descriptor, CompletionRecord::new(code, 0, 0, 0, 0))
    }

    /// Writes the record of a descriptor; returns its status.
    fn report(
        &self,
        step: &ModelStep,
        descriptor: &DsaDescriptor,
        record: CompletionRecord,
    ) -> Result<u8, NoRecord> {
        let is_wanted =
            descriptor.flags() & flag::REQUEST_RECORD != 0 || record.code() != status::SUCCESS;
        let address = descriptor.record().filter(|at| at.is_multiple_of(RECORD_BYTES as u64));
        if !self.state.is_wanted(step) {
            return Err(NoRecord::Cancelled);
        }
        if let Some(address) = address.filter(|_| is_wanted) {
            if self.loses_record() {
                return Ok(record.code());
            }
            if self.memory.write_record(address, record.words()) {
                self.count(step, |counters| counters.records += 1);
            } else {
                self.record_violation(format!("there is no completion record at {address:#x}"));
                self.state.lock().software_error = r::SWERR_VALID
                    | 0x1A << r::SWERR_CODE_SHIFT
                    | (step.queue as u64) << r::SWERR_QUEUE_SHIFT;
            }
        }
        Ok(record.code())
    }

    fn loses_record(&self) -> bool {
        lock(&self.script).loses_record()
    }

    /// Executes an operation up to a limit of bytes, page by page.
    fn execute(
        &self,
        descriptor: &DsaDescriptor,
        limit: u64,
        progress: &mut Progress,
    ) -> Result<(), AccessFault> {
        let size = u64::from(descriptor.size());
        let operation = descriptor.operation().expect("it was checked");
        if let DsaOperation::Crc { seed, .. } | DsaOperation::CopyCrc { seed, .. } = operation {
            progress.value = seed;
        }
        if matches!(operation, DsaOperation::Noop | DsaOperation::Drain) {
            return Ok(());
        }
        let (mut buffer, mut other) = ([0; BUFFER_BYTES], [0; BUFFER_BYTES]);
        while progress.done < size {
            let rest = operation.moved_by(progress.done);
            if progress.done >= limit {
                let (address, is_write) = rest.first_write();
                return Err(AccessFault { address, is_write });
            }
            let left = (size - progress.done).min(limit - progress.done).min(BUFFER_BYTES as u64);
            let bytes = rest.in_page(left) as usize;
            let (buffer, other) = (&mut buffer[..bytes], &mut other[..bytes]);
            match rest {
                DsaOperation::Copy { source, target } => {
                    self.memory.read(source, buffer)?;
                    self.memory.write(target, buffer)?;
                }
                DsaOperation::Fill { pattern, target } => {
                    let pattern = pattern.to_le_bytes();
                    for (at, byte) in buffer.iter_mut().enumerate() {
                        *byte = pattern[at % 8];
                    }
                    self.memory.write(target, buffer)?;
                }
                DsaOperation::Compare { left, right } => {
                    self.memory.read(left, buffer)?;
                    self.memory.read(right, other)?;
                    if let Some(at) = buffer.iter().zip(other).position(|(a, b)| a != b) {
                        progress.done += at as u64;
                        progress.result = 1;
                        return Ok(());
                    }
                }
                DsaOperation::Dualcast { source, target, second } => {
                    self.memory.read(source, buffer)?;
                    self.memory.write(target, buffer)?;
                    self.memory.write(second, buffer)?;
                }
                DsaOperation::Crc { source, .. } => {
                    self.memory.read(source, buffer)?;
                    progress.value = crc32c(progress.value, buffer);
                }
                DsaOperation::CopyCrc { source, target, .. } => {
                    self.memory.read(source, buffer)?;
                    self.memory.write(target, buffer)?;
                    progress.value = crc32c(progress.value, buffer);
                }
                DsaOperation::Noop | DsaOperation::Drain | DsaOperation::Batch { .. } => (),
            }
            progress.done += bytes as u64;
        }
        Ok(())
    }
}

impl DsaOperation {
    /// The same operation further on in memory.
    fn moved_by(self, bytes: u64) -> Self {
        match self {
            Self::Crc { source, seed } => Self::Crc { source: source + bytes, seed },
            Self::CopyCrc { source, target, seed } => {
                Self::CopyCrc { source: source + bytes, target: target + bytes, seed }
            }
            other => other.after(bytes).unwrap_or(other),
        }
    }

    /// The address that is accessed first and whether it is written, for an injected page fault.
    fn first_write(self) -> (u64, bool) {
        match self {
            Self::Copy { target, .. }
            | Self::Fill { target, .. }
            | Self::Dualcast { target, .. }
            | Self::CopyCrc { target, .. } => (target, true),
            Self::Compare { left, .. } => (left, false),
            Self::Crc { source, .. } => (source, false),
            Self::Noop | Self::Drain | Self::Batch { .. } => (0, false),
        }
    }

    /// The number of bytes up to the end of a page of any operand, at most `bytes`.
    fn in_page(self, bytes: u64) -> u64 {
        match self {
            Self::Copy { source, target } | Self::CopyCrc { source, target, .. } => {
                bytes.min(left_in_page(source)).min(left_in_page(target))
            }
            Self::Fill { target, .. } => bytes.min(left_in_page(target)),
            Self::Compare { left, right } => bytes.min(left_in_page(left)).min(left_in_page(right)),
            Self::Dualcast { source, target, second } => {
                let both = left_in_page(target).min(left_in_page(second));
                bytes.min(left_in_page(source)).min(both)
            }
            Self::Crc { source, .. } => bytes.min(left_in_page(source)),
            Self::Noop | Self::Drain | Self::Batch { .. } => bytes,
        }
    }
}
