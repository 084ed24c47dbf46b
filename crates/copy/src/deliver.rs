//! Many pieces, one behind the other, into one target: as messages arrive in packets, and go where
//! they are wanted.
//!
//! All pieces are parts of one transfer, on one channel, in order: they end together, with one
//! notification. An engine that gathers, as a network card does, moves many of them at once.
//!
//! The notification never comes before the last byte, whoever moves which piece. What a channel does
//! not take, or cannot because it is not pinned, the launching thread moves; every piece counts down
//! the same bytes, and who counts the last one down sets the variable. An engine that sets it itself
//! does so behind the last piece only if nothing is missing then but what it has before that piece.

use std::sync::Arc;

use memferry_engine::completion::{Completion, Launch, Order, Work};
use memferry_engine::contract::{Channel, Pins};
use memferry_engine::{Descriptor, Operation};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::Access;

use crate::carry::{Inner, OpenEngine};
use crate::cookie::Cookie;
use crate::error::{Error, ValidationError};
use crate::ferry::{Ferry, check_lengths};
use crate::plan::{Path, Plan};
use crate::policy::Choice;
use crate::request::{Extras, Options, Request, check_range};
use crate::transfer::Transfer;

/// The most bytes of a chunk that parts are counted down in.
const LARGEST_CHUNK: u64 = 1 << 30;

/// A piece of memory that is read.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Where it begins.
    pub address: *const u8,
    /// How long it is.
    pub length: usize,
}

impl Piece {
    /// The pieces for a target of `length` bytes, which must be as long as all of them.
    pub(crate) fn all(slices: &[&[u8]], length: usize) -> Result<Vec<Self>, ValidationError> {
        let pieces: Vec<_> = slices.iter().map(|slice| Self::from(*slice)).collect();
        check_lengths(total(&pieces), length).map(|()| pieces)
    }
}

impl From<&[u8]> for Piece {
    fn from(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr(), length: bytes.len() }
    }
}

impl Ferry {
    /// Copies pieces one behind the other into `target`, which must be as long as all of them, and
    /// returns when it is done.
    ///
    /// The caller waits, so short deliveries are copied by its own core, whatever engines there are.
    /// With [`Options::spare_caller`] a channel copies them; [`Ferry::ideliver`] does not wait.
    ///
    /// ```
    /// # use memferry_copy::{Ferry, Options};
    /// let ferry = Ferry::new()?;
    /// let packets = [[1u8; 1460], [2; 1460], [3; 1460]];
    /// let mut message = vec![0; 3 * 1460];
    /// let pieces = [&packets[0][..], &packets[1], &packets[2]];
    /// ferry.deliver(&pieces, &mut message, Options::new())?;
    /// assert_eq!(message, packets.concat());
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn deliver(
        &self,
        pieces: &[&[u8]],
        target: &mut [u8],
        options: Options<'_>,
    ) -> Result<(), Error> {
        let pieces = Piece::all(pieces, target.len())?;
        // SAFETY: all slices are borrowed until this returns, which is after the end.
        let delivery = unsafe { self.begin(&pieces, target.as_mut_ptr(), options, true) }?;
        delivery.wait().map(|_| ())
    }

    /// Starts copying pieces one behind the other to `target`. None of them may overlap it. All bytes
    /// become ready together, at the end. The list of pieces may go when this returns; what they
    /// point to may not.
    ///
    /// # Safety
    /// As for [`Ferry::start`], for every piece and for as many bytes at the target as all pieces have.
    pub unsafe fn ideliver(
        &self,
        pieces: &[Piece],
        target: *mut u8,
        options: Options<'_>,
    ) -> Result<Transfer, Error> {
        // SAFETY: passed on.
        unsafe { self.begin(pieces, target, options, false) }
    }

