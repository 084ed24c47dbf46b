//! Execution of a plan: from a validated request to descriptors on channels.

mod active_engine;
pub(crate) mod batch;
pub(crate) mod channel_selection;
pub(crate) mod delivery_rates;
mod dispatch;
pub(crate) mod inline_limit;
pub(crate) mod share_pause;
pub(crate) mod share_rates;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use memferry_engine::completion::CrcVariable;
use memferry_engine::contract::ReuseHint;
use memferry_engine::runtime::is_engine_thread;
use memferry_engine::{Channel, Descriptor, Kernel, MemoryKind, Opcode};
use memferry_sys::copy;
use memferry_sys::probes;
use memferry_sys::stats::{self, kinds::CopyPath};

use crate::cookie::CookieTable;
use crate::error::ValidationError;
use crate::parts;
use crate::plan::{self, CopyPlan, CopyPlanContext, CopyQuery, CopyStrategy};
use crate::policy::{Choice, Policy};
use crate::poller::PollThread;
use crate::request::{CacheHint, Options, Request};
use crate::transfer::{Transfer, WaitConfig};

pub(crate) use active_engine::ActiveEngine;
pub(crate) use batch::EachBatch;
pub(crate) use delivery_rates::{DeliveryBy, DeliveryChoice, DeliveryRates};
pub(crate) use inline_limit::InlineLimit;
use inline_limit::SmallCopy;
pub(crate) use share_pause::{SharedChunks, SharedTimes};
use share_rates::{CopyWay, SharedWith};
pub(crate) use share_rates::{ShareChoice, ShareRates};

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
    pub(crate) inline_limit: InlineLimit,
    pub(crate) delivery_rates: DeliveryRates,
    /// `None` if the user has set the limit from which on copies are shared.
    pub(crate) share_rates: Option<ShareRates>,
}

