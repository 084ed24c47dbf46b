//! The ferry: the calls that start transfers.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytemuck::Pod;
use memferry_engine::completion::TransferOutput;

use crate::builder::FerryBuilder;
use crate::cookie::{Cookie, CookieStatus};
use crate::error::{BuildError, Error, ValidationError};
use crate::learned::LearnedValues;
use crate::plan::{self, CopyPlan, CopyPlanContext, CopyQuery};
use crate::policy::PolicyKind;
use crate::request::{Options, Request};
use crate::statistics::Statistics;
use crate::submit::{ActiveEngine, FerryCore, ShareRates, SharedTimes, copy_inline};
use crate::transfer::{FailedTransfer, OwnedSource, OwnedTarget, OwnedTransfer, Transfer};
use memferry_sys::stats;

/// Copies memory with one or more engines. A clone is cheap and shares engines, channels and
/// cookies. When the last clone is dropped, the channels drain and close. A transfer that depends
/// on another one, or whose handle still exists, may complete later: its memory is free when the
/// handle reports completion.
///
/// ```
/// use memferry::Ferry;
///
/// let ferry = Ferry::new()?;
/// let mut target = [0u16; 3];
/// ferry.copy(&[1, 2, 3], &mut target)?;
/// assert_eq!(target, [1, 2, 3]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Ferry {
    /// Blocking copies below this size in bytes are a plain `memcpy`. The limit is stored beside
    /// the pointer so that reading it costs no further cache miss.
    plain_below: usize,
    /// Asynchronous transfers up to this size in bytes with default options are executed inline.
    /// The planner decides the same, but takes longer than some of these copies.
    pub(crate) inline_bytes: u64,
    /// Asynchronous transfers up to this size in bytes are executed inline, or are one descriptor
    /// of the only engine. The planner decides the same.
    small_bytes: u64,
    pub(crate) core: Arc<FerryCore>,
}

impl std::fmt::Debug for Ferry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let engines: Vec<_> =
            self.plan_context().engines.iter().map(|engine| &engine.name).collect();
        f.debug_struct("Ferry").field("engines", &engines).finish_non_exhaustive()
    }
}

impl Ferry {
    /// Builds a ferry with default settings: the processor engine, which leaves one core to the
    /// application.
    pub fn new() -> Result<Self, BuildError> {
        FerryBuilder::new().build()
    }

    /// Returns a builder for a ferry with other settings.
    pub fn builder() -> FerryBuilder {
        FerryBuilder::new()
    }

    pub(crate) fn from_core(mut inner: FerryCore) -> Self {
        inner.inline_limit.small_bytes = inner.small_bytes();
        let profile = &inner.plan_context.profile;
        let plain_below = profile.split_bytes.min(profile.stream_bytes);
        let at_once = profile.inline_bytes.min(profile.stream_bytes.saturating_sub(1)) as u64;
        let small = at_once.max(inner.small_bytes());
        Self { plain_below, inline_bytes: at_once, small_bytes: small, core: Arc::new(inner) }
    }

    /// Copies `source` to `target`, which must be of equal length, and returns when the copy is
    /// complete. The elements are bytes or any other plain type.
    #[inline]
    pub fn copy<T: Pod>(&self, source: &[T], target: &mut [T]) -> Result<(), Error> {
        if size_of_val(source) >= self.plain_below || source.len() != target.len() {
            let (source, target) = (bytemuck::cast_slice(source), bytemuck::cast_slice_mut(target));
            return self.copy_large(source, target).map_err(|error| *error);
        }
        target.copy_from_slice(source);
        Ok(())
    }

    /// Slow path of [`Ferry::copy`]. It is a separate function whose result fits into a register,
    /// so that small copies need no stack frame and save no registers.
    #[cold]
    #[inline(never)]
    fn copy_large(&self, source: &[u8], target: &mut [u8]) -> Result<(), Box<Error>> {
        self.copy_with(source, target, Options::new()).map_err(Box::new)
    }

    /// [`Ferry::copy`] with options.
    pub fn copy_with<T: Pod>(
        &self,
        source: &[T],
        target: &mut [T],
        options: Options<'_>,
    ) -> Result<(), Error> {
        let length = check_lengths(size_of_val(source), size_of_val(target))?;
        let request = Request::copy(source.as_ptr().cast(), target.as_mut_ptr().cast(), length);
        // SAFETY: both slices are borrowed until this call returns, after the transfer is complete;
        // any bytes are valid elements.
        unsafe { self.run_raw(request.with(options)) }.map(|_| ())
    }