    /// As [`Ferry::ideliver`]; the cookie is for [`Ferry::check`] and [`Ferry::wait`].
    ///
    /// # Safety
    /// As for [`Ferry::ideliver`].
    pub unsafe fn ideliver_cookie(
        &self,
        pieces: &[Piece],
        target: *mut u8,
        options: Options<'_>,
    ) -> Result<Cookie, Error> {
        // SAFETY: passed on.
        self.cookie_for(unsafe { self.ideliver(pieces, target, options) }?)
    }

    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn begin(
        &self,
        pieces: &[Piece],
        target: *mut u8,
        options: Options<'_>,
        blocking: bool,
    ) -> Result<Transfer, Error> {
        let length = total(pieces);
        check(pieces, target, length)?;
        // Of the two sides only the target is meant.
        let mut request = Request::copy(target, target, length).with(options);
        let (plan, is_simple) = (self.inner.plan(&request, blocking)?, request.is_simple());
        let extras = request.options.take_extras();
        let helps = !request.options.spare_caller;
        let route = Route::of(&self.inner, &plan, request.length);
        let delivery = Delivery { pieces, request: &request, plan: &plan, route };
        if is_simple && delivery.route.is_none() {
            // SAFETY: passed on.
            unsafe { delivery.run() };
            return Ok(Transfer::over(length as u64));
        }
        // SAFETY: passed on.
        let completion = unsafe { delivery.launch(extras) };
        Ok(Transfer::shared(completion, length as u64, helps, self.inner.waiting.clone()))
    }
}

/// Checks all ranges, and that no piece shares a byte with the target.
fn check(pieces: &[Piece], target: *mut u8, length: usize) -> Result<(), ValidationError> {
    let (target, length) = (target as u64, length as u64);
    if length > 0 {
        check_range("target", target, length)?;
    }
    for piece in pieces.iter().filter(|piece| piece.length > 0) {
        let (address, bytes) = (piece.address as u64, piece.length as u64);
        check_range("source", address, bytes)?;
        if address < target + length && target < address + bytes {
            return Err(ValidationError::Overlap { address });
        }
    }
    Ok(())
}

/// The length of all pieces; as long as can be if there is no such length, which no target has.
fn total(pieces: &[Piece]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length))
}

/// The one channel that all pieces go to.
#[derive(Clone, Copy)]
struct Route<'a> {
    open: &'a OpenEngine,
    channel: &'a Arc<dyn Channel>,
}

impl<'a> Route<'a> {
    /// `None`: the caller carries them out.
    fn of(inner: &'a Inner, plan: &Plan, length: u64) -> Option<Self> {
        let (Path::Whole { engine }
        | Path::Chunks { engine, .. }
        | Path::Split { processors: engine, .. }
        | Path::Parts { engine, .. }) = plan.path
        else {
            return None;
        };
        let open = &inner.engines[engine];
        let index = match inner.policy.choose(&open.channels, length) {
            Choice::Channel { index, .. } => index,
            Choice::Caller if matches!(plan.path, Path::Parts { .. }) => 0,
            Choice::Caller => return None,
        };
        Some(Self { open, channel: &open.channels[index] })
    }

    /// The order for what was collected, if anything was.
    fn order(self, batch: &mut Vec<Descriptor>) -> Option<Order> {
        if batch.is_empty() {
            return None;
        }
        let self_driving = self.open.engine.capabilities().self_driving;
        Some(Order::many(self.channel.clone(), self_driving, batch.drain(..)))
    }
}

/// A delivery on its way to a channel. The request has the target, and no source.
struct Delivery<'a> {
    pieces: &'a [Piece],
    request: &'a Request<'a>,
    plan: &'a Plan,
    route: Option<Route<'a>>,
}

