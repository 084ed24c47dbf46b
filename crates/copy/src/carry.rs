//! Carrying out a plan: from a validated request to descriptors on channels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_engine::completion::{Completion, Launch, Order, Work};
use memferry_engine::contract::Acquaintance;
use memferry_engine::cuda::CudaEngine;
use memferry_engine::{Channel, Descriptor, Engine, MemoryKind, Operation};

use crate::cookie::CookieTable;
use crate::driver::Driver;
use crate::error::ValidationError;
use crate::parts::{self, Cut};
use crate::plan::{self, Facts, Path, Plan, Question};
use crate::policy::{Choice, Policy};
use crate::registration::{PinnedPieces, Registration};
use crate::request::{Extras, Request};
use crate::statistics::PinStatistics;
use crate::transfer::{Lane, Transfer, Waiting};

/// What all clones of a ferry share.
#[derive(Debug)]
pub(crate) struct Inner {
    /// First, so that it is dropped first: it drains the channels it drives.
    pub(crate) _driver: Option<Driver>,
    pub(crate) engines: Vec<OpenEngine>,
    pub(crate) facts: Facts,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) cookies: CookieTable,
    /// Bytes of blocking copies for which no channel was woken since the last time one was.
    pub(crate) owed_bytes: AtomicU64,
    pub(crate) waiting: Arc<Waiting>,
    /// The GPU among the engines, if the builder opened one.
    pub(crate) gpu: Option<Arc<CudaEngine>>,
}

/// An engine with its channels.
#[derive(Debug)]
pub(crate) struct OpenEngine {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) channels: Vec<Arc<dyn Channel>>,
    /// The same channels, for numbered transfers.
    pub(crate) lanes: Vec<Arc<Lane>>,
    /// Its pinned memory, if it needs any.
    pub(crate) registration: Option<Registration>,
    /// The number of a small descriptor says all there is to say: none fails, and none has pins.
    pub(crate) numbers_suffice: bool,
}

impl Inner {
    pub(crate) fn plan(
        &self,
        request: &Request<'_>,
        blocking: bool,
    ) -> Result<Plan, ValidationError> {
        let question = Question {
            operation: request.operation,
            bytes: request.length,
            blocking,
            temperature: request.options.temperature,
            spare_caller: request.options.spare_caller,
            source_memory: request.source_memory,
            target_memory: request.target_memory,
            acquaintance: self.meet(request),
        };
        let plan = plan::plan(&self.facts, &question).ok_or(ValidationError::NoEngine)?;
        if !request.is_host_only() {
            self.check_device(request, plan.path)?;
        }
        Ok(plan)
    }

