//! The message costs of a machine: measured once, and stored beside the profile of the copy core.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use memferry_engine::runtime::profile_store::{
    self, MeasureError, ProfileError, ProfileFields, ProfileOrigin, ProfileSource, StoredProfile,
};
use memferry_sys::affinity;
use memferry_sys::fork::ForkSafe;

use super::costs::{CorePairCosts, Measurement};
use super::{Locality, PathCosts, calibrate};

/// The message costs of this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct MessageProfile {
    /// The origin of the values.
    pub origin: ProfileOrigin,
    shared_cache: CorePair,
    separate_cache: CorePair,
}

/// The costs of two cores.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CorePair {
    measured: Measurement,
    path_costs: PathCosts,
}

impl MessageProfile {
    /// The profile of all endpoints and links of this process: the file that `MEMFERRY_PROFILE`
    /// names, else the stored one, else measured now and stored. Fails if `MEMFERRY_PROFILE` names
    /// a file that cannot be used.
    pub fn load() -> Result<&'static Self, &'static ProfileError> {
        static PROFILE: ForkSafe<Result<MessageProfile, ProfileError>> = ForkSafe::new();
        PROFILE.get_or_init(Self::find).as_ref()
    }

    /// As [`MessageProfile::load`], without the cache.
    pub fn find() -> Result<Self, ProfileError> {
        profile_store::load(&ProfileSource::Automatic)
    }

    /// Measures this machine, and stores the result at the default path if that can be written.
    pub fn remeasure() -> Self {
        profile_store::remeasure()
    }

    /// Default costs.
    pub fn built_in() -> Self {
        Self::new(ProfileOrigin::BuiltIn, Measurement::default(), Measurement::default())
    }

    /// Creates a profile from the measurements with and without a shared cache.
    pub fn new(
        origin: ProfileOrigin,
        shared_cache: Measurement,
        separate_cache: Measurement,
    ) -> Self {
        let pair = |locality, measured: Measurement| CorePair {
            measured,
            path_costs: measured.costs(locality).path_costs(),
        };
        Self {
            origin,
            shared_cache: pair(Locality::SharedCache, shared_cache),
            separate_cache: pair(Locality::SeparateCache, separate_cache),
        }
    }

    fn pair(&self, locality: Locality) -> &CorePair {
        match locality {
            Locality::SharedCache => &self.shared_cache,
            Locality::SeparateCache => &self.separate_cache,
        }
    }

    /// The cost lines of a locality.
    pub fn path_costs(&self, locality: Locality) -> &PathCosts {
        &self.pair(locality).path_costs
    }

    /// The measured costs of a locality. The rest are defaults.
    pub fn measured(&self, locality: Locality) -> &Measurement {
        &self.pair(locality).measured
    }
}

impl StoredProfile for MessageProfile {
    const MAGIC: &'static str = "memferry-messages";

    fn path(named: &Path, _: bool) -> PathBuf {
        let mut name = named.as_os_str().to_owned();
        name.push(".messages");
        name.into()
    }

    /// All cores of the machine: processes that are bound to one core each exchange messages too.
    fn cores() -> usize {
        affinity::online_cores()
    }

    fn built_in() -> Self {
        Self::built_in()
    }

    fn measure() -> Result<Self, MeasureError> {
        let [shared_cache, separate_cache] = calibrate::measure()?;
        Ok(Self::new(ProfileOrigin::Measured, shared_cache, separate_cache))
    }

    /// Stored values must satisfy the same limits as measured ones.
    fn implausible(&self) -> Option<String> {
        if Locality::ALL.into_iter().all(|locality| self.measured(locality).is_empty()) {
            return Some("nothing was measured".into());
        }
        let is_wrong = |locality: &Locality| {
            let measured = self.measured(*locality);
            !measured.is_empty() && measured.plausible(*locality).is_none()
        };
        let wrong = Locality::ALL.into_iter().find(is_wrong)?;
        let values = self.measured(wrong).values();
        Some(format!("costs that no idle machine has, {}: {values:?}", wrong.name()))
    }

