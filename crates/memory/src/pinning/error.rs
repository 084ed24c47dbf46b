//! Why memory could not be pinned, and how to fix it.

use super::PageRange;

/// Why memory could not be pinned. The texts say how to fix it.
///
/// ```
/// use memferry::PinError;
///
/// assert!(PinError::OutOfMemory.is_shortage()); // unpinning other memory may help
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The limit of locked memory would be exceeded.
    #[error(
        "pinning {requested_bytes} bytes would exceed the limit of locked memory: {limit_bytes} bytes, \
         of which {locked_bytes} are in use{}; raise it by `ulimit -l` or LimitMEMLOCK=",
        other_users_note(*limit_bytes, *locked_bytes, *requested_bytes)
    )]
    MemlockLimit {
        /// The limit, in bytes.
        limit_bytes: u64,
        /// The part of it that this process uses, in bytes.
        locked_bytes: u64,
        /// The requested bytes.
        requested_bytes: u64,
    },
    /// The memory is not mapped, or does not allow the access.
    #[error(
        "the memory {range} is not mapped, or does not allow the access: check the address, the \
         length and the protection"
    )]
    BadMemory {
        /// The requested range.
        range: PageRange,
    },
    /// The range is empty, or extends past the last address.
    #[error("{length} bytes at {address:#x} are not a range of memory")]
    InvalidRange {
        /// The requested start.
        address: usize,
        /// The requested length in bytes.
        length: usize,
    },
    /// The process has reached its maximum number of mappings, and pinning a part of a mapping
    /// splits it.
    #[error(
        "pinning would split a mapping, and the process has {map_count} of at most {max_map_count}: raise \
         it by `sysctl vm.max_map_count`, or pin whole mappings"
    )]
    MapCount {
        /// The number of mappings.
        map_count: u64,
        /// The maximum number of mappings.
        max_map_count: u64,
    },
    /// There is not enough memory to make the pages resident.
    #[error("the machine or the cgroup of the process does not have enough memory")]
    OutOfMemory,
    /// The device has no free IOVA or table entry.
    #[error("the device has no free addresses (IOVA): keep less memory pinned for it")]
    IovaExhausted,
    /// The kernel or device does not support the operation.
    #[error("{what} is not supported here: {fix}")]
    Unsupported {
        /// The operation.
        what: &'static str,
        /// The fix.
        fix: &'static str,
    },
    /// The kernel or device refused for another reason.
    #[error("{what} failed: {}", std::io::Error::from_raw_os_error(*code))]
    Refused {
        /// The operation.
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
                | Self::IovaExhausted
        )
    }
}

/// The explanation if memory that is not locked by this process counts against the limit.
fn other_users_note(limit_bytes: u64, locked_bytes: u64, requested_bytes: u64) -> &'static str {
    if locked_bytes.saturating_add(requested_bytes) > limit_bytes {
        return "";
    }
    " by this process, and the rest by other processes of its user, or by pins that the kernel has \
     not released yet"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_what_is_locked_adds_up_or_says_who_has_the_rest() {
        let text = |locked_bytes, requested_bytes| {
            PinError::MemlockLimit { limit_bytes: 8 << 20, locked_bytes, requested_bytes }
                .to_string()
        };
        let full = text(6 << 20, 4 << 20);
        assert!(full.contains("of which 6291456 are in use; raise it"), "{full}");
        let unseen = text(4 << 20, 4 << 20);
        assert!(
            unseen.contains("are in use by this process, and the rest by other processes"),
            "{unseen}"
        );
    }
}
