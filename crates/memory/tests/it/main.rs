//! Tests of pinning, the pin cache and the handle lookup.
#![cfg(not(loom))]

mod lookup;
mod pin_cache;
mod pin_cache_model;
mod pinning;
mod stale;
mod support;
