//! The planner of prefaulting: which side prefaults which end before a copy, and why. Pure
//! functions.
//!
//! A page that was never touched, was discarded or is swapped out costs a page fault during the
//! copy. One populate call for many pages costs less; for resident pages the call is wasted, so it
//! is made only for memory that was checked. Nothing is prefaulted before a rendezvous, and each
//! side prefaults only what it copies itself: two cores that fault pages in one address space slow
//! each other down.

use std::fmt;

use memferry_sys::settings::switch;

use super::{AccessMethod, MessagePlanContext, MessageQuery, PathKind};

/// The setting: whether memory is prefaulted before it is copied.
///
/// ```
/// use memferry::message::{Endpoint, Pinning};
///
/// let endpoint = Endpoint::builder().pinning(Pinning::On).open("doc-pinning")?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Pinning {
    /// Memory that is not resident is prefaulted.
    #[default]
    Auto,
    /// Nothing is prefaulted.
    Off,
    /// All memory is prefaulted.
    On,
}

impl Pinning {
    /// All settings.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Off, Self::On];

    /// The name of the setting.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::On => "on",
        }
    }

    /// The setting with a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|pinning| pinning.name() == name)
    }

    /// The setting of a variable: `auto`, or a switch in any spelling.
    pub(crate) fn from_setting(text: &str) -> Option<Self> {
        match switch::parse(text) {
            Some(true) => Some(Self::On),
            Some(false) => Some(Self::Off),
            None => text.eq_ignore_ascii_case("auto").then_some(Self::Auto),
        }
    }
}

/// A flag for each end of a copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct BufferEnds {
    /// The flag of the source.
    pub source: bool,
    /// The flag of the target.
    pub target: bool,
}

/// The side that copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Copier {
    /// The receiver, or its engines.
    Receiver,
    /// The sender.
    Sender,
}

/// The minimum size of a message whose residency is checked. From this size, its page faults take
/// longer than the rest of the message.
pub const RESIDENCY_CHECK_LIMIT: u64 = 64 << 10;

/// Up to this size, a receiver that prefaults many pages at once is faster alone than both sides,
/// which contend for the lock of one address space at every page.
pub const NONRESIDENT_SINGLE_LIMIT: u64 = 64 << 10;

/// The minimum size of a cooperative message by system calls for which the receiver prefaults its
/// chunks. Below, it slows the sender's calls, which fault pages of the same address space, as much
/// as it helps the receiver.
pub const COOPERATIVE_PREFAULT_LIMIT: u64 = 4 << 20;

/// The ends that the copying side can prefault. `method`: its access to the peer's memory. The
/// system call for cross-memory access faults the peer's pages itself, many at a time, so only the
/// local end remains; of mapped memory both ends can be prefaulted.
pub fn prefaultable(path: PathKind, copier: Copier, method: AccessMethod) -> BufferEnds {
    match (path, copier) {
        // The receiver reads what the sender has just written, and alone writes the target.
        (PathKind::Single | PathKind::Cooperative | PathKind::Pipeline, Copier::Receiver) => {
            BufferEnds { source: false, target: true }
        }
        (PathKind::Cooperative, Copier::Sender) => {
            BufferEnds { source: true, target: method == AccessMethod::Mapped }
        }
        // Engines must not cause a page fault at either end.
        (PathKind::Offload, Copier::Receiver) => BufferEnds { source: true, target: true },
        _ => BufferEnds::default(),
    }
}

/// Returns whether the residency of a message is checked.
pub fn checks_residency(context: &MessagePlanContext, bytes: u64) -> bool {
    context.thresholds.pinning == Pinning::Auto && bytes >= RESIDENCY_CHECK_LIMIT
}

