//! The ferry: engines with open channels, and the calls that put them to work.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memferry_engine::completion::{Completion, Finish, Launch, Order, Work};
use memferry_engine::{Channel, Descriptor, Engine, Taken};

use crate::builder::Builder;
use crate::cookie::{Cookie, CookieTable, Known};
use crate::driver::Driver;
use crate::error::{BuildError, Error, ValidationError};
use crate::plan::{self, Facts, Path, Plan, Question};
use crate::policy::{Choice, Policy};
use crate::request::{Options, Request};
use crate::statistics::{Counters, Statistics};
use crate::transfer::{Failed, Lane, OwnedSource, OwnedTarget, OwnedTransfer, Transfer, Waiting};

/// Moves memory. Cheap to clone; clones share engines, channels and cookies. When the last clone
/// is dropped, transfers in flight are finished and the channels closed.
#[derive(Debug, Clone)]
pub struct Ferry {
    /// Blocking copies below this size are a plain `memcpy`. Kept here, beside the pointer, so
    /// that finding out costs nothing.
    plain_below: usize,
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// First, so that it is dropped first: it drains the channels it drives.
    pub(crate) driver: Option<Driver>,
    pub(crate) engines: Vec<OpenEngine>,
    pub(crate) facts: Facts,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) cookies: CookieTable,
    pub(crate) counters: Counters,
    pub(crate) waiting: Arc<Waiting>,
}

/// An engine with its channels.
#[derive(Debug)]
pub(crate) struct OpenEngine {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) channels: Vec<Arc<dyn Channel>>,
    /// The same channels, for numbered transfers.
    pub(crate) lanes: Vec<Arc<Lane>>,
}

impl Ferry {
    /// A ferry with the usual settings: the processor engine, leaving one core to the application.
    pub fn new() -> Result<Self, BuildError> {
        Builder::new().build()
    }

