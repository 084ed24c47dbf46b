//! What is known of this machine: which streaming kernel is best, from which size it pays, what a
//! hand-over costs. Measured once, saved in the user's cache folder, and open to correction.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use memferry_sys::copy::stream::Streaming;
use memferry_sys::{affinity, cpu};

use super::calibrate;
use crate::saved::{self, Entries, NotMeasured, Saved};
pub use crate::saved::{Origin, ProfileError, ProfileSource};

/// A copy of data in a cache is at most so many times as fast as one in memory. Chosen with much room: a
/// quiet Xeon had 3, one that was busy 73.
const SLOWEST_MEMORY: f64 = 40.0;

/// What is known of this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// How the values were found.
    pub origin: Origin,
    /// The best way to write around the caches.
    pub streaming: Streaming,
    /// Time for a cache line to reach another core.
    pub handover_ns: f64,
    /// What waking a sleeping channel costs the thread that wakes it.
    pub wake_ns: f64,
    /// One core, data in its cache.
    pub cached_gb_per_s: f64,
    /// One core, streaming.
    pub stream_gb_per_s: f64,
    /// Two cores, streaming.
    pub pair_stream_gb_per_s: f64,
    /// Asynchronous copies up to this size are done at once by the caller: handing them over
    /// would take longer.
    pub inline_bytes: usize,
    /// Blocking copies from this size on are shared with channels.
    pub split_bytes: usize,
    /// Copies by one party stream from this size on.
    pub stream_bytes: usize,
    /// Copies shared by several parties stream from this size on.
    pub shared_stream_bytes: usize,
    /// The largest chunk that a large copy is cut into.
    pub chunk_bytes: usize,
}

impl Profile {
    /// The profile that a source stands for.
    pub fn load(source: &ProfileSource) -> Result<Arc<Self>, ProfileError> {
        if *source != ProfileSource::Automatic {
            return saved::load(source).map(Arc::new);
        }
        // Looked for once per process: every ferry of a process has the same profile.
        static FOUND: OnceLock<Arc<Profile>> = OnceLock::new();
        if let Some(profile) = FOUND.get() {
            return Ok(profile.clone());
        }
        let profile = saved::load(source)?;
        Ok(FOUND.get_or_init(|| Arc::new(profile)).clone())
    }

    /// Where profiles are saved unless told otherwise.
    pub fn default_path() -> Option<PathBuf> {
        saved::default_path::<Self>()
    }

    /// Measures this machine, and saves the result at the default place if that can be written.
    pub fn remeasure() -> Self {
        saved::remeasure()
    }

    /// Writes the profile whole or not at all.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        saved::save(self, path)
    }

    /// Values that are sensible for most machines, from the processor's flags and cache sizes.
    pub fn built_in() -> Self {
        let l2_bytes = cpu::facts().l2_bytes;
        let alone = affinity::allowed_cores().len() == 1;
        Self {
            origin: Origin::BuiltIn,
            streaming: Streaming::supported().next().unwrap_or(Streaming::Plain),
            handover_ns: 200.0,
            wake_ns: 3000.0,
            cached_gb_per_s: 20.0,
            stream_gb_per_s: 10.0,
            pair_stream_gb_per_s: 18.0,
            inline_bytes: 4 << 10,
            split_bytes: if alone { usize::MAX } else { 512 << 10 },
            stream_bytes: l2_bytes.max(1 << 20),
            shared_stream_bytes: 2 * l2_bytes.max(1 << 20),
            chunk_bytes: 256 << 10,
        }
    }
}

impl Saved for Profile {
    const FIRST_WORD: &'static str = "memferry-profile";

    /// A process that is bound to a few cores keeps a profile of its own at the usual place: what
    /// it measures is not for those that have them all.
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

    fn measure() -> Result<Self, NotMeasured> {
        calibrate::measure()
    }

    /// Limits far from any machine's values, that those of a busy machine still exceed: a hand-over then
    /// takes as long as it is somebody else's turn, and two cores are slower than one.
    fn implausible(&self) -> Option<String> {
        let times = [("handover_ns", self.handover_ns, 1e5), ("wake_ns", self.wake_ns, 1e6)];
        for (name, ns, most) in times {
            if !(1.0..=most).contains(&ns) {
                return Some(format!("{name} is {ns:.0}, and not from 1 to {most:.0}"));
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
                return Some(format!("{name} is {gb_per_s:.3}, and not from 0.05 to 5000"));
            }
        }
        let slower = format!("two cores copy {two:.1} GB/s, and one of them {one:.1} GB/s");
        if two < one / 2.0 {
            return Some(slower);
        }
        let cached = self.cached_gb_per_s;
        let streams = [("stream_gb_per_s", one), ("pair_stream_gb_per_s", two)];
        let slow = streams.into_iter().find(|(_, gb_per_s)| *gb_per_s < cached / SLOWEST_MEMORY);
        slow.map(|(name, gb_per_s)| {
            format!("{name} is {gb_per_s:.2}, less than a {SLOWEST_MEMORY:.0}th of {cached:.1} in a cache")
        })
    }

