//! The name of a line: the unit in which translations are attached, cached and forgotten.

use crate::handle::ProcessHandle;

/// Names a line: some neighbouring pages of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LineName {
    /// The process whose memory it is.
    pub process: ProcessHandle,
    /// The address of the first page, a multiple of the bytes of a line.
    pub address: u64,
}
