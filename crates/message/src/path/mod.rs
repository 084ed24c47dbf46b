//! The paths that a message can take, each in a file of its own behind one trait.
//!
//! A path does the next step of a message whenever it is asked, for the sender or the receiver,
//! and never waits: what cannot be done now is asked for again later. Its state is in
//! [`Sending`] and [`Receiving`], so a path itself is only code.

mod cooperative;
mod copying;
mod eager;
mod inline;
mod offload;
mod pinning;
mod pipeline;
mod single;
mod stream;

use std::sync::Arc;

use memferry_copy::Ferry;
use memferry_sys::copy::stream::Streaming;

use crate::connection::{CopyError, Description, Wire};
use crate::envelope::Envelope;
use crate::error::{Error, Who};
use crate::pieces::Pieces;
use crate::plan::{PathKind, Plan};
use crate::port::Received;
use crate::quarantine::{Claim, Claimed};
use crate::ring::cells::Nonsense;
use crate::wire::Number;
use offload::Engines;

/// What came of a step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing could be done now.
    Idle,
    /// Something was done, and more may be possible at once.
    Moved,
    /// The message has a copy to make, for whoever lets go of the lock. It is made only if the turn permits.
    Copy,
    /// This side's part is over.
    Done,
    /// It ended badly, and the operation with it.
    Failed(Error),
    /// The kernel refuses to copy: the peer has ended, or the message has to take another path. Nobody
    /// writes to its memory at the moment.
    Refused(CopyError),
}

/// What a path has for a step, besides the message.
pub(crate) struct Turn<'a> {
    /// The number of the operation.
    pub(crate) number: Number,
    /// The connection.
    pub(crate) wire: &'a mut Wire,
    /// The best way to write around the caches.
    pub(crate) streaming: Streaming,
    /// Whether whoever asks makes a copy that is due.
    pub(crate) may_copy: bool,
    /// The copy core, for engines. Built when first needed.
    pub(crate) ferry: fn() -> Option<&'static Ferry>,
}

/// A message on its way out.
#[derive(Debug)]
pub(crate) struct Sending {
    /// To whom.
    pub(crate) peer: usize,
    pub(crate) envelope: Envelope,
    pub(crate) pieces: Pieces,
    pub(crate) length: u64,
    pub(crate) path: PathKind,
    pub(crate) chunk_bytes: u32,
    /// Receives were under way when it was begun.
    pub(crate) expects: bool,
    /// Its memory may not be there: whoever reads it may wait for any time.
    pub(crate) absent: bool,
    /// The copy that this side makes for the receiver.
    pub(crate) copying: Option<Arc<Copying>>,
    pub(crate) stage: SendStage,
}

/// How far it is.
#[derive(Debug)]
pub(crate) enum SendStage {
    /// Nothing is sent.
    Queued,
    /// So many bytes are in the space or beyond it; with the receiver's number if it asked.
    Streaming { sent: u64, receiver: Option<Number>, until: u64 },
    /// The receiver knows of it.
    Announced,
    /// The receiver lets this side help.
    Helping(Box<Together>),
    /// The receiver is asked to give it back.
    Withdrawing,
    /// The carrier has it.
    Carried,
    /// It has ended, and will have when nobody of this process reads its memory any more.
    Held(Box<Held>),
}

/// A message on its way in.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub(crate) pieces: Pieces,
    /// The bytes of all pieces.
    pub(crate) capacity: u64,
    /// Who sends it, once it is matched.
    pub(crate) peer: usize,
    /// Its arrival number, once it is matched and not complete at once.
    pub(crate) arrival: u64,
    pub(crate) envelope: Envelope,
    /// The length of the message, once it is matched.
    pub(crate) length: u64,
    /// The receive of several messages that it is a part of.
    pub(crate) part_of: Option<Number>,
    pub(crate) stage: ReceiveStage,
}

/// How far it is.
#[derive(Debug)]
pub(crate) enum ReceiveStage {
    /// No message has met it.
    Posted,
    /// So many bytes of the message have come through the space.
    Arriving { arrived: u64, requested: Option<Requested> },
    /// The message waits in the sender's memory. How it comes is decided when this side has time:
    /// by then it may have a message for the sender, and the two copy one each.
    Met { sender: Number, source: Description, core: u16, absent: bool },
    /// All of it is here, and the sender is to be told as soon as there is room in the ring.
    Arrived { sender: Number },
    /// The message waits in the sender's memory and is being fetched.
    Fetching(Box<Fetch>),
    /// The carrier brings it.
    Carried,
    /// It was given up, and will have failed when nobody writes to its memory any more.
    Held(Box<Held>),
}

/// A message that has ended while somebody was still at its memory.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) claims: Vec<Claim>,
    pub(crate) outcome: Result<Received, Error>,
    pub(crate) since_ns: u64,
}

/// A message that comes through the space because this side asked for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Requested {
    /// The sender's number for it.
    pub(crate) sender: Number,
    /// So many bytes of the target have been brought in, if that is done.
    pub(crate) populated: Option<u64>,
}

