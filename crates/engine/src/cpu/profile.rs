//! The profile of this machine: the best streaming kernel, the sizes from which it pays off, and
//! the cost of a submission. Measured once, saved in the user's cache folder, and editable.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::fork::ForkSafe;
use memferry_sys::{affinity, cpu};

use super::SiblingUse;
use super::calibrate;
use crate::runtime::profile_store::{self, MeasureError, ProfileFields, StoredProfile};
pub use crate::runtime::profile_store::{ProfileError, ProfileOrigin, ProfileSource};

/// The maximum plausible ratio of the copy speed in a cache to the speed in memory. Chosen with a
/// wide margin: an idle Xeon had 3, a busy one 73.
const MAX_CACHE_SPEEDUP: f64 = 40.0;

/// The measured values of this machine.
///
/// ```
/// use memferry::engine::cpu::{CpuProfile, ProfileSource};
///
/// let profile = CpuProfile::load(&ProfileSource::BuiltIn)?;
/// println!("copies from {} bytes on bypass the caches", profile.stream_bytes);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct CpuProfile {
    /// The origin of the values.
    pub origin: ProfileOrigin,
    /// The best kernel with non-temporal stores.
    pub streaming: Streaming,
    /// The time for a cache line to reach another core, in nanoseconds.
    pub handover_ns: f64,
    /// The cost of waking a sleeping channel for the thread that wakes it, in nanoseconds.
    pub wake_ns: f64,
    /// The time that reading a long range takes more for each cache line, if another core has written
    /// it, in nanoseconds.
    pub remote_line_ns: f64,
    /// How many times as fast as by one core a copy is that it shares with the other hardware thread of
    /// the same core; 0 if there is none, or if it was not measured.
    pub sibling_gain: f64,
    /// The same for a copy that it shares with the nearest other core.
    pub neighbour_gain: f64,
    /// The time in nanoseconds to ask the kernel for the nodes of a copy's source and target.
    pub node_query_ns: f64,
    /// The bandwidth of one core with data in its cache.
    pub cached_gb_per_s: f64,
    /// The bandwidth of one core with non-temporal stores.
    pub stream_gb_per_s: f64,
    /// The bandwidth of two cores with non-temporal stores.
    pub pair_stream_gb_per_s: f64,
    /// The size up to which the caller executes asynchronous copies inline: submitting them would
    /// take longer.
    pub inline_bytes: usize,
    /// The size from which blocking copies are shared with channels.
    pub split_bytes: usize,
    /// The size from which copies by one thread use non-temporal stores.
    pub stream_bytes: usize,
    /// The size from which copies shared by several threads use non-temporal stores.
    pub shared_stream_bytes: usize,
    /// The maximum chunk size of a large copy.
    pub chunk_bytes: usize,
}

impl CpuProfile {
    /// Loads the profile from a source.
    pub fn load(source: &ProfileSource) -> Result<Arc<Self>, ProfileError> {
        if *source != ProfileSource::Automatic {
            return profile_store::load(source).map(Arc::new);
        }
        // Loaded once per process: every ferry of a process has the same profile.
        static LOADED: ForkSafe<Arc<CpuProfile>> = ForkSafe::new();
        if let Some(profile) = LOADED.get() {
            return Ok(profile.clone());
        }
        let profile = profile_store::load(source)?;
        Ok(LOADED.get_or_init(|| Arc::new(profile)).clone())
    }

    /// The profile of processes on all cores of this machine, if one was saved. It says how several cores
    /// copy at the same time, which a process on one core cannot measure.
    pub fn saved_for_all_cores() -> Option<Self> {
        profile_store::saved_for_all(affinity::online_cores())
    }

    /// What channels on the other hardware thread of the caller's core are used for.
    pub fn sibling_use(&self) -> SiblingUse {
        SiblingUse::of_gains(self.sibling_gain, self.neighbour_gain)
    }

    /// The default path of saved profiles.
    pub fn default_path() -> Option<PathBuf> {
        profile_store::default_path::<Self>()
    }

    /// Measures this machine, and saves the result at the default path if that is writable.
    pub fn remeasure() -> Self {
        profile_store::remeasure()
    }

