//! Translation of handles: a small set-associative cache in front of tables without a limit.
//!
//! The cache contains lines of all processes whose memory is accessed; a hit takes no lock and
//! executes no locked instruction. A caller that misses fills the cache from the table of the
//! process. A line that is not there becomes an event in a bounded queue: the miss thread, or a
//! caller that would only wait, makes the [`TranslationBackend`] attach it. Lines that the cache evicts stay attached in the table until a sweep finds too many
//! lines there. `docs/design/handle-lookup.md` has the reasons.

#[cfg(not(loom))]
mod api;
#[cfg(not(loom))]
mod backend;
#[doc(hidden)]
pub mod cache;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod detached_history;
#[cfg(not(loom))]
mod entries;
#[cfg(not(loom))]
mod error;
#[cfg(all(feature = "comparison", not(loom)))]
mod flat;
#[cfg(not(loom))]
mod footprint;
mod geometry;
#[doc(hidden)]
pub mod hazard;
#[cfg(not(loom))]
mod histogram;
mod line;
#[cfg(not(loom))]
mod line_map;
mod lru_order;
#[cfg(not(loom))]
mod miss;
#[cfg(not(loom))]
mod miss_classifier;
#[cfg(not(loom))]
mod miss_path;
#[cfg(not(loom))]
mod process_table;
#[cfg(not(loom))]
mod readers;
#[cfg(not(loom))]
mod service;
#[cfg(not(loom))]
mod shared;
mod slot;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod thread_number;
#[cfg(not(loom))]
pub mod trace;
#[cfg(not(loom))]
mod translation;

#[cfg(not(loom))]
pub use api::Lookup;
#[cfg(not(loom))]
pub use backend::{AttachError, TranslationBackend};
#[cfg(not(loom))]
pub use config::{DataPath, LookupConfig, MissPolicy, TableKind};
#[cfg(not(loom))]
pub use counters::{ByDataPath, LookupCounters, MissCounts};
#[cfg(not(loom))]
pub use entries::LineRun;
#[cfg(not(loom))]
pub use error::{LookupError, TooManyProcesses};
#[cfg(not(loom))]
pub use footprint::LookupFootprint;
pub use geometry::{CacheFootprint, Geometry, GeometryError, MAX_WAYS};
#[cfg(not(loom))]
pub use histogram::Histogram;
pub use line::LineKey;
#[cfg(not(loom))]
pub use translation::Translation;
