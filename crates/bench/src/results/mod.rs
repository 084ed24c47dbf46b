//! Results: the format in which benches report, the meaning of their numbers, and what readers see
//! first. Nothing here measures.

pub mod figure;
pub mod headline;
pub mod number;
pub mod outcome;
pub mod recorded;
#[cfg(any(test, feature = "testing"))]
pub mod sample;
pub mod series;
pub mod size;
pub mod suite;
pub mod summary_keys;

/// Names of all benches, in the order of the suite.
pub const BENCH_NAMES: [&str; 19] = [
    "copy-latency",
    "copy-bandwidth",
    "overlap",
    "overhead",
    "pollution",
    "ipc",
    "pingpong",
    "alltoall",
    "collectives",
    "receive-overhead",
    "matching",
    "scale",
    "pinning",
    "lookup",
    "gpu",
    "load",
    "devices",
    "apps",
    "unmodified",
];