    /// A ferry with settings.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(crate) fn from_inner(inner: Inner) -> Self {
        let profile = &inner.facts.profile;
        let plain_below = profile.split_bytes.min(profile.stream_bytes);
        Self { plain_below, inner: Arc::new(inner) }
    }

    /// Copies `source` to `target`, which must be of equal length, and returns when it is done.
    #[inline]
    pub fn copy(&self, source: &[u8], target: &mut [u8]) -> Result<(), Error> {
        if source.len() == target.len() && source.len() < self.plain_below {
            target.copy_from_slice(source);
            return Ok(());
        }
        self.copy_large(source, target)
    }

    fn copy_large(&self, source: &[u8], target: &mut [u8]) -> Result<(), Error> {
        self.copy_with(source, target, Options::new())
    }

    /// As [`Ferry::copy`], with wishes.
    pub fn copy_with(
        &self,
        source: &[u8],
        target: &mut [u8],
        options: Options<'_>,
    ) -> Result<(), Error> {
        check_lengths(source.len(), target.len())?;
        let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), target.len());
        // SAFETY: both slices are borrowed until this returns, which is after the end.
        unsafe { self.run(request.with(options)) }.map(|_| ())
    }

    /// Copies a range of a buffer to another place in it, with memmove's result, and returns when
    /// it is done.
    pub fn copy_within(
        &self,
        buffer: &mut [u8],
        source: impl RangeBounds<usize>,
        target: usize,
    ) -> Result<(), Error> {
        let from = match source.start_bound() {
            Bound::Included(&at) => at,
            Bound::Excluded(&at) => at.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let to = match source.end_bound() {
            Bound::Included(&at) => at.saturating_add(1),
            Bound::Excluded(&at) => at,
            Bound::Unbounded => buffer.len(),
        };
        let inside = |from: usize, to: usize| {
            let (from, to, length) = (from as u64, to as u64, buffer.len() as u64);
            if from <= to && to <= length {
                Ok(())
            } else {
                Err(ValidationError::OutOfRange { from, to, length })
            }
        };
        inside(from, to)?;
        inside(target, target.saturating_add(to - from))?;
        let start = buffer.as_mut_ptr();
        // SAFETY: both ranges were checked to lie inside the buffer, which is borrowed until this
        // returns, after the end.
        unsafe {
            let request = Request::copy(start.add(from), start.add(target), to - from);
            self.run(request).map(|_| ())
        }
    }

    /// Sets every byte of `target` to `value` and returns when it is done.
    pub fn fill(&self, target: &mut [u8], value: u8) -> Result<(), Error> {
        // SAFETY: the slice is borrowed until this returns, which is after the end.
        unsafe { self.run(Request::fill(target.as_mut_ptr(), value, target.len())) }.map(|_| ())
    }

    /// The offset of the first byte in which two slices of equal length differ, if any.
    pub fn compare(&self, left: &[u8], right: &[u8]) -> Result<Option<usize>, Error> {
        check_lengths(left.len(), right.len())?;
        let request = Request::compare(left.as_ptr(), right.as_ptr(), left.len());
        // SAFETY: both slices are borrowed until this returns, which is after the end; a compare
        // only reads.
        let finish = unsafe { self.run(request) }?;
        Ok(finish.difference.map(|at| at as usize))
    }

    /// Starts copying between owned buffers of equal length; they come back at the end.
    pub fn icopy_owned<S: OwnedSource, T: OwnedTarget>(
        &self,
        source: S,
        target: T,
    ) -> Result<OwnedTransfer<S, T>, Failed<S, T>> {
        self.icopy_owned_with(source, target, Options::new())
    }

    /// As [`Ferry::icopy_owned`], with wishes.
    pub fn icopy_owned_with<S: OwnedSource, T: OwnedTarget>(
        &self,
        source: S,
        target: T,
        options: Options<'static>,
    ) -> Result<OwnedTransfer<S, T>, Failed<S, T>> {
        OwnedTransfer::start(source, target, |(from, from_length), (to, length)| {
            check_lengths(from_length, length)?;
            // SAFETY: the transfer owns both buffers and gives neither back before its end.
            unsafe { self.start(Request::copy(from, to, length).with(options)) }
        })
    }

    /// Starts filling an owned buffer; it comes back at the end.
    pub fn ifill_owned<T: OwnedTarget>(
        &self,
        target: T,
        value: u8,
        options: Options<'static>,
    ) -> Result<OwnedTransfer<(), T>, Failed<(), T>> {
        OwnedTransfer::start((), target, |_, (to, length)| {
            // SAFETY: the transfer owns the buffer and does not give it back before its end.
            unsafe { self.start(Request::fill(to, value, length).with(options)) }
        })
    }

    /// Starts copying `length` bytes between raw ranges, which may overlap; the cookie is for
    /// [`Ferry::check`] and [`Ferry::wait`].
    ///
    /// # Safety
    /// As for [`Ferry::start`].
    pub unsafe fn icopy(
        &self,
        source: *const u8,
        target: *mut u8,
        length: usize,
    ) -> Result<Cookie, Error> {
        // SAFETY: passed on.
        unsafe { self.start_cookie(Request::copy(source, target, length)) }
    }

    /// Starts a request over raw memory and returns its cookie.
    ///
    /// # Safety
    /// As for [`Ferry::start`].
    pub unsafe fn start_cookie(&self, request: Request<'_>) -> Result<Cookie, Error> {
        // SAFETY: passed on.
        let transfer = unsafe { self.start(request) }?;
        match self.inner.cookies.insert(transfer.clone()) {
            Ok(cookie) => Ok(cookie),
            Err(error) => {
                // Without a cookie nobody could wait for it later.
                let _ = transfer.wait();
                Err(error.into())
            }
        }
    }

    /// Whether the transfer of a cookie is over. If it is, asking again gives the same answer.
    pub fn check(&self, cookie: Cookie) -> Result<bool, Error> {
        match self.inner.cookies.find(cookie)? {
            Known::Over(outcome) => Ok(outcome.map(|()| true)?),
            Known::Transfer(transfer) => transfer.check().map_or(Ok(false), |o| o.map(|_| true)),
        }
    }

    /// Waits for the transfer of a cookie. If it is over, waiting again gives the same answer.
    pub fn wait(&self, cookie: Cookie) -> Result<(), Error> {
        match self.inner.cookies.find(cookie)? {
            Known::Over(outcome) => Ok(outcome?),
            Known::Transfer(transfer) => transfer.wait().map(|_| ()),
        }
    }

    /// Starts a request over raw memory.
    ///
    /// # Safety
    /// Until the transfer is over, the source must stay valid for reads and the target for writes
    /// of the request's length, nobody else may access the target or write to the source, and a
    /// notification variable must stay valid. Dropping the handle changes nothing of this.
    #[inline]
    pub unsafe fn start(&self, mut request: Request<'_>) -> Result<Transfer, Error> {
        request.validate()?;
        let plan = self.inner.plan(&request, false)?;
        // SAFETY: passed on.
        Ok(unsafe { self.inner.carry_out(request, &plan) })
    }

    /// Carries out a request over raw memory and returns when it is over.
    ///
    /// # Safety
    /// As for [`Ferry::start`], until this returns.
    pub unsafe fn run(&self, mut request: Request<'_>) -> Result<Finish, Error> {
        request.validate()?;
        let plan = self.inner.plan(&request, true)?;
        // SAFETY: passed on; the wait makes sure that it is over.
        unsafe { self.inner.carry_out(request, &plan) }.wait()
    }

    /// What would be done with a request, and why, without doing it.
    pub fn explain(&self, question: &Question) -> Option<Plan> {
        plan::plan(&self.inner.facts, question)
    }

    /// What the planner goes by.
    pub fn facts(&self) -> &Facts {
        &self.inner.facts
    }

    /// The policy that spreads transfers over channels.
    pub fn policy(&self) -> &dyn Policy {
        &*self.inner.policy
    }

    /// What was done so far.
    pub fn statistics(&self) -> Statistics {
        let Inner { engines, counters, waiting, .. } = &*self.inner;
        let channels = |open: &OpenEngine| open.channels.iter().map(|c| c.statistics()).collect();
        Statistics {
            by_caller: counters.by_caller.load(Ordering::Relaxed),
            by_engine: counters.by_engine.load(Ordering::Relaxed),
            helped_chunks: waiting.helped_chunks.load(Ordering::Relaxed),
            engines: engines.iter().map(|o| (o.engine.name().into(), channels(o))).collect(),
        }
    }
}

