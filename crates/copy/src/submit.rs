//! Execution of a plan: from a validated request to descriptors on channels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_engine::completion::{ChannelBatch, ChunkedWork, Completion, Dispatch};
use memferry_engine::contract::{RegistrationCache, ReuseHint};
use memferry_engine::{Channel, Descriptor, Engine, MemoryKind, Opcode};

use crate::cookie::CookieTable;
use crate::error::ValidationError;
use crate::parts::{self, PartBuilder};
use crate::plan::{self, CopyPlan, CopyPlanContext, CopyQuery, CopyStrategy};
use crate::policy::{Choice, Policy};
use crate::poller::PollThread;
use crate::registration::{EngineRegistrations, PipelinedRegistration};
use crate::request::{Request, RequestExtras};
use crate::transfer::{ChannelWaiter, Transfer, WaitConfig};

/// The state that all clones of a ferry share.
#[derive(Debug)]
pub(crate) struct FerryCore {
    /// The first field, so that it is dropped first: it drains the channels that it polls.
    pub(crate) _poll_thread: Option<PollThread>,
    pub(crate) engines: Vec<ActiveEngine>,
    pub(crate) plan_context: CopyPlanContext,
    pub(crate) policy: Policy,
    pub(crate) cookies: CookieTable,
    /// Bytes of copies since a sleeping channel was last woken.
    pub(crate) unwoken_bytes: AtomicU64,
    pub(crate) wait_config: Arc<WaitConfig>,
}

/// An engine with its channels.
#[derive(Debug)]
pub(crate) struct ActiveEngine {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) channels: Vec<Arc<dyn Channel>>,
    /// The same channels, for transfers that complete by sequence.
    pub(crate) waiters: Vec<Arc<ChannelWaiter>>,
    /// The pinned memory of the engine, if it needs any.
    pub(crate) registrations: Option<EngineRegistrations>,
    /// Whether the sequence of a small descriptor suffices as its completion: no descriptor fails,
    /// and none has pins.
    pub(crate) sequence_completion: bool,
}

impl FerryCore {
    pub(crate) fn plan(
        &self,
        request: &Request<'_>,
        blocking: bool,
    ) -> Result<CopyPlan, ValidationError> {
        let question = CopyQuery {
            operation: request.operation,
            bytes: request.length,
            blocking,
            cache_hint: request.options.cache_hint,
            no_caller_assist: request.options.no_caller_assist,
            source_memory: request.source_memory,
            target_memory: request.target_memory,
            reuse: self.record_use(request),
        };
        let plan = plan::plan(&self.plan_context, &question).ok_or(ValidationError::NoEngine)?;
        if !request.is_host_only() {
            self.check_device(request, plan.strategy)?;
        }
        Ok(plan)
    }

    /// Rejects memory of a device that the engine of the plan does not reach.
    fn check_device(
        &self,
        request: &Request<'_>,
        path: CopyStrategy,
    ) -> Result<(), ValidationError> {
        let Some(engine) = path.engine().map(|index| &self.engines[index].engine) else {
            return Ok(());
        };
        let sides = [
            ("source", request.source_memory, request.source),
            ("target", request.target_memory, request.target),
        ];
        for (side, kind, address) in sides {
            if kind == MemoryKind::Device && !engine.reaches(address) {
                return Err(ValidationError::OtherDevice { side, address });
            }
        }
        Ok(())
    }

    /// Records the use of a request's memory with the engine that registers memory, and returns its
    /// reuse hint.
    fn record_use(&self, request: &Request<'_>) -> ReuseHint {
        let registry = self.engines.iter().find_map(|open| open.engine.registrations());
        let Some(registry) = registry else { return ReuseHint::FirstUse };
        let meet = |kind, address| match kind {
            MemoryKind::Host if request.length < plan::MIN_TRACKED_BYTES => {
                registry.reuse_hint(address, request.length)
            }
            MemoryKind::Host => registry.record_use(address, request.length),
            MemoryKind::Device => ReuseHint::Reused,
        };
        let target = meet(request.target_memory, request.target);
        match request.operation {
            Opcode::Fill => target,
            _ => target.min(meet(request.source_memory, request.source)),
        }
    }

