//! Finds where the memory named by handles is: a small set-associative cache in front of tables
//! without a limit.
//!
//! The cache stands where copies are initiated. It holds lines of all processes whose memory is
//! touched; a hit takes no lock. A miss becomes an event in a bounded queue; the miss thread, or a
//! caller that would only wait, finds the line in the table of its process or has the [`Source`]
//! attach it, and fills the cache. What falls out of the cache stays attached in the table until a
//! sweep finds that there are too many lines. `docs/design/handle-lookup.md` has the reasons.

#[doc(hidden)]
pub mod cache;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod departed;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod front;
#[cfg(not(loom))]
mod full;
mod geometry;
#[cfg(not(loom))]
mod histogram;
mod line;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod miss;
mod order;
#[cfg(not(loom))]
mod processes;
#[cfg(not(loom))]
mod recency;
#[cfg(not(loom))]
mod service;
#[cfg(not(loom))]
mod settings;
#[cfg(not(loom))]
mod shared;
mod slot;
#[cfg(not(loom))]
mod source;
#[cfg(not(loom))]
mod stripes;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
pub mod trace;
#[cfg(not(loom))]
mod translation;
#[cfg(not(loom))]
mod waiting;

#[cfg(not(loom))]
pub use counters::{ByRoute, Counters, Misses};
#[cfg(not(loom))]
pub use error::{LookupError, TooManyProcesses};
#[cfg(not(loom))]
pub use front::Lookup;
pub use geometry::{CacheMemory, Geometry, GeometryError, MOST_WAYS};
#[cfg(not(loom))]
pub use histogram::Histogram;
pub use line::LineName;
#[cfg(not(loom))]
pub use memory::MemoryUse;
#[cfg(not(loom))]
pub use settings::{Kind, Policy, Route, Settings};
#[cfg(not(loom))]
pub use source::{Refused, Source};
#[cfg(not(loom))]
pub use translation::Translation;
