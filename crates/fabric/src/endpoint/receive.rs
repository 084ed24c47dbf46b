//! Receives of tagged and untagged messages: single receives, multi-receives, and peeks.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use memferry_message::{Error, MatchSpace, MatchSpec, Segment};

use super::Endpoint;
use super::core::{EndpointCore, entry_of};
use super::tracked::is_tracked;
use crate::abi::*;
use crate::guard::{FiError, Result};
use crate::queue::{QueuedCompletion, space_flag};

/// The messages that a receive matches.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecvMatch {
    pub(super) space: MatchSpace,
    /// A number of the address vector, or any.
    pub(super) from: u64,
    pub(super) tag: u64,
    /// The bits of the tag that are ignored.
    pub(super) ignored: u64,
}

impl RecvMatch {
    #[inline]
    fn match_spec(self, core: &EndpointCore) -> Result<MatchSpec> {
        let Self { space, from, tag, ignored } = self;
        Ok(MatchSpec { space, from: core.source(from)?, tag, mask: !ignored })
    }
}

impl Endpoint {
    #[inline]
    pub(super) fn receive_flags(&self) -> u64 {
        self.receive_flags.load(Ordering::Relaxed)
    }

    /// Starts a receive, or peeks.
    ///
    /// # Safety
    /// The segments must be valid for writes until the receive completes.
    #[inline]
    pub(super) unsafe fn receive(
        &self,
        recv_match: RecvMatch,
        segments: &[Segment],
        context: *mut c_void,
        flags: u64,
    ) -> Result {
        let core = self.core()?;
        let context = context as u64;
        if flags & FI_PEEK != 0 {
            return peek(core, recv_match, context, flags);
        }
        let messages = &core.messages;
        if flags & (FI_CLAIM | FI_DISCARD) != 0 {
            if flags & FI_DISCARD != 0 {
                return discard_claimed(core, recv_match, context, flags);
            }
            return post(core, context, flags, |posted_context| {
                // SAFETY: the caller guarantees it.
                unsafe { messages.post_claimed(context, segments, posted_context) }
            });
        }
        let spec = recv_match.match_spec(core)?;
        if flags & FI_MULTI_RECV != 0 {
            let [memory] = *segments else { return Err(FiError(FI_EINVAL)) };
            let min_bytes = self.shared.min_multi_recv.load(Ordering::Relaxed) as u64;
            return post(core, context, flags, |posted_context| {
                // SAFETY: the caller guarantees it.
                unsafe { messages.post_multi_receive(&spec, memory, posted_context, min_bytes) }
            });
        }
        // A message for a posted buffer makes its entry without [`EndpointCore::complete`].
        if core.has_single_queue() && !core.receives.is_silent(flags) && !is_tracked(context) {
            // SAFETY: the caller guarantees it.
            return Ok(unsafe { messages.post_buffer(&spec, segments, context) }?);
        }
        post(core, context, flags, |posted_context| {
            // SAFETY: the caller guarantees it.
            unsafe { messages.post_receive(&spec, segments, posted_context) }
        })
    }
}

/// Starts a receive with its context, or as a tracked operation if more is needed at completion.
#[inline]
fn post(
    core: &EndpointCore,
    context: u64,
    flags: u64,
    begin: impl FnOnce(u64) -> std::result::Result<(), Error>,
) -> Result {
    let is_silent = core.receives.is_silent(flags);
    if !is_silent && !is_tracked(context) {
        return Ok(begin(context)?);
    }
    let mark = core.track(context, is_silent, flags & FI_MULTI_RECV != 0);
    begin(mark).map_err(|error| {
        core.tracked.remove(mark);
        error.into()
    })
}

/// Peeks for a message, and pushes the result to the queue, also if there is none.
fn peek(core: &EndpointCore, recv_match: RecvMatch, context: u64, flags: u64) -> Result {
    let spec = recv_match.match_spec(core)?;
    let found = if flags & FI_DISCARD != 0 {
        core.messages.discard(&spec)?
    } else {
        core.messages.peek(&spec, (flags & FI_CLAIM != 0).then_some(context))?
    };
    let entry = match &found {
        Some(report) => QueuedCompletion {
            context,
            buffer: std::ptr::null_mut(),
            source: core.source_of(report),
            ..entry_of(report)
        },
        None => QueuedCompletion { code: FI_ENOMSG, ..no_message(recv_match, context) },
    };
    core.receives.deliver(entry);
    Ok(())
}

/// Drops the message that was claimed with this context.
fn discard_claimed(core: &EndpointCore, recv_match: RecvMatch, context: u64, flags: u64) -> Result {
    if flags & FI_CLAIM == 0 {
        return Err(FiError(FI_EINVAL));
    }
    core.messages.discard_claimed(context)?;
    core.receives.deliver(no_message(recv_match, context));
    Ok(())
}

fn no_message(recv_match: RecvMatch, context: u64) -> QueuedCompletion {
    QueuedCompletion {
        tag: recv_match.tag,
        ..QueuedCompletion::new(context, FI_RECV | space_flag(recv_match.space))
    }
}