/// The ends that the receiver prefaults on its path, and the reason.
pub(super) fn prefault_plan(
    context: &MessagePlanContext,
    query: &MessageQuery,
    path: PathKind,
) -> PrefaultPlan {
    let possible = prefaultable(path, Copier::Receiver, query.receiver_access);
    let nonresident = query.nonresident;
    match context.thresholds.pinning {
        _ if possible == BufferEnds::default() => PrefaultPlan::none(PrefaultReason::NothingToDo),
        Pinning::Off => PrefaultPlan::none(PrefaultReason::Off),
        Pinning::On => PrefaultPlan { ends: possible, reason: PrefaultReason::On },
        Pinning::Auto if query.bytes < RESIDENCY_CHECK_LIMIT => {
            PrefaultPlan::none(PrefaultReason::TooSmall { limit_bytes: RESIDENCY_CHECK_LIMIT })
        }
        Pinning::Auto
            if path == PathKind::Cooperative
                && query.sender_access == AccessMethod::CrossMemory
                && nonresident.target
                && query.bytes < COOPERATIVE_PREFAULT_LIMIT =>
        {
            PrefaultPlan::none(PrefaultReason::DoneBySyscalls {
                limit_bytes: COOPERATIVE_PREFAULT_LIMIT,
            })
        }
        Pinning::Auto => {
            let ends = BufferEnds {
                source: possible.source && nonresident.source,
                target: possible.target && nonresident.target,
            };
            let reason = if ends == BufferEnds::default() {
                PrefaultReason::Resident
            } else {
                PrefaultReason::NotResident
            };
            PrefaultPlan { ends, reason }
        }
    }
}

/// The ends that are prefaulted, and the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefaultPlan {
    /// The ends.
    pub ends: BufferEnds,
    /// The reason.
    pub reason: PrefaultReason,
}

impl PrefaultPlan {
    pub(super) fn none(reason: PrefaultReason) -> Self {
        Self { ends: BufferEnds::default(), reason }
    }
}

/// The reason of prefaulting or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefaultReason {
    /// The path has no memory of unknown residency, or the message is too short.
    NothingToDo,
    /// Disabled by configuration.
    Off,
    /// Enabled by configuration.
    On,
    /// The check would cost more than it saves.
    TooSmall {
        /// Below this size.
        limit_bytes: u64,
    },
    /// Both sides copy by system calls, which fault the pages in.
    DoneBySyscalls {
        /// Below this size.
        limit_bytes: u64,
    },
    /// The memory is resident.
    Resident,
    /// The memory is not resident.
    NotResident,
}

impl fmt::Display for PrefaultReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingToDo => write!(f, "nothing: the message is sent at once"),
            Self::Off => write!(f, "nothing, as configured"),
            Self::On => write!(f, "everything, as configured"),
            Self::TooSmall { limit_bytes } => {
                write!(f, "nothing: below {limit_bytes} bytes a check costs more than it saves")
            }
            Self::DoneBySyscalls { limit_bytes } => write!(
                f,
                "nothing: below {limit_bytes} bytes it would slow the sender's calls, which fault \
                 pages of the same process"
            ),
            Self::Resident => write!(f, "nothing: the memory is resident"),
            Self::NotResident => write!(
                f,
                "pages that are not resident, many at a time, just before they are copied"
            ),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_name_of_its_own() {
        for pinning in Pinning::ALL {
            assert_eq!(Pinning::from_name(pinning.name()), Some(pinning));
        }
        assert_eq!(Pinning::from_name("sometimes"), None);
    }

    #[test]
    fn who_copies_brings_in_what_no_system_call_brings_in_for_it() {
        let ends = |source, target| BufferEnds { source, target };
        let receiver = |path| prefaultable(path, Copier::Receiver, AccessMethod::CrossMemory);
        let sender = |path, method| prefaultable(path, Copier::Sender, method);
        for path in [PathKind::Inline, PathKind::Eager] {
            assert_eq!(receiver(path), ends(false, false));
            assert_eq!(sender(path, AccessMethod::Mapped), ends(false, false));
        }
        for path in [PathKind::Single, PathKind::Cooperative, PathKind::Pipeline] {
            assert_eq!(receiver(path), ends(false, true), "{path:?}");
        }
        assert_eq!(receiver(PathKind::Offload), ends(true, true));
        assert_eq!(sender(PathKind::Cooperative, AccessMethod::CrossMemory), ends(true, false));
        assert_eq!(sender(PathKind::Cooperative, AccessMethod::Mapped), ends(true, true));
        assert_eq!(sender(PathKind::Single, AccessMethod::Mapped), ends(false, false));
    }
}
