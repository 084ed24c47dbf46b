//! Benches of copies within a process.

pub(crate) mod bandwidth;
mod beside_load;
pub(crate) mod latency;
pub(crate) mod overhead;
pub(crate) mod overlap;
pub(crate) mod pollution;