fn check_lengths(source: usize, target: usize) -> Result<(), ValidationError> {
    if source == target {
        return Ok(());
    }
    let (source_bytes, target_bytes) = (source as u64, target as u64);
    Err(ValidationError::LengthMismatch { source_bytes, target_bytes })
}

impl Inner {
    fn plan(&self, request: &Request<'_>, blocking: bool) -> Result<Plan, ValidationError> {
        let question = Question {
            operation: request.operation,
            bytes: request.length,
            blocking,
            temperature: request.options.temperature,
            spare_caller: request.options.spare_caller,
            source_memory: request.source_memory,
            target_memory: request.target_memory,
        };
        plan::plan(&self.facts, &question).ok_or(ValidationError::NoEngine)
    }

    /// # Safety
    /// As for [`Ferry::start`]; the request must have been validated.
    #[inline]
    unsafe fn carry_out(&self, request: Request<'_>, plan: &Plan) -> Transfer {
        let length = request.length;
        if request.is_simple() {
            // SAFETY: passed on.
            if let Some(transfer) = unsafe { self.carry_out_simply(&request, plan) } {
                return transfer;
            }
        }
        let helps = !request.options.spare_caller;
        // SAFETY: passed on.
        let completion = unsafe { self.launch(request, plan) };
        Transfer::shared(completion, length, helps, self.waiting.clone())
    }

    /// The two ways that need no completion: done at once, or a number in a channel. `None` if
    /// neither is open to this request.
    ///
    /// # Safety
    /// As for [`Inner::carry_out`].
    #[inline]
    unsafe fn carry_out_simply(&self, request: &Request<'_>, plan: &Plan) -> Option<Transfer> {
        let length = request.length;
        if length == 0 {
            return Some(Transfer::over(0));
        }
        if plan.path == Path::Caller {
            // SAFETY: passed on.
            unsafe { descriptor(request, plan) }.run();
            Counters::count(&self.counters.by_caller);
            return Some(Transfer::over(length));
        }
        let (index, open) = self.channel_for(plan.path, length)?;
        if length > plan::WHOLE_BYTES || !open.engine.capabilities().never_fails {
            return None;
        }
        // Everything that takes a locked instruction comes before the submit: after it, such an
        // instruction would wait until the channel's cache line has come over.
        Counters::count(&self.counters.by_engine);
        let lane = open.lanes[index].clone();
        // SAFETY: passed on.
        let mut batch = [Some(unsafe { descriptor(request, plan) })];
        if let Ok(Taken { first, count: 1 }) = lane.channel.submit(&mut batch) {
            return Some(Transfer::numbered(lane, first, length));
        }
        // Full or closed: there is a thread here that can work.
        batch.into_iter().flatten().for_each(|descriptor| {
            descriptor.run();
        });
        Some(Transfer::over(length))
    }

