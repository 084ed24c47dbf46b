//! The costs of a machine: measured once, saved beside the profile of the copy core, and open to
//! correction.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memferry_engine::saved::{
    self, Entries, NotMeasured, Origin, ProfileError, ProfileSource, Saved,
};
use memferry_sys::affinity;

use super::costs::{Costs, Measurement};
use super::{Closeness, Lines, calibrate};

/// What is known of messages on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// How the values were found.
    pub origin: Origin,
    shared_cache: Pair,
    apart: Pair,
}

/// What is known of two cores.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pair {
    measured: Measurement,
    lines: Lines,
}

impl Profile {
    /// The profile that all endpoints and links of this process go by: as `MEMFERRY_PROFILE` says,
    /// else the saved one, else measured now and saved. An error if `MEMFERRY_PROFILE` names a file
    /// that cannot be used.
    pub fn load() -> Result<&'static Self, &'static ProfileError> {
        static FOUND: OnceLock<Result<Profile, ProfileError>> = OnceLock::new();
        FOUND.get_or_init(Self::find).as_ref()
    }

    /// As [`Profile::load`], with what stands in the way.
    pub fn find() -> Result<Self, ProfileError> {
        saved::load(&ProfileSource::Automatic)
    }

    /// Measures this machine, and saves the result at the usual place if that can be written.
    pub fn remeasure() -> Self {
        saved::remeasure()
    }

    /// Costs that are sensible for most machines.
    pub fn built_in() -> Self {
        Self::new(Origin::BuiltIn, Measurement::default(), Measurement::default())
    }

    /// From what was measured between near cores and between far ones.
    pub fn new(origin: Origin, shared_cache: Measurement, apart: Measurement) -> Self {
        let pair = |closeness, measured: Measurement| Pair {
            measured,
            lines: measured.costs(closeness).lines(),
        };
        Self {
            origin,
            shared_cache: pair(Closeness::SharedCache, shared_cache),
            apart: pair(Closeness::Apart, apart),
        }
    }

    fn pair(&self, closeness: Closeness) -> &Pair {
        match closeness {
            Closeness::SharedCache => &self.shared_cache,
            Closeness::Apart => &self.apart,
        }
    }

    /// The lines between two cores.
    pub fn lines(&self, closeness: Closeness) -> &Lines {
        &self.pair(closeness).lines
    }

    /// What was measured between two cores. The rest is built in.
    pub fn measured(&self, closeness: Closeness) -> &Measurement {
        &self.pair(closeness).measured
    }
}

impl Saved for Profile {
    const FIRST_WORD: &'static str = "memferry-messages";

    fn path(named: &Path, _: bool) -> PathBuf {
        let mut name = named.as_os_str().to_owned();
        name.push(".messages");
        name.into()
    }

    /// All cores of the machine: processes that are bound to one core each talk to each other.
    fn cores() -> usize {
        affinity::online_cores()
    }

    fn built_in() -> Self {
        Self::built_in()
    }

    fn measure() -> Result<Self, NotMeasured> {
        let [shared_cache, apart] = calibrate::measure()?;
        Ok(Self::new(Origin::Measured, shared_cache, apart))
    }

    /// What was saved is held against the same limits as what is measured.
    fn implausible(&self) -> Option<String> {
        if Closeness::ALL.into_iter().all(|closeness| self.measured(closeness).is_empty()) {
            return Some("nothing was measured".into());
        }
        let is_wrong = |closeness: &Closeness| {
            let measured = self.measured(*closeness);
            !measured.is_empty() && measured.plausible(*closeness).is_none()
        };
        let wrong = Closeness::ALL.into_iter().find(is_wrong)?;
        let values = self.measured(wrong).values();
        Some(format!("costs that no quiet machine has, {}: {values:?}", wrong.name()))
    }

    fn found(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    fn to_entries(&self) -> String {
        let mut text = String::new();
        for closeness in Closeness::ALL {
            for (name, value) in Costs::NAMES.iter().zip(self.measured(closeness).values()) {
                if let Some(value) = value {
                    let _ = writeln!(text, "{}.{name} {value}", closeness.name());
                }
            }
        }
        text
    }

    /// What is not there was not measured.
    fn from_entries(entries: &Entries<'_>) -> Result<Self, String> {
        let mut found = Closeness::ALL.map(|_| Measurement::default());
        for (closeness, found) in Closeness::ALL.into_iter().zip(&mut found) {
            let mut values = found.values();
            for (name, value) in Costs::NAMES.iter().zip(&mut values) {
                let name = format!("{}.{name}", closeness.name());
                if entries.find(&name).is_some() {
                    *value = Some(entries.number(&name)?);
                }
            }
            *found = Measurement::new(values);
        }
        let [shared_cache, apart] = found;
        Ok(Self::new(Origin::BuiltIn, shared_cache, apart))
    }
}

#[cfg(test)]
mod tests {
    use memferry_engine::saved::{from_text, to_text};

    use super::*;

    fn profile() -> Profile {
        let near = [Some(120.5), Some(0.2), None, Some(0.06), Some(0.03), Some(0.11)];
        let apart = [Some(300.0), Some(0.3), None, None, Some(0.07), Some(0.2)];
        Profile::new(Origin::BuiltIn, Measurement::new(near), Measurement::new(apart))
    }

    #[test]
    fn a_saved_profile_is_read_back_as_it_was() {
        assert_eq!(from_text(&to_text(&profile())), Ok(Some(profile())));
        assert_eq!(from_text::<Profile>(&to_text(&Profile::built_in())), Ok(None));
    }

    #[test]
    fn broken_values_are_refused() {
        let good = to_text(&profile());
        for (from, to) in [("handover_ns 120.5", "handover_ns 0"), ("byte 0.2", "byte little")] {
            assert_ne!(good.replace(from, to), good);
            assert!(from_text::<Profile>(&good.replace(from, to)).is_err(), "{from} -> {to}");
        }
    }

    #[test]
    fn costs_of_a_busy_machine_are_refused_when_they_are_found_in_a_file() {
        let busy = [Some(13e6), Some(0.2), None, Some(0.06), Some(0.03), Some(0.11)];
        let nothing = Measurement::default();
        let profile = Profile::new(Origin::Measured, Measurement::new(busy), nothing);
        assert!(profile.implausible().is_some_and(|why| why.contains("13000000")));
        assert_eq!(from_text::<Profile>(&to_text(&profile)), Ok(None));
        assert!(Profile::built_in().implausible().is_some_and(|why| why.contains("nothing")));
    }

    #[test]
    fn the_profile_of_the_copy_core_is_not_taken_for_one_of_messages() {
        assert!(from_text::<Profile>("memferry-profile 0.1.0 2 some processor\n").is_err());
    }

    #[test]
    fn it_lies_beside_the_profile_of_the_copy_core() {
        let path = Profile::path(Path::new("folder/profile"), false);
        assert_eq!(path, Path::new("folder/profile.messages"));
    }

    #[test]
    fn near_and_far_cores_have_lines_of_their_own() {
        let profile = profile();
        assert_eq!(profile.lines(Closeness::SharedCache).handover_ns, 120.5);
        assert_eq!(profile.lines(Closeness::Apart).handover_ns, 300.0);
    }
}
