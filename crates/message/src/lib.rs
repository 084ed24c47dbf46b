//! Messages between processes of one machine, from any memory to any memory, with a single copy.
//!
//! [`Endpoint`]s exchange tagged messages with many peers; a [`Link`] connects two processes that
//! read and write in order; a [`Job`] lets many endpoints find each other by a name.
//! A [`Window`] is memory that peers put to and get from without a word from its owner.
//! [`ShareableBuffer`] is memory that peers map, so that messages need no system call.
//!
//! Inside, from the outside in: [`endpoint`](Endpoint) and [`link`](Link) hand over memory and
//! take results ([`operation`]); a port keeps connections and operations and moves them on; the
//! planner ([`plan`]) picks a path for each message; paths write notes and copy bytes through a
//! connection, which stands on shared rings ([`ring`]).

// Shared memory cannot hold the atomics of the model checker: `tests/loom` includes the ring alone.
#![cfg(not(loom))]

mod buffers;
mod builder;
mod carrier;
mod connect;
mod connection;
mod endpoint;
mod envelope;
mod error;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod job;
mod link;
mod matching;
pub mod operation;
mod path;
mod pieces;
pub mod plan;
mod port;
mod posted;
mod quarantine;
mod region;
mod report;
#[doc(hidden)]
pub mod ring;
pub mod window;
mod wire;

pub use buffers::{IntoPieces, IntoPiecesMut, Source};
pub use builder::Builder;
pub use carrier::{AccessWay, CarriedAccess, Carrier, CarrierEvent};
pub use connect::reach::Reach;
pub use endpoint::{Endpoint, TAG_ALL, TAG_ANY, Watch};
pub use envelope::{Envelope, Lane, Wanted};
pub use error::{ConnectError, Error, Gone, SystemError, ValidationError, Who};
pub use job::Job;
pub use link::{Link, Listener};
pub use memferry_sys::cross_memory::Denied;
pub use operation::{Failed, Operation, OwnedOperation, Scope, ScopedOperation};
pub use pieces::{MOST_PIECES, Piece, Pieces};
pub use port::{Peer, Received, offload_by};
pub use quarantine::kept_buffers;
pub use region::ShareableBuffer;
pub use report::{Ending, Report, ReportKind};
pub use window::{Notify, RawMemory, RemoteWindow, Rights, Window, WindowHandle};