    /// # Safety
    /// As for [`Inner::carry_out`].
    #[inline(never)]
    unsafe fn launch(&self, mut request: Request<'_>, plan: &Plan) -> Arc<Completion> {
        let Options { after, notify, kept, .. } = std::mem::take(&mut request.options);
        let completion = match plan.path {
            Path::Chunks { chunk_bytes, .. } | Path::Parts { chunk_bytes, .. } => {
                let Request { operation, source, target, length, value, .. } = request;
                // SAFETY: the caller of `start` vouches for the memory until the transfer is over.
                Completion::chunked(unsafe {
                    Work::new(operation, plan.kernel, source, target, length, value, chunk_bytes)
                })
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
            self.hand_over(&completion, &after, std::iter::empty());
            return completion;
        }
        match plan.path {
            Path::Caller | Path::Whole { .. } => {
                // SAFETY: passed on.
                let whole = unsafe { descriptor(&request, plan) }.completes(completion.clone());
                let order = match self.channel_for(plan.path, request.length) {
                    Some((index, open)) => {
                        Order::one(open.channels[index].clone(), open.is_self_driving(), whole)
                    }
                    None => Order::here(whole),
                };
                self.hand_over(&completion, &after, [order]);
            }
            Path::Chunks { engine, channels, .. } => {
                let open = &self.engines[engine];
                let chosen = self.invited(open, request.length, channels);
                let orders = chosen.map(|channel| {
                    let invitation = Descriptor::chunks(completion.clone());
                    Order::one(channel.clone(), open.is_self_driving(), invitation)
                });
                self.hand_over(&completion, &after, orders);
            }
            Path::Parts { engine, .. } => {
                let open = &self.engines[engine];
                // SAFETY: passed on.
                let parts = unsafe { parts(&request, plan, open, &completion) };
                let index = match self.policy.choose(&open.channels, request.length) {
                    Choice::Channel { index, .. } => index,
                    Choice::Caller => 0,
                };
                let channel = open.channels[index].clone();
                let order = Order::many(channel, open.is_self_driving(), parts);
                self.hand_over(&completion, &after, [order]);
            }
        }
        completion
    }

    /// Where a whole request goes; `None` if the caller carries it out.
    fn channel_for(&self, path: Path, bytes: u64) -> Option<(usize, &OpenEngine)> {
        let Path::Whole { engine } = path else { return None };
        let open = &self.engines[engine];
        match self.policy.choose(&open.channels, bytes) {
            Choice::Caller => None,
            Choice::Channel { index, .. } => Some((index, open)),
        }
    }

    /// The channels that are invited to claim chunks; none if the policy leaves it to the caller.
    fn invited<'a>(
        &self,
        open: &'a OpenEngine,
        bytes: u64,
        count: usize,
    ) -> impl Iterator<Item = &'a Arc<dyn Channel>> + use<'a> {
        let (first_lane, start, count) = match self.policy.choose(&open.channels, bytes) {
            Choice::Caller => (0, 0, 0),
            Choice::Channel { index, first_lane } => (first_lane, index - first_lane, count),
        };
        let lanes = &open.channels[first_lane..];
        (0..count.min(lanes.len())).map(move |turn| &lanes[(start + turn) % lanes.len()])
    }

    fn hand_over(
        &self,
        completion: &Arc<Completion>,
        after: &[Arc<Completion>],
        orders: impl IntoIterator<Item = Order>,
    ) {
        Counters::count(&self.counters.by_engine);
        if after.is_empty() {
            Launch::now(completion, orders);
        } else {
            Launch::after(after, completion.clone(), orders.into_iter().collect());
        }
        if let Some(driver) = &self.driver {
            driver.launched();
        }
    }
}

impl OpenEngine {
    fn is_self_driving(&self) -> bool {
        self.engine.capabilities().self_driving
    }
}

/// The whole request as one descriptor.
///
/// # Safety
/// As for [`Ferry::start`].
unsafe fn descriptor(request: &Request<'_>, plan: &Plan) -> Descriptor {
    // SAFETY: the caller of `start` vouches for the memory; overlapping copies were turned into
    // moves by the validation.
    unsafe {
        Descriptor::new(request.operation, request.source, request.target, request.length)
            .value(request.value)
            .kernel(plan.kernel)
            .memory(request.source_memory, request.target_memory)
    }
}

/// The request cut as an engine demands, never across a chunk, every chunk claimed.
///
/// # Safety
/// As for [`Ferry::start`].
unsafe fn parts(
    request: &Request<'_>,
    plan: &Plan,
    open: &OpenEngine,
    completion: &Arc<Completion>,
) -> Vec<Descriptor> {
    let work = completion.work().expect("parts belong to chunked work");
    let capabilities = open.engine.capabilities();
    let mut parts = Vec::new();
    while let Some(chunk) = work.claim_front() {
        let end = chunk.offset + chunk.length;
        let mut offset = chunk.offset;
        while offset < end {
            let (source, target) = (request.source + offset, request.target + offset);
            let length = capabilities.longest_piece(source, target, end - offset);
            // SAFETY: a part of the memory that the caller of `start` vouches for.
            let part = unsafe { Descriptor::new(request.operation, source, target, length) };
            parts.push(
                part.value(request.value)
                    .kernel(plan.kernel)
                    .memory(request.source_memory, request.target_memory)
                    .part_of(completion.clone(), offset),
            );
            offset += length;
        }
    }
    parts
}
