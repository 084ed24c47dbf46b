//! Benches of copies within a process.

pub(crate) mod bandwidth;
pub(crate) mod latency;
pub(crate) mod overhead;
pub(crate) mod overlap;
pub(crate) mod pollution;
