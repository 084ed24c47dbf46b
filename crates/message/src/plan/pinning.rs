//! Whether memory that is not there is brought in just before it is copied, by whom, and why. Pure.
//!
//! A page that was never touched, was discarded or is swapped out costs a fault in the middle of a
//! copy. One call that brings in many costs less. On memory that is there such a call is lost time,
//! so it is made only for memory that was looked at. Nothing is brought in before a rendezvous, and
//! nothing that somebody else copies: two cores that do it in one address space slow each other.

use std::fmt;

use super::{Facts, PathKind, Question, Way};

/// The setting: whether memory is brought in before it is copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Pinning {
    /// Where it is not there.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always, whether it is there or not.
    On,
}

impl Pinning {
    /// All settings.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Off, Self::On];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::On => "on",
        }
    }

    /// The setting of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|pinning| pinning.name() == name)
    }
}

/// Something about the two ends of a copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Ends {
    /// About the memory that is copied from.
    pub source: bool,
    /// About the memory that is copied to.
    pub target: bool,
}

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Copier {
    /// The side that receives, or its engines.
    Receiver,
    /// The side that sends.
    Sender,
}

/// Below this size no message is looked at. It is also where its own faults begin to outweigh the
/// rest of a message.
pub const LOOK_LIMIT: u64 = 64 << 10;

/// Up to this size a receiver alone, who brings many pages in at once, is faster than two sides who
/// wait for each other at every page of one address space.
pub const FRESH_ALONE_LIMIT: u64 = 64 << 10;

/// From this size on it pays for a receiver to bring in its share of what both sides copy by system
/// calls. Below, the sender's calls, which bring in pages of the same address space, suffer as much
/// as the receiver gains.
pub const SHARED_CALLS_LIMIT: u64 = 4 << 20;

/// Which ends somebody who copies can bring in before. `way`: how the copier gets at the other
/// side's memory. The system call for cross-memory access brings in the other side's pages itself,
/// many at a time, so only the copier's own side is left to do; what is mapped is both.
pub fn reachable(path: PathKind, copier: Copier, way: Way) -> Ends {
    match (path, copier) {
        // The receiver reads what its sender has just written, into what it alone writes.
        (PathKind::Single | PathKind::Cooperative | PathKind::Pipeline, Copier::Receiver) => {
            Ends { source: false, target: true }
        }
        (PathKind::Cooperative, Copier::Sender) => Ends { source: true, target: way == Way::Near },
        // Engines must not meet a fault at either end.
        (PathKind::Offload, Copier::Receiver) => Ends { source: true, target: true },
        _ => Ends::default(),
    }
}

/// Whether the memory of a message is worth a look.
pub fn looks(facts: &Facts, bytes: u64) -> bool {
    facts.limits.pinning == Pinning::Auto && bytes >= LOOK_LIMIT
}

/// What the receiver brings in on its path, and why.
pub(super) fn populating(facts: &Facts, question: &Question, path: PathKind) -> Populating {
    let can = reachable(path, Copier::Receiver, question.receiver_reads);
    let absent = question.absent;
    match facts.limits.pinning {
        _ if can == Ends::default() => Populating::nothing(PinReason::NothingToDo),
        Pinning::Off => Populating::nothing(PinReason::Off),
        Pinning::On => Populating { ends: can, reason: PinReason::On },
        Pinning::Auto if question.bytes < LOOK_LIMIT => {
            Populating::nothing(PinReason::TooSmall { limit_bytes: LOOK_LIMIT })
        }
        Pinning::Auto
            if path == PathKind::Cooperative
                && question.sender_writes == Way::Cross
                && absent.target
                && question.bytes < SHARED_CALLS_LIMIT =>
        {
            Populating::nothing(PinReason::BothCall { limit_bytes: SHARED_CALLS_LIMIT })
        }
        Pinning::Auto => {
            let ends =
                Ends { source: can.source && absent.source, target: can.target && absent.target };
            let reason =
                if ends == Ends::default() { PinReason::Present } else { PinReason::Absent };
            Populating { ends, reason }
        }
    }
}

/// What is brought in before it is copied, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Populating {
    /// Which ends.
    pub ends: Ends,
    /// Why these.
    pub reason: PinReason,
}

impl Populating {
    pub(super) fn nothing(reason: PinReason) -> Self {
        Self { ends: Ends::default(), reason }
    }
}

/// Why memory is brought in, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinReason {
    /// The path has no memory of unknown state, or is too short.
    NothingToDo,
    /// Switched off by hand.
    Off,
    /// Switched on by hand.
    On,
    /// A look would cost more than it can save.
    TooSmall {
        /// Below this size.
        limit_bytes: u64,
    },
    /// Both sides copy by system calls, which bring it in.
    BothCall {
        /// Below this size.
        limit_bytes: u64,
    },
    /// The memory is there.
    Present,
    /// The memory is not there.
    Absent,
}

impl fmt::Display for PinReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingToDo => write!(f, "nothing, since the message is sent at once"),
            Self::Off => write!(f, "nothing, as was set"),
            Self::On => write!(f, "everything, as was set"),
            Self::TooSmall { limit_bytes } => {
                write!(f, "nothing: below {limit_bytes} bytes a look costs more than it saves")
            }
            Self::BothCall { limit_bytes } => write!(
                f,
                "nothing: below {limit_bytes} bytes it would slow the sender's calls, which bring \
                 in pages of the same process"
            ),
            Self::Present => write!(f, "nothing, since the memory is there"),
            Self::Absent => write!(
                f,
                "pages, many at a time, just before they are copied, since they are not there"
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
        let ends = |source, target| Ends { source, target };
        let receiver = |path| reachable(path, Copier::Receiver, Way::Cross);
        let sender = |path, way| reachable(path, Copier::Sender, way);
        for path in [PathKind::Inline, PathKind::Eager] {
            assert_eq!(receiver(path), ends(false, false));
            assert_eq!(sender(path, Way::Near), ends(false, false));
        }
        for path in [PathKind::Single, PathKind::Cooperative, PathKind::Pipeline] {
            assert_eq!(receiver(path), ends(false, true), "{path:?}");
        }
        assert_eq!(receiver(PathKind::Offload), ends(true, true));
        assert_eq!(sender(PathKind::Cooperative, Way::Cross), ends(true, false));
        assert_eq!(sender(PathKind::Cooperative, Way::Near), ends(true, true));
        assert_eq!(sender(PathKind::Single, Way::Near), ends(false, false));
    }
}