    /// Copies a range of elements of a buffer to its element `target`, with the result of
    /// `memmove`, and returns when the copy is complete.
    pub fn copy_within<T: Pod>(
        &self,
        buffer: &mut [T],
        source: impl RangeBounds<usize>,
        target: usize,
    ) -> Result<(), Error> {
        let (from, to) = bounds(&source, buffer.len());
        let length = buffer.len();
        let inside = |from: usize, to: usize| {
            if from <= to && to <= length {
                return Ok(());
            }
            let bytes = |elements: usize| (elements as u64).saturating_mul(size_of::<T>() as u64);
            let (from, to, length) = (bytes(from), bytes(to), bytes(length));
            Err(ValidationError::OutOfRange { from, to, length })
        };
        inside(from, to)?;
        inside(target, target.saturating_add(to - from))?;
        let (start, length) = (buffer.as_mut_ptr(), (to - from) * size_of::<T>());
        // SAFETY: both ranges lie inside the buffer, as checked above, and the buffer is borrowed
        // until this call returns, after the transfer is complete; any bytes are valid elements.
        unsafe {
            let request = Request::copy(start.add(from).cast(), start.add(target).cast(), length);
            self.run_raw(request).map(|_| ())
        }
    }

    /// Sets every byte of `target` to `value` and returns when the fill is complete.
    pub fn fill(&self, target: &mut [u8], value: u8) -> Result<(), Error> {
        // SAFETY: the slice is borrowed until this call returns, after the transfer is complete.
        unsafe { self.run_raw(Request::fill(target.as_mut_ptr(), value, target.len())) }.map(|_| ())
    }

    /// Returns the index of the first element whose bytes differ between two slices of equal
    /// length, if any.
    pub fn compare<T: Pod>(&self, left: &[T], right: &[T]) -> Result<Option<usize>, Error> {
        let length = check_lengths(size_of_val(left), size_of_val(right))?;
        let request = Request::compare(left.as_ptr().cast(), right.as_ptr().cast(), length);
        // SAFETY: both slices are borrowed until this call returns, after the transfer is complete;
        // a compare only reads, and plain elements have no uninitialised bytes.
        let output = unsafe { self.run_raw(request) }?;
        Ok(output.difference.map(|at| at as usize / size_of::<T>().max(1)))
    }

    /// Starts to copy between owned buffers, which the transfer returns at completion. The buffers
    /// are vectors or boxed slices of any plain type, a [`Buffer`](crate::Buffer), or GPU memory;
    /// both must have the same number of bytes.
    ///
    /// This is the call for async code: `icopy(source, target)?.await`.
    pub fn icopy<S: OwnedSource, T: OwnedTarget>(
        &self,
        source: S,
        target: T,
    ) -> Result<OwnedTransfer<S, T>, FailedTransfer<S, T>> {
        self.icopy_with(source, target, Options::new())
    }

    /// [`Ferry::icopy`] with options.
    pub fn icopy_with<S: OwnedSource, T: OwnedTarget>(
        &self,
        source: S,
        target: T,
        options: Options<'static>,
    ) -> Result<OwnedTransfer<S, T>, FailedTransfer<S, T>> {
        OwnedTransfer::start(source, target, |from, to| {
            check_lengths(from.length, to.length)?;
            let request = Request::copy(from.address, to.address, to.length);
            // SAFETY: the transfer owns both buffers and returns them only after completion.
            unsafe { self.start_raw(request.memory(from.memory, to.memory).with(options)) }
        })
    }

    /// Starts to set every byte of an owned buffer to `value`; the transfer returns the buffer at
    /// completion.
    pub fn ifill<T: OwnedTarget>(
        &self,
        target: T,
        value: u8,
    ) -> Result<OwnedTransfer<(), T>, FailedTransfer<(), T>> {
        self.ifill_with(target, value, Options::new())
    }

    /// [`Ferry::ifill`] with options.
    pub fn ifill_with<T: OwnedTarget>(
        &self,
        target: T,
        value: u8,
        options: Options<'static>,
    ) -> Result<OwnedTransfer<(), T>, FailedTransfer<(), T>> {
        OwnedTransfer::start((), target, |_, to| {
            let request = Request::fill(to.address, value, to.length);
            // SAFETY: the transfer owns the buffer and returns it only after completion.
            unsafe { self.start_raw(request.memory(to.memory, to.memory).with(options)) }
        })
    }

