//! Memory made ready for engines and peers.
//!
//! [`pinning`] makes pages stay where they are, whole or in growing chunks with the copy following
//! behind; [`pin_cache`] keeps them so after use and finds them again by address; [`handle`] names
//! memory of processes, and [`lookup`] finds where it is through a small cache in front of tables
//! without limits; [`device_pages`] is the pinned memory of devices, with their own addresses of it.
//! Engines and messages get their registered memory from here and nowhere else.

#[cfg(not(loom))]
pub mod device_pages;
pub mod handle;
pub mod lookup;
pub mod pin_cache;
pub mod pinning;