    fn with_origin(self, origin: ProfileOrigin) -> Self {
        Self { origin, ..self }
    }

    fn to_fields(&self) -> String {
        let mut text = String::new();
        for locality in Locality::ALL {
            for (name, value) in CorePairCosts::NAMES.iter().zip(self.measured(locality).values()) {
                if let Some(value) = value {
                    let _ = writeln!(text, "{}.{name} {value}", locality.name());
                }
            }
        }
        text
    }

    /// A missing field was not measured.
    fn from_fields(fields: &ProfileFields<'_>) -> Result<Self, String> {
        let mut found = Locality::ALL.map(|_| Measurement::default());
        for (locality, found) in Locality::ALL.into_iter().zip(&mut found) {
            let mut values = found.values();
            for (name, value) in CorePairCosts::NAMES.iter().zip(&mut values) {
                let name = format!("{}.{name}", locality.name());
                if fields.find(&name).is_some() {
                    *value = Some(fields.number(&name)?);
                }
            }
            *found = Measurement::new(values);
        }
        let [shared_cache, separate_cache] = found;
        Ok(Self::new(ProfileOrigin::BuiltIn, shared_cache, separate_cache))
    }
}

#[cfg(test)]
mod tests {
    use memferry_engine::runtime::profile_store::{from_text, to_text};

    use super::*;

    fn profile() -> MessageProfile {
        let near = [Some(120.5), Some(0.2), None, Some(0.06), Some(0.03), Some(0.11)];
        let separate_cache = [Some(300.0), Some(0.3), None, None, Some(0.07), Some(0.2)];
        MessageProfile::new(
            ProfileOrigin::BuiltIn,
            Measurement::new(near),
            Measurement::new(separate_cache),
        )
    }

    #[test]
    fn a_saved_profile_is_read_back_as_it_was() {
        assert_eq!(from_text(&to_text(&profile())), Ok(Some(profile())));
        assert_eq!(from_text::<MessageProfile>(&to_text(&MessageProfile::built_in())), Ok(None));
    }

    #[test]
    fn broken_values_are_refused() {
        let good = to_text(&profile());
        for (from, to) in [("handover_ns 120.5", "handover_ns 0"), ("byte 0.2", "byte little")] {
            assert_ne!(good.replace(from, to), good);
            assert!(
                from_text::<MessageProfile>(&good.replace(from, to)).is_err(),
                "{from} -> {to}"
            );
        }
    }

    #[test]
    fn costs_of_a_busy_machine_are_refused_when_they_are_found_in_a_file() {
        let busy = [Some(13e6), Some(0.2), None, Some(0.06), Some(0.03), Some(0.11)];
        let nothing = Measurement::default();
        let profile = MessageProfile::new(ProfileOrigin::Measured, Measurement::new(busy), nothing);
        assert!(profile.implausible().is_some_and(|reason| reason.contains("13000000")));
        assert_eq!(from_text::<MessageProfile>(&to_text(&profile)), Ok(None));
        assert!(
            MessageProfile::built_in()
                .implausible()
                .is_some_and(|reason| reason.contains("nothing"))
        );
    }

    #[test]
    fn the_profile_of_the_copy_core_is_not_taken_for_one_of_messages() {
        assert!(from_text::<MessageProfile>("memferry-profile 0.1.0 2 some processor\n").is_err());
    }

    #[test]
    fn it_lies_beside_the_profile_of_the_copy_core() {
        let path = MessageProfile::path(Path::new("folder/profile"), false);
        assert_eq!(path, Path::new("folder/profile.messages"));
    }

    #[test]
    fn near_and_far_cores_have_lines_of_their_own() {
        let profile = profile();
        assert_eq!(profile.path_costs(Locality::SharedCache).handover_ns, 120.5);
        assert_eq!(profile.path_costs(Locality::SeparateCache).handover_ns, 300.0);
    }
}