impl Delivery<'_> {
    /// Pieces that have bytes, and where in the target each begins.
    fn placed(&self) -> impl Iterator<Item = (Piece, u64)> {
        let mut next = 0;
        self.pieces.iter().filter(|piece| piece.length > 0).map(move |piece| {
            let offset = next;
            next += piece.length as u64;
            (*piece, offset)
        })
    }

    /// Carries everything out on the calling processor.
    ///
    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn run(&self) {
        for (piece, offset) in self.placed() {
            // SAFETY: passed on.
            unsafe { self.descriptor(piece.address as u64, offset, piece.length as u64) }.run();
        }
    }

    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn launch(&self, extras: Extras) -> Arc<Completion> {
        let Extras { after, notify, kept } = extras;
        let span = tracing::trace_span!(
            "delivery",
            pieces = self.pieces.len(),
            bytes = self.request.length,
            path = ?self.plan.path,
            kernel = self.plan.kernel.name(),
        );
        // SAFETY: passed on.
        let completion = unsafe { self.completion() };
        let completion = Arc::new(completion.notifying(notify).traced(span));
        if let Some(variable) = kept {
            let _ = completion.keep_until_end(variable);
        }
        let registration = self.route.and_then(|route| route.open.registration.as_ref());
        let variable = registration.and_then(|pin| pin.variable(notify.as_ref()));
        // SAFETY: passed on.
        let orders = unsafe { self.orders(&completion, variable) };
        // SAFETY: the completion is this delivery's, and these are all its parts.
        unsafe {
            if after.is_empty() {
                Launch::now(&completion, orders);
            } else {
                Launch::after(&after, completion.clone(), orders);
            }
        }
        completion
    }

    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn completion(&self) -> Completion {
        let Request { target, length, .. } = *self.request;
        if length == 0 {
            return Completion::whole();
        }
        let (kernel, chunk) = (self.plan.kernel, length.min(LARGEST_CHUNK));
        // SAFETY: the target is vouched for until the transfer is over. The source is not where this
        // says, but nobody reads it there: all chunks are claimed before anybody else knows of them,
        // and only parts with sources of their own are made.
        let work = unsafe { Work::new(Operation::Copy, kernel, target, target, length, 0, chunk) };
        while work.claim_front().is_some() {}
        Completion::chunked(work)
    }

    /// # Safety
    /// As for [`Ferry::ideliver`]; the completion must be this delivery's.
    unsafe fn orders(
        &self,
        completion: &Arc<Completion>,
        variable: Option<Arc<Lease>>,
    ) -> Vec<Order> {
        let Request { target, length, .. } = *self.request;
        let mut orders = Vec::new();
        let Some(route) = self.route else {
            for (piece, offset) in self.placed() {
                let mut push = |part| orders.push(Order::here(part));
                // SAFETY: passed on.
                unsafe { self.cut(piece, offset, completion, &mut push) };
            }
            return orders;
        };
        let registration = route.open.registration.as_ref().filter(|_| length > 0);
        let target = registration.map(|pin| pin.lease(target, length, Access::Write));
        let mut batch = Vec::with_capacity(self.pieces.len());
        for (piece, offset) in self.placed() {
            let Some((registration, target)) = registration.zip(target.clone()) else {
                // SAFETY: passed on.
                unsafe { self.cut(piece, offset, completion, |part| batch.push(part)) };
                continue;
            };
            let pins = target.and_then(|target| {
                let (address, length) = (piece.address as u64, piece.length as u64);
                let source = registration.lease(address, length, Access::Read)?;
                let (source, target) = (Some(source), Some(target));
                Ok(Arc::new(Pins { source, target, variable: variable.clone() }))
            });
            match pins {
                Ok(pins) => {
                    let mut push = |part: Descriptor| batch.push(part.pinned_by(pins.clone()));
                    // SAFETY: passed on.
                    unsafe { self.cut(piece, offset, completion, &mut push) };
                }
                Err(unpinned) => {
                    orders.extend(route.order(&mut batch));
                    let mut push = |part| orders.push(registration.without_pins(part, unpinned));
                    // SAFETY: passed on.
                    unsafe { self.cut(piece, offset, completion, &mut push) };
                }
            }
        }
        orders.extend(route.order(&mut batch));
        orders
    }

    /// Cuts a piece to the limits of the engine and to those of chunks, and makes a part of each.
    ///
    /// # Safety
    /// As for [`Ferry::ideliver`]; the completion must be this delivery's, and no piece is cut twice.
    unsafe fn cut(
        &self,
        piece: Piece,
        mut offset: u64,
        completion: &Arc<Completion>,
        mut push: impl FnMut(Descriptor),
    ) {
        let work = completion.work().expect("what has bytes is chunked work");
        let capabilities = self.route.map(|route| route.open.engine.capabilities());
        let (mut source, end) = (piece.address as u64, offset + piece.length as u64);
        while offset < end {
            let left = end.min(work.chunk_end(offset)) - offset;
            let length = capabilities.map_or(left, |capabilities| {
                capabilities.longest_piece(source, self.request.target + offset, left)
            });
            // SAFETY: passed on; a part of the piece and its place at the target.
            let part = unsafe { self.descriptor(source, offset, length) };
            // SAFETY: all chunks were claimed when the completion was made, and no piece is cut twice.
            push(unsafe { part.part_of(completion.clone(), offset) });
            (source, offset) = (source + length, offset + length);
        }
    }

    /// # Safety
    /// As for [`Ferry::ideliver`], for these bytes.
    unsafe fn descriptor(&self, source: u64, offset: u64, length: u64) -> Descriptor {
        let target = self.request.target + offset;
        // SAFETY: passed on; no piece overlaps the target, as was checked.
        unsafe { Descriptor::new(Operation::Copy, source, target, length) }.kernel(self.plan.kernel)
    }
}
