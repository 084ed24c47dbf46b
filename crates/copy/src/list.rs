//! Lists: many segments as one transfer, for deliveries and for batches.
//!
//! A processor gets the whole list as one work: one descriptor for each channel that takes part,
//! which claims chunks of the list, as a waiting caller does. Other engines get every segment as
//! parts of one transfer on one channel, in order; an engine that gathers, such as a network card,
//! copies many of them at once.
//!
//! The notification variable is set after the last byte, no matter which thread or engine copies
//! which segment. The dispatching thread copies segments that the channel does not accept or that
//! cannot be pinned. Every part decrements the same count of remaining bytes, and the thread that
//! decrements it to zero sets the variable. An engine that writes the variable itself does so after
//! the last part, and only if all remaining bytes belong to parts that precede it in the same
//! channel.

use std::sync::{Arc, Weak};

use memferry_engine::completion::{
    ChannelBatch, ChunkedWork, Completion, Dispatch, WorkSegment, execute_segments,
};
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::{Descriptor, Kernel, Opcode};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::Access;

use crate::plan::{CopyPlan, CopyStrategy, STREAM_SEGMENT_BYTES};
use crate::policy::Choice;
use crate::request::{Options, RequestExtras};
use crate::submit::channel_selection::CopyMemory;
use crate::submit::{ActiveEngine, FerryCore};
use crate::transfer::Transfer;
use memferry_sys::stats;

/// Maximum size in bytes of a chunk, and so of a list with a segment that must not be cut.
pub(crate) const MAX_CHUNK: u64 = 1 << 30;

/// The bytes of a list that a device copies become ready in this many steps, each of at least so many
/// bytes.
pub(crate) const READY_STEPS: u64 = 512;
pub(crate) const MIN_READY_BYTES: u64 = 4096;

/// Many segments before they are submitted.
pub(crate) struct List<'a, I> {
    /// The name of the transfer in traces.
    pub(crate) name: &'static str,
    /// The segments, whose ranges were checked.
    pub(crate) segments: I,
    /// The number of segments.
    pub(crate) count: usize,
    /// The total length in bytes.
    pub(crate) length: u64,
    /// The whole target, if it is one range.
    pub(crate) target: Option<u64>,
    /// Whether a segment is moved, which must not be cut.
    pub(crate) is_moved: bool,
    pub(crate) plan: CopyPlan,
    pub(crate) options: Options<'a>,
}