    /// # Safety
    /// As for [`Ferry::start_raw`]; the request must have been validated.
    pub(crate) unsafe fn execute(
        &self,
        request: Request<'_>,
        plan: &CopyPlan,
        blocking: bool,
    ) -> Transfer {
        let length = request.length;
        if request.is_simple() {
            // SAFETY: the caller upholds the contract.
            if let Some(transfer) = unsafe { self.try_execute_fast(&request, plan) } {
                return transfer;
            }
        }
        let helps = !request.options.no_caller_assist;
        // SAFETY: the caller upholds the contract.
        let completion = unsafe { self.dispatch(request, plan, blocking) };
        Transfer::with_completion(completion, length, helps, self.wait_config.clone())
    }

    /// Returns the size in bytes up to which every copy, move or fill of host memory that is not
    /// executed inline is one descriptor through the caches that completes by sequence. Returns 0
    /// if the planner must decide.
    pub(crate) fn small_bytes(&self) -> u64 {
        let [only] = &self.engines[..] else { return 0 };
        let capabilities = only.engine.capabilities();
        let does = |operation| capabilities.operations.contains(operation);
        let is_plain = only.sequence_completion
            && only.engine.registrations().is_none()
            && capabilities.claims_chunks
            && capabilities.memory.contains(MemoryKind::Host)
            && [Opcode::Copy, Opcode::Move, Opcode::Fill].into_iter().all(does);
        let cached = (self.plan_context.profile.stream_bytes as u64).saturating_sub(1);
        if is_plain { plan::SINGLE_DESCRIPTOR_BYTES.min(cached) } else { 0 }
    }

    /// Submits a small request: the result of [`FerryCore::plan`] and [`FerryCore::execute`] for
    /// it, without the planner.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`]; the request must be simple, over host memory, and not longer
    /// than [`FerryCore::small_bytes`].
    #[inline(always)]
    pub(crate) unsafe fn submit_small(&self, request: &Request<'_>) -> Transfer {
        let Request { operation, source, target, length, value, .. } = *request;
        let only = &self.engines[0];
        let choice = self.policy.choose(&only.channels, length);
        // SAFETY: the caller upholds the contract.
        let descriptor = unsafe { Descriptor::new(operation, source, target, length) }.value(value);
        let Choice::Channel { index, .. } = choice else {
            descriptor.run();
            return Transfer::done(length);
        };
        only.submit_sequence(index, descriptor)
    }

    /// Executes the request without a completion, inline or with a sequence in a channel. Returns
    /// `None` if neither is possible.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`].
    unsafe fn try_execute_fast(&self, request: &Request<'_>, plan: &CopyPlan) -> Option<Transfer> {
        let length = request.length;
        if length == 0 {
            return Some(Transfer::done(0));
        }
        if plan.strategy == CopyStrategy::Inline {
            // SAFETY: the caller upholds the contract.
            unsafe { parts::single_descriptor(request, plan) }.run();
            return Some(Transfer::done(length));
        }
        let (index, open) = self.channel_for(plan.strategy, request)?;
        if length > plan::SINGLE_DESCRIPTOR_BYTES
            || !open.sequence_completion
            || !request.is_host_only()
        {
            return None;
        }
        // SAFETY: the caller upholds the contract.
        Some(open.submit_sequence(index, unsafe { parts::single_descriptor(request, plan) }))
    }

