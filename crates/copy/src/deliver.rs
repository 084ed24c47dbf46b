//! Many pieces, one behind the other, into one target: as messages arrive in packets, and go where
//! they are wanted.
//!
//! All pieces are parts of one transfer, on one channel, in order: they end together, with one
//! notification. An engine that gathers, as a network card does, moves many of them at once.

use std::sync::Arc;

use memferry_engine::completion::{Completion, Launch, Order, Work};
use memferry_engine::contract::Pins;
use memferry_engine::{Descriptor, Operation};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::Access;

use crate::carry::{Inner, OpenEngine};
use crate::error::{Error, ValidationError};
use crate::ferry::Ferry;
use crate::plan::{Path, Plan};
use crate::policy::Choice;
use crate::request::{Extras, Options, Request};
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

impl From<&[u8]> for Piece {
    fn from(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr(), length: bytes.len() }
    }
}

impl Ferry {
    /// Copies pieces one behind the other into `target`, which must be as long as all of them, and
    /// returns when it is done.
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
        let pieces: Vec<_> = pieces.iter().map(|piece| Piece::from(*piece)).collect();
        check_total(&pieces, target.len())?;
        // SAFETY: all slices are borrowed until this returns, which is after the end.
        unsafe { self.ideliver(&pieces, target.as_mut_ptr(), options) }?.wait().map(|_| ())
    }

    /// Starts copying pieces one behind the other to `target`. None of them may overlap it.
    ///
    /// # Safety
    /// As for [`Ferry::start`], for every piece and for as many bytes at the target as all pieces have.
    pub unsafe fn ideliver(
        &self,
        pieces: &[Piece],
        target: *mut u8,
        options: Options<'_>,
    ) -> Result<Transfer, Error> {
        let length = total(pieces);
        let mut request = Request::copy(target, target, length);
        request.validate()?;
        for piece in pieces.iter().filter(|piece| piece.length > 0) {
            let mut each = Request::copy(piece.address, target, piece.length);
            each.validate()?;
            if each.source < each.target + request.length && each.target < each.source + each.length
            {
                return Err(ValidationError::Overlap { address: each.source }.into());
            }
        }
        // Of the two only the target is meant.
        request.operation = Operation::Copy;
        let mut request = request.with(options);
        let plan = self.inner.plan(&request, false)?;
        let extras = request.options.take_extras();
        let spares = request.options.spare_caller;
        let delivery = Delivery { inner: &self.inner, pieces, request: &request, plan: &plan };
        // SAFETY: passed on.
        let completion = unsafe { delivery.launch(extras) };
        Ok(Transfer::shared(completion, length as u64, !spares, self.inner.waiting.clone()))
    }
}

pub(crate) fn check_total(pieces: &[Piece], target: usize) -> Result<(), ValidationError> {
    let (source_bytes, target_bytes) = (total(pieces) as u64, target as u64);
    match source_bytes == target_bytes {
        true => Ok(()),
        false => Err(ValidationError::LengthMismatch { source_bytes, target_bytes }),
    }
}

/// The length of all pieces; as long as can be if there is no such length, which no target has.
fn total(pieces: &[Piece]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length))
}

/// A delivery on its way to a channel. The request has the target, and no source.
struct Delivery<'a> {
    inner: &'a Inner,
    pieces: &'a [Piece],
    request: &'a Request<'a>,
    plan: &'a Plan,
}

