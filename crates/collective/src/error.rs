//! Errors of collective operations. Every text names the cause.

use std::io;
use std::sync::Arc;

use thiserror::Error;

/// An error of a collective operation. Except for [`Error::Argument`], all ranks get one, and the team is of no
/// further use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The process of a rank has exited during an operation.
    #[error("the process of rank {0} has exited")]
    RankDied(usize),
    /// A rank has left the team while another one needs it.
    #[error("rank {0} has left the team before this operation")]
    RankLeft(usize),
    /// A rank did not join the team in time, or cannot join it.
    #[error("rank {0} has not joined the team")]
    RankMissing(usize),
    /// A rank has called another operation, or the same one with another length, root or type.
    #[error(
        "rank {0} has called another operation, or with another length or type: all ranks must call the same \
         operations in the same order"
    )]
    Mismatch(usize),
    /// The progress function of a rank, or its function that combines elements, has failed or panicked.
    #[error(
        "rank {0} has stopped the operation: it was interrupted, or its function failed; see the error of \
         that rank"
    )]
    Stopped(usize),
    /// The memory that a rank named cannot be read or written.
    #[error("the memory that rank {0} passed cannot be accessed")]
    BadMemory(usize),
    /// The shared memory holds values that no rank writes.
    #[error("the memory of the team is corrupt")]
    Corrupt,
    /// The team belongs to the parent of this process.
    #[error("the team belongs to the process that forked this one")]
    Forked,
    /// The arguments are wrong. Nothing was done, and nothing was told to other ranks.
    #[error("{0}")]
    Argument(&'static str),
    /// A system call failed while the team was created.
    #[error("a team cannot be created: {0}")]
    System(SystemError),
}

/// An error of the system that can be cloned and compared.
#[derive(Debug, Clone)]
pub struct SystemError(pub Arc<io::Error>);

impl PartialEq for SystemError {
    fn eq(&self, other: &Self) -> bool {
        self.0.kind() == other.0.kind() && self.0.raw_os_error() == other.0.raw_os_error()
    }
}

impl Eq for SystemError {}

impl std::fmt::Display for SystemError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::System(SystemError(Arc::new(error)))
    }
}

/// Why a team is broken, in a word that all ranks read.
impl Error {
    /// The word of an error that all ranks get.
    pub(crate) fn to_word(&self, own_rank: usize) -> u64 {
        let (cause, rank) = match *self {
            Self::RankDied(rank) => (1, rank),
            Self::RankLeft(rank) => (2, rank),
            Self::RankMissing(rank) => (3, rank),
            Self::Mismatch(rank) => (4, rank),
            Self::Stopped(rank) => (5, rank),
            Self::BadMemory(rank) => (6, rank),
            Self::Corrupt | Self::Forked | Self::Argument(_) | Self::System(_) => (7, own_rank),
        };
        cause << 32 | rank as u64
    }

    /// The error of a word; `None` if the team is not broken.
    pub(crate) fn from_word(word: u64, size: usize) -> Option<Self> {
        let rank = (word as u32) as usize;
        Some(match word >> 32 {
            _ if word == 0 => return None,
            _ if rank >= size => Self::Corrupt,
            1 => Self::RankDied(rank),
            2 => Self::RankLeft(rank),
            3 => Self::RankMissing(rank),
            4 => Self::Mismatch(rank),
            5 => Self::Stopped(rank),
            6 => Self::BadMemory(rank),
            _ => Self::Corrupt,
        })
    }
}
