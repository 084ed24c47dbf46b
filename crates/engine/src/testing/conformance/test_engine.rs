//! The test fixture of the cases: channels, descriptors over test buffers, and waits with a timeout
//! that poll channels without automatic progress.

use std::sync::Arc;
use std::time::Instant;

use super::pinning::PinningChannel;
use super::{CASE_TIMEOUT, EngineUnderTest, Verdict};
use crate::completion::{ChannelBatch, ChunkedWork, Completion, Dispatch, TransferOutput};
use crate::contract::{
    Capabilities, Channel, ChannelOptions, Descriptor, Engine, ExecutionError, Kernel, Opcode,
    OpenError, RegistrationMode, Submitted,
};

/// An engine with open channels.
pub(super) struct TestEngine {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) channels: Vec<Arc<dyn Channel>>,
}

/// One operation between addresses of test buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct TestOperation {
    pub(super) operation: Opcode,
    pub(super) source: u64,
    pub(super) target: u64,
    /// The second target of a dualcast.
    pub(super) second: u64,
    pub(super) length: u64,
    pub(super) value: u8,
    pub(super) kernel: Kernel,
}

impl TestOperation {
    /// A copy.
    pub(super) fn copy(source: u64, target: u64, length: usize) -> Self {
        let length = length as u64;
        let (operation, kernel) = (Opcode::Copy, Kernel::Cached);
        Self { operation, source, target, second: 0, length, value: 0, kernel }
    }

    /// A fill.
    pub(super) fn fill(target: u64, length: usize, value: u8) -> Self {
        Self { operation: Opcode::Fill, source: 0, value, ..Self::copy(0, target, length) }
    }

    /// A dualcast.
    pub(super) fn dualcast(source: u64, targets: [u64; 2], length: usize) -> Self {
        let copy = Self::copy(source, targets[0], length);
        Self { operation: Opcode::Dualcast, second: targets[1], ..copy }
    }

    /// The same with another operation.
    pub(super) fn operation(self, operation: Opcode) -> Self {
        Self { operation, ..self }
    }

    /// One descriptor for all of it.
    pub(super) fn descriptor(&self) -> Descriptor {
        self.part(0, self.length)
    }

    /// One descriptor for a part of it.
    pub(super) fn part(&self, offset: u64, length: u64) -> Descriptor {
        let source = self.source.wrapping_add(offset);
        // SAFETY: addresses come from test buffers, which checked the range and live (or are
        // leaked) until the work on them is complete; cases never let two operations write to the
        // same bytes.
        let part = unsafe {
            let part = Descriptor::new(self.operation, source, self.target + offset, length);
            match self.operation {
                Opcode::Dualcast => part.with_second_target(self.second + offset),
                _ => part,
            }
        };
        part.value(self.value).kernel(self.kernel)
    }

    /// The maximum length of a part that starts at `offset`.
    fn max_part(&self, capabilities: &Capabilities, offset: u64, left: u64) -> u64 {
        let (source, target) = (self.source.wrapping_add(offset), self.target + offset);
        let bytes = capabilities.max_part(source, target, left);
        match self.operation {
            Opcode::Dualcast => capabilities.max_part(source, self.second + offset, bytes),
            _ => bytes,
        }
    }

    /// The same, as chunked work.
    pub(super) fn work(&self, chunk_bytes: u64) -> ChunkedWork {
        let Self { operation, source, target, second, length, value, kernel } = *self;
        // SAFETY: as for `part`.
        unsafe {
            ChunkedWork::new(operation, kernel, source, target, length, value, chunk_bytes)
                .with_second_target(second)
        }
    }
}

/// The submitted descriptors of an operation, by their offset.
pub(super) type RunningParts = Vec<(u64, Arc<Completion>)>;

impl TestEngine {
    /// An engine with one channel.
    pub(super) fn new(subject: &EngineUnderTest) -> Self {
        Self::with_channels(subject, 1)
    }

    /// An engine with one channel of this capacity, if the engine supports the option.
    pub(super) fn with_capacity(subject: &EngineUnderTest, capacity: usize) -> Self {
        let options = ChannelOptions { capacity: Some(capacity), ..subject.options.clone() };
        Self::open(subject, &options, 1)
    }

    /// An engine with `count` channels, or all that it has.
    pub(super) fn with_channels(subject: &EngineUnderTest, count: usize) -> Self {
        Self::open(subject, &subject.options, count)
    }