    /// Writes the profile atomically.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        profile_store::save(self, path)
    }

    /// Values that suit most machines, from the processor's flags and cache sizes.
    pub fn built_in() -> Self {
        let l2_bytes = cpu::info().l2_bytes;
        let is_single_core = affinity::allowed_cores().len() == 1;
        Self {
            origin: ProfileOrigin::BuiltIn,
            streaming: Streaming::supported().next().unwrap_or(Streaming::Plain),
            handover_ns: 200.0,
            wake_ns: 3000.0,
            remote_line_ns: 5.0,
            sibling_gain: 0.0,
            neighbour_gain: 0.0,
            node_query_ns: 1000.0,
            cached_gb_per_s: 20.0,
            stream_gb_per_s: 10.0,
            pair_stream_gb_per_s: 18.0,
            inline_bytes: 4 << 10,
            split_bytes: if is_single_core { usize::MAX } else { 512 << 10 },
            stream_bytes: l2_bytes.max(1 << 20),
            shared_stream_bytes: 2 * l2_bytes.max(1 << 20),
            chunk_bytes: 256 << 10,
        }
    }
}

impl StoredProfile for CpuProfile {
    const MAGIC: &'static str = "memferry-profile";

    /// The default path of a process that is bound to fewer cores has a suffix: its values do not
    /// apply to processes on all cores.
    fn path(named: &Path, by_hand: bool) -> PathBuf {
        let cores = Self::cores();
        if by_hand || cores >= affinity::online_cores() {
            return named.to_owned();
        }
        let mut name = named.as_os_str().to_owned();
        name.push(format!(".{cores}"));
        name.into()
    }

    fn cores() -> usize {
        affinity::allowed_cores().len()
    }

    fn built_in() -> Self {
        Self::built_in()
    }

    fn measure() -> Result<Self, MeasureError> {
        calibrate::measure()
    }

    /// Rejects values beyond limits that are far from every machine's values, but that a busy
    /// machine exceeds: a submission then takes a scheduler time slice, and two cores are slower
    /// than one.
    fn implausible(&self) -> Option<String> {
        if !(0.0..=1e4).contains(&self.remote_line_ns) {
            return Some(format!(
                "remote_line_ns is {:.0}, not in 0 to 10000",
                self.remote_line_ns
            ));
        }
        for (name, gain) in
            [("sibling_gain", self.sibling_gain), ("neighbour_gain", self.neighbour_gain)]
        {
            if !(0.0..=100.0).contains(&gain) {
                return Some(format!("{name} is {gain:.2}, not in 0 to 100"));
            }
        }
        let times = [
            ("handover_ns", self.handover_ns, 1e5),
            ("wake_ns", self.wake_ns, 1e6),
            ("node_query_ns", self.node_query_ns, 1e6),
        ];
        for (name, ns, max) in times {
            if !(1.0..=max).contains(&ns) {
                return Some(format!("{name} is {ns:.0}, not in 1 to {max:.0}"));
            }
        }
        let (one, two) = (self.stream_gb_per_s, self.pair_stream_gb_per_s);
        let speeds = [
            ("cached_gb_per_s", self.cached_gb_per_s),
            ("stream_gb_per_s", one),
            ("pair_stream_gb_per_s", two),
        ];
        for (name, gb_per_s) in speeds {
            if !(0.05..=5000.0).contains(&gb_per_s) {
                return Some(format!("{name} is {gb_per_s:.3}, not in 0.05 to 5000"));
            }
        }
        let slower = format!("two cores copy {two:.1} GB/s, but one core {one:.1} GB/s");
        if two < one / 2.0 {
            return Some(slower);
        }
        let cached = self.cached_gb_per_s;
        let streams = [("stream_gb_per_s", one), ("pair_stream_gb_per_s", two)];
        let slow = streams.into_iter().find(|(_, gb_per_s)| *gb_per_s < cached / MAX_CACHE_SPEEDUP);
        slow.map(|(name, gb_per_s)| {
            format!("{name} is {gb_per_s:.2}, below 1/{MAX_CACHE_SPEEDUP:.0} of cached_gb_per_s")
        })
    }

    fn with_origin(self, origin: ProfileOrigin) -> Self {
        Self { origin, ..self }
    }

