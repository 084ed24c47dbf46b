//! The model checker runs without the memory layer: nothing is ever pinned there.

use super::Descriptor;

/// There is none.
#[derive(Debug)]
pub enum Pins {}

/// There is none: no variable is pinned.
#[derive(Debug, Clone, Copy)]
pub enum Notice {}

impl Descriptor {
    /// None.
    pub fn notice(&self, _before: impl FnOnce() -> u64) -> Option<Notice> {
        None
    }
}

/// There is none.
pub trait Pinner: Send + Sync + std::fmt::Debug {}
