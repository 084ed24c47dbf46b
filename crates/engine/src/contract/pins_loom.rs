//! The model checker runs without the memory layer: nothing is ever pinned there.

/// There is none.
#[derive(Debug)]
pub enum Pins {}

/// There is none.
pub trait Pinner: Send + Sync + std::fmt::Debug {}
