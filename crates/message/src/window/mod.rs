//! Windows: memory that a process exposes, and that its peers put to and get from without a call of
//! the owner.
//!
//! The owner [exposes](crate::Endpoint::expose) memory and sends the [`WindowHandle`] to its peers,
//! which [attach](crate::Endpoint::attach) it and get a [`RemoteWindow`]. The parts, from the
//! owner's memory to the copy: `window_table` is the owner's table of open windows; `peer_memory`
//! has the access to a peer's memory; `direct` computes where bytes are from where their window is;
//! where that is not possible or not wanted, the lookup translates every page through
//! `translation_backend`; `rma` executes an access step by step, and an `rma_queue` keeps the
//! accesses to one peer in order.

mod access;
mod direct;
mod exposed;
mod mapped;
pub(crate) mod peer_memory;
mod rma;
pub(crate) mod rma_engine;
mod rma_queue;
mod rma_workers;
mod translation_backend;
pub(crate) mod window_table;

use memferry_memory::handle::BufferHandle;
pub use memferry_memory::handle::HandleError;

pub use access::{PutNotification, RemoteWindow};
pub(crate) use exposed::{ExposedRange, WatchedWord};
pub use exposed::{RawMemory, Window, WindowBusy};

/// What peers may do with a window.
///
/// ```
/// use memferry::message::Rights;
///
/// assert!(Rights::READ_WRITE.include(Rights::READ));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// Peers may get from it.
    pub const READ: Self = Self(1);
    /// Peers may put to it.
    pub const WRITE: Self = Self(2);
    /// Peers may do both.
    pub const READ_WRITE: Self = Self(3);

    /// Returns whether these rights include `others`.
    pub fn include(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    pub(crate) fn bits(self) -> u8 {
        self.0
    }

    pub(crate) fn from_bits(bits: u8) -> Self {
        Self(bits & 3)
    }
}

impl std::fmt::Display for Rights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            1 => "read",
            2 => "write",
            3 => "read and write",
            _ => "nothing",
        })
    }
}

/// The name of a window, which its owner sends to peers that may attach it. The handle alone is no
/// right to access the window; only connected peers can use it.
///
/// ```
/// use memferry::message::{Endpoint, Rights, WindowHandle};
///
/// let owner = Endpoint::open("doc-handle")?;
/// let window = owner.expose(vec![0u8; 64], Rights::READ)?;
/// let bytes = window.handle().to_bytes(); // for a message
/// assert_eq!(WindowHandle::from_bytes(bytes)?, window.handle());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowHandle(pub(crate) BufferHandle);

impl WindowHandle {
    /// The length of an encoded handle, in bytes.
    pub const BYTES: usize = BufferHandle::BYTES;

    /// Encodes the handle.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_bytes()
    }

    /// Decodes a handle.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Result<Self, HandleError> {
        BufferHandle::from_bytes(bytes).map(Self)
    }

    pub(crate) fn window_id(self) -> window_table::WindowId {
        window_table::WindowId { index: self.0.number(), generation: self.0.generation() }
    }
}
