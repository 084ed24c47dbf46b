//! Collective operations of the processes of one machine, over shared memory.
//!
//! A [`Team`] is one rank's membership in a group of processes that call the same operations in the same order:
//! barrier, broadcast, reduce, gather, all-to-all. Rank 0 makes the memory of the team and an [`Invitation`], whose
//! bytes the other ranks need to join.
//!
//! Small data is in one line of shared memory for each rank. Large data is copied once, directly between the
//! memories of the processes, if the system permits it; otherwise through staging buffers in shared memory. Every rank
//! copies and reduces its part.

// Shared memory cannot hold the atomics of the model checker: `tests/loom` includes only the lines.
#![cfg(not(loom))]

mod access;
mod bootstrap;
mod broadcast;
mod element;
mod error;
mod exchange;
mod kernels;
mod line;
mod reduce;
mod reduce_large;
mod shared;
mod team;
mod tree;
mod tuning;
mod typed;
mod waiting;

pub use bootstrap::Invitation;
pub use element::{Element, ElementType, ReduceOp, Reduction};
pub use error::{Error, SystemError};
pub use team::Team;
pub use tuning::Tuning;
pub use waiting::{NoProgress, Progress, Stop};
