//! Dispatch of a planned transfer with a completion: one function for each strategy.

use std::sync::{Arc, Weak};

use memferry_engine::completion::{
    ChannelBatch, ChunkedWork, Completion, Dispatch, PendingNotification,
};
use memferry_engine::{Channel, Descriptor};

use super::FerryCore;
use super::channel_selection::{ChannelSelection, CopyMemory};
use crate::parts::{self, PartBuilder};
use crate::plan::{CopyPlan, CopyStrategy};
use crate::policy::Choice;
use crate::registration::{PipelinedRegistration, is_pinned_at_once};
use crate::request::{Request, RequestExtras};
use memferry_sys::{affinity, probes, stats};

/// A transfer that is about to be dispatched.
struct PendingTransfer<'a> {
    request: &'a Request<'a>,
    plan: &'a CopyPlan,
    completion: Arc<Completion>,
    /// The transfers that it is ordered after.
    after: &'a [Arc<Completion>],
    notify: Option<PendingNotification>,
    /// Whether the caller waits and claims chunks.
    blocking: bool,
}

impl PendingTransfer<'_> {
    /// Dispatches the batches of the transfer.
    ///
    /// # Safety
    /// As for [`Dispatch::now`]; the batches must be all descriptors of the transfer.
    unsafe fn dispatch(&self, batches: impl IntoIterator<Item = ChannelBatch>) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            if self.after.is_empty() {
                Dispatch::now(&self.completion, batches);
            } else {
                let batches = batches.into_iter().collect();
                Dispatch::after(self.after, self.completion.clone(), batches);
            }
        }
    }
}

/// Counts a transfer that is about to be dispatched, and returns its span.
pub(super) fn count_transfer(request: &Request<'_>, plan: &CopyPlan) -> tracing::Span {
    let span = tracing::trace_span!(
        "transfer",
        operation = ?request.operation,
        bytes = request.length,
        path = ?plan.strategy,
        kernel = plan.kernel.name(),
    );
    let path = plan.strategy.counted();
    stats::thread(|counters| counters.count_copy(path, request.length));
    probes::submit(request.length, path as u64);
    span
}

impl FerryCore {
    /// Dispatches a transfer and returns its completion.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`].
    pub(super) unsafe fn dispatch(
        &self,
        mut request: Request<'_>,
        plan: &CopyPlan,
        blocking: bool,
    ) -> Arc<Completion> {
        let plan = &self.with_one_part(plan, &request);
        let RequestExtras { after, notify, keep_alive } = request.options.take_extras();
        // A caller that waits but does not assist needs a channel, as one that does not wait.
        let blocking = blocking && !request.options.no_caller_assist;
        let (first, others) = self.offered_channels(&request, plan, blocking);
        // SAFETY: the caller upholds the contract.
        let mut completion = unsafe { new_completion(&request, plan) }.spread_over(others);
        if blocking {
            completion = completion.awaited_on(affinity::current_core());
        }
        // SAFETY: the caller guarantees the validity of the variable until the transfer is complete.
        let completion = unsafe { completion.storing_crc(request.crc_variable) };
        let span = count_transfer(&request, plan);
        let completion = Arc::new(completion.notifying(notify).traced(span));
        if let Some(variable) = keep_alive {
            let _ = completion.keep_alive(variable);
        }
        let transfer = PendingTransfer {
            request: &request,
            plan,
            completion,
            after: &after,
            notify,
            blocking,
        };
        // SAFETY: the caller upholds the contract; the completion is new, and belongs to this
        // transfer.
        unsafe {
            match plan.strategy {
                _ if request.length == 0 => transfer.dispatch(std::iter::empty()),
                CopyStrategy::Inline | CopyStrategy::SingleDescriptor { .. } => {
                    self.dispatch_single(&transfer);
                }
                CopyStrategy::WorkSharing { engine, .. } => {
                    self.dispatch_work_sharing(&transfer, engine, first);
                }
                CopyStrategy::HybridWorkSharing { engine, processors, channels, .. } => {
                    self.dispatch_hybrid(&transfer, engine, processors, channels);
                }
                CopyStrategy::FixedParts { engine, .. } => self.dispatch_parts(&transfer, engine),
            }
        }
        transfer.completion
    }

    /// Returns the plan with one descriptor, if it has fixed parts and the request is only one, so short
    /// that it is pinned at once: that needs no chunks, and no list of parts.
    fn with_one_part(&self, plan: &CopyPlan, request: &Request<'_>) -> CopyPlan {
        match plan.strategy {
            CopyStrategy::FixedParts { engine, chunk_bytes }
                if request.length <= chunk_bytes
                    && is_pinned_at_once(request.length)
                    && parts::is_one(request, self.engines[engine].engine.capabilities()) =>
            {
                CopyPlan { strategy: CopyStrategy::SingleDescriptor { engine }, ..*plan }
            }
            _ => *plan,
        }
    }

    /// Dispatches a transfer that is one descriptor.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`]; nothing else may report to the completion.
    unsafe fn dispatch_single(&self, transfer: &PendingTransfer<'_>) {
        let PendingTransfer { request, plan, completion, notify, .. } = transfer;
        // SAFETY: the caller upholds the contract.
        let whole =
            unsafe { parts::single_descriptor(request, plan).completes(completion.clone()) };
        let batch = match self.channel_for(plan.strategy, request) {
            Some((index, open)) => {
                let submit = |whole| open.batch(&open.channels[index], whole);
                match &open.registrations {
                    Some(registrations) => {
                        let variable = registrations.notification_lease(notify.as_ref());
                        registrations.single_batch(request, whole, variable, submit)
                    }
                    None => submit(whole),
                }
            }
            None => ChannelBatch::inline(whole),
        };
        // SAFETY: the completion belongs to this transfer, and this is its only descriptor.
        unsafe { transfer.dispatch([batch]) };
    }