    fn to_fields(&self) -> String {
        let mut text = String::new();
        for (name, value) in [
            ("handover_ns", self.handover_ns),
            ("wake_ns", self.wake_ns),
            ("remote_line_ns", self.remote_line_ns),
            ("node_query_ns", self.node_query_ns),
            ("cached_gb_per_s", self.cached_gb_per_s),
            ("stream_gb_per_s", self.stream_gb_per_s),
            ("pair_stream_gb_per_s", self.pair_stream_gb_per_s),
            ("inline_bytes", self.inline_bytes as f64),
            ("split_bytes", self.split_bytes as f64),
            ("stream_bytes", self.stream_bytes as f64),
            ("shared_stream_bytes", self.shared_stream_bytes as f64),
            ("chunk_bytes", self.chunk_bytes as f64),
        ] {
            let _ = writeln!(text, "{name} {value}");
        }
        for (name, gain) in
            [("sibling_gain", self.sibling_gain), ("neighbour_gain", self.neighbour_gain)]
        {
            // What was not measured is left out: every number of a profile is positive.
            if gain > 0.0 {
                let _ = writeln!(text, "{name} {gain}");
            }
        }
        let _ = writeln!(text, "streaming {}", self.streaming.name());
        text
    }

    fn from_fields(fields: &ProfileFields<'_>) -> Result<Self, String> {
        let bytes = |name: &str| fields.number(name).map(|value| value as usize);
        // Profiles that were saved before this was measured do not have it.
        let number_or = |name: &str, usual: f64| match fields.word(name) {
            Ok(_) => fields.number(name),
            Err(_) => Ok(usual),
        };
        let usual = Self::built_in();
        let streaming = Streaming::from_name(fields.word("streaming")?)
            .filter(|variant| variant.is_supported())
            .ok_or("\"streaming\" is not a kernel of this processor")?;
        Ok(Self {
            origin: ProfileOrigin::BuiltIn,
            streaming,
            handover_ns: fields.number("handover_ns")?,
            wake_ns: fields.number("wake_ns")?,
            remote_line_ns: number_or("remote_line_ns", usual.remote_line_ns)?,
            sibling_gain: number_or("sibling_gain", usual.sibling_gain)?,
            neighbour_gain: number_or("neighbour_gain", usual.neighbour_gain)?,
            node_query_ns: number_or("node_query_ns", usual.node_query_ns)?,
            cached_gb_per_s: fields.number("cached_gb_per_s")?,
            stream_gb_per_s: fields.number("stream_gb_per_s")?,
            pair_stream_gb_per_s: fields.number("pair_stream_gb_per_s")?,
            inline_bytes: bytes("inline_bytes")?,
            split_bytes: bytes("split_bytes")?,
            stream_bytes: bytes("stream_bytes")?,
            shared_stream_bytes: bytes("shared_stream_bytes")?,
            chunk_bytes: bytes("chunk_bytes")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::profile_store::{from_text, to_text};

    #[test]
    fn a_saved_profile_is_read_back_as_it_was() {
        let profile = CpuProfile {
            handover_ns: 123.5,
            sibling_gain: 1.25,
            neighbour_gain: 1.75,
            split_bytes: usize::MAX,
            ..CpuProfile::built_in()
        };
        assert_eq!(from_text(&to_text(&profile)), Ok(Some(profile)));
    }

    #[test]
    fn a_profile_without_the_latest_values_has_the_usual_ones() {
        let usual = CpuProfile::built_in();
        let is_old = |line: &&str| !line.contains("_gain") && !line.contains("node_query_ns");
        let text: String =
            to_text(&usual).lines().filter(is_old).map(|line| format!("{line}\n")).collect();
        assert_eq!(from_text(&text), Ok(Some(usual)));
    }

    #[test]
    fn a_profile_of_another_machine_is_measured_anew() {
        let text = format!("{} 0.0.0 99 some other processor\n", CpuProfile::MAGIC);
        assert_eq!(from_text::<CpuProfile>(&text), Ok(None));
    }

    #[test]
    fn a_file_that_is_no_profile_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        std::fs::write(&path, "hello").unwrap();
        let error = CpuProfile::load(&ProfileSource::File(path)).unwrap_err().to_string();
        assert!(error.contains("no profile") && error.contains("MEMFERRY_PROFILE"), "{error}");
    }

    #[test]
    fn broken_values_are_refused() {
        let good = to_text(&CpuProfile::built_in());
        for (from, to) in [
            ("handover_ns 200", "handover_ns -3"),
            ("handover_ns 200", "handover_ns soon"),
            ("chunk_bytes", "chunk_bites"),
            ("streaming ", "streaming warp"),
        ] {
            assert!(from_text::<CpuProfile>(&good.replace(from, to)).is_err(), "{from} -> {to}");
        }
    }

    #[test]
    fn a_missing_file_is_measured_and_saved_or_the_machine_was_busy() {
        let folder = tempfile::tempdir().unwrap();
        let source = ProfileSource::File(folder.path().join("profile"));
        let measured = CpuProfile::load(&source).unwrap();
        let again = CpuProfile::load(&source).unwrap();
        match &measured.origin {
            ProfileOrigin::Measured => {
                assert!(matches!(again.origin, ProfileOrigin::Saved(_)));
                assert_eq!(again.streaming, measured.streaming);
            }
            ProfileOrigin::Rejected(why) => {
                assert!(!why.is_empty());
                assert_eq!(*again, *measured, "no new measurement within RETRY_AFTER");
            }
            origin => panic!("{origin:?}"),
        }
    }

    #[test]
    fn values_of_a_busy_machine_are_refused_when_they_are_found_in_a_file() {
        let good = CpuProfile::built_in();
        assert_eq!(good.implausible(), None);
        let slow = |stream_gb_per_s, pair_stream_gb_per_s| CpuProfile {
            stream_gb_per_s,
            pair_stream_gb_per_s,
            ..good.clone()
        };
        for (what, busy) in [
            ("handover_ns", CpuProfile { handover_ns: 13e6, ..good.clone() }),
            ("handover_ns", CpuProfile { handover_ns: f64::NAN, ..good.clone() }),
            ("wake_ns", CpuProfile { wake_ns: 4e6, ..good.clone() }),
            ("sibling_gain", CpuProfile { sibling_gain: 1e3, ..good.clone() }),
            ("neighbour_gain", CpuProfile { neighbour_gain: 1e4, ..good.clone() }),
            ("node_query_ns", CpuProfile { node_query_ns: 1e7, ..good.clone() }),
            ("two cores", CpuProfile { pair_stream_gb_per_s: 0.6, ..good.clone() }),
            ("stream_gb_per_s", CpuProfile { stream_gb_per_s: 0.01, ..good.clone() }),
            // Both speeds were measured while other processes had the cores.
            ("stream_gb_per_s", CpuProfile { cached_gb_per_s: 32.5, ..slow(0.44, 0.52) }),
            ("pair_stream_gb_per_s", CpuProfile { cached_gb_per_s: 32.5, ..slow(1.0, 0.6) }),
            ("cached_gb_per_s", CpuProfile { cached_gb_per_s: 1e6, ..good.clone() }),
        ] {
            let why = busy.implausible().expect("the values are implausible");
            assert!(why.starts_with(what), "{why}");
            if !busy.handover_ns.is_nan() {
                assert_eq!(from_text::<CpuProfile>(&to_text(&busy)), Ok(None), "{what}");
            }
        }
    }

    #[test]
    fn slow_machines_and_fast_ones_are_believed() {
        let good = CpuProfile::built_in();
        let (speed, pair) = (|gb_per_s| gb_per_s, |gb_per_s: f64| 0.6 * gb_per_s);
        for gb_per_s in [0.2, 2.0, 400.0] {
            let machine = CpuProfile {
                handover_ns: 20_000.0 / gb_per_s,
                wake_ns: 100_000.0,
                cached_gb_per_s: speed(gb_per_s),
                stream_gb_per_s: speed(gb_per_s),
                pair_stream_gb_per_s: pair(gb_per_s),
                ..good.clone()
            };
            assert_eq!(machine.implausible(), None);
        }
    }

    #[test]
    fn a_bound_process_does_not_overwrite_the_profile_of_the_whole_machine() {
        if affinity::online_cores() < 2 {
            let why = "there is only one core";
            return memferry_testing::skip(memferry_testing::Requirement::Cores, why);
        }
        let whole = affinity::allowed_cores();
        std::thread::spawn(move || {
            affinity::bind_to_core(whole[0]).unwrap();
            let usual = Path::new("profile");
            assert_eq!(CpuProfile::path(usual, false), Path::new("profile.1"));
            assert_eq!(CpuProfile::path(usual, true), usual);
        })
        .join()
        .unwrap();
    }
}
