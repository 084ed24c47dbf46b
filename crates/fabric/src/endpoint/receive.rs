//! Receives of both kinds, once their arguments are gathered: ordinary ones, those that take several
//! messages, and looks at messages that wait.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use memferry_message::{Error, Lane, Piece, Wanted};

use super::Endpoint;
use super::marked::is_mark;
use super::station::{Station, entry_of, lane_flag};
use crate::abi::*;
use crate::guard::{Code, Result};
use crate::queue::Entry;

/// Which messages a receive takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) lane: Lane,
    /// A number of the address vector, or any.
    pub(super) from: u64,
    pub(super) tag: u64,
    /// The bits of the tag that do not count.
    pub(super) ignored: u64,
}

impl Asked {
    #[inline]
    fn wanted(self, station: &Station) -> Result<Wanted> {
        let Self { lane, from, tag, ignored } = self;
        Ok(Wanted { lane, from: station.source(from)?, tag, mask: !ignored })
    }
}

impl Endpoint {
    #[inline]
    pub(super) fn receive_flags(&self) -> u64 {
        self.receive_flags.load(Ordering::Relaxed)
    }

    /// Begins a receive, or looks at a message.
    ///
    /// # Safety
    /// The pieces must be valid for writes until the receive has ended.
    #[inline]
    pub(super) unsafe fn receive(
        &self,
        asked: Asked,
        pieces: &[Piece],
        context: *mut c_void,
        flags: u64,
    ) -> Result {
        let station = self.station()?;
        let context = context as u64;
        if flags & FI_PEEK != 0 {
            return peek(station, asked, context, flags);
        }
        let messages = &station.messages;
        if flags & (FI_CLAIM | FI_DISCARD) != 0 {
            if flags & FI_DISCARD != 0 {
                return discard_claimed(station, asked, context, flags);
            }
            return post(station, context, flags, |context_or_mark| {
                // SAFETY: the caller's promise.
                unsafe { messages.post_claimed(context, pieces, context_or_mark) }
            });
        }
        let wanted = asked.wanted(station)?;
        if flags & FI_MULTI_RECV != 0 {
            let [memory] = *pieces else { return Err(Code(FI_EINVAL)) };
            let least = self.common.least_room.load(Ordering::Relaxed) as u64;
            return post(station, context, flags, |context_or_mark| {
                // SAFETY: the caller's promise.
                unsafe { messages.post_receive_several(&wanted, memory, context_or_mark, least) }
            });
        }
        post(station, context, flags, |context_or_mark| {
            // SAFETY: the caller's promise.
            unsafe { messages.post_receive(&wanted, pieces, context_or_mark) }
        })
    }
}

/// Begins a receive with its context, or with a mark if more must be known at its end.
#[inline]
fn post(
    station: &Station,
    context: u64,
    flags: u64,
    begin: impl FnOnce(u64) -> std::result::Result<(), Error>,
) -> Result {
    let is_quiet = station.receives.is_quiet(flags);
    if !is_quiet && !is_mark(context) {
        return Ok(begin(context)?);
    }
    let mark = station.mark(context, is_quiet, flags & FI_MULTI_RECV != 0);
    begin(mark).map_err(|error| {
        station.marks.forget(mark);
        error.into()
    })
}

/// Looks for a message, and tells the queue what it found. That there is none is told there too.
fn peek(station: &Station, asked: Asked, context: u64, flags: u64) -> Result {
    let wanted = asked.wanted(station)?;
    let found = if flags & FI_DISCARD != 0 {
        station.messages.discard(&wanted)?
    } else {
        station.messages.peek(&wanted, (flags & FI_CLAIM != 0).then_some(context))?
    };
    let entry = match &found {
        Some(report) => Entry {
            context,
            buffer: std::ptr::null_mut(),
            source: station.source_of(report),
            ..entry_of(report)
        },
        None => Entry { code: FI_ENOMSG, ..without_message(asked, context) },
    };
    station.receives.tell(entry);
    Ok(())
}

/// Drops the message that was set aside for this context.
fn discard_claimed(station: &Station, asked: Asked, context: u64, flags: u64) -> Result {
    if flags & FI_CLAIM == 0 {
        return Err(Code(FI_EINVAL));
    }
    station.messages.discard_claimed(context)?;
    station.receives.tell(without_message(asked, context));
    Ok(())
}

fn without_message(asked: Asked, context: u64) -> Entry {
    Entry { tag: asked.tag, ..Entry::new(context, FI_RECV | lane_flag(asked.lane)) }
}