    /// Refuses memory of a device that the engine of a plan does not reach: another device's.
    fn check_device(&self, request: &Request<'_>, path: Path) -> Result<(), ValidationError> {
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

    /// What an engine that registers memory knows of a request's. From now on it knows it.
    fn meet(&self, request: &Request<'_>) -> Acquaintance {
        let registry = self.engines.iter().find_map(|open| open.engine.registry());
        let Some(registry) = registry else { return Acquaintance::New };
        let meet = |kind, address| match kind {
            MemoryKind::Host if request.length < plan::REMEMBERED_BYTES => {
                registry.acquaintance(address, request.length)
            }
            MemoryKind::Host => registry.meet(address, request.length),
            MemoryKind::Device => Acquaintance::Known,
        };
        let target = meet(request.target_memory, request.target);
        match request.operation {
            Operation::Fill => target,
            _ => target.min(meet(request.source_memory, request.source)),
        }
    }

    /// # Safety
    /// As for [`Ferry::start`]; the request must have been validated.
    pub(crate) unsafe fn carry_out(
        &self,
        request: Request<'_>,
        plan: &Plan,
        blocking: bool,
    ) -> Transfer {
        let length = request.length;
        if request.is_simple() {
            // SAFETY: passed on.
            if let Some(transfer) = unsafe { self.carry_out_simply(&request, plan) } {
                return transfer;
            }
        }
        let helps = !request.options.spare_caller;
        // SAFETY: passed on.
        let completion = unsafe { self.launch(request, plan, blocking) };
        Transfer::shared(completion, length, helps, self.waiting.clone())
    }

    /// Up to this size every copy, move or fill of ordinary memory that is not done at once is one
    /// descriptor, through the caches, of which the number is kept. 0 if the plan has to be asked.
    pub(crate) fn small_bytes(&self) -> u64 {
        let [only] = &self.engines[..] else { return 0 };
        let capabilities = only.engine.capabilities();
        let does = |operation| capabilities.operations.contains(operation);
        let is_plain = only.numbers_suffice
            && only.engine.registry().is_none()
            && capabilities.claims_chunks
            && capabilities.memory.contains(MemoryKind::Host)
            && [Operation::Copy, Operation::Move, Operation::Fill].into_iter().all(does);
        let cached = (self.facts.profile.stream_bytes as u64).saturating_sub(1);
        if is_plain { plan::WHOLE_BYTES.min(cached) } else { 0 }
    }

    /// Hands over a small request: what [`Inner::plan`] and [`Inner::carry_out`] come to for it.
    ///
    /// # Safety
    /// As for [`Inner::carry_out`]; the request must be simple, over ordinary memory, and not longer than
    /// [`Inner::small_bytes`].
    #[inline(always)]
    pub(crate) unsafe fn hand_over_small(&self, request: &Request<'_>) -> Transfer {
        let Request { operation, source, target, length, value, .. } = *request;
        let only = &self.engines[0];
        let choice = self.policy.choose(&only.channels, length);
        // SAFETY: passed on.
        let descriptor = unsafe { Descriptor::new(operation, source, target, length) }.value(value);
        let Choice::Channel { index, .. } = choice else {
            descriptor.run();
            return Transfer::over(length);
        };
        only.submit_numbered(index, descriptor)
    }

    /// The two ways that need no completion: done at once, or a number in a channel. `None` if
    /// neither is open to this request.
    ///
    /// # Safety
    /// As for [`Inner::carry_out`].
    unsafe fn carry_out_simply(&self, request: &Request<'_>, plan: &Plan) -> Option<Transfer> {
        let length = request.length;
        if length == 0 {
            return Some(Transfer::over(0));
        }
        if plan.path == Path::Caller {
            // SAFETY: passed on.
            unsafe { parts::whole(request, plan) }.run();
            return Some(Transfer::over(length));
        }
        let (index, open) = self.channel_for(plan.path, request)?;
        if length > plan::WHOLE_BYTES || !open.numbers_suffice || !request.is_host_only() {
            return None;
        }
        // SAFETY: passed on.
        Some(open.submit_numbered(index, unsafe { parts::whole(request, plan) }))
    }

    /// # Safety
    /// As for [`Inner::carry_out`].
    unsafe fn launch(
        &self,
        mut request: Request<'_>,
        plan: &Plan,
        blocking: bool,
    ) -> Arc<Completion> {
        let Extras { after, notify, kept } = request.options.take_extras();
        let completion = match plan.path {
            Path::Chunks { chunk_bytes, .. }
            | Path::Split { chunk_bytes, .. }
            | Path::Parts { chunk_bytes, .. } => {
                let Request { operation, source, target, length, value, .. } = request;
                // SAFETY: the caller of `start` vouches for the memory until the transfer is over.
                let work = unsafe {
                    Work::new(operation, plan.kernel, source, target, length, value, chunk_bytes)
                };
                Completion::chunked(work.in_memory(request.source_memory, request.target_memory))
            }
            Path::Caller | Path::Whole { .. } => Completion::whole(),
        };
        let span = tracing::trace_span!(
            "transfer",
            operation = ?request.operation,
            bytes = request.length,
            path = ?plan.path,
            kernel = plan.kernel.name(),
        );
        let completion = Arc::new(completion.notifying(notify).traced(span));
        if let Some(variable) = kept {
            let _ = completion.keep_until_end(variable);
        }
        if request.length == 0 {
            // SAFETY: the completion is new, and there is nothing to report to it.
            unsafe { Self::hand_over(&completion, &after, std::iter::empty()) };
            return completion;
        }
        match plan.path {
            Path::Caller | Path::Whole { .. } => {
                // SAFETY: passed on; nothing else reports to the completion.
                let whole = unsafe { parts::whole(&request, plan).completes(completion.clone()) };
                let order = match self.channel_for(plan.path, &request) {
                    Some((index, open)) => {
                        let submit = |whole| {
                            Order::one(open.channels[index].clone(), open.is_self_driving(), whole)
                        };
                        match &open.registration {
                            Some(registration) => {
                                let variable = registration.variable(notify.as_ref());
                                registration.whole(&request, whole, variable, submit)
                            }
                            None => submit(whole),
                        }
                    }
                    None => Order::here(whole),
                };
                // SAFETY: the completion is this transfer\'s, and these are all its descriptors.
                unsafe { Self::hand_over(&completion, &after, [order]) };
            }
            Path::Chunks { engine, channels, .. } => {
                let open = &self.engines[engine];
                let orders = match open.engine.registry() {
                    Some(_) => self.all_invited(open, channels),
                    None => self.invited(open, request.length, channels, blocking),
                };
                let orders = orders.into_iter();
                let invitation = || Descriptor::chunks(completion.clone()).passing(plan.passing);
                let orders = orders.map(|channel| open.order(channel, invitation()));
                // SAFETY: the completion is this transfer\'s, and these are all its descriptors.
                unsafe { Self::hand_over(&completion, &after, orders) };
            }
            Path::Split { engine, processors, channels, .. } => {
                let quick = &self.engines[engine];
                let first = self.all_invited(quick, 1).into_iter();
                let invitation = || Descriptor::chunks(completion.clone()).shared(true);
                let first = first.map(|channel| quick.order(channel, invitation()));
                let others = &self.engines[processors];
                let invited = self.invited(others, request.length, channels, blocking).into_iter();
                let invited = invited.map(|channel| others.order(channel, invitation()));
                // SAFETY: the completion is this transfer\'s, and these are all its descriptors.
                unsafe { Self::hand_over(&completion, &after, first.chain(invited)) };
            }
            Path::Parts { engine, .. } => {
                let open = &self.engines[engine];
                let index = match self.policy.choose(&open.channels, request.length) {
                    Choice::Channel { index, .. } => index,
                    Choice::Caller => 0,
                };
                let channel = open.channels[index].clone();
                let capabilities = open.engine.capabilities();
                let cut = Cut { request: &request, plan, capabilities, completion: &completion };
                if let Some(registration) = &open.registration {
                    let variable = registration.variable(notify.as_ref());
                    // SAFETY: passed on; the completion is nobody else's before this returns.
                    let pieces = unsafe { PinnedPieces::new(registration, cut, channel, variable) };
                    // SAFETY: the completion is this transfer\'s, and these are all its descriptors.
                    unsafe { Self::hand_over(&completion, &after, pieces) };
                } else {
                    // SAFETY: passed on.
                    let parts = unsafe { cut.all() };
                    let order = Order::many(channel, open.is_self_driving(), parts);
                    // SAFETY: the completion is this transfer\'s, and these are all its descriptors.
                    unsafe { Self::hand_over(&completion, &after, [order]) };
                }
            }
        }
        completion
    }

    /// Where a whole request goes; `None` if the caller carries it out.
    fn channel_for(&self, path: Path, request: &Request<'_>) -> Option<(usize, &OpenEngine)> {
        let Path::Whole { engine } = path else { return None };
        let open = &self.engines[engine];
        match self.policy.choose(&open.channels, request.length) {
            // What no processor reaches the caller cannot do.
            Choice::Caller if request.is_host_only() => None,
            Choice::Caller => Some((0, open)),
            Choice::Channel { index, .. } => Some((index, open)),
        }
    }

    /// As many channels of a device as are wanted, from the one on that has least to do. All of them
    /// use the same copy engines, so that the first will do while it is idle.
    fn all_invited<'a>(&self, open: &'a OpenEngine, count: usize) -> Invited<'a> {
        let outstanding = open.channels.iter().map(|channel| channel.outstanding_bytes());
        let first = outstanding.enumerate().min_by_key(|(_, bytes)| *bytes);
        let first = first.map_or(0, |(index, _)| index);
        let mut chosen = Invited::default();
        for turn in 0..count.min(open.channels.len()) {
            chosen.push(&open.channels[(first + turn) % open.channels.len()]);
        }
        chosen
    }

    /// The channels that are invited to claim chunks, at most `count`: those that are awake, and as
    /// many sleeping ones as the copy is worth waking. A caller that goes on needs one at least,
    /// the one that the policy chose; one that waits can do without any. None if the policy leaves
    /// the copy to the caller.
    fn invited<'a>(
        &self,
        open: &'a OpenEngine,
        bytes: u64,
        count: usize,
        blocking: bool,
    ) -> Invited<'a> {
        let mut chosen = Invited::default();
        let Choice::Channel { index, first_lane } = self.policy.choose(&open.channels, bytes)
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
            // A channel that fell asleep or woke meanwhile is invited twice or not at all: neither
            // does harm.
            in_turn()
                .filter(|channel| channel.is_asleep())
                .take(worth)
                .for_each(|c| chosen.push(c));
        }
        chosen
    }

    /// How many sleeping channels to wake. Copies that are too small for it by themselves add up,
    /// so that a program that makes many of them gets its channels after a few.
    fn worth_waking(&self, bytes: u64, blocking: bool) -> usize {
        let owed = self.owed_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let worth = plan::worth_waking(&self.facts.profile, owed, blocking);
        if worth > 0 {
            self.owed_bytes.store(0, Ordering::Relaxed);
        }
        worth
    }

    /// # Safety
    /// As for [`Launch::now`].
    unsafe fn hand_over(
        completion: &Arc<Completion>,
        after: &[Arc<Completion>],
        orders: impl IntoIterator<Item = Order>,
    ) {
        // SAFETY: passed on.
        unsafe {
            if after.is_empty() {
                Launch::now(completion, orders);
            } else {
                Launch::after(after, completion.clone(), orders.into_iter().collect());
            }
        }
    }
}