    fn open(subject: &EngineUnderTest, options: &ChannelOptions, count: usize) -> Self {
        let engine = (subject.make)();
        assert!(
            engine.capabilities().operations.contains(Opcode::Copy),
            "every engine copies, but {} does not",
            engine.name()
        );
        let mut bench = Self { engine, channels: Vec::new() };
        bench.channels.push(bench.open_channel(options).expect("a first channel"));
        for _ in 1..count {
            bench.channels.extend(bench.open_channel(options));
        }
        bench
    }

    /// Opens one more channel of the engine; if the engine needs pinned memory, one that pins it.
    pub(super) fn open_channel(
        &self,
        options: &ChannelOptions,
    ) -> Result<Arc<dyn Channel>, OpenError> {
        let channel = self.engine.open_channel(options)?;
        Ok(match self.capabilities().registration {
            RegistrationMode::BySubmitter => {
                let pinner = self.engine.pinner().expect("an engine with pinned memory pins it");
                Arc::new(PinningChannel::new(channel, pinner))
            }
            RegistrationMode::NotRequired | RegistrationMode::ByEngine => channel,
        })
    }

    pub(super) fn channel(&self) -> &Arc<dyn Channel> {
        &self.channels[0]
    }

    pub(super) fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    pub(super) fn can(&self, operation: Opcode) -> bool {
        self.capabilities().operations.contains(operation)
    }

    /// The verdict of a case about an operation that the engine does not support.
    pub(super) fn skip(&self, what: &str) -> Verdict {
        Verdict::Skipped(format!("{} does not {what}", self.engine.name()))
    }

    /// A length of at most `wanted` that one descriptor can cover between multiples of it.
    pub(super) fn max_part(&self, wanted: u64) -> usize {
        let max_bytes = self.capabilities().max_part(0, 0, wanted);
        1 << max_bytes.ilog2()
    }

    /// Polls channels without automatic progress.
    pub(super) fn poll(&self) {
        if !self.capabilities().auto_progress {
            self.channels.iter().for_each(|channel| _ = channel.poll());
        }
    }