impl<I: Iterator<Item = WorkSegment> + Clone> List<'_, I> {
    /// Starts the transfer. `blocking`: the caller waits for it in the same call.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`](crate::Ferry::start_raw), for every segment.
    pub(crate) unsafe fn start(mut self, core: &FerryCore, blocking: bool) -> Transfer {
        let (length, helps) = (self.length, !self.options.no_caller_assist);
        if length / (self.count.max(1) as u64) < STREAM_SEGMENT_BYTES {
            self.plan.kernel = Kernel::of_segments();
        }
        let extras = self.options.take_extras();
        let is_traced = tracing::enabled!(tracing::Level::TRACE);
        let engine = match self.plan.strategy {
            CopyStrategy::Inline => None,
            CopyStrategy::HybridWorkSharing { processors, .. } => Some(processors),
            strategy => strategy.engine(),
        };
        let open = engine.map(|engine| &core.engines[engine]);
        let path = self.plan.strategy.counted();
        stats::thread(|counters| counters.count_copy(path, length));
        if open.is_none() && extras.after.is_empty() && !is_traced {
            // SAFETY: the caller upholds the contract.
            unsafe { execute_segments(self.plan.kernel, self.segments) };
            if let Some(notify) = extras.notify {
                notify.deliver();
            }
            return Transfer::done(length);
        }
        // SAFETY: the caller upholds the contract.
        let completion = unsafe {
            match open {
                Some(open) if open.runs_lists => self.share(core, open, extras, blocking && helps),
                Some(open) => self.submit_parts(ListRoute::of(core, open, &self), extras),
                None => self.submit_parts(None, extras),
            }
        };
        Transfer::with_completion(completion, length, helps, core.wait_config.clone())
    }

    fn new_completion(
        &self,
        work: Option<ChunkedWork>,
        passed_on: Vec<Weak<dyn Channel>>,
        extras: &mut RequestExtras,
    ) -> Arc<Completion> {
        let span = tracing::trace_span!(
            "list",
            kind = self.name,
            segments = self.count,
            bytes = self.length,
            path = ?self.plan.strategy,
            kernel = self.plan.kernel.name(),
        );
        let completion = work.map_or_else(Completion::whole, Completion::chunked);
        let completion =
            Arc::new(completion.notifying(extras.notify).traced(span).spread_over(passed_on));
        if let Some(variable) = extras.keep_alive.take() {
            let _ = completion.keep_alive(variable);
        }
        completion
    }

    /// Offers the list to channels of processors, which claim chunks of it.
    ///
    /// # Safety
    /// As for [`List::start`].
    unsafe fn share(
        &self,
        core: &FerryCore,
        open: &ActiveEngine,
        mut extras: RequestExtras,
        blocking: bool,
    ) -> Arc<Completion> {
        let (chunk_bytes, channels) = match self.plan.strategy {
            CopyStrategy::WorkSharing { chunk_bytes, channels, .. }
            | CopyStrategy::HybridWorkSharing { chunk_bytes, channels, .. }
                if !self.is_moved =>
            {
                (chunk_bytes, channels)
            }
            _ => (self.length, 1),
        };
        let (kernel, segments) = (self.plan.kernel, self.segments.clone());
        let work = (self.length > 0).then(|| {
            // SAFETY: the caller upholds the contract; a moved segment lies in the only chunk.
            unsafe { ChunkedWork::of_segments(kernel, segments, self.length, chunk_bytes) }
        });
        let has_work = work.is_some();
        let first = self.segments.clone().next();
        let (source, target) = first.map_or((0, 0), |segment| (segment.source, segment.target));
        let memory = CopyMemory { source, target, bytes: self.length };
        let selected = core.select_channels(open, memory, channels, blocking);
        let (selected, passed_on) = selected.split_first();
        let completion = self.new_completion(work, passed_on, &mut extras);
        let offers = selected
            .into_iter()
            .filter(|_| has_work)
            .map(|channel| open.batch(channel, Descriptor::work_offer(completion.clone())));
        // SAFETY: the completion belongs to this list, and these are all its descriptors.
        unsafe { dispatch(&completion, &extras.after, offers) };
        completion
    }

    /// Submits every segment in parts within the limits of the engine; without a route, the
    /// dispatching thread executes them.
    ///
    /// # Safety
    /// As for [`List::start`].
    unsafe fn submit_parts(
        &self,
        route: Option<ListRoute<'_>>,
        mut extras: RequestExtras,
    ) -> Arc<Completion> {
        let work = (self.length > 0).then(|| {
            // Bytes become ready chunk by chunk, and parts may cross chunks.
            let chunk = match self.plan.strategy {
                CopyStrategy::FixedParts { .. } => {
                    self.length.div_ceil(READY_STEPS).max(MIN_READY_BYTES)
                }
                _ => MAX_CHUNK,
            };
            let (kernel, chunk) = (self.plan.kernel, self.length.min(chunk));
            // SAFETY: the addresses are placeholders that no thread uses: all chunks are claimed
            // here before another thread has access to the work, and every part has its own source
            // and target.
            let work =
                unsafe { ChunkedWork::new(Opcode::Copy, kernel, 0, 0, self.length, 0, chunk) };
            while work.claim_front().is_some() {}
            work
        });
        let completion = self.new_completion(work, Vec::new(), &mut extras);
        let registrations = route.and_then(|route| route.open.registrations.as_ref());
        let variable = registrations.and_then(|pin| pin.notification_lease(extras.notify.as_ref()));
        let parts = ListParts { list: self, route, completion: &completion };
        // SAFETY: the caller upholds the contract.
        let batches = unsafe { parts.batches(variable) };
        // SAFETY: the completion belongs to this list, and the batches contain all its parts.
        unsafe { dispatch(&completion, &extras.after, batches) };
        completion
    }
}

/// Dispatches all batches of a list.
///
/// # Safety
/// As for [`Dispatch::now`].
unsafe fn dispatch(
    completion: &Arc<Completion>,
    after: &[Arc<Completion>],
    batches: impl IntoIterator<Item = ChannelBatch>,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if after.is_empty() {
            Dispatch::now(completion, batches);
        } else {
            Dispatch::after(after, completion.clone(), batches.into_iter().collect());
        }
    }
}

/// The channel that receives all parts.
#[derive(Clone, Copy)]
struct ListRoute<'a> {
    open: &'a ActiveEngine,
    channel: &'a Arc<dyn Channel>,
}

impl<'a> ListRoute<'a> {
    /// Returns `None` if the policy leaves the list to the caller.
    fn of<I>(core: &FerryCore, open: &'a ActiveEngine, list: &List<'_, I>) -> Option<Self> {
        let index = match core.policy.choose(&open.channels, list.length) {
            Choice::Channel { index, .. } => index,
            Choice::Caller if matches!(list.plan.strategy, CopyStrategy::FixedParts { .. }) => 0,
            Choice::Caller => return None,
        };
        Some(Self { open, channel: &open.channels[index] })
    }

