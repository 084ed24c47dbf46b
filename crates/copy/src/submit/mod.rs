//! Execution of a plan: from a validated request to descriptors on channels.

mod active_engine;
mod channel_selection;
mod dispatch;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use memferry_engine::contract::ReuseHint;
use memferry_engine::{Descriptor, MemoryKind, Opcode};

use crate::cookie::CookieTable;
use crate::error::ValidationError;
use crate::parts;
use crate::plan::{self, CopyPlan, CopyPlanContext, CopyQuery, CopyStrategy};
use crate::policy::{Choice, Policy};
use crate::poller::PollThread;
use crate::request::Request;
use crate::transfer::{Transfer, WaitConfig};

pub(crate) use active_engine::ActiveEngine;

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