    /// # Safety
    /// As for [`FerryCore::execute`].
    unsafe fn dispatch(
        &self,
        mut request: Request<'_>,
        plan: &CopyPlan,
        blocking: bool,
    ) -> Arc<Completion> {
        let RequestExtras { after, notify, keep_alive: kept } = request.options.take_extras();
        let completion = match plan.strategy {
            CopyStrategy::WorkSharing { chunk_bytes, .. }
            | CopyStrategy::HybridWorkSharing { chunk_bytes, .. }
            | CopyStrategy::FixedParts { chunk_bytes, .. } => {
                let Request { operation, source, target, length, value, .. } = request;
                // SAFETY: the caller of `start_raw` guarantees the validity of the memory until the
                // transfer is complete.
                let work = unsafe {
                    ChunkedWork::new(
                        operation,
                        plan.kernel,
                        source,
                        target,
                        length,
                        value,
                        chunk_bytes,
                    )
                };
                Completion::chunked(work.in_memory(request.source_memory, request.target_memory))
            }
            CopyStrategy::Inline | CopyStrategy::SingleDescriptor { .. } => Completion::whole(),
        };
        let span = tracing::trace_span!(
            "transfer",
            operation = ?request.operation,
            bytes = request.length,
            path = ?plan.strategy,
            kernel = plan.kernel.name(),
        );
        let completion = Arc::new(completion.notifying(notify).traced(span));
        if let Some(variable) = kept {
            let _ = completion.keep_alive(variable);
        }
        if request.length == 0 {
            // SAFETY: the completion is new, and no descriptor reports to it.
            unsafe { Self::dispatch_batches(&completion, &after, std::iter::empty()) };
            return completion;
        }
        match plan.strategy {
            CopyStrategy::Inline | CopyStrategy::SingleDescriptor { .. } => {
                // SAFETY: the caller upholds the contract; nothing else reports to the completion.
                let whole = unsafe {
                    parts::single_descriptor(&request, plan).completes(completion.clone())
                };
                let order = match self.channel_for(plan.strategy, &request) {
                    Some((index, open)) => {
                        let submit = |whole| {
                            ChannelBatch::one(
                                open.channels[index].clone(),
                                open.has_auto_progress(),
                                whole,
                            )
                        };
                        match &open.registrations {
                            Some(registration) => {
                                let variable = registration.notification_lease(notify.as_ref());
                                registration.single_batch(&request, whole, variable, submit)
                            }
                            None => submit(whole),
                        }
                    }
                    None => ChannelBatch::inline(whole),
                };
                // SAFETY: the completion belongs to this transfer, and these are all its
                // descriptors.
                unsafe { Self::dispatch_batches(&completion, &after, [order]) };
            }
            CopyStrategy::WorkSharing { engine, channels, .. } => {
                let open = &self.engines[engine];
                let orders = match open.engine.registrations() {
                    Some(_) => self.least_loaded_channels(open, channels),
                    None => self.select_channels(open, request.length, channels, blocking),
                };
                let orders = orders.into_iter();
                let invitation =
                    || Descriptor::work_offer(completion.clone()).transient(plan.transient);
                let orders = orders.map(|channel| open.batch(channel, invitation()));
                // SAFETY: the completion belongs to this transfer, and these are all its
                // descriptors.
                unsafe { Self::dispatch_batches(&completion, &after, orders) };
            }
            CopyStrategy::HybridWorkSharing { engine, processors, channels, .. } => {
                let quick = &self.engines[engine];
                let first = self.least_loaded_channels(quick, 1).into_iter();
                let invitation = || Descriptor::work_offer(completion.clone()).shared(true);
                let first = first.map(|channel| quick.batch(channel, invitation()));
                let others = &self.engines[processors];
                let invited =
                    self.select_channels(others, request.length, channels, blocking).into_iter();
                let invited = invited.map(|channel| others.batch(channel, invitation()));
                // SAFETY: the completion belongs to this transfer, and these are all its
                // descriptors.
                unsafe { Self::dispatch_batches(&completion, &after, first.chain(invited)) };
            }
            CopyStrategy::FixedParts { engine, .. } => {
                let open = &self.engines[engine];
                let index = match self.policy.choose(&open.channels, request.length) {
                    Choice::Channel { index, .. } => index,
                    Choice::Caller => 0,
                };
                let channel = open.channels[index].clone();
                let capabilities = open.engine.capabilities();
                let cut =
                    PartBuilder { request: &request, plan, capabilities, completion: &completion };
                if let Some(registration) = &open.registrations {
                    let variable = registration.notification_lease(notify.as_ref());
                    // SAFETY: the caller upholds the contract; no other thread has access to the
                    // completion before this call returns.
                    let pieces =
                        unsafe { PipelinedRegistration::new(registration, cut, channel, variable) };
                    // SAFETY: the completion belongs to this transfer, and these are all its
                    // descriptors.
                    unsafe { Self::dispatch_batches(&completion, &after, pieces) };
                } else {
                    // SAFETY: the caller upholds the contract.
                    let parts = unsafe { cut.all() };
                    let order = ChannelBatch::many(channel, open.has_auto_progress(), parts);
                    // SAFETY: the completion belongs to this transfer, and these are all its
                    // descriptors.
                    unsafe { Self::dispatch_batches(&completion, &after, [order]) };
                }
            }
        }
        completion
    }

