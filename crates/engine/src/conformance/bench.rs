//! What the cases need of an engine: channels, descriptors over a field's memory, and waits that
//! drive a channel if nobody else does, and that end.

use std::sync::Arc;
use std::time::Instant;

use super::pinning::Pinning;
use super::{LIMIT, Subject, Verdict};
use crate::completion::{Completion, Finish, Launch, Order, Work};
use crate::contract::{
    Capabilities, Channel, ChannelOptions, Descriptor, Engine, ExecutionError, Kernel, OpenError,
    Operation, Registration, Taken,
};

/// An engine with open channels.
pub(super) struct Bench {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) channels: Vec<Arc<dyn Channel>>,
}

/// One operation between addresses that a field gave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    pub(super) operation: Operation,
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) length: u64,
    pub(super) value: u8,
    pub(super) kernel: Kernel,
}

impl Job {
    /// A copy; the methods of [`Bench`] take it from here.
    pub(super) fn copy(source: u64, target: u64, length: usize) -> Self {
        let length = length as u64;
        let (operation, kernel) = (Operation::Copy, Kernel::Cached);
        Self { operation, source, target, length, value: 0, kernel }
    }

    /// A fill.
    pub(super) fn fill(target: u64, length: usize, value: u8) -> Self {
        Self { operation: Operation::Fill, source: 0, value, ..Self::copy(0, target, length) }
    }

    /// The same with another operation.
    pub(super) fn operation(self, operation: Operation) -> Self {
        Self { operation, ..self }
    }

    /// One descriptor for all of it.
    pub(super) fn descriptor(&self) -> Descriptor {
        self.piece(0, self.length)
    }

    /// One descriptor for a piece of it.
    pub(super) fn piece(&self, offset: u64, length: u64) -> Descriptor {
        let source = self.source.wrapping_add(offset);
        // SAFETY: addresses come from a field, which checked the range and is kept (or leaked)
        // until the work on it is over; cases never let two jobs write to the same bytes.
        unsafe { Descriptor::new(self.operation, source, self.target + offset, length) }
            .value(self.value)
            .kernel(self.kernel)
    }

    /// The same, to be cut into chunks.
    pub(super) fn work(&self, chunk_bytes: u64) -> Work {
        let Self { operation, source, target, length, value, kernel } = *self;
        // SAFETY: as for `piece`.
        unsafe { Work::new(operation, kernel, source, target, length, value, chunk_bytes) }
    }
}

/// The descriptors of a job that were handed over, by their offset.
pub(super) type Running = Vec<(u64, Arc<Completion>)>;

impl Bench {
    /// An engine with one channel.
    pub(super) fn new(subject: &Subject) -> Self {
        Self::with_channels(subject, 1)
    }

    /// An engine with one channel that holds so many descriptors, if it takes such wishes.
    pub(super) fn with_capacity(subject: &Subject, capacity: usize) -> Self {
        let options = ChannelOptions { capacity: Some(capacity), ..subject.options.clone() };
        Self::open(subject, &options, 1)
    }

    /// An engine with so many channels, or as many as it has.
    pub(super) fn with_channels(subject: &Subject, count: usize) -> Self {
        Self::open(subject, &subject.options, count)
    }