/// A message being fetched from the sender's memory.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// The sender's number for it.
    pub(crate) sender: Number,
    pub(crate) plan: Plan,
    pub(crate) sides: Arc<Sides>,
    /// Bytes that this side has copied.
    pub(crate) done: u64,
    pub(crate) together: Option<Together>,
    pub(crate) engines: Option<Engines>,
    /// The copy that this side makes.
    pub(crate) copying: Option<Arc<Copying>>,
    /// The source may never come.
    pub(crate) is_slow: bool,
    /// The target is not all there, and the sender should know before it helps.
    pub(crate) is_target_absent: bool,
}

impl Sending {
    /// Whether it copies for its receiver, into memory that may never come.
    pub(crate) fn helps_slowly(&self) -> bool {
        matches!(&self.stage, SendStage::Helping(together) if together.is_slow)
    }
}

impl Receiving {
    /// Whether an engine of this process copies it.
    pub(crate) fn is_offloaded(&self) -> bool {
        matches!(&self.stage, ReceiveStage::Fetching(fetch) if fetch.engines.is_some())
    }

    /// Whether somebody makes the one copy that brings all of it.
    pub(crate) fn is_in_its_only_copy(&self) -> bool {
        let ReceiveStage::Fetching(fetch) = &self.stage else { return false };
        let is_short = self.accepted() <= fetch.plan.chunk_bytes.into();
        is_short && !fetch.is_slow && fetch.copying.as_ref().is_some_and(|c| c.is_under_way())
    }

    /// How many bytes of the message fit.
    pub(crate) fn accepted(&self) -> u64 {
        self.length.min(self.capacity)
    }
}

/// A way for messages.
pub(crate) trait Path: Sync {
    /// The sender's next step. Usual: tell the receiver, who does the rest.
    fn send(&self, sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
        match sending.stage {
            SendStage::Queued => announce(sending, turn),
            _ => Ok(Step::Idle),
        }
    }

    /// The receiver has a place for a message: tells the others who can do something about it.
    /// Copies nothing.
    fn begin(&self, _receiving: &mut Receiving, _turn: &mut Turn<'_>) -> Result<(), Nonsense> {
        Ok(())
    }

    /// The receiver's next step, for a message that is matched. Usual: all of it comes by itself.
    fn receive(&self, _: &mut Receiving, _: &mut Turn<'_>) -> Result<Step, Nonsense> {
        Ok(Step::Done)
    }

    /// A receive is to be given up: the other side can claim nothing more of its memory. Returns what
    /// it has claimed, if it may still write there.
    fn give_up(&self, _receiving: &mut Receiving, _wire: &mut Wire) -> Option<Claimed> {
        None
    }
}

/// The path of a kind.
pub(crate) fn of(kind: PathKind) -> &'static dyn Path {
    match kind {
        PathKind::Inline => &inline::Inline,
        PathKind::Eager => &eager::Eager,
        PathKind::Single => &single::Single,
        PathKind::Cooperative => &cooperative::Cooperative,
        PathKind::Offload => &offload::Offload,
        PathKind::Pipeline => &pipeline::Pipeline,
    }
}

pub(crate) use cooperative::{Together, begin_helping};
pub(crate) use copying::{Copying, Sides};
pub(crate) use eager::put_eager;
pub(crate) use inline::put_inline;
pub(crate) use pinning::{Looks, copy_at_once};
pub(crate) use single::start_slow;
pub(crate) use stream::arrive;

/// What a failed copy means for the message of the side that copied.
fn copy_failed(error: CopyError) -> Step {
    match error {
        CopyError::Bad(who) => Step::Failed(Error::BadMemory(who)),
        CopyError::Refused(_) => Step::Refused(error),
    }
}

/// Sends the request for a message that waits in this side's memory. For all paths that do.
fn announce(sending: &mut Sending, turn: &mut Turn<'_>) -> Result<Step, Nonsense> {
    let (wire, number) = (&mut *turn.wire, turn.number);
    use crate::wire::Note;
    use memferry_sys::shared_memory::Access;
    if !wire.has_room()? || !wire.takes_announcement() {
        return Ok(Step::Idle);
    }
    let Some(source) = wire.describe(sending.pieces.as_slice(), Access::Read)? else {
        return Ok(Step::Idle);
    };
    // Sharing a region may have taken the room.
    if !wire.has_room()? {
        return Ok(Step::Idle);
    }
    let core = memferry_sys::affinity::current_core() as u16;
    let Sending { envelope, length, expects, absent, .. } = *sending;
    let sender = number;
    wire.write(&Note::Request { envelope, length, sender, source, core, expects, absent }.encode());
    sending.stage = SendStage::Announced;
    Ok(Step::Moved)
}

/// The error that the receiver reported for a message.
pub(crate) fn reported(error: u16) -> Option<Error> {
    match error {
        0 => None,
        1 => Some(Error::BadMemory(Who::Ours)),
        _ => Some(Error::BadMemory(Who::Theirs)),
    }
}

/// How an error of the receiver is reported to the sender: its memory is theirs, and the reverse.
pub(crate) fn report(error: &Error) -> u16 {
    match error {
        Error::BadMemory(Who::Theirs) => 1,
        _ => 2,
    }
}
