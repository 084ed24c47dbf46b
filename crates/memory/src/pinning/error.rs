//! Why memory could not be pinned, and what would help.

use super::PageRange;

/// Why memory could not be pinned. The texts are for people who have to change something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The process may not lock that much memory.
    #[error(
        "pinning {asked_bytes} bytes would exceed the limit of locked memory: {limit_bytes} bytes, \
         of which {locked_bytes} are in use{}; raise it by `ulimit -l` or LimitMEMLOCK=",
        by_others(*limit_bytes, *locked_bytes, *asked_bytes)
    )]
    MemlockLimit {
        /// The limit of the process.
        limit_bytes: u64,
        /// How much of it this process used.
        locked_bytes: u64,
        /// How much was asked for.
        asked_bytes: u64,
    },
    /// The memory is not there, or not for this access.
    #[error(
        "the memory {range} is not mapped, or does not allow the access: check the address, the \
         length and the protection"
    )]
    BadMemory {
        /// What was asked for.
        range: PageRange,
    },
    /// The memory asked for has no bytes, or goes beyond the last address.
    #[error("{length} bytes at {address:#x} are not a range of memory")]
    NoRange {
        /// Where it would begin.
        address: usize,
        /// How many bytes it would have.
        length: usize,
    },
    /// The process has as many mappings as it may have, and pinning a part of one splits it.
    #[error(
        "pinning would split a mapping, and the process has {maps} of at most {most_maps}: raise \
         it by `sysctl vm.max_map_count`, or pin whole mappings"
    )]
    MapCount {
        /// How many it had.
        maps: u64,
        /// How many it may have.
        most_maps: u64,
    },
    /// There is not enough memory to bring the pages in.
    #[error("the machine, or the control group of the process, has not enough memory")]
    OutOfMemory,
    /// The device has as much memory mapped as it has addresses or entries for.
    #[error("the device has no addresses left for more memory: let it keep less of it pinned")]
    DeviceAddresses,
    /// This kernel or device cannot do it.
    #[error("{what} is not supported here: {cure}")]
    Unsupported {
        /// What was wanted.
        what: &'static str,
        /// What would help.
        cure: &'static str,
    },
    /// The kernel or device said no for another reason.
    #[error("{what} failed: {}", std::io::Error::from_raw_os_error(*code))]
    Refused {
        /// What was wanted.
        what: &'static str,
        /// The kernel's error number.
        code: i32,
    },
}

impl PinError {
    /// Whether unpinning other memory may help.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            Self::MemlockLimit { .. }
                | Self::MapCount { .. }
                | Self::OutOfMemory
                | Self::DeviceAddresses
        )
    }
}

/// What is counted against the limit and is not seen in this process.
fn by_others(limit_bytes: u64, locked_bytes: u64, asked_bytes: u64) -> &'static str {
    if locked_bytes.saturating_add(asked_bytes) > limit_bytes {
        return "";
    }
    " by this process, and the rest by others of its user, or by pins that the kernel has not yet \
     given up"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_what_is_locked_adds_up_or_says_who_has_the_rest() {
        let text = |locked_bytes, asked_bytes| {
            PinError::MemlockLimit { limit_bytes: 8 << 20, locked_bytes, asked_bytes }.to_string()
        };
        let full = text(6 << 20, 4 << 20);
        assert!(full.contains("of which 6291456 are in use; raise it"), "{full}");
        let unseen = text(4 << 20, 4 << 20);
        assert!(unseen.contains("are in use by this process, and the rest by others"), "{unseen}");
    }
}
