//! The key of a line: the unit in which translations are attached, cached and invalidated.

use crate::handle::ProcessHandle;

/// Identifies a line: consecutive pages of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LineKey {
    /// The process that owns the memory.
    pub process: ProcessHandle,
    /// The address of the first page, a multiple of the line size.
    pub address: u64,
}
