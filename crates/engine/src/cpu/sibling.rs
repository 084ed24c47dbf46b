//! Whether the other hardware thread of the caller's core pays as a channel.

/// What a channel on the other hardware thread of the caller's core is used for.
///
/// ```
/// use memferry::engine::cpu::{CpuProfile, SiblingUse};
///
/// let rates = CpuProfile { sibling_gain: 1.6, neighbour_gain: 1.7, ..CpuProfile::built_in() };
/// assert_eq!(rates.sibling_use(), SiblingUse::Last);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SiblingUse {
    /// It is as good as a channel on the nearest core.
    Near,
    /// It gets copies after all channels on other cores.
    #[default]
    Last,
    /// The caller does not share copies with it, unless the policy chooses it for a whole one.
    Unused,
}

/// The minimum gain of a copy that is shared with the sibling: less is within the spread of a measurement.
const MIN_GAIN: f64 = 1.05;
/// The sibling is near from this part of the nearest core's gain on. Whoever computes there loses as much
/// as the copy gains, so a core that is equally fast is better.
const NEAR_PART: f64 = 0.98;

impl SiblingUse {
    /// Decides by how many times as fast as the caller alone a copy is that it shares with its sibling, and
    /// with the nearest other core; 0 stands for what was not measured.
    pub fn of_gains(sibling_gain: f64, neighbour_gain: f64) -> Self {
        if sibling_gain <= 0.0 {
            Self::Last
        } else if sibling_gain < MIN_GAIN {
            Self::Unused
        } else if neighbour_gain > 0.0 && sibling_gain >= NEAR_PART * neighbour_gain {
            Self::Near
        } else {
            Self::Last
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sibling_is_near_last_or_unused_by_what_it_gains() {
        for (sibling, neighbour, expected) in [
            // Two threads of one core have no more bandwidth than one.
            (1.0, 1.9, SiblingUse::Unused),
            (0.7, 1.9, SiblingUse::Unused),
            (1.04, 0.0, SiblingUse::Unused),
            (1.3, 1.9, SiblingUse::Last),
            // A machine whose memory is the limit, not its cores.
            (1.5, 1.5, SiblingUse::Near),
            (1.49, 1.5, SiblingUse::Near),
            (1.5, 1.2, SiblingUse::Near),
            // There is no other core.
            (1.5, 0.0, SiblingUse::Last),
            // Not measured.
            (0.0, 0.0, SiblingUse::Last),
        ] {
            let decided = SiblingUse::of_gains(sibling, neighbour);
            assert_eq!(decided, expected, "{sibling} and {neighbour}");
        }
    }
}