impl Drop for FerryCore {
    /// Waits for the work of processors. A channel that passes a work offer on holds a handle of the
    /// next one, so dropping the handles here may not be the end of it. An engine thread does not
    /// wait for another.
    fn drop(&mut self) {
        const PARK_TIMEOUT: Duration = Duration::from_millis(100);
        if self.wait_config.is_forked() || is_engine_thread() {
            return;
        }
        let open = self.engines.iter().filter(|open| open.runs_lists);
        let channels: Vec<_> = open.flat_map(|open| &open.channels).collect();
        channels.iter().for_each(|channel| channel.close());
        for channel in channels {
            while !channel.park(channel.statistics().submitted, PARK_TIMEOUT) {}
        }
    }
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
        let plan = plan::plan(&self.plan_context, &question);
        let plan = plan.ok_or_else(|| self.plan_context.no_engine(&question))?;
        if !request.is_host_only() {
            self.check_device(request, plan.strategy)?;
        }
        probes::plan(|| {
            (request.length, plan.strategy.counted() as u64, format!("{:?}", plan.reason))
        });
        Ok(plan)
    }

    /// Plans a list of segments in host memory.
    pub(crate) fn plan_list(
        &self,
        operation: Opcode,
        bytes: u64,
        options: &Options<'_>,
        blocking: bool,
    ) -> Result<CopyPlan, ValidationError> {
        let question = CopyQuery {
            operation,
            cache_hint: options.cache_hint,
            no_caller_assist: options.no_caller_assist,
            ..CopyQuery::copy(bytes, blocking)
        };
        let plan = plan::plan(&self.plan_context, &question);
        plan.ok_or_else(|| self.plan_context.no_engine(&question))
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
            // A CRC has no target: both addresses are those of the source.
            Opcode::Fill | Opcode::Crc => target,
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
        if plan.strategy == CopyStrategy::Inline && request.is_plain_crc() {
            stats::thread(|counters| counters.count_copy(CopyPath::Inline, length));
            // SAFETY: the caller upholds the contract.
            let (_, crc) = unsafe { parts::single_descriptor(&request, plan) }.run_valued();
            let crc = crc.map(|crc| crc as u32);
            // SAFETY: as above, for the variable.
            unsafe { CrcVariable::store(request.crc_variable, crc) };
            return Transfer::done_with_crc(length, crc);
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

    /// Returns the channel of a small request; `None` if the caller executes it.
    #[inline(always)]
    pub(crate) fn channel_of_small(&self, length: u64) -> Option<usize> {
        match self.policy.choose(&self.engines[0].channels, length) {
            Choice::Channel { index, .. } => Some(index),
            Choice::Caller => None,
        }
    }

    /// Submits a small request: the result of [`FerryCore::plan`] and [`FerryCore::execute`] for
    /// it, without the planner.
    ///
    /// # Safety
    /// As for [`FerryCore::execute`]; the request must be simple, over host memory, and not longer
    /// than [`FerryCore::small_bytes`].
    #[inline(always)]
    pub(crate) unsafe fn submit_small_to(&self, channel: usize, request: &Request<'_>) -> Transfer {
        let Request { operation, source, target, length, value, .. } = *request;
        // SAFETY: the caller upholds the contract.
        let descriptor = unsafe { Descriptor::new(operation, source, target, length) }
            .value(value)
            .kernel(self.kernel_of_small());
        self.engines[0].submit_sequence(channel, descriptor.any_thread(), true)
    }

    /// The kernel of a small request: one of so many in flight that together they exceed the caches
    /// bypasses them.
    #[inline]
    fn kernel_of_small(&self) -> Kernel {
        let profile = &self.plan_context.profile;
        match self.policy.in_flight_bytes() >= profile.shared_stream_bytes as u64 {
            true => Kernel::Stream(profile.streaming),
            false => Kernel::Cached,
        }
    }

    /// Executes or submits a request that is executed inline if its data is in the caches.
    ///
    /// # Safety
    /// As for [`FerryCore::submit_small_to`].
    #[inline]
    pub(crate) unsafe fn copy_inline_or_submit(&self, request: &Request<'_>) -> Transfer {
        let length = request.length;
        // SAFETY: the caller upholds the contract.
        unsafe {
            if length <= plan::ALWAYS_INLINE_BYTES {
                return copy_inline(request);
            }
            match self.inline_limit.decide(length) {
                SmallCopy::Inline => copy_inline(request),
                SmallCopy::Measured => {
                    let start = Instant::now();
                    let transfer = copy_inline(request);
                    self.inline_limit.record(length, start);
                    transfer
                }
                SmallCopy::Submit => match self.awake_channel_for(length) {
                    Some(channel) => self.submit_small_to(channel, request),
                    None => copy_inline(request),
                },
            }
        }
    }

    /// Returns the channel of a small transfer, if it is awake or worth waking.
    fn awake_channel_for(&self, bytes: u64) -> Option<usize> {
        if bytes > self.inline_limit.small_bytes {
            return None;
        }
        let only = &self.engines[0];
        match self.policy.choose(&only.channels, bytes) {
            Choice::Channel { index, .. } => {
                let is_awake = !only.channels[index].is_asleep();
                (is_awake || self.is_worth_waking_for_small(bytes)).then_some(index)
            }
            Choice::Caller => None,
        }
    }

    /// Returns the plan with non-temporal stores, if it is one of so many asynchronous copies in
    /// flight that together they exceed the caches.
    pub(crate) fn in_window(&self, plan: CopyPlan, request: &Request<'_>) -> CopyPlan {
        let CopyStrategy::WorkSharing { engine, channels, .. } = plan.strategy else { return plan };
        let (open, profile) = (&self.engines[engine], &self.plan_context.profile);
        let is_free = plan.kernel == Kernel::Cached
            && request.options.cache_hint == CacheHint::Unknown
            && open.runs_lists;
        if !is_free {
            return plan;
        }
        let in_flight = |channel: &Arc<dyn Channel>| channel.outstanding_bytes();
        let backlog: u64 = open.channels.iter().take(channels).map(in_flight).sum();
        match request.length.saturating_add(backlog) >= profile.shared_stream_bytes as u64 {
            true => CopyPlan { kernel: Kernel::Stream(profile.streaming), ..plan },
            false => plan,
        }
    }

    /// Decides whether a blocking request is shared with processors as planned, and changes the plan and
    /// the request if not. Returns the decision, whose time is to be recorded; `None`: the plan stands.
    pub(crate) fn choose_sharing(
        &self,
        plan: &mut CopyPlan,
        request: &mut Request<'_>,
    ) -> Option<ShareChoice> {
        let is_measured = request.operation == Opcode::Copy && request.has_default_options();
        let with = match plan.strategy {
            CopyStrategy::HybridWorkSharing { .. } if is_measured => SharedWith::Engine,
            CopyStrategy::WorkSharing { engine, .. } if self.engines[engine].runs_lists => {
                if is_measured {
                    SharedWith::Caller
                } else {
                    SharedWith::UnmeasuredCaller
                }
            }
            _ => return None,
        };
        let Options { cache_hint, no_caller_assist, .. } = request.options;
        let has_choice = !no_caller_assist && !request.options.has_predecessors();
        let rates = self.share_rates.as_ref().filter(|_| has_choice)?;
        let choice = rates.decide(request.length, with);
        if choice.way == CopyWay::Alone {
            let operation = request.operation;
            let question =
                CopyQuery { operation, cache_hint, ..CopyQuery::copy(request.length, true) };
            if let CopyStrategy::HybridWorkSharing { engine, .. } = plan.strategy {
                *plan = plan::by_engine(&self.plan_context, &question, engine);
                request.options.no_caller_assist = true;
            } else {
                *plan = plan::by_caller(&self.plan_context, &question);
            }
        }
        Some(choice)
    }

    /// Decides who copies a delivery in `count` segments, of which `request` describes the target.
    /// `None`: the planner decides.
    pub(crate) fn choose_delivery(
        &self,
        count: usize,
        request: &Request<'_>,
        blocking: bool,
    ) -> Option<DeliveryChoice> {
        let has_choice = self.inline_limit.small_bytes > 0
            && !blocking
            && request.length <= plan::MAX_CALLER_BYTES
            && request.length < plan::STREAM_SEGMENT_BYTES.saturating_mul(count as u64)
            && !request.options.no_caller_assist
            && !request.options.has_predecessors()
            && !tracing::enabled!(tracing::Level::TRACE);
        has_choice.then(|| match request.length {
            ..=plan::ALWAYS_INLINE_BYTES => DeliveryChoice::INLINE,
            length => self.delivery_rates.decide(length),
        })
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
            stats::thread(|counters| counters.count_copy(CopyPath::Inline, length));
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
        let descriptor = unsafe { parts::single_descriptor(request, plan) };
        let Options { cache_hint, no_caller_assist, .. } = request.options;
        // A window may bypass the caches, so a transfer with a hint is in none.
        let descriptor = match cache_hint {
            CacheHint::Unknown if !no_caller_assist => descriptor.any_thread(),
            _ => descriptor,
        };
        Some(open.submit_sequence(index, descriptor, !no_caller_assist))
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
            // The caller executes what is planned for processors, and cannot access device memory.
            Choice::Caller if open.runs_lists && request.is_host_only() => None,
            Choice::Caller => Some((0, open)),
            Choice::Channel { index, .. } => Some((index, open)),
        }
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
    stats::thread(|counters| counters.count_copy(CopyPath::Inline, length));
    // SAFETY: the caller upholds the contract; copies of ranges that overlap are moves.
    unsafe {
        match operation {
            // Without a descriptor: a load of what was just stored in smaller parts would wait until
            // the stores of the copy before have left the store buffer.
            Opcode::Copy => copy::cached(target as *mut u8, source as *const u8, length as usize),
            _ if length == 0 => {}
            _ => drop(Descriptor::new(operation, source, target, length).value(value).run()),
        }
    }
    Transfer::done(length)
}
