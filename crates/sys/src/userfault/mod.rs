//! Hearing of changes to this process's mappings, through a userfaultfd.
//!
//! Watched ranges are registered for write-protection and nothing is ever protected, so no fault
//! is delivered; what arrives are the events: unmapped, moved, discarded. A thread that unmaps or
//! moves watched memory returns only when its event was read, one that discards it begins only
//! then. Somebody must therefore read for as long as anything is watched.

#[cfg(not(loom))]
mod kernel;
#[cfg(loom)]
mod model;

use std::io;

use crate::fork::MOST_PARENT_ONLY;

#[cfg(not(loom))]
pub use kernel::{Stop, Userfault, keep_signals_away};
#[cfg(loom)]
pub use model::{Stop, Userfault, changing, keep_signals_away};

/// How many events one read takes.
pub const EVENTS_PER_READ: usize = 16;

/// What happened to watched memory: addresses, the end not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Nothing of the former mapping is there any more.
    Unmapped {
        /// The first address.
        start: usize,
        /// The address after the last.
        end: usize,
    },
    /// The pages are at another address now, still watched.
    Moved {
        /// Where they were.
        from: usize,
        /// Where they are.
        to: usize,
        /// How many bytes.
        length: usize,
    },
    /// The contents are about to be thrown away, once this event was read.
    Discarded {
        /// The first address.
        start: usize,
        /// The address after the last.
        end: usize,
    },
}

/// Why a range cannot be watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwatchable {
    /// Memory of a kind that has no events, such as a mapped file.
    Kind,
    /// Another userfaultfd watches it already.
    Taken,
    /// The process has too many mappings, or the kernel no memory.
    NoRoom,
    /// Nothing is mapped there.
    NotMapped,
}

/// Why [`Userfault::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// There may be events.
    Events,
    /// Nothing happened for the time given.
    TimeOut,
    /// The caller was asked to stop.
    Stopped,
}

/// Why events are not to be had, for people who have to change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// The system call does not exist, or a filter says so.
    Missing,
    /// A filter or security module forbids the system call.
    Forbidden,
    /// The kernel is older than the first that can be relied on.
    OldKernel,
    /// The kernel cannot watch for writes on this processor.
    NoWriteProtection,
    /// No descriptor is left, or too many are open for this purpose.
    NoDescriptor,
    /// The kernel said no with this error number.
    Unknown(i32),
}

impl Denied {
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

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing => write!(
                f,
                "the kernel has no userfaultfd, or a filter (seccomp) hides it: use a kernel with \
                 CONFIG_USERFAULTFD, or allow the system call in the container's profile"
            ),
            Self::Forbidden => write!(
                f,
                "userfaultfd is forbidden by a filter (seccomp) or a security module: allow it in \
                 the container's profile; `sysctl vm.unprivileged_userfaultfd=1` helps where a \
                 distribution ties it to that setting"
            ),
            Self::OldKernel => write!(f, "events need Linux 5.18 or later"),
            Self::NoWriteProtection => {
                write!(f, "the kernel cannot watch for writes on this kind of processor")
            }
            Self::NoDescriptor => write!(
                f,
                "no descriptor is left: raise the limit by `ulimit -n`, and keep fewer than \
                 {MOST_PARENT_ONLY} caches and devices in one process"
            ),
            Self::Unknown(code) => {
                write!(f, "the kernel refused it: {}", io::Error::from_raw_os_error(*code))
            }
        }
    }
}

impl std::error::Error for Denied {}

/// Says why events are not to be had here; `Ok` where they are.
pub fn probe() -> Result<(), Denied> {
    Userfault::open().map(drop)
}
