//! The ferry: the calls that put engines to work.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memferry_engine::completion::Finish;

use crate::builder::Builder;
use crate::carry::{self, Inner, OpenEngine};
use crate::cookie::{Cookie, Known};
use crate::error::{BuildError, Error, ValidationError};
use crate::plan::{self, Facts, Plan, Question};
use crate::policy::Policy;
use crate::request::{Options, Request};
use crate::statistics::Statistics;
use crate::transfer::{Failed, OwnedSource, OwnedTarget, OwnedTransfer, Transfer};

/// Moves memory. Cheap to clone; clones share engines, channels and cookies. When the last clone
/// is dropped, the channels finish what they hold and end. A transfer that waits for another, or
/// whose handle lives on, may end later than that: memory is free when its transfer says so.
#[derive(Clone)]
pub struct Ferry {
    /// Blocking copies below this size are a plain `memcpy`. Kept here, beside the pointer, so
    /// that finding out costs nothing.
    plain_below: usize,
    /// Asynchronous transfers up to this size, without any wish, are carried out at once. The plan
    /// would say the same, but asking it takes longer than some of these copies.
    at_once: u64,
    /// Those up to this size are carried out at once, or are one descriptor for the only engine there
    /// is. The plan would say the same.
    small: u64,
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Ferry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let engines: Vec<_> = self.facts().engines.iter().map(|engine| &engine.name).collect();
        f.debug_struct("Ferry").field("engines", &engines).finish_non_exhaustive()
    }
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
        let at_once = profile.inline_bytes.min(profile.stream_bytes.saturating_sub(1)) as u64;
        let small = at_once.max(inner.small_bytes());
        Self { plain_below, at_once, small, inner: Arc::new(inner) }
    }

    /// Copies `source` to `target`, which must be of equal length, and returns when it is done.
    #[inline]
    pub fn copy(&self, source: &[u8], target: &mut [u8]) -> Result<(), Error> {
        if source.len() >= self.plain_below || source.len() != target.len() {
            return self.copy_large(source, target).map_err(|error| *error);
        }
        target.copy_from_slice(source);
        Ok(())
    }

    /// Out of the way, and with a result that fits a register, so that the small copies above
    /// need neither a stack frame nor a shuffle of registers.
    #[cold]
    #[inline(never)]
    fn copy_large(&self, source: &[u8], target: &mut [u8]) -> Result<(), Box<Error>> {
        self.copy_with(source, target, Options::new()).map_err(Box::new)
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
        OwnedTransfer::start(source, target, |from, to| {
            check_lengths(from.length, to.length)?;
            let request = Request::copy(from.address, to.address, to.length);
            // SAFETY: the transfer owns both buffers and gives neither back before its end.
            unsafe { self.start(request.memory(from.memory, to.memory).with(options)) }
        })
    }

    /// Starts filling an owned buffer; it comes back at the end.
    pub fn ifill_owned<T: OwnedTarget>(
        &self,
        target: T,
        value: u8,
        options: Options<'static>,
    ) -> Result<OwnedTransfer<(), T>, Failed<(), T>> {
        OwnedTransfer::start((), target, |_, to| {
            let request = Request::fill(to.address, value, to.length);
            // SAFETY: the transfer owns the buffer and does not give it back before its end.
            unsafe { self.start(request.memory(to.memory, to.memory).with(options)) }
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
        self.cookie_for(unsafe { self.start(request) }?)
    }

    /// The cookie of a transfer that was just started.
    pub(crate) fn cookie_for(&self, transfer: Transfer) -> Result<Cookie, Error> {
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
    pub unsafe fn start(&self, mut request: Request<'_>) -> Result<Transfer, Error> {
        request.validate()?;
        if request.length <= self.small && request.is_without_wishes() {
            // SAFETY: passed on.
            return Ok(unsafe {
                match request.length <= self.at_once {
                    true => carry::at_once(&request),
                    false => self.inner.hand_over_small(&request),
                }
            });
        }
        let plan = self.inner.plan(&request, false)?;
        // SAFETY: passed on.
        Ok(unsafe { self.inner.carry_out(request, &plan, false) })
    }

    /// Carries out a request over raw memory and returns when it is over.
    ///
    /// # Safety
    /// As for [`Ferry::start`], until this returns.
    pub unsafe fn run(&self, mut request: Request<'_>) -> Result<Finish, Error> {
        request.validate()?;
        let plan = self.inner.plan(&request, true)?;
        // SAFETY: passed on; the wait makes sure that it is over.
        unsafe { self.inner.carry_out(request, &plan, true) }.wait()
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
        let Inner { engines, waiting, .. } = &*self.inner;
        let channels = |open: &OpenEngine| open.channels.iter().map(|c| c.statistics()).collect();
        Statistics {
            helped_chunks: waiting.helped_chunks.load(Ordering::Relaxed),
            engines: engines.iter().map(|o| (o.engine.name().into(), channels(o))).collect(),
            pinning: engines
                .iter()
                .filter_map(|o| {
                    Some((o.engine.name().into(), o.pin_statistics(waiting.is_forked())?))
                })
                .collect(),
        }
    }

    /// Lets go of what is kept pinned of `length` bytes at `address`. Call it before memory that was
    /// copied from or to is unmapped, if an engine needs pinned memory and its
    /// [`PinStatistics::watching`](crate::PinStatistics::watching) is not by events. Transfers in
    /// flight keep their pins until they are over.
    pub fn forget(&self, address: *const u8, length: usize) {
        // In a forked child engines are the parent's, and so are locks that were held at the fork.
        if self.inner.waiting.is_forked() {
            return;
        }
        for open in &self.inner.engines {
            if let Some(registration) = &open.registration {
                registration.forget(address as usize, length);
            }
            if let Some(registry) = open.engine.registry() {
                registry.forget(address as usize, length);
            }
        }
    }
}

pub(crate) fn check_lengths(source: usize, target: usize) -> Result<(), ValidationError> {
    if source == target {
        return Ok(());
    }
    let (source_bytes, target_bytes) = (source as u64, target as u64);
    Err(ValidationError::LengthMismatch { source_bytes, target_bytes })
}
