//! Benches of pinning, and of the lookup of pages in windows.

pub(crate) mod lookup;
pub(crate) mod pinning;
