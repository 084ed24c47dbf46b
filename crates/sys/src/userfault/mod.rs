//! Events of changes to this process's mappings, through a userfaultfd.
//!
//! Monitored ranges are registered for write-protection, but no page is ever protected, so no fault
//! is delivered; only the events of unmap, remap and remove arrive. A thread that unmaps or remaps
//! monitored memory blocks in that call until its event is read; a thread that discards memory
//! blocks before it starts. A reader must therefore run as long as any range is monitored.

#[cfg(not(loom))]
mod kernel;
#[cfg(loom)]
mod model;

use std::io;

use crate::fork::MAX_CLOSE_ON_FORK;

#[cfg(not(loom))]
pub use kernel::{StopSignal, Userfault, block_all_signals};
#[cfg(loom)]
pub use model::{StopSignal, Userfault, block_all_signals, changing};

/// Maximum number of events of one read.
pub const EVENTS_PER_READ: usize = 16;

/// A change of monitored memory. Ends of ranges are exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingEvent {
    /// The range was unmapped or replaced.
    Unmap {
        /// The first address.
        start: usize,
        /// The end, exclusive.
        end: usize,
    },
    /// The pages were moved to another address and are still monitored.
    Remap {
        /// The old address.
        from: usize,
        /// The new address.
        to: usize,
        /// The length in bytes.
        length: usize,
    },
    /// The contents are discarded after this event is read.
    Remove {
        /// The first address.
        start: usize,
        /// The end, exclusive.
        end: usize,
    },
}

/// Why a range cannot be monitored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterRangeError {
    /// The mapping has no events, for example that of a file.
    UnsupportedMapping,
    /// Another userfaultfd monitors the range.
    AlreadyRegistered,
    /// The process has too many mappings, or the kernel has no memory.
    NoMemory,
    /// A part of the range is not mapped.
    NotMapped,
}

/// Why [`Userfault::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Events may be available.
    Events,
    /// The timeout expired.
    TimedOut,
    /// The stop signal is set.
    Stopped,
}

/// Why userfaultfd events are not available, with the fix in the displayed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserfaultDenied {
    /// The system call does not exist, or a filter returns `ENOSYS`.
    Missing,
    /// A filter or security module forbids the system call.
    Forbidden,
    /// The kernel is older than Linux 5.18.
    OldKernel,
    /// The kernel has no userfaultfd write-protection on this architecture.
    NoWriteProtection,
    /// The process or system has no free descriptor, or the process has too many close-on-fork
    /// descriptors.
    NoDescriptor,
    /// The kernel refused with this error number.
    Unknown(i32),
}

impl UserfaultDenied {
    #[cfg(not(loom))]
    fn from_error(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSYS) => Self::Missing,
            Some(libc::EPERM | libc::EACCES) => Self::Forbidden,
            Some(libc::EINVAL) => Self::OldKernel,
            Some(libc::EMFILE | libc::ENFILE) => Self::NoDescriptor,
            code => Self::Unknown(code.unwrap_or(0)),
        }
    }
}

impl std::fmt::Display for UserfaultDenied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing => write!(
                f,
                "the kernel has no userfaultfd, or a seccomp filter hides it: use a kernel with \
                 CONFIG_USERFAULTFD, or allow the system call in the container's profile"
            ),
            Self::Forbidden => write!(
                f,
                "a seccomp filter or a security module forbids userfaultfd: allow it in \
                 the container's profile; `sysctl vm.unprivileged_userfaultfd=1` helps where a \
                 distribution ties it to that setting"
            ),
            Self::OldKernel => write!(f, "userfaultfd events need Linux 5.18 or later"),
            Self::NoWriteProtection => {
                write!(f, "the kernel has no userfaultfd write-protection on this architecture")
            }
            Self::NoDescriptor => write!(
                f,
                "no free file descriptor: raise the limit (`ulimit -n`), and use fewer than \
                 {MAX_CLOSE_ON_FORK} caches and devices in one process"
            ),
            Self::Unknown(code) => {
                write!(f, "the kernel refused userfaultfd: {}", io::Error::from_raw_os_error(*code))
            }
        }
    }
}

impl std::error::Error for UserfaultDenied {}

/// Checks whether userfaultfd events are available.
pub fn probe() -> Result<(), UserfaultDenied> {
    Userfault::open().map(drop)
}
