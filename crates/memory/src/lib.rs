//! Memory for engines and peers.
//!
//! [`pinning`] pins pages, as a whole or in growing chunks that are copied while later ones are
//! pinned; [`pin_cache`] keeps pinned ranges for reuse and finds them by address; `registration` is
//! the registered memory of an engine, over both; [`handle`] names memory of processes, and [`lookup`] translates it through a small cache in front of unlimited
//! tables; [`dma_mappings`] is the pinned memory of devices, by their IOVAs. Engines and messages
//! get registered memory only from this crate.

#[cfg(not(loom))]
pub mod dma_mappings;
pub mod handle;
pub mod lookup;
pub mod pin_cache;
pub mod pinning;
#[cfg(not(loom))]
pub mod registration;