    /// Returns the channel of a whole request; `None` if the caller executes it.
    fn channel_for(
        &self,
        path: CopyStrategy,
        request: &Request<'_>,
    ) -> Option<(usize, &ActiveEngine)> {
        let CopyStrategy::SingleDescriptor { engine } = path else { return None };
        let open = &self.engines[engine];
        match self.policy.choose(&open.channels, request.length) {
            // The caller cannot access device memory.
            Choice::Caller if request.is_host_only() => None,
            Choice::Caller => Some((0, open)),
            Choice::Channel { index, .. } => Some((index, open)),
        }
    }

    /// Returns up to `count` channels of a device, starting with the least loaded one. All channels
    /// use the same copy engines, so the first one suffices while it is idle.
    fn least_loaded_channels<'a>(
        &self,
        open: &'a ActiveEngine,
        count: usize,
    ) -> ChannelSelection<'a> {
        let outstanding = open.channels.iter().map(|channel| channel.outstanding_bytes());
        let first = outstanding.enumerate().min_by_key(|(_, bytes)| *bytes);
        let first = first.map_or(0, |(index, _)| index);
        let mut chosen = ChannelSelection::default();
        for turn in 0..count.min(open.channels.len()) {
            chosen.push(&open.channels[(first + turn) % open.channels.len()]);
        }
        chosen
    }

    /// Selects at most `count` channels that get a work offer: those that are awake, and as many
    /// sleeping ones as the copy is worth waking. If the caller does not wait, the channel that the
    /// policy chose is always among them; a waiting caller needs none. Returns none if the policy
    /// leaves the copy to the caller.
    fn select_channels<'a>(
        &self,
        open: &'a ActiveEngine,
        bytes: u64,
        count: usize,
        blocking: bool,
    ) -> ChannelSelection<'a> {
        let mut chosen = ChannelSelection::default();
        let Choice::Channel { index, first_channel: first_lane } =
            self.policy.choose(&open.channels, bytes)
        else {
            return chosen;
        };
        let lanes = &open.channels[first_lane..];
        let in_turn =
            || (0..lanes.len()).map(|turn| &lanes[(index - first_lane + turn) % lanes.len()]);
        let mut asleep = 0;
        for (turn, channel) in in_turn().enumerate() {
            if (turn > 0 || blocking) && channel.is_asleep() {
                asleep += 1;
            } else if chosen.len() < count {
                chosen.push(channel);
            }
        }
        let room = asleep.min(count - chosen.len());
        if room > 0 {
            let worth = self.worth_waking(bytes, blocking).min(room);
            // A channel that fell asleep or woke up since the loop above gets two work offers or
            // none; both are harmless.
            in_turn()
                .filter(|channel| channel.is_asleep())
                .take(worth)
                .for_each(|c| chosen.push(c));
        }
        chosen
    }

    /// Returns how many sleeping channels to wake. The bytes of copies that are too small for a
    /// wakeup add up, so that a program that makes many small copies gets its channels after a few
    /// of them.
    fn worth_waking(&self, bytes: u64, blocking: bool) -> usize {
        let owed = self.unwoken_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let worth = plan::worth_waking(&self.plan_context.profile, owed, blocking);
        if worth > 0 {
            self.unwoken_bytes.store(0, Ordering::Relaxed);
        }
        worth
    }

    /// # Safety
    /// As for [`Dispatch::now`].
    unsafe fn dispatch_batches(
        completion: &Arc<Completion>,
        after: &[Arc<Completion>],
        orders: impl IntoIterator<Item = ChannelBatch>,
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            if after.is_empty() {
                Dispatch::now(completion, orders);
            } else {
                Dispatch::after(after, completion.clone(), orders.into_iter().collect());
            }
        }
    }
}

