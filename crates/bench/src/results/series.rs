//! Names of series that several benches and the headline share.

/// Memferry, with ordinary memory.
pub const MEMFERRY: &str = "memferry";
/// Memferry, with memory that the peer maps.
pub const SHAREABLE: &str = "memferry (shareable)";
/// Open MPI with its own transport.
pub const OPEN_MPI: &str = "Open MPI";
/// MPICH with its own transport.
pub const MPICH: &str = "MPICH";
/// Open MPI over Memferry.
pub const OPEN_MPI_OVER_MEMFERRY: &str = "Open MPI over memferry";
/// MPICH over Memferry.
pub const MPICH_OVER_MEMFERRY: &str = "MPICH over memferry";
/// Open MPI over Memferry, with allocations that peers map.
pub const OPEN_MPI_SHARED_HEAP: &str = "Open MPI over memferry, shared heap";
/// MPICH over Memferry, with allocations that peers map.
pub const MPICH_SHARED_HEAP: &str = "MPICH over memferry, shared heap";
/// The lower bound of every message.
pub const LOWER_BOUND: &str = "floor: a cache line each way";
/// A single line that both threads write.
pub const SINGLE_LINE: &str = "one cache line to and fro";

/// Returns whether a series is MPI over Memferry, or exists only for the comparison with it.
pub fn is_reference(series: &str) -> bool {
    let versioned = |name: &str| {
        series.strip_prefix(name).is_some_and(|rest| {
            rest.starts_with(' ') && rest[1..].starts_with(|c: char| c.is_ascii_digit())
        })
    };
    [OPEN_MPI_OVER_MEMFERRY, MPICH_OVER_MEMFERRY].contains(&series)
        || versioned(OPEN_MPI)
        || versioned(MPICH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_over_memferry_and_their_partners_stand_aside() {
        for series in [OPEN_MPI_OVER_MEMFERRY, MPICH_OVER_MEMFERRY, "MPICH 5.0.2"] {
            assert!(is_reference(series), "{series}");
        }
        for series in [OPEN_MPI, MPICH, MEMFERRY, "UCX"] {
            assert!(!is_reference(series), "{series}");
        }
    }
}
