//! Messages between processes of one machine, from any memory to any memory, with a single copy.
//!
//! [`Endpoint`]s exchange tagged messages with many peers; a [`Link`] connects two processes that
//! read and write in order; a [`Job`] connects many endpoints by a name and a rank each, and has collective
//! operations. A
//! [`Window`] is memory that peers put to and get from without a call of its owner.
//! [`ShareableBuffer`] is memory that peers map, so that messages need no system call.
//!
//! The layers, from the outside in: [`endpoint`](Endpoint) and [`link`](Link) take memory and
//! return results ([`operation`]); a port holds connections and operations and makes progress on
//! them; the planner ([`plan`]) picks a path for each message; paths write control messages and
//! copy bytes through a connection, which consists of shared rings ([`ring`]).

// Shared memory cannot hold the atomics of the model checker: `tests/loom` includes only the ring.
#![cfg(not(loom))]

mod buffers;
mod builder;
mod completion;
mod connect;
mod connection;
mod control;
mod endpoint;
mod envelope;
mod error;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod job;
mod job_collective;
mod job_team;
mod link;
mod link_listener;
mod matching;
pub mod operation;
mod path;
pub mod plan;
mod port;
mod posted;
mod quarantine;
mod region;
mod remote_transport;
#[doc(hidden)]
pub mod ring;
mod segments;
mod thread;
pub mod window;

pub use buffers::{IntoSegments, IntoSegmentsMut, Source};
pub use builder::EndpointBuilder;
#[doc(hidden)]
pub use completion::{CompletionEntry, CompletionKind, CompletionOptions};
pub use connect::access_probe::PeerAccess;
pub use endpoint::{Endpoint, ReadyFd, TAG_ALL, TAG_ANY};
#[doc(hidden)]
pub use envelope::{Envelope, MatchSpace, MatchSpec};
pub use error::{
    ConnectError, Disconnect, DisconnectReason, Error, MemorySide, OperationName, PeerName,
    SystemError, ValidationError,
};
pub use job::Job;
pub use link::Link;
pub use link_listener::Listener;
pub use memferry_collective::{
    Element, ElementType, Error as CollectiveError, ReduceOp, Reduction, Stop,
};
pub use memferry_sys::cross_memory::CrossMemoryDenied;
pub use operation::{FailedOperation, Operation, OperationScope, OwnedOperation, ScopedOperation};
#[doc(hidden)]
pub use port::{BufferReceived, PendingOps, ServiceMessage};
pub use port::{MessageStatus, Peer, set_offload_ferry};
pub use quarantine::quarantined_buffers;
pub use region::ShareableBuffer;
#[doc(hidden)]
pub use remote_transport::{RemoteEvent, RemoteRma, RemoteRmaOp, RemoteTransport};
pub use segments::{MAX_SEGMENTS, Segment, Segments};
pub use window::{PutNotification, RawMemory, RemoteWindow, Rights, Window, WindowHandle};
