//! The variables of the environment that Memferry reads: the libraries, the provider, the program and the
//! tests. `docs/reference/settings.md` describes them, and a test compares it with this list.

/// What all of them begin with.
pub const PREFIX: &str = "MEMFERRY_";

/// Variables that begin with this are set by tests for the processes that they start.
pub const TEST_PREFIX: &str = "MEMFERRY_TEST_";

/// All variables, except those of [`TEST_PREFIX`].
pub const ALL: &[&str] = &[
    // Copies.
    "MEMFERRY_CHANNELS",
    "MEMFERRY_CHUNK_BYTES",
    "MEMFERRY_INLINE_BYTES",
    "MEMFERRY_POLICY",
    "MEMFERRY_PROFILE",
    "MEMFERRY_SPIN_NS",
    "MEMFERRY_SPLIT_BYTES",
    "MEMFERRY_SPREAD",
    "MEMFERRY_STREAMING",
    "MEMFERRY_STREAM_BYTES",
    // GPUs and devices.
    "MEMFERRY_CUDA_SOLE_USER",
    "MEMFERRY_DSA",
    "MEMFERRY_GPU",
    "MEMFERRY_IOAT",
    "MEMFERRY_NIC",
    "MEMFERRY_PYTHON",
    "MEMFERRY_VM_KERNEL",
    // Messages.
    "MEMFERRY_BACKGROUND",
    "MEMFERRY_CMA",
    "MEMFERRY_COOPERATIVE_BYTES",
    "MEMFERRY_EAGER_BYTES",
    "MEMFERRY_LOOKUP_TRACE",
    "MEMFERRY_MESSAGE_SPIN_NS",
    "MEMFERRY_OFFLOAD_BYTES",
    "MEMFERRY_PATH",
    "MEMFERRY_PINNING",
    // Seeing.
    "MEMFERRY_STATS",
    // Unmodified programs.
    "MEMFERRY_CALL_PROFILE",
    "MEMFERRY_COPIES",
    "MEMFERRY_COPY_LIBRARY",
    "MEMFERRY_SHARED_HEAP",
    "MEMFERRY_SHARED_HEAP_PEERS",
    // MPI.
    "MEMFERRY_CHECKED_VARIABLES",
    "MEMFERRY_COLLECTIVES",
    "MEMFERRY_FABRIC_INTERFACE",
    "MEMFERRY_HOST_ID",
    "MEMFERRY_MPICH",
    "MEMFERRY_OPENMPI",
    "MEMFERRY_PROVIDER_DIR",
    "MEMFERRY_REMOTE",
    // Tests.
    "MEMFERRY_BLESS",
    "MEMFERRY_FABRIC_HEADERS",
    "MEMFERRY_FABTESTS_SOURCE",
    "MEMFERRY_FAULTS",
    "MEMFERRY_FLOW",
    "MEMFERRY_FUZZ",
    "MEMFERRY_FUZZ_LOUD",
    "MEMFERRY_FUZZ_ORDERS",
    "MEMFERRY_FUZZ_SECONDS",
    "MEMFERRY_HOSTILE_SECONDS",
    "MEMFERRY_LIBADMA",
    "MEMFERRY_MPICH_SOURCE",
    "MEMFERRY_NIC_CHILD",
    "MEMFERRY_REQUIRE",
    "MEMFERRY_SKIP_LOG",
    "MEMFERRY_TRAFFIC_KILLS",
];

/// Whether a part of Memferry reads this variable.
pub fn is_known(name: &str) -> bool {
    name.starts_with(TEST_PREFIX) || ALL.contains(&name)
}

/// The variable whose name is nearest to an unknown one, if any is near.
pub fn nearest(unknown: &str) -> Option<&'static str> {
    let unknown = unknown.to_ascii_uppercase();
    let typed = unknown.strip_prefix(PREFIX).unwrap_or(&unknown);
    let distances = ALL.iter().map(|name| (distance(typed, &name[PREFIX.len()..]), *name));
    let (distance, name) = distances.min_by_key(|(distance, _)| *distance)?;
    // A third of the letters: more would suggest a variable that has nothing to do with the typed one.
    (distance <= typed.len().max(3) / 3).then_some(name)
}

/// The number of letters to insert, delete, replace or swap with their neighbour.
fn distance(one: &str, other: &str) -> usize {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (row, letter) in one.iter().enumerate() {
        let mut now = vec![row + 1];
        for (column, wanted) in other.iter().enumerate() {
            let replaced = last[column] + usize::from(letter != wanted);
            let mut best = replaced.min(last[column + 1] + 1).min(now[column] + 1);
            let is_swap =
                row > 0 && column > 0 && one[row - 1] == *wanted && *letter == other[column - 1];
            if is_swap {
                best = best.min(before[column - 1] + 1);
            }
            now.push(best);
        }
        before = std::mem::replace(&mut last, now);
    }
    last[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_is_near_to_the_right_name() {
        for (typed, meant) in [
            ("MEMFERRY_EAGR_BYTES", "MEMFERRY_EAGER_BYTES"),
            ("MEMFERRY_CHANELS", "MEMFERRY_CHANNELS"),
            ("MEMFERRY_CHANNEL", "MEMFERRY_CHANNELS"),
            ("MEMFERRY_GUP", "MEMFERRY_GPU"),
            ("MEMFERRY_Cma", "MEMFERRY_CMA"),
            ("MEMFERRY_PROFILES", "MEMFERRY_PROFILE"),
        ] {
            assert_eq!(nearest(typed), Some(meant), "{typed}");
        }
    }

    #[test]
    fn nothing_is_suggested_for_a_name_unlike_all_others() {
        for typed in ["MEMFERRY_VERBOSITY_LEVEL", "MEMFERRY_XYZ", "MEMFERRY_", "MEMFERRY_Ä"] {
            assert_eq!(nearest(typed), None, "{typed}");
        }
    }

    #[test]
    fn variables_of_tests_are_known_by_their_beginning() {
        assert!(is_known("MEMFERRY_TEST_WHATEVER"));
        assert!(is_known("MEMFERRY_REQUIRE"));
        assert!(!is_known("MEMFERRY_TESTS"));
    }

    #[test]
    fn every_variable_stands_in_the_list_once() {
        for (index, name) in ALL.iter().enumerate() {
            assert!(name.starts_with(PREFIX) && !ALL[..index].contains(name), "{name}");
        }
    }
}