impl Delivery<'_> {
    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn launch(&self, extras: Extras) -> Arc<Completion> {
        let Extras { after, notify, kept } = extras;
        let Request { target, length, .. } = *self.request;
        let completion = match length {
            0 => Completion::whole(),
            _ => {
                let (kernel, chunk) = (self.plan.kernel, length.min(LARGEST_CHUNK));
                // SAFETY: the target is vouched for until the transfer is over. The source is not
                // where this says, but nobody reads it there: all chunks are claimed before anybody
                // else knows of them, and only parts with sources of their own are made.
                let work =
                    unsafe { Work::new(Operation::Copy, kernel, target, target, length, 0, chunk) };
                while work.claim_front().is_some() {}
                Completion::chunked(work)
            }
        };
        let completion = Arc::new(completion.notifying(notify));
        if let Some(variable) = kept {
            let _ = completion.keep_until_end(variable);
        }
        let variable =
            self.open().and_then(|open| open.registration.as_ref()?.variable(notify.as_ref()));
        // SAFETY: passed on.
        let orders = unsafe { self.orders(&completion, variable) };
        if after.is_empty() {
            Launch::now(&completion, orders);
        } else {
            Launch::after(&after, completion.clone(), orders);
        }
        completion
    }

    /// The engine that the plan names, if it names one.
    fn open(&self) -> Option<&OpenEngine> {
        let (Path::Whole { engine }
        | Path::Chunks { engine, .. }
        | Path::Split { processors: engine, .. }
        | Path::Parts { engine, .. }) = self.plan.path
        else {
            return None;
        };
        Some(&self.inner.engines[engine])
    }

    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn orders(
        &self,
        completion: &Arc<Completion>,
        variable: Option<Arc<Lease>>,
    ) -> Vec<Order> {
        let Request { target, length, .. } = *self.request;
        let registration = self.open().and_then(|open| open.registration.as_ref());
        let target = registration.map(|pin| pin.lease(target, length, Access::Write));
        let (mut orders, mut batch, mut offset) = (Vec::new(), Vec::new(), 0);
        for piece in self.pieces.iter().filter(|piece| piece.length > 0) {
            let pins = registration.zip(target.clone()).map(|(registration, target)| {
                let (address, length) = (piece.address as u64, piece.length as u64);
                let source = Some(registration.lease(address, length, Access::Read)?);
                let (target, variable) = (Some(target?), variable.clone());
                Ok(Arc::new(Pins { source, target, variable }))
            });
            // SAFETY: passed on.
            let parts = unsafe { self.parts(piece, offset, completion) };
            offset += piece.length as u64;
            match (pins, registration) {
                (Some(Err(unpinned)), Some(registration)) => {
                    orders.extend(self.to_channel(&mut batch));
                    let parts = parts.into_iter();
                    orders.extend(parts.map(|part| registration.without_pins(part, unpinned)));
                }
                (Some(Ok(pins)), _) => {
                    batch.extend(parts.into_iter().map(|part| part.pinned_by(pins.clone())));
                }
                _ if self.open().is_some() => batch.extend(parts),
                _ => orders.extend(parts.into_iter().map(Order::here)),
            }
        }
        orders.extend(self.to_channel(&mut batch));
        orders
    }

    /// The descriptors of a piece, cut to the engine's limits.
    ///
    /// # Safety
    /// As for [`Ferry::ideliver`].
    unsafe fn parts(
        &self,
        piece: &Piece,
        mut offset: u64,
        completion: &Arc<Completion>,
    ) -> Vec<Descriptor> {
        let work = completion.work();
        let (mut source, end) = (piece.address as u64, offset + piece.length as u64);
        let mut parts = Vec::new();
        while offset < end {
            let target = self.request.target + offset;
            let left = (end - offset).min(work.map_or(0, |work| work.chunk_end(offset) - offset));
            let length = match self.open() {
                Some(open) => open.engine.capabilities().longest_piece(source, target, left),
                None => left,
            };
            // SAFETY: passed on; a part of the piece and its place at the target.
            let part = unsafe { Descriptor::new(Operation::Copy, source, target, length) };
            parts.push(part.kernel(self.plan.kernel).part_of(completion.clone(), offset));
            (source, offset) = (source + length, offset + length);
        }
        parts
    }

    /// The order for what was collected for the channel.
    fn to_channel(&self, batch: &mut Vec<Descriptor>) -> Option<Order> {
        let open = self.open().filter(|_| !batch.is_empty())?;
        let index = match self.inner.policy.choose(&open.channels, self.request.length) {
            Choice::Channel { index, .. } => index,
            Choice::Caller => 0,
        };
        let self_driving = open.engine.capabilities().self_driving;
        Some(Order::many(open.channels[index].clone(), self_driving, batch.drain(..)))
    }
}
