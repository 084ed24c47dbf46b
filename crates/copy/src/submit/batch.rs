//! Batches in which each item has a transfer of its own.
//!
//! Items are collected into runs, and a run is one submission: its slots are claimed together and
//! become visible together, and a device is told of it once. A run that channels could share ends
//! when it is as long as the backlog of a channel may be, so the policy spreads a long batch as it
//! spreads single copies, and a short batch is one run.

mod ordered;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use memferry_engine::completion::{ChannelBatch, ChunkedWork, Completion, Dispatch};
use memferry_engine::contract::DescriptorLeases;
use memferry_engine::{Descriptor, Opcode};
use memferry_memory::pinning::Access;
use memferry_sys::{stats, stats::kinds::CopyPath};

use super::active_engine::run_refused;
use super::dispatch::count_transfer;
use super::inline_limit::SmallCopy;
use super::{ActiveEngine, FerryCore, copy_inline};
use crate::parts::{self, PartBuilder};
use crate::plan::{self, CopyPlan, CopyStrategy};
use crate::policy::Choice;
use crate::request::Request;
use crate::transfer::Transfer;

/// Maximum number of descriptors of a run.
pub(crate) const MAX_RUN: usize = 512;
/// Number of descriptors from which a run for a device is submitted.
pub(crate) const MAX_DEVICE_RUN: usize = 128;
/// Size in bytes up to which items for a device stay one run, however many channels it has.
pub(crate) const MIN_DEVICE_RUN_BYTES: u64 = 256 << 10;
/// How many descriptors the caller executes before it offers the others to a full channel again.
pub(crate) const OWN_TURNS: usize = 16;
/// How many descriptors a channel that was full is offered. A channel looks at all that it is
/// offered, so this bounds the looks at each.
const RETRY_OFFER: usize = 2 * OWN_TURNS;

/// A batch that is being started.
pub(crate) struct EachBatch<'a> {
    core: &'a FerryCore,
    /// The size in bytes up to which the caller executes copies whose data is in the caches.
    inline_bytes: u64,
    /// The size in bytes up to which an item is one descriptor without a plan.
    small_bytes: u64,
    /// A transfer for each item so far. What is in a run has a placeholder.
    transfers: Vec<Transfer>,
    sequences: SequenceRun,
    completions: CompletionRun,
    /// The last ordered item, or the first of all: the next ordered item waits for it and for those
    /// behind it.
    group_start: usize,
    /// What the caller has executed while a run waits.
    bytes_of_caller: u64,
}

/// Descriptors of one engine that complete by sequence.
#[derive(Default)]
struct SequenceRun {
    engine: usize,
    descriptors: Vec<Option<Descriptor>>,
    /// The item of each descriptor.
    items: Vec<usize>,
    bytes: u64,
    /// The length of the longest one.
    longest: u64,
    /// Whether one of them is longer than what the caller may execute to spare a wakeup.
    needs_channel: bool,
}

/// Descriptors of one engine that report to completions.
#[derive(Default)]
struct CompletionRun {
    engine: usize,
    descriptors: Vec<Descriptor>,
    completions: Vec<Arc<Completion>>,
    /// The first item.
    first_item: usize,
    /// What the first item waits for, if it is ordered; the others wait for the first then.
    after: Vec<Arc<Completion>>,
    /// The memory that the items access, for an engine that orders descriptors.
    operands: Vec<Range<u64>>,
    bytes: u64,
    /// The length of the longest item.
    longest: u64,
}

impl<'a> EachBatch<'a> {
    /// A batch of `count` items. The caller executes copies up to `inline_bytes` if their data is in
    /// the caches.
    pub(crate) fn new(core: &'a FerryCore, inline_bytes: u64, count: usize) -> Self {
        // With a span for each transfer, the planner decides about all.
        let is_traced = tracing::enabled!(tracing::Level::TRACE);
        Self {
            core,
            inline_bytes,
            small_bytes: if is_traced { 0 } else { inline_bytes.max(core.small_bytes()) },
            transfers: Vec::with_capacity(count),
            sequences: SequenceRun::default(),
            completions: CompletionRun::default(),
            group_start: 0,
            bytes_of_caller: 0,
        }
    }