    /// Returns the channels that get a work offer from the caller, and those that get one from other
    /// channels.
    fn offered_channels(
        &self,
        request: &Request<'_>,
        plan: &CopyPlan,
        blocking: bool,
    ) -> (ChannelSelection<'_>, Vec<Weak<dyn Channel>>) {
        let CopyStrategy::WorkSharing { engine, channels, .. } = plan.strategy else {
            return Default::default();
        };
        let open = &self.engines[engine];
        if open.engine.registrations().is_some() {
            return (self.least_loaded_channels(open, channels), Vec::new());
        }
        let selected = self.select_channels(open, CopyMemory::of(request), channels, blocking);
        // Only processors pass a work offer on.
        if open.runs_lists { selected.split_first() } else { (selected, Vec::new()) }
    }

    /// Dispatches a transfer in chunks, which the channels of one engine claim.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`]; nothing else may report to the completion.
    unsafe fn dispatch_work_sharing(
        &self,
        transfer: &PendingTransfer<'_>,
        engine: usize,
        selected: ChannelSelection<'_>,
    ) {
        let PendingTransfer { plan, completion, .. } = transfer;
        let open = &self.engines[engine];
        let offer = || Descriptor::work_offer(completion.clone()).transient(plan.transient);
        let batches = selected.into_iter().map(|channel| open.batch(channel, offer()));
        // SAFETY: the completion belongs to this transfer, and these are all its descriptors.
        unsafe { transfer.dispatch(batches) };
    }

    /// Dispatches a transfer in chunks, which a device and processors claim.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`]; nothing else may report to the completion.
    unsafe fn dispatch_hybrid(
        &self,
        transfer: &PendingTransfer<'_>,
        engine: usize,
        processors: usize,
        channels: usize,
    ) {
        let PendingTransfer { request, completion, blocking, .. } = transfer;
        let (device, others) = (&self.engines[engine], &self.engines[processors]);
        let offer = || Descriptor::work_offer(completion.clone()).shared(true);
        let first = self.least_loaded_channels(device, 1).into_iter();
        let first = first.map(|channel| device.batch(channel, offer()));
        let selected = self.select_channels(others, CopyMemory::of(request), channels, *blocking);
        let selected = selected.into_iter().map(|channel| others.batch(channel, offer()));
        // SAFETY: the completion belongs to this transfer, and these are all its descriptors.
        unsafe { transfer.dispatch(first.chain(selected)) };
    }

    /// Dispatches a transfer in parts, which are cut to the limits of the engine.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`]; nothing else may report to the completion.
    unsafe fn dispatch_parts(&self, transfer: &PendingTransfer<'_>, engine: usize) {
        let PendingTransfer { request, plan, completion, notify, .. } = transfer;
        let open = &self.engines[engine];
        let index = match self.policy.choose(&open.channels, request.length) {
            Choice::Channel { index, .. } => index,
            Choice::Caller => 0,
        };
        let channel = open.channels[index].clone();
        let capabilities = open.engine.capabilities();
        let parts = PartBuilder { request, plan, capabilities, completion };
        if let Some(registrations) = &open.registrations {
            let variable = registrations.notification_lease(notify.as_ref());
            // SAFETY: the caller upholds the contract; no other thread has access to the completion
            // before this call returns.
            let pieces =
                unsafe { PipelinedRegistration::new(registrations, parts, channel, variable) };
            // SAFETY: the completion belongs to this transfer, and these are all its descriptors.
            unsafe { transfer.dispatch(pieces) };
        } else {
            // SAFETY: the caller upholds the contract.
            let parts = unsafe { parts.all() };
            let batch = ChannelBatch::many(channel, open.has_auto_progress(), parts);
            // SAFETY: the completion belongs to this transfer, and these are all its descriptors.
            unsafe { transfer.dispatch([batch]) };
        }
    }
}

/// Returns a new completion for the strategy of the plan.
///
/// # Safety
/// As for [`FerryCore::execute`].
unsafe fn new_completion(request: &Request<'_>, plan: &CopyPlan) -> Completion {
    let Request { operation, source, target, second, length, value, .. } = *request;
    let chunk_bytes = match plan.strategy {
        CopyStrategy::WorkSharing { chunk_bytes, .. }
        | CopyStrategy::HybridWorkSharing { chunk_bytes, .. }
        | CopyStrategy::FixedParts { chunk_bytes, .. } => chunk_bytes,
        CopyStrategy::Inline | CopyStrategy::SingleDescriptor { .. } => {
            return Completion::whole().of_operation(operation);
        }
    };
    // SAFETY: the caller of `start_raw` guarantees the validity of the memory until the transfer is
    // complete; `validate` has rejected targets that overlap.
    let work = unsafe {
        ChunkedWork::new(operation, plan.kernel, source, target, length, value, chunk_bytes)
            .with_second_target(second)
    };
    Completion::chunked(work.in_memory(request.source_memory, request.target_memory))
}
