//! Windows: memory that a process exposes, and that its peers put to and get from without a word
//! from it.
//!
//! The owner [exposes](crate::Endpoint::expose) memory and sends the [`WindowHandle`] to whom it
//! likes; they [attach](crate::Endpoint::attach) it and get a [`RemoteWindow`]. Inside, from the
//! owner's memory to the copy: the owner's `board` says what is open to whom; `peer_memory`
//! knows how the memory of a peer is reached; the lookup finds every page through `source`;
//! `carry` does an access piece by piece, and a `lane` keeps the accesses to one peer in order.

mod access;
pub(crate) mod board;
mod carry;
mod exposed;
mod lane;
pub(crate) mod peer_memory;
mod source;
pub(crate) mod windows;
mod workers;

use memferry_memory::handle::{BufferHandle, HandleError};

pub use access::{Notify, RemoteWindow};
pub(crate) use exposed::{Exposure, Variable};
pub use exposed::{RawMemory, StillAccessed, Window};

/// What peers may do with a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// Get from it.
    pub const READ: Self = Self(1);
    /// Put to it.
    pub const WRITE: Self = Self(2);
    /// Both.
    pub const READ_WRITE: Self = Self(3);

    /// Whether these include others.
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

/// The name of a window: what its owner sends to whom may attach it. Knowing it is no right by
/// itself; only connected peers can use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowHandle(pub(crate) BufferHandle);

impl WindowHandle {
    /// The bytes of a handle.
    pub const BYTES: usize = BufferHandle::BYTES;

    /// As bytes, to be sent.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_bytes()
    }

    /// From bytes that were received, if they are a handle.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Result<Self, HandleError> {
        BufferHandle::from_bytes(bytes).map(Self)
    }

    pub(crate) fn name(self) -> board::Name {
        board::Name { number: self.0.number(), generation: self.0.generation() }
    }
}