    /// Waits until a condition holds.
    pub(super) fn wait_until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        wait_until(what, || {
            self.poll();
            condition()
        });
    }

    /// Waits for the end of a transfer.
    pub(super) fn outcome(
        &self,
        completion: &Completion,
    ) -> Result<TransferOutput, ExecutionError> {
        if self.capabilities().auto_progress {
            let is_done = completion.wait(0, Some(Instant::now() + CASE_TIMEOUT));
            assert!(is_done, "timeout waiting for the end of a transfer");
        } else {
            self.wait_until("the end of a transfer", || completion.is_done());
        }
        completion.outcome().expect("it is complete")
    }

    /// Waits for the end of a transfer that must succeed.
    pub(super) fn succeeds(&self, completion: &Completion) -> TransferOutput {
        self.outcome(completion).expect("the transfer succeeds")
    }

    /// Submits descriptors to the first channel, in several batches if necessary.
    pub(super) fn submit(
        &self,
        descriptors: impl IntoIterator<Item = Descriptor>,
    ) -> Vec<Submitted> {
        let mut batch: Vec<_> = descriptors.into_iter().map(Some).collect();
        let (mut accepted, mut start) = (Vec::new(), 0);
        wait_until("space in the channel", || {
            let now = self.channel().submit(&mut batch[start..]).expect("an open channel");
            start += now.count;
            accepted.extend((now.count > 0).then_some(now));
            let all = start == batch.len();
            if !all {
                self.poll();
            }
            all
        });
        accepted
    }

    /// Submits an operation in parts that the engine accepts, each with a completion of its own.
    pub(super) fn begin(&self, job: &TestOperation) -> RunningParts {
        let (mut offset, mut running, mut descriptors) = (0, Vec::new(), Vec::new());
        loop {
            let length = job.max_part(self.capabilities(), offset, job.length - offset);
            let completion = Arc::new(Completion::whole());
            descriptors.push(job.part(offset, length).reports_to(completion.clone()));
            running.push((offset, completion));
            offset += length;
            if offset == job.length {
                break;
            }
        }
        self.submit(descriptors);
        running
    }

    /// Waits for the parts of an operation; for a compare, returns the first difference.
    pub(super) fn end(&self, running: RunningParts) -> Option<u64> {
        let differences = running.into_iter().map(|(offset, completion)| {
            let output = self.succeeds(&completion);
            output.difference.map(|at| offset + at)
        });
        differences.collect::<Vec<_>>().into_iter().flatten().min()
    }

    /// Executes an operation and waits for it.
    pub(super) fn execute(&self, job: &TestOperation) -> Option<u64> {
        self.end(self.begin(job))
    }

    /// A batch of one descriptor for a channel.
    pub(super) fn channel_batch(&self, channel: usize, descriptor: Descriptor) -> ChannelBatch {
        let channel = self.channels[channel % self.channels.len()].clone();
        ChannelBatch::one(channel, self.capabilities().auto_progress, descriptor)
    }

    /// Starts an operation with a chunked completion on all channels: work offers if the engine
    /// claims chunks, fixed parts otherwise.
    pub(super) fn dispatch(&self, job: &TestOperation, completion: &Arc<Completion>) {
        let batches = if self.capabilities().claims_chunks {
            let offer =
                |channel| self.channel_batch(channel, Descriptor::work_offer(completion.clone()));
            (0..self.channels.len()).map(offer).collect()
        } else {
            self.fixed_parts(job, completion)
        };
        dispatch_now(completion, batches);
    }

    /// The parts of a chunk, each of which one descriptor covers: offset and length.
    pub(super) fn parts_of(
        &self,
        job: &TestOperation,
        chunk: usize,
        length: usize,
    ) -> Vec<(usize, usize)> {
        if self.capabilities().claims_chunks {
            return vec![(chunk, length)];
        }
        let (mut offset, mut parts) = (chunk, Vec::new());
        while offset < chunk + length {
            let (source, target) = (job.source + offset as u64, job.target + offset as u64);
            let left = (chunk + length - offset) as u64;
            let part = self.capabilities().max_part(source, target, left) as usize;
            parts.push((offset, part));
            offset += part;
        }
        parts
    }

    fn fixed_parts(&self, job: &TestOperation, completion: &Arc<Completion>) -> Vec<ChannelBatch> {
        let work = completion.work().expect("a completion that was cut");
        let mut batches = Vec::new();
        while let Some(chunk) = work.claim_front() {
            let (mut offset, end) = (chunk.offset, chunk.offset + chunk.length);
            let mut parts = Vec::new();
            while offset < end {
                let length = job.max_part(self.capabilities(), offset, end - offset);
                parts.push(job.part(offset, length).reports_part_to(completion.clone(), offset));
                offset += length;
            }
            let channel = self.channels[batches.len() % self.channels.len()].clone();
            batches.push(ChannelBatch::many(channel, self.capabilities().auto_progress, parts));
        }
        batches
    }
}

/// The completions of the descriptors of cases.
pub(super) trait ReportsTo {
    /// Reports to a completion that has no other descriptor.
    fn reports_to(self, completion: Arc<Completion>) -> Descriptor;
    /// Reports to a chunked completion, of which it covers a part.
    fn reports_part_to(self, completion: Arc<Completion>, offset: u64) -> Descriptor;
}

impl ReportsTo for Descriptor {
    fn reports_to(self, completion: Arc<Completion>) -> Descriptor {
        // SAFETY: cases create one descriptor for each completion that is not chunked.
        unsafe { self.completes(completion) }
    }

    fn reports_part_to(self, completion: Arc<Completion>, offset: u64) -> Descriptor {
        // SAFETY: cases claim all chunks before they create parts, one part for each byte.
        unsafe { self.part_of(completion, offset) }
    }
}

/// A descriptor of length 0.
pub(super) fn empty_descriptor(completion: Arc<Completion>) -> Descriptor {
    // SAFETY: no byte is accessed.
    unsafe { Descriptor::new(Opcode::Copy, 0, 0, 0) }.reports_to(completion)
}

/// Dispatches a transfer of a case.
pub(super) fn dispatch_now(
    completion: &Completion,
    batches: impl IntoIterator<Item = ChannelBatch>,
) {
    // SAFETY: cases dispatch each completion once, with all its descriptors.
    unsafe { Dispatch::now(completion, batches) };
}

/// Dispatches a transfer of a case after other transfers.
pub(super) fn dispatch_after(
    predecessors: &[Arc<Completion>],
    completion: Arc<Completion>,
    batches: Vec<ChannelBatch>,
) {
    // SAFETY: as above.
    unsafe { Dispatch::after(predecessors, completion, batches) };
}

/// Waits until a condition holds, and fails after the timeout.
pub(super) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + CASE_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timeout waiting for {what}");
        std::thread::yield_now();
    }
}