    /// Returns the collected descriptors as a batch, or `None` if there are none.
    fn take_batch(self, batch: &mut Vec<Descriptor>) -> Option<ChannelBatch> {
        if batch.is_empty() {
            return None;
        }
        let auto_progress = self.open.engine.capabilities().auto_progress;
        Some(ChannelBatch::many(self.channel.clone(), auto_progress, batch.drain(..)))
    }
}

/// The segments of a list as parts of one transfer.
struct ListParts<'a, 'b, I> {
    list: &'a List<'b, I>,
    route: Option<ListRoute<'a>>,
    completion: &'a Arc<Completion>,
}

impl<I: Iterator<Item = WorkSegment> + Clone> ListParts<'_, '_, I> {
    /// Returns the non-empty segments, each with its offset in the transfer.
    fn segments(&self) -> impl Iterator<Item = (WorkSegment, u64)> {
        let mut next = 0;
        let segments = self.list.segments.clone().filter(|segment| segment.length > 0);
        segments.map(move |segment| {
            let offset = next;
            next += segment.length;
            (segment, offset)
        })
    }

    /// # Safety
    /// As for [`List::start`]; called once.
    unsafe fn batches(&self, variable: Option<Arc<Lease>>) -> Vec<ChannelBatch> {
        let mut batches = Vec::new();
        let mut batch = Vec::with_capacity(self.list.count);
        // A target that is one range is pinned as one.
        let registrations = self.route.and_then(|route| route.open.registrations.as_ref());
        let whole = registrations.zip(self.list.target.filter(|_| self.list.length > 0));
        let whole = whole.map(|(pin, target)| pin.lease(target, self.list.length, Access::Write));
        for (segment, offset) in self.segments() {
            // SAFETY: the caller upholds the contract.
            let split = |push: &mut dyn FnMut(Descriptor)| unsafe {
                self.split(segment, offset, push);
            };
            let route = self.route.filter(|_| segment.operation != Opcode::Move);
            let (Some(route), registrations) = (route, registrations) else {
                batches.extend(self.route.and_then(|route| route.take_batch(&mut batch)));
                split(&mut |part| batches.push(ChannelBatch::inline(part)));
                continue;
            };
            let Some(registrations) = registrations else {
                split(&mut |part| batch.push(part));
                continue;
            };
            let target = whole.clone().unwrap_or_else(|| {
                registrations.lease(segment.target, segment.length, Access::Write)
            });
            let pins = target.and_then(|target| {
                let reads = segment.operation != Opcode::Fill;
                let lease = || registrations.lease(segment.source, segment.length, Access::Read);
                let source = reads.then(lease).transpose()?;
                let target = Some(target);
                let variable = variable.clone();
                Ok(Arc::new(DescriptorLeases { source, target, second: None, variable }))
            });
            match pins {
                Ok(pins) => split(&mut |part| batch.push(part.pinned_by(pins.clone()))),
                Err(unpinned) => {
                    batches.extend(route.take_batch(&mut batch));
                    split(&mut |part| batches.push(registrations.unpinned_batch(part, unpinned)));
                }
            }
        }
        batches.extend(self.route.and_then(|route| route.take_batch(&mut batch)));
        batches
    }

    /// Splits a segment at the limits of the engine, and creates a part for each range.
    ///
    /// # Safety
    /// As for [`List::start`]; no segment is split twice.
    unsafe fn split(&self, segment: WorkSegment, offset: u64, push: &mut dyn FnMut(Descriptor)) {
        let WorkSegment { operation, value, source, target, length } = segment;
        let route = self.route.filter(|_| operation != Opcode::Move);
        let capabilities = route.map(|route| route.open.engine.capabilities());
        let mut done = 0;
        while done < length {
            let left = (length - done).min(MAX_CHUNK);
            let (source, target) = (source.wrapping_add(done), target + done);
            let bytes = capabilities.map_or(left, |limits| limits.max_part(source, target, left));
            // SAFETY: the caller upholds the contract: the range is part of the segment.
            let part = unsafe { Descriptor::new(operation, source, target, bytes) };
            let part = part.value(value).kernel(self.list.plan.kernel);
            // SAFETY: all chunks were claimed when the completion was created, so a part may touch
            // several; no segment is split twice.
            push(unsafe { part.part_of(self.completion.clone(), offset + done) });
            done += bytes;
        }
    }
}