    /// Starts to copy `length` bytes between raw ranges, which may overlap.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`].
    pub unsafe fn icopy_raw(
        &self,
        source: *const u8,
        target: *mut u8,
        length: usize,
    ) -> Result<Transfer, Error> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.start_raw(Request::copy(source, target, length)) }
    }

    /// [`Ferry::icopy_raw`] that returns a cookie, for [`Ferry::check`] and [`Ferry::wait`].
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`].
    pub unsafe fn icopy_cookie_raw(
        &self,
        source: *const u8,
        target: *mut u8,
        length: usize,
    ) -> Result<Cookie, Error> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.start_cookie_raw(Request::copy(source, target, length)) }
    }

    /// Starts a request over raw memory and returns its cookie.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`].
    pub unsafe fn start_cookie_raw(&self, request: Request<'_>) -> Result<Cookie, Error> {
        // SAFETY: the caller upholds the contract.
        self.cookie_for(unsafe { self.start_raw(request) }?)
    }

    /// Assigns a cookie to a transfer that was just started.
    pub(crate) fn cookie_for(&self, transfer: Transfer) -> Result<Cookie, Error> {
        let cookies = &self.core.cookies;
        let inserted = match cookies.reserve(1) {
            Ok(numbers) => cookies.insert(numbers.start, transfer),
            Err(error) => Err((error, transfer)),
        };
        inserted.map_err(|(error, transfer)| {
            // Without a cookie, the caller could not wait for the transfer later.
            let _ = transfer.wait();
            error.into()
        })
    }

    /// Returns whether the transfer of a cookie is complete. Once it is, every further query
    /// returns the same result.
    pub fn check(&self, cookie: Cookie) -> Result<bool, Error> {
        match self.core.cookies.find(cookie)? {
            CookieStatus::Done(outcome) => Ok(outcome.map(|()| true)?),
            CookieStatus::Transfer(transfer) => {
                transfer.check().map_or(Ok(false), |o| o.map(|_| true))
            }
        }
    }

    /// Waits for the transfer of a cookie. Once it is complete, every further wait returns the same
    /// result.
    pub fn wait(&self, cookie: Cookie) -> Result<(), Error> {
        match self.core.cookies.find(cookie)? {
            CookieStatus::Done(outcome) => Ok(outcome?),
            CookieStatus::Transfer(transfer) => transfer.wait().map(|_| ()),
        }
    }

    /// Starts a request over raw memory.
    ///
    /// # Safety
    /// Until the transfer is complete, the source must stay valid for reads and the target for
    /// writes of the request's length, no other code may access the target or write to the source,
    /// and the variables of a notification and of a CRC must stay valid. Dropping the handle does not
    /// change this.
    pub unsafe fn start_raw(&self, mut request: Request<'_>) -> Result<Transfer, Error> {
        request.validate()?;
        if request.length <= self.small_bytes && request.has_default_options() {
            // A return of its own for each: where they meet, the transfer would be moved by loads
            // that wait for the stores to the ring.
            // SAFETY: the caller upholds the contract.
            unsafe {
                if request.length <= self.inline_bytes {
                    return Ok(self.core.copy_inline_or_submit(&request));
                }
                if let Some(channel) = self.core.channel_of_small(request.length) {
                    return Ok(self.core.submit_small_to(channel, &request));
                }
                return Ok(copy_inline(&request));
            }
        }
        let plan = self.core.plan(&request, false)?;
        let plan = self.core.in_window(plan, &request);
        // SAFETY: the caller upholds the contract.
        Ok(unsafe { self.core.execute(request, &plan, false) })
    }

    /// Executes a request over raw memory and returns when it is complete.
    ///
    /// # Safety
    /// As for [`Ferry::start_raw`], until this call returns.
    pub unsafe fn run_raw(&self, mut request: Request<'_>) -> Result<TransferOutput, Error> {
        request.validate()?;
        if !request.is_host_only()
            // SAFETY: the caller upholds the contract.
            && let Some(outcome) = unsafe { self.copy_by_caller(&request) }
        {
            return outcome.map(|()| TransferOutput::default());
        }
        let mut plan = self.core.plan(&request, true)?;
        let sharing = self.core.choose_sharing(&mut plan, &mut request);
        let length = request.length;
        let start = (length >= MIN_TIMED_BYTES).then(Instant::now);
        // SAFETY: the caller upholds the contract; the wait ensures completion.
        let transfer = unsafe { self.core.execute(request, &plan, true) };
        let own_chunks = transfer.run_unclaimed();
        let claimed = own_chunks.zip(start).map(|(own, start)| (own, start.elapsed()));
        let outcome = transfer.wait();
        if let Some(start) = start {
            let took = start.elapsed();
            if let (Some(choice), Some(rates), true) =
                (sharing, &self.core.share_rates, outcome.is_ok())
            {
                rates.record(length, choice, took);
                if let Some((own, claimed)) = claimed
                    && let Some(chunks) = transfer.shared_chunks(own)
                {
                    rates.record_shared(chunks, SharedTimes { claimed, whole: took });
                }
            }
            let time = stats::class_of(took.as_nanos() as u64);
            stats::thread(|counters| counters.copy_latency[time].add(1));
        }
        outcome
    }

    /// Returns the plan of a request with its reason, without executing it. The plan of a short
    /// blocking copy between host and device memory is [`CopyStrategy::Inline`](plan::CopyStrategy):
    /// the caller makes it.
    pub fn explain(&self, question: &CopyQuery) -> Option<CopyPlan> {
        let by_caller = self.explain_caller(question);
        by_caller.or_else(|| plan::plan(&self.core.plan_context, question))
    }

    /// Returns the input of the planner.
    pub fn plan_context(&self) -> &CopyPlanContext {
        &self.core.plan_context
    }

    /// Returns the policy that distributes transfers over channels.
    pub fn policy(&self) -> PolicyKind {
        self.core.policy.kind()
    }

    /// Returns what was learned from the time of copies so far.
    pub fn learned(&self) -> LearnedValues {
        let FerryCore { inline_limit, delivery_rates, share_rates, engines, .. } = &*self.core;
        let channels = engines.iter().flat_map(|open| &open.channels);
        LearnedValues {
            inline_bytes: inline_limit.bytes(),
            max_inline_bytes: self.core.plan_context.profile.inline_bytes as u64,
            deliveries: delivery_rates.learned(),
            first_submit_ns: delivery_rates.first_submit_ns(),
            shares: share_rates.as_ref().map(ShareRates::learned),
            groups: channels.filter_map(|channel| channel.group_kernels()).collect(),
        }
    }

    /// Returns the counters so far.
    pub fn statistics(&self) -> Statistics {
        let FerryCore { engines, wait_config: waiting, .. } = &*self.core;
        let channels = |open: &ActiveEngine| open.channels.iter().map(|c| c.statistics()).collect();
        Statistics {
            caller_chunks: waiting.caller_chunks.load(Ordering::Relaxed),
            engines: engines.iter().map(|o| (o.engine.name().into(), channels(o))).collect(),
            pinning: engines
                .iter()
                .filter_map(|o| {
                    Some((o.engine.name().into(), o.registration_cache()?.statistics()))
                })
                .collect(),
        }
    }

    /// Releases cached pins of `length` bytes at `address`. Call it before memory that was copied
    /// from or to is unmapped, if an engine needs pinned memory and its
    /// [`RegistrationStatistics::invalidation_mode`](crate::RegistrationStatistics::invalidation_mode)
    /// is not [`KernelEvents`](memferry_memory::pin_cache::InvalidationMode::KernelEvents).
    /// Transfers in flight keep their pins until they are complete.
    pub fn invalidate(&self, address: *const u8, length: usize) {
        // In a forked child, the engines and the locks held at the fork belong to the parent.
        if self.core.wait_config.is_forked() {
            return;
        }
        for open in &self.core.engines {
            if let Some(registrations) = open.registration_cache() {
                registrations.invalidate(address as usize, length);
            }
        }
    }
}

/// The size in bytes from which blocking copies are timed. Smaller ones do not read the clock.
pub(crate) const MIN_TIMED_BYTES: u64 = 64 << 10;

/// Returns the start and the exclusive end of a range in a slice of `length` elements.
pub(crate) fn bounds(range: &impl RangeBounds<usize>, length: usize) -> (usize, usize) {
    let from = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(&at) => at.saturating_add(1),
        Bound::Excluded(&at) => at,
        Bound::Unbounded => length,
    };
    (from, to)
}

/// Returns the common length in bytes of two buffers, or an error if they differ.
pub(crate) fn check_lengths(source: usize, target: usize) -> Result<usize, ValidationError> {
    if source == target {
        return Ok(target);
    }
    let (source_bytes, target_bytes) = (source as u64, target as u64);
    Err(ValidationError::LengthMismatch { source_bytes, target_bytes })
}