    fn found(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    fn to_entries(&self) -> String {
        let mut text = String::new();
        for (name, value) in [
            ("handover_ns", self.handover_ns),
            ("wake_ns", self.wake_ns),
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
        let _ = writeln!(text, "streaming {}", self.streaming.name());
        text
    }

    fn from_entries(entries: &Entries<'_>) -> Result<Self, String> {
        let bytes = |name: &str| entries.number(name).map(|value| value as usize);
        let streaming = Streaming::from_name(entries.word("streaming")?)
            .filter(|variant| variant.is_supported())
            .ok_or("\"streaming\" names no kernel of this processor")?;
        Ok(Self {
            origin: Origin::BuiltIn,
            streaming,
            handover_ns: entries.number("handover_ns")?,
            wake_ns: entries.number("wake_ns")?,
            cached_gb_per_s: entries.number("cached_gb_per_s")?,
            stream_gb_per_s: entries.number("stream_gb_per_s")?,
            pair_stream_gb_per_s: entries.number("pair_stream_gb_per_s")?,
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
    use crate::saved::{from_text, to_text};

    #[test]
    fn a_saved_profile_is_read_back_as_it_was() {
        let profile =
            Profile { handover_ns: 123.5, split_bytes: usize::MAX, ..Profile::built_in() };
        assert_eq!(from_text(&to_text(&profile)), Ok(Some(profile)));
    }

    #[test]
    fn a_profile_of_another_machine_is_measured_anew() {
        let text = format!("{} 0.0.0 99 some other processor\n", Profile::FIRST_WORD);
        assert_eq!(from_text::<Profile>(&text), Ok(None));
    }

    #[test]
    fn a_file_that_is_no_profile_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        std::fs::write(&path, "hello").unwrap();
        let error = Profile::load(&ProfileSource::File(path)).unwrap_err().to_string();
        assert!(error.contains("no profile") && error.contains("MEMFERRY_PROFILE"), "{error}");
    }

    #[test]
    fn broken_values_are_refused() {
        let good = to_text(&Profile::built_in());
        for (from, to) in [
            ("handover_ns 200", "handover_ns -3"),
            ("handover_ns 200", "handover_ns soon"),
            ("chunk_bytes", "chunk_bites"),
            ("streaming ", "streaming warp"),
        ] {
            assert!(from_text::<Profile>(&good.replace(from, to)).is_err(), "{from} -> {to}");
        }
    }

    #[test]
    fn a_missing_file_is_measured_and_saved_or_the_machine_was_busy() {
        let folder = tempfile::tempdir().unwrap();
        let source = ProfileSource::File(folder.path().join("deep").join("profile"));
        let measured = Profile::load(&source).unwrap();
        let again = Profile::load(&source).unwrap();
        match &measured.origin {
            Origin::Measured => {
                assert!(matches!(again.origin, Origin::Saved(_)));
                assert_eq!(again.streaming, measured.streaming);
            }
            Origin::NotKept(why) => {
                assert!(!why.is_empty());
                assert_eq!(*again, *measured, "nobody measures again at once");
            }
            origin => panic!("{origin:?}"),
        }
    }

    #[test]
    fn values_of_a_busy_machine_are_refused_when_they_are_found_in_a_file() {
        let good = Profile::built_in();
        assert_eq!(good.implausible(), None);
        let slow = |stream_gb_per_s, pair_stream_gb_per_s| Profile {
            stream_gb_per_s,
            pair_stream_gb_per_s,
            ..good.clone()
        };
        for (what, busy) in [
            ("handover_ns", Profile { handover_ns: 13e6, ..good.clone() }),
            ("handover_ns", Profile { handover_ns: f64::NAN, ..good.clone() }),
            ("wake_ns", Profile { wake_ns: 4e6, ..good.clone() }),
            ("two cores", Profile { pair_stream_gb_per_s: 0.6, ..good.clone() }),
            ("stream_gb_per_s", Profile { stream_gb_per_s: 0.01, ..good.clone() }),
            // Both speeds were measured while others had the cores.
            ("stream_gb_per_s", Profile { cached_gb_per_s: 32.5, ..slow(0.44, 0.52) }),
            ("pair_stream_gb_per_s", Profile { cached_gb_per_s: 32.5, ..slow(1.0, 0.6) }),
            ("cached_gb_per_s", Profile { cached_gb_per_s: 1e6, ..good.clone() }),
        ] {
            let why = busy.implausible().expect("nobody can believe it");
            assert!(why.starts_with(what), "{why}");
            if !busy.handover_ns.is_nan() {
                assert_eq!(from_text::<Profile>(&to_text(&busy)), Ok(None), "{what}");
            }
        }
    }

    #[test]
    fn slow_machines_and_fast_ones_are_believed() {
        let good = Profile::built_in();
        let (speed, pair) = (|gb_per_s| gb_per_s, |gb_per_s: f64| 0.6 * gb_per_s);
        for gb_per_s in [0.2, 2.0, 400.0] {
            let machine = Profile {
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
            assert_eq!(Profile::path(usual, false), Path::new("profile.1"));
            assert_eq!(Profile::path(usual, true), usual);
        })
        .join()
        .unwrap();
    }
}
