//! Sends of both kinds, once their arguments are gathered.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use memferry_message::{Ending, Envelope, Piece};

use super::Endpoint;
use super::marked::{Marked, is_mark};
use super::station::{Station, lane_flag};
use crate::abi::*;
use crate::guard::{Code, Result};
use crate::info::{INJECT_BYTES, MOST_PIECES};
use crate::queue::Entry;

const _: () = assert!(MOST_PIECES <= memferry_message::MOST_PIECES);

/// Flags with which a send ends only when its message is received.
const UNTIL_RECEIVED: u64 = FI_DELIVERY_COMPLETE | FI_COMMIT_COMPLETE | FI_MATCH_COMPLETE;

/// The pieces of memory of a message, gathered from what C has.
pub(super) struct Gathered {
    pieces: [Piece; MOST_PIECES],
    count: usize,
}

impl Gathered {
    /// # Safety
    /// There must be `count` vectors.
    pub(super) unsafe fn new(vectors: *const libc::iovec, count: usize) -> Result<Self> {
        if count > MOST_PIECES || (count > 0 && vectors.is_null()) {
            return Err(Code(FI_EINVAL));
        }
        let mut pieces = [Piece::target(std::ptr::null_mut(), 0); MOST_PIECES];
        for (index, piece) in pieces[..count].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let vector = unsafe { *vectors.add(index) };
            *piece = Piece::target(vector.iov_base.cast(), vector.iov_len);
        }
        Ok(Self { pieces, count })
    }

    pub(super) fn as_slice(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }
}

impl Endpoint {
    #[inline]
    pub(super) fn send_flags(&self) -> u64 {
        self.send_flags.load(Ordering::Relaxed)
    }

    /// Begins a send.
    ///
    /// # Safety
    /// The pieces must be valid and unchanged until the send has ended.
    #[inline]
    pub(super) unsafe fn send(
        &self,
        to: u64,
        envelope: Envelope,
        pieces: &[Piece],
        context: *mut c_void,
        flags: u64,
    ) -> Result {
        let station = self.station()?;
        let peer = station.peer(to)?;
        let quiet = station.sends.is_quiet(flags);
        let delivered = flags & UNTIL_RECEIVED != 0;
        let ending = Ending { context: context as u64, quiet, delivered };
        if flags & FI_INJECT != 0 {
            // SAFETY: passed on.
            return unsafe { send_copy(station, to, envelope, pieces, ending) };
        }
        // A quiet send makes no report that could be counted.
        if is_mark(ending.context) || (quiet && station.sends.counter.is_some()) {
            // SAFETY: passed on.
            return unsafe { send_marked(station, to, envelope, pieces, ending, None) };
        }
        // SAFETY: passed on.
        if let Some(report) = unsafe { station.messages.post_send(peer, envelope, pieces, ending)? }
        {
            station.tell(&report);
        }
        Ok(())
    }

    /// Sends bytes that may change as soon as this returns. Nothing is told.
    ///
    /// # Safety
    /// There must be as many bytes.
    #[inline]
    pub(super) unsafe fn inject(
        &self,
        to: u64,
        envelope: Envelope,
        address: *const c_void,
        length: usize,
    ) -> Result {
        let station = self.station()?;
        if length > INJECT_BYTES {
            return Err(Code(FI_EINVAL));
        }
        let bytes = match length {
            0 => &[][..],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) },
        };
        station.messages.inject(station.peer(to)?, envelope, bytes)?;
        station.sends.count(true);
        Ok(())
    }
}

/// A copy of memory that may be injected.
///
/// # Safety
/// The pieces must be valid.
pub(super) unsafe fn copy_of(pieces: &[Piece]) -> Result<Box<[u8]>> {
    let total = pieces.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.length));
    if total > INJECT_BYTES {
        return Err(Code(FI_EINVAL));
    }
    let mut bytes = Vec::with_capacity(total);
    for piece in pieces.iter().filter(|piece| piece.length > 0) {
        let address = piece.address.cast_const();
        // SAFETY: the caller's promise.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, piece.length) });
    }
    Ok(bytes.into_boxed_slice())
}

/// Sends a copy. The end is told, unless nobody asked.
///
/// # Safety
/// The pieces must be valid.
unsafe fn send_copy(
    station: &Station,
    to: u64,
    envelope: Envelope,
    pieces: &[Piece],
    ending: Ending,
) -> Result {
    // SAFETY: passed on.
    let bytes = unsafe { copy_of(pieces) }?;
    if ending.delivered {
        let copy = Piece::source(bytes.as_ptr(), bytes.len());
        // SAFETY: the mark owns the bytes until the end.
        return unsafe { send_marked(station, to, envelope, &[copy], ending, Some(bytes)) };
    }
    station.messages.inject(station.peer(to)?, envelope, &bytes)?;
    station.sends.count(true);
    if !ending.quiet {
        station.sends.tell(Entry::new(ending.context, lane_flag(envelope.lane) | FI_SEND));
    }
    Ok(())
}

/// Begins a send of which more must be known at its end.
///
/// # Safety
/// The pieces must be valid and unchanged until the send has ended, or be those of `bytes`.
#[cold]
unsafe fn send_marked(
    station: &Station,
    to: u64,
    envelope: Envelope,
    pieces: &[Piece],
    ending: Ending,
    bytes: Option<Box<[u8]>>,
) -> Result {
    let Ending { context, quiet: is_quiet, delivered } = ending;
    let peer = station.peer(to)?;
    let mark = station.marks.add(Marked { bytes, ..Marked::new(context, is_quiet) });
    let ending = Ending { context: mark, quiet: false, delivered };
    // SAFETY: the caller's promise.
    match unsafe { station.messages.post_send(peer, envelope, pieces, ending) } {
        Ok(report) => report.iter().for_each(|report| station.tell(report)),
        Err(error) => {
            station.marks.forget(mark);
            return Err(error.into());
        }
    }
    Ok(())
}