impl ActiveEngine {
    fn has_auto_progress(&self) -> bool {
        self.engine.capabilities().auto_progress
    }

    /// Returns the registered memory of the engine, if it registers any: that of its submitter, or
    /// its own.
    pub(crate) fn registration_cache(&self) -> Option<&RegistrationCache> {
        match &self.registrations {
            Some(registrations) => Some(registrations.cache()),
            None => self.engine.registrations(),
        }
    }

    /// Submits a descriptor that completes by sequence. If the channel is full or closed, the
    /// calling thread executes it.
    ///
    /// The function is always inlined, so that the transfer is built where it is returned: copying
    /// it after the submit takes about 10 ns more.
    #[inline(always)]
    fn submit_sequence(&self, index: usize, descriptor: Descriptor) -> Transfer {
        let length = descriptor.length();
        // Every atomic read-modify-write comes before the submit: after it, such an instruction
        // would wait for the transfer of the channel's cache line.
        let lane = self.waiters[index].clone();
        match lane.channel.submit_one(descriptor) {
            Ok(sequence) => Transfer::sequenced(lane, sequence, length),
            Err(descriptor) => {
                descriptor.run();
                Transfer::done(length)
            }
        }
    }

    /// Returns a batch of one descriptor for a channel.
    fn batch(&self, channel: &Arc<dyn Channel>, descriptor: Descriptor) -> ChannelBatch {
        ChannelBatch::one(channel.clone(), self.has_auto_progress(), descriptor)
    }
}

/// Executes a small request on the calling thread, through the caches.
///
/// # Safety
/// As for [`Ferry::start_raw`](crate::Ferry::start_raw); the request must be validated, simple, and
/// over host memory.
#[inline]
pub(crate) unsafe fn copy_inline(request: &Request<'_>) -> Transfer {
    let Request { operation, source, target, length, value, .. } = *request;
    if length > 0 {
        // SAFETY: the caller upholds the contract.
        unsafe { Descriptor::new(operation, source, target, length).value(value) }.run();
    }
    Transfer::done(length)
}

/// The channels that get a work offer. Usually there is one, for which no list is allocated.
#[derive(Default)]
struct ChannelSelection<'a> {
    first: Option<&'a Arc<dyn Channel>>,
    others: Vec<&'a Arc<dyn Channel>>,
}

impl<'a> ChannelSelection<'a> {
    fn push(&mut self, channel: &'a Arc<dyn Channel>) {
        match self.first {
            None => self.first = Some(channel),
            Some(_) => self.others.push(channel),
        }
    }

    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    fn into_iter(self) -> impl Iterator<Item = &'a Arc<dyn Channel>> {
        self.first.into_iter().chain(self.others)
    }
}