    /// Counts what the caller executes itself. Runs do not wait while it executes more than a channel
    /// may have before it.
    fn count_own(&mut self, length: u64) {
        self.bytes_of_caller += length;
        if self.bytes_of_caller > plan::max_backlog_bytes(&self.core.plan_context.profile) {
            self.submit_completions();
            self.submit_sequences();
        }
    }

    /// Adds the next item, and starts it at the latest in [`EachBatch::finish`]. An ordered one starts
    /// when all before it are complete.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`](crate::Ferry::start_raw); the request must be validated, a copy,
    /// move or fill of host memory, and without options.
    pub(crate) unsafe fn add(&mut self, request: Request<'static>, is_ordered: bool) {
        let length = request.length;
        if is_ordered && !self.transfers.is_empty() {
            // SAFETY: the caller upholds the contract.
            return unsafe { self.add_ordered(request) };
        }
        if length == 0 {
            return self.transfers.push(Transfer::done(0));
        }
        // SAFETY: the caller upholds the contract.
        unsafe {
            if length > self.small_bytes {
                self.add_planned(request);
            } else if length > self.inline_bytes {
                self.add_small(&request, true);
            } else {
                self.add_inline(&request);
            }
        }
    }

    /// Executes an item that the caller executes if its data is in the caches, or adds it to a run.
    ///
    /// # Safety
    /// As for [`EachBatch::add`].
    unsafe fn add_inline(&mut self, request: &Request<'static>) {
        let (length, limit) = (request.length, &self.core.inline_limit);
        let decision = match length {
            ..=plan::ALWAYS_INLINE_BYTES => SmallCopy::Inline,
            _ => limit.decide(length),
        };
        // SAFETY: the caller upholds the contract.
        let transfer = unsafe {
            match decision {
                SmallCopy::Submit if length <= limit.small_bytes => {
                    return self.add_small(request, false);
                }
                SmallCopy::Measured => {
                    let start = Instant::now();
                    let transfer = copy_inline(request);
                    limit.record(length, start);
                    transfer
                }
                SmallCopy::Inline | SmallCopy::Submit => copy_inline(request),
            }
        };
        self.transfers.push(transfer);
        self.count_own(length);
    }

    /// Adds an item to the run of the only engine.
    ///
    /// # Safety
    /// As for [`EachBatch::add`]; it must not be longer than [`FerryCore::small_bytes`].
    unsafe fn add_small(&mut self, request: &Request<'static>, needs_channel: bool) {
        let Request { operation, source, target, length, value, .. } = *request;
        // SAFETY: the caller upholds the contract.
        let descriptor = unsafe { Descriptor::new(operation, source, target, length) };
        let descriptor = descriptor.value(value).kernel(self.core.kernel_of_small());
        self.add_sequence(0, descriptor, needs_channel);
    }

