//! Posted operations, which end in a completion entry. They are for callers with a table of
//! operations of their own, which poll one endpoint for all completions instead of testing each
//! operation.

use crate::envelope::Envelope;
use crate::error::Error;
use crate::port::Peer;

/// Options of a posted operation's completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompletionOptions {
    /// The caller's value for the operation. The completion entry contains it, and it names the
    /// operation when it is cancelled.
    pub context: u64,
    /// A send that succeeds makes no completion entry.
    pub silent_on_success: bool,
    /// A send completes when the message is in the receiver's memory, and not when the sender's
    /// memory may be reused.
    pub delivery_complete: bool,
}

/// The kind of the operation that completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompletionKind {
    /// A send.
    Send,
    /// A receive.
    Receive,
    /// A put to a window of a peer.
    Put,
    /// A get from a window of a peer.
    Get,
    /// No operation: requests of peers have arrived, which
    /// [`crate::Endpoint::take_services`] returns. The context of the entry is `u64::MAX`.
    #[doc(hidden)]
    Service,
}

/// The completion of a posted operation.
#[derive(Debug, Clone)]
pub struct CompletionEntry {
    /// The value given when the operation was posted.
    pub context: u64,
    /// The kind of the operation.
    pub kind: CompletionKind,
    /// The sender of the message, or its destination; `None` for a receive that was not matched,
    /// and for accesses that did not complete at once.
    pub peer: Option<Peer>,
    /// The envelope of the message.
    pub envelope: Envelope,
    /// The length of the message in bytes, including those that did not fit.
    pub length: u64,
    /// The address of the first byte of a received message.
    pub address: *mut u8,
    /// The last entry of a receive of several messages: it takes no more, and its memory is free.
    pub is_last: bool,
    /// The result of the operation.
    pub outcome: Result<(), Error>,
    /// The index of the peer, from which its [`Peer`] is made when the entry is returned.
    pub(crate) peer_index: usize,
}

impl CompletionEntry {
    /// Creates an entry without the fields of the message.
    pub(crate) fn new(kind: CompletionKind, context: u64, outcome: Result<(), Error>) -> Self {
        Self {
            context,
            kind,
            peer: None,
            envelope: Envelope::default(),
            length: 0,
            address: std::ptr::null_mut(),
            is_last: false,
            outcome,
            peer_index: usize::MAX,
        }
    }
}

// SAFETY: the address is a value; a caller that dereferences it is responsible for the memory.
unsafe impl Send for CompletionEntry {}
// SAFETY: as above.
unsafe impl Sync for CompletionEntry {}