impl OpenEngine {
    fn is_self_driving(&self) -> bool {
        self.engine.capabilities().self_driving
    }

    /// What was pinned for it, if it needs that.
    pub(crate) fn pin_statistics(&self, is_forked: bool) -> Option<PinStatistics> {
        if let Some(registration) = &self.registration {
            return Some(registration.statistics());
        }
        let registry = self.engine.registry()?;
        // A lock that was held at a fork is held for ever in the child.
        let (refused, last_refusal) = if is_forked { (0, None) } else { registry.refusals() };
        let (cache, watching) = (registry.cache().statistics(), registry.cache().watching());
        Some(PinStatistics { cache, watching, refused, refused_bytes: 0, last_refusal })
    }

    /// Submits a descriptor of which the number is kept, or carries it out: there is a thread here that
    /// can work while the channel is full or closed.
    ///
    /// Always inlined, so that the transfer is built where it is returned: copying it after the submit
    /// takes some 10 ns more.
    #[inline(always)]
    fn submit_numbered(&self, index: usize, descriptor: Descriptor) -> Transfer {
        let length = descriptor.length();
        // Everything that takes a locked instruction comes before the submit: after it, such an
        // instruction would wait until the channel's cache line has come over.
        let lane = self.lanes[index].clone();
        match lane.channel.submit_one(descriptor) {
            Ok(sequence) => Transfer::numbered(lane, sequence, length),
            Err(descriptor) => {
                descriptor.run();
                Transfer::over(length)
            }
        }
    }

    /// A descriptor for a channel.
    fn order(&self, channel: &Arc<dyn Channel>, descriptor: Descriptor) -> Order {
        Order::one(channel.clone(), self.is_self_driving(), descriptor)
    }
}

/// Carries out a small request on the calling processor, through the caches.
///
/// # Safety
/// As for [`Ferry::start`](crate::Ferry::start); the request must have been validated, simple, and
/// over ordinary memory.
#[inline]
pub(crate) unsafe fn at_once(request: &Request<'_>) -> Transfer {
    let Request { operation, source, target, length, value, .. } = *request;
    if length > 0 {
        // SAFETY: passed on.
        unsafe { Descriptor::new(operation, source, target, length).value(value) }.run();
    }
    Transfer::over(length)
}

/// Invited channels. Most often there is one, for which no list is allocated.
#[derive(Default)]
struct Invited<'a> {
    first: Option<&'a Arc<dyn Channel>>,
    others: Vec<&'a Arc<dyn Channel>>,
}

impl<'a> Invited<'a> {
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