    /// Adds an item for which the planner chooses the engine.
    ///
    /// # Safety
    /// As for [`EachBatch::add`].
    unsafe fn add_planned(&mut self, request: Request<'static>) {
        let (core, length) = (self.core, request.length);
        let Ok(plan) = core.plan(&request, false) else {
            // It does not happen: a processor executes everything that a batch has.
            // SAFETY: the caller upholds the contract.
            return self.transfers.push(unsafe { copy_inline(&request) });
        };
        if length <= plan::SINGLE_DESCRIPTOR_BYTES {
            let engine = plan.strategy.engine().unwrap_or_default();
            let open = &core.engines[engine];
            match plan.strategy {
                CopyStrategy::SingleDescriptor { .. }
                    if open.sequence_completion && request.is_simple() =>
                {
                    // SAFETY: the caller upholds the contract.
                    let descriptor = unsafe { parts::single_descriptor(&request, &plan) };
                    return self.add_sequence(engine, descriptor, true);
                }
                CopyStrategy::SingleDescriptor { .. }
                    if open.has_auto_progress() && open.engine.registrations().is_none() =>
                {
                    self.end_waiting_run();
                    let completion = Completion::whole().of_operation(request.operation);
                    let completion = new_completion(completion, &request, &plan);
                    // SAFETY: the caller upholds the contract; the completion is new.
                    let whole = unsafe {
                        parts::single_descriptor(&request, &plan).completes(completion.clone())
                    };
                    return self.add_completion(engine, completion, length, |run| {
                        run.descriptors.push(whole);
                    });
                }
                CopyStrategy::FixedParts { chunk_bytes, .. } => {
                    // What cannot be pinned is no part of a run.
                    if let Some(pins) = pins_of(open, &request) {
                        self.end_waiting_run();
                        let (pins, after) = (pins.as_ref(), Vec::new());
                        // SAFETY: the caller upholds the contract.
                        return unsafe {
                            self.add_parts(engine, &request, &plan, chunk_bytes, pins, after);
                        };
                    }
                }
                _ => {}
            }
        }
        let plan = core.in_window(plan, &request);
        // It may take long.
        self.submit_completions();
        self.submit_sequences();
        // SAFETY: the caller upholds the contract.
        self.transfers.push(unsafe { core.execute(request, &plan, false) });
    }

    /// Submits a run that waits for others, before an item that does not.
    fn end_waiting_run(&mut self) {
        if !self.completions.after.is_empty() {
            self.submit_completions();
        }
    }

    /// Adds an item in parts within the limits of its engine, ordered after items of the same run.
    ///
    /// # Safety
    /// As for [`EachBatch::add`].
    unsafe fn add_parts(
        &mut self,
        engine: usize,
        request: &Request<'static>,
        plan: &CopyPlan,
        chunk_bytes: u64,
        pins: Option<&Arc<DescriptorLeases>>,
        after: Vec<Arc<Completion>>,
    ) {
        let Request { operation, source, target, length, value, .. } = *request;
        let is_ordered = !after.is_empty();
        // SAFETY: the caller upholds the contract.
        let work = unsafe {
            ChunkedWork::new(operation, plan.kernel, source, target, length, value, chunk_bytes)
        };
        let completion = Completion::chunked(work).ordered_after(after);
        let completion = new_completion(completion, request, plan);
        let device = &self.core.engines[engine].engine;
        let capabilities = device.capabilities();
        let builder = PartBuilder { request, plan, capabilities, completion: &completion };
        let work = completion.work().expect("the completion is that of chunked work");
        let keeps_order = device.orders_descriptors();
        self.add_completion(engine, completion.clone(), length, |run| {
            let first = run.descriptors.len();
            while let Some(chunk) = work.claim_front() {
                let range = chunk.offset..chunk.offset + chunk.length;
                // SAFETY: the caller upholds the contract; the chunk was just claimed.
                unsafe { builder.extend(&mut run.descriptors, range, pins) };
            }
            if is_ordered {
                let parts = run.descriptors.split_off(first);
                run.descriptors.extend(parts.into_iter().map(Descriptor::ordered));
            }
            if keeps_order {
                run.operands.extend(ordered::operands(request));
            }
        });
    }

    /// Adds a descriptor that completes by sequence to the run.
    fn add_sequence(&mut self, engine: usize, descriptor: Descriptor, needs_channel: bool) {
        if engine != self.sequences.engine {
            self.submit_sequences();
            self.sequences.engine = engine;
        }
        let run = &mut self.sequences;
        let length = descriptor.length();
        run.items.push(self.transfers.len());
        run.descriptors.push(Some(descriptor.any_thread()));
        run.bytes += length;
        run.longest = run.longest.max(length);
        run.needs_channel |= needs_channel;
        self.transfers.push(Transfer::done(length));
        let is_spread = self.core.engines[engine].channels.len() > 1
            && run.bytes > plan::max_backlog_bytes(&self.core.plan_context.profile);
        if is_spread || run.descriptors.len() == MAX_RUN {
            self.submit_sequences();
        }
    }