    fn open(subject: &Subject, options: &ChannelOptions, count: usize) -> Self {
        let engine = (subject.make)();
        assert!(
            engine.capabilities().operations.contains(Operation::Copy),
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

    /// One more channel of the engine; if the engine needs pinned memory, one that pins it.
    pub(super) fn open_channel(
        &self,
        options: &ChannelOptions,
    ) -> Result<Arc<dyn Channel>, OpenError> {
        let channel = self.engine.open_channel(options)?;
        Ok(match self.capabilities().registration {
            Registration::ByMemoryLayer => {
                let pinner = self.engine.pinner().expect("an engine with pinned memory pins it");
                Arc::new(Pinning::new(channel, pinner))
            }
            Registration::NotNeeded | Registration::ByEngine => channel,
        })
    }

    pub(super) fn channel(&self) -> &Arc<dyn Channel> {
        &self.channels[0]
    }

    pub(super) fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    pub(super) fn can(&self, operation: Operation) -> bool {
        self.capabilities().operations.contains(operation)
    }

    /// The verdict of a case about something that the engine does not claim to do.
    pub(super) fn skip(&self, what: &str) -> Verdict {
        Verdict::Skipped(format!("{} does not {what}", self.engine.name()))
    }

    /// A length of at most `wanted` that one descriptor can carry from and to multiples of it.
    pub(super) fn one_piece(&self, wanted: u64) -> usize {
        let longest = self.capabilities().longest_piece(0, 0, wanted);
        1 << longest.ilog2()
    }

    /// Lets channels that do not move on by themselves do so.
    pub(super) fn poll(&self) {
        if !self.capabilities().self_driving {
            self.channels.iter().for_each(|channel| _ = channel.poll());
        }
    }

    /// Waits until something is so.
    pub(super) fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        until(what, || {
            self.poll();
            so()
        });
    }

    /// Waits for the end of a transfer.
    pub(super) fn outcome(&self, completion: &Completion) -> Result<Finish, ExecutionError> {
        if self.capabilities().self_driving {
            let over = completion.wait(0, Some(Instant::now() + LIMIT));
            assert!(over, "gave up waiting for the end of a transfer");
        } else {
            self.until("the end of a transfer", || completion.is_done());
        }
        completion.outcome().expect("it is over")
    }

    /// Waits for the end of a transfer that must end well.
    pub(super) fn succeeds(&self, completion: &Completion) -> Finish {
        self.outcome(completion).expect("the transfer ends well")
    }

    /// Hands over descriptors to the first channel, in as many batches as it takes.
    pub(super) fn submit(&self, descriptors: impl IntoIterator<Item = Descriptor>) -> Vec<Taken> {
        let mut batch: Vec<_> = descriptors.into_iter().map(Some).collect();
        let (mut taken, mut start) = (Vec::new(), 0);
        until("room in the channel", || {
            let now = self.channel().submit(&mut batch[start..]).expect("an open channel");
            start += now.count;
            taken.extend((now.count > 0).then_some(now));
            let all = start == batch.len();
            if !all {
                self.poll();
            }
            all
        });
        taken
    }

    /// Hands over a job in pieces that the engine can take, each with a completion of its own.
    pub(super) fn begin(&self, job: &Job) -> Running {
        let (mut offset, mut running, mut descriptors) = (0, Vec::new(), Vec::new());
        loop {
            let (source, left) = (job.source.wrapping_add(offset), job.length - offset);
            let length = self.capabilities().longest_piece(source, job.target + offset, left);
            let completion = Arc::new(Completion::whole());
            descriptors.push(job.piece(offset, length).reports_to(completion.clone()));
            running.push((offset, completion));
            offset += length;
            if offset == job.length {
                break;
            }
        }
        self.submit(descriptors);
        running
    }

    /// Waits for the pieces of a job; for a compare, says where the first difference is.
    pub(super) fn end(&self, running: Running) -> Option<u64> {
        let differences = running.into_iter().map(|(offset, completion)| {
            let finish = self.succeeds(&completion);
            finish.difference.map(|at| offset + at)
        });
        differences.collect::<Vec<_>>().into_iter().flatten().min()
    }

    /// Carries out a job and waits for it.
    pub(super) fn carry_out(&self, job: &Job) -> Option<u64> {
        self.end(self.begin(job))
    }

    /// An order of one descriptor for a channel.
    pub(super) fn order(&self, channel: usize, descriptor: Descriptor) -> Order {
        let channel = self.channels[channel % self.channels.len()].clone();
        Order::one(channel, self.capabilities().self_driving, descriptor)
    }

    /// Starts a job whose completion is cut into chunks, on all channels: invitations where the
    /// engine claims chunks, fixed parts elsewhere.
    pub(super) fn launch(&self, job: &Job, completion: &Arc<Completion>) {
        let orders = if self.capabilities().claims_chunks {
            let invitation = |channel| self.order(channel, Descriptor::chunks(completion.clone()));
            (0..self.channels.len()).map(invitation).collect()
        } else {
            self.fixed_parts(job, completion)
        };
        launch_now(completion, orders);
    }

    fn fixed_parts(&self, job: &Job, completion: &Arc<Completion>) -> Vec<Order> {
        let work = completion.work().expect("a completion that was cut");
        let mut orders = Vec::new();
        while let Some(chunk) = work.claim_front() {
            let (mut offset, end) = (chunk.offset, chunk.offset + chunk.length);
            let mut parts = Vec::new();
            while offset < end {
                let (source, target) = (job.source.wrapping_add(offset), job.target + offset);
                let length = self.capabilities().longest_piece(source, target, end - offset);
                parts.push(job.piece(offset, length).reports_part_to(completion.clone(), offset));
                offset += length;
            }
            let channel = self.channels[orders.len() % self.channels.len()].clone();
            orders.push(Order::many(channel, self.capabilities().self_driving, parts));
        }
        orders
    }
}

/// Whom the descriptors of cases report to.
pub(super) trait Reporting {
    /// To a completion that has no other descriptor.
    fn reports_to(self, completion: Arc<Completion>) -> Descriptor;
    /// To a chunked completion, of which it carries a part.
    fn reports_part_to(self, completion: Arc<Completion>, offset: u64) -> Descriptor;
}

impl Reporting for Descriptor {
    fn reports_to(self, completion: Arc<Completion>) -> Descriptor {
        // SAFETY: cases make one descriptor for each completion that is not chunked.
        unsafe { self.completes(completion) }
    }

    fn reports_part_to(self, completion: Arc<Completion>, offset: u64) -> Descriptor {
        // SAFETY: cases claim all chunks before they make parts, one of each byte.
        unsafe { self.part_of(completion, offset) }
    }
}

/// A descriptor that moves nothing.
pub(super) fn nothing(completion: Arc<Completion>) -> Descriptor {
    // SAFETY: no byte is touched.
    unsafe { Descriptor::new(Operation::Copy, 0, 0, 0) }.reports_to(completion)
}

/// Launches a transfer of a case.
pub(super) fn launch_now(completion: &Completion, orders: impl IntoIterator<Item = Order>) {
    // SAFETY: cases launch each completion once, with all its descriptors.
    unsafe { Launch::now(completion, orders) };
}

/// Launches a transfer of a case when others are over.
pub(super) fn launch_after(
    predecessors: &[Arc<Completion>],
    completion: Arc<Completion>,
    orders: Vec<Order>,
) {
    // SAFETY: as above.
    unsafe { Launch::after(predecessors, completion, orders) };
}

/// Waits until something is so, and fails if it does not become so.
pub(super) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < deadline, "gave up waiting for {what}");
        std::thread::yield_now();
    }
}
