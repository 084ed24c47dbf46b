//! Operations that end in a report: for those who keep their own books of what is under way, and
//! ask one endpoint for everything that has ended instead of asking each operation.

use crate::envelope::Envelope;
use crate::error::Error;
use crate::port::Peer;

/// How a posted operation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ending {
    /// Comes back in the report, and names the operation when it is to be cancelled.
    pub context: u64,
    /// A send that ends well makes no report.
    pub quiet: bool,
    /// A send ends when the receiver has it in its own memory, and not when the sender's memory may
    /// be used again.
    pub delivered: bool,
}

/// What has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportKind {
    /// A send.
    Send,
    /// A receive.
    Receive,
    /// A put to a window of a peer.
    Put,
    /// A get from a window of a peer.
    Get,
}

/// The end of a posted operation.
#[derive(Debug, Clone)]
pub struct Report {
    /// What was given when it was posted.
    pub context: u64,
    /// What it was.
    pub kind: ReportKind,
    /// Who sent it, or to whom it was sent; `None` for a receive that no message has met, and for
    /// accesses that did not end at once.
    pub peer: Option<Peer>,
    /// What came with the message.
    pub envelope: Envelope,
    /// The bytes of the message, those that did not fit included.
    pub length: u64,
    /// Where the first byte of a received message is.
    pub address: *mut u8,
    /// Of a receive that takes several messages: it takes no more, and its memory is free.
    pub is_last: bool,
    /// How it ended.
    pub outcome: Result<(), Error>,
    /// The place of the peer, from which the peer is told when the report is handed over.
    pub(crate) place: usize,
}

impl Report {
    /// One that says nothing yet of the message.
    pub(crate) fn new(kind: ReportKind, context: u64, outcome: Result<(), Error>) -> Self {
        Self {
            context,
            kind,
            peer: None,
            envelope: Envelope::default(),
            length: 0,
            address: std::ptr::null_mut(),
            is_last: false,
            outcome,
            place: usize::MAX,
        }
    }
}

// SAFETY: the address is only told; whoever uses it answers for what is there.
unsafe impl Send for Report {}
// SAFETY: as above.
unsafe impl Sync for Report {}