    /// Adds what `push` adds, the descriptors of a completion, to the run.
    fn add_completion(
        &mut self,
        engine: usize,
        completion: Arc<Completion>,
        length: u64,
        push: impl FnOnce(&mut CompletionRun),
    ) {
        if engine != self.completions.engine && !self.completions.completions.is_empty() {
            self.submit_completions();
        }
        if self.completions.completions.is_empty() {
            (self.completions.engine, self.completions.first_item) = (engine, self.transfers.len());
        }
        let config = self.core.wait_config.clone();
        self.transfers.push(Transfer::with_completion(completion.clone(), length, true, config));
        let run = &mut self.completions;
        push(run);
        run.completions.push(completion);
        run.bytes += length;
        run.longest = run.longest.max(length);
        // The device shall begin before the memory of a long batch is pinned, and its channels shall
        // share the batch.
        let channels = self.core.engines[engine].channels.len() as u64;
        let max_bytes = (plan::MAX_DEVICE_CHUNK / channels).max(MIN_DEVICE_RUN_BYTES);
        if run.bytes >= max_bytes || run.descriptors.len() >= MAX_DEVICE_RUN {
            self.submit_completions();
        }
    }

    /// Submits the run of descriptors that complete by sequence. The caller executes some of what a
    /// full channel does not accept, and then offers it others.
    fn submit_sequences(&mut self) {
        let mut run = std::mem::take(&mut self.sequences);
        let (mut descriptors, mut bytes) = (std::mem::take(&mut run.descriptors), run.bytes);
        self.bytes_of_caller = 0;
        let open = &self.core.engines[run.engine];
        let (mut next, mut offer) = (0, descriptors.len());
        while next < descriptors.len() {
            let end = descriptors.len().min(next.saturating_add(offer));
            let channel = self.core.channel_of_run(open, bytes, &run);
            let turns = match channel {
                Some(channel) => {
                    let mut sequences = open.submit_sequences(channel, &mut descriptors[next..end]);
                    while next < end && descriptors[next].is_none() {
                        let transfer = &mut self.transfers[run.items[next]];
                        *transfer = sequences.next_transfer(transfer.len());
                        bytes -= transfer.len();
                        next += 1;
                    }
                    offer = if next == end { 2 * offer } else { RETRY_OFFER };
                    if next == end { 0 } else { OWN_TURNS }
                }
                None => descriptors.len(),
            };
            for left in descriptors[next..].iter_mut().take(turns) {
                let Some(descriptor) = left.take() else { continue };
                bytes -= descriptor.length();
                // The placeholder of its transfer is that of one that is done.
                match channel {
                    Some(_) => drop(run_refused(descriptor)),
                    None => run_by_caller(descriptor),
                }
            }
            next += turns.min(descriptors.len() - next);
        }
    }

    /// Submits the run of descriptors that report to completions.
    fn submit_completions(&mut self) {
        let run = std::mem::take(&mut self.completions);
        self.bytes_of_caller = 0;
        let Some(last) = run.completions.last() else { return };
        let open = &self.core.engines[run.engine];
        let index = match self.core.policy.choose_for_run(&open.channels, run.bytes, run.longest) {
            Choice::Channel { index, .. } => index,
            Choice::Caller => 0,
        };
        let (channel, auto_progress) = (&open.channels[index], open.has_auto_progress());
        if !auto_progress {
            run.completions.iter().for_each(|completion| completion.set_polled(channel));
        }
        let batch = ChannelBatch::many(channel.clone(), auto_progress, run.descriptors);
        if !run.after.is_empty() {
            // Nothing but the run's descriptors reports to the completion, and nobody waits for it.
            let all = Arc::new(Completion::whole());
            // SAFETY: as below; a completion without descriptors is not waited for.
            return unsafe { Dispatch::after(&run.after, all, vec![batch]) };
        }
        // SAFETY: only the descriptors of the run report to its completions; the batch has all of
        // them, and a dispatch with descriptors over host memory starts every one.
        unsafe { Dispatch::now(last, [batch]) };
    }

    /// Starts what is in runs, and returns the transfers.
    pub(crate) fn finish(mut self) -> Vec<Transfer> {
        self.submit_completions();
        self.submit_sequences();
        self.transfers
    }
}

impl FerryCore {
    /// Returns the channel of a run; `None` if the caller executes it. A run that does not need a
    /// channel wakes one only if that is worth it.
    fn channel_of_run(&self, open: &ActiveEngine, bytes: u64, run: &SequenceRun) -> Option<usize> {
        match self.policy.choose_for_run(&open.channels, bytes, run.longest) {
            Choice::Channel { index, .. } => {
                let is_awake = run.needs_channel || !open.channels[index].is_asleep();
                (is_awake || self.is_worth_waking_for_small(bytes)).then_some(index)
            }
            Choice::Caller => None,
        }
    }
}

/// Executes a small descriptor for which there is no channel.
fn run_by_caller(descriptor: Descriptor) {
    stats::thread(|counters| counters.count_copy(CopyPath::Inline, descriptor.length()));
    descriptor.run();
}

/// Returns the completion of an item, counted and with its span.
fn new_completion(
    completion: Completion,
    request: &Request<'_>,
    plan: &CopyPlan,
) -> Arc<Completion> {
    Arc::new(completion.traced(count_transfer(request, plan)))
}

/// Pins the memory of an item for an engine whose submitter registers it: `Some(None)` if it needs
/// none, `None` if it cannot be pinned.
#[allow(clippy::option_option, reason = "an engine without pins is not one whose pins failed")]
fn pins_of(open: &ActiveEngine, request: &Request<'_>) -> Option<Option<Arc<DescriptorLeases>>> {
    let Some(registrations) = &open.registrations else { return Some(None) };
    let Request { operation, source, target, length, .. } = *request;
    let leases = DescriptorLeases::default();
    let pins = if operation == Opcode::Fill {
        let target = registrations.lease(target, length, Access::Write).ok()?;
        DescriptorLeases { target: Some(target), ..leases }
    } else {
        let both = [(source, length, Access::Read), (target, length, Access::Write)];
        let [source, target] = registrations.lease_both(both).ok()?;
        DescriptorLeases { source: Some(source), target: Some(target), ..leases }
    };
    Some(Some(Arc::new(pins)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use memferry_engine::cpu::ProfileSource;
    use memferry_testing::until;

    use super::*;
    use crate::{BatchItem, Ferry};

    #[test]
    fn a_batch_whose_copies_are_slow_is_given_to_channels() {
        let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).channels(1);
        let ferry = ferry.inline_bytes(16 << 10).build().unwrap();
        let long_ago = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        let (source, mut target) = (vec![1u8; 64 << 13], vec![0u8; 64 << 13]);
        until("a channel got copies of a batch", || {
            (0..60).for_each(|_| ferry.core.inline_limit.record(8 << 10, long_ago));
            target.fill(0);
            let pairs = source.chunks(8 << 10).zip(target.chunks_mut(8 << 10));
            let items: Vec<_> = pairs
                .map(|(from, to)| BatchItem::copy(from.as_ptr(), to.as_mut_ptr(), from.len()))
                .collect();
            // SAFETY: both live until the copies are complete.
            let transfers = unsafe { ferry.start_each_raw(&items) }.unwrap();
            transfers.iter().for_each(|transfer| _ = transfer.wait().unwrap());
            assert!(target == source);
            ferry.statistics().engine("cpu").submitted > 0
        });
    }
}
