//! What is known of this machine: which streaming kernel is best, from which size it pays, what a
//! hand-over costs. Measured once, saved in the user's cache folder, and open to correction.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::{env, fs, io};

use memferry_sys::copy::stream::Streaming;
use memferry_sys::{affinity, cpu};
use thiserror::Error;

use super::calibrate;

/// Where a profile comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ProfileSource {
    /// As `MEMFERRY_PROFILE` says, else the saved one, else measure now and save.
    #[default]
    Automatic,
    /// Measure now (at most 200 ms) and save nothing.
    Measure,
    /// No measurement: values that are sensible for most machines.
    BuiltIn,
    /// A saved profile; measured and written there if the file does not exist.
    File(PathBuf),
}

/// How the values of a profile were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Measured by this process.
    Measured,
    /// Read from a file.
    Saved(PathBuf),
    /// Not measured.
    BuiltIn,
}

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

/// A profile could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The file could not be read or written.
    #[error(
        "profile {path}: {error}: name a file that can be read and written, or unset MEMFERRY_PROFILE"
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The file is no profile.
    #[error(
        "{path} is no profile: {problem}; unset MEMFERRY_PROFILE, or let it name a file that may be written"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl Profile {
    /// The profile that a source stands for.
    pub fn load(source: &ProfileSource) -> Result<Arc<Self>, ProfileError> {
        match source {
            ProfileSource::Automatic => Self::automatic(),
            ProfileSource::Measure => Ok(Arc::new(calibrate::measure())),
            ProfileSource::BuiltIn => Ok(Arc::new(Self::built_in())),
            ProfileSource::File(path) => Self::read_or_measure(path).map(Arc::new),
        }
    }

    /// Looks at the environment once per process: every ferry of a process has the same profile.
    fn automatic() -> Result<Arc<Self>, ProfileError> {
        static FOUND: OnceLock<Arc<Profile>> = OnceLock::new();
        if let Some(profile) = FOUND.get() {
            return Ok(profile.clone());
        }
        let profile = match env::var_os("MEMFERRY_PROFILE") {
            Some(word) if word == "off" => Self::built_in(),
            Some(word) if word == "measure" => calibrate::measure(),
            Some(path) => Self::read_or_measure(Path::new(&path))?,
            // Without a place to save this process measures for itself; a broken file at the
            // default place is our own, and is replaced.
            None => Self::default_path()
                .and_then(|path| Self::read_or_measure(&path).ok())
                .unwrap_or_else(Self::remeasure),
        };
        Ok(FOUND.get_or_init(|| Arc::new(profile)).clone())
    }

    /// Where profiles are saved unless told otherwise.
    pub fn default_path() -> Option<PathBuf> {
        let cache = env::var_os("XDG_CACHE_HOME")
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("memferry").join("profile"))
    }

    /// Measures this machine, and saves the result at the default place if that can be written.
    pub fn remeasure() -> Self {
        let profile = calibrate::measure();
        if let Some(path) = Self::default_path() {
            let _ = profile.save(&path);
        }
        profile
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

    /// A saved profile of another machine is measured anew, a missing one for the first time.
    fn read_or_measure(path: &Path) -> Result<Self, ProfileError> {
        let at = |error| ProfileError::Io { path: path.to_owned(), error };
        match fs::read_to_string(path) {
            Ok(text) => match Self::parse(&text) {
                Ok(Some(profile)) => {
                    return Ok(Self { origin: Origin::Saved(path.to_owned()), ..profile });
                }
                Ok(None) => {}
                Err(problem) => {
                    return Err(ProfileError::Malformed { path: path.to_owned(), problem });
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(error)),
        }
        let profile = calibrate::measure();
        profile.save(path).map_err(at)?;
        Ok(profile)
    }

    /// Writes the profile whole or not at all.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        fs::write(&partial, self.to_text())?;
        fs::rename(&partial, path).inspect_err(|_| {
            let _ = fs::remove_file(&partial);
        })
    }

    fn to_text(&self) -> String {
        let mut text = machine_line();
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

    /// Reads a saved profile; `None` if it is of another machine or another version.
    fn parse(text: &str) -> Result<Option<Self>, String> {
        let machine = machine_line();
        let Some(rest) = text.strip_prefix(&machine) else {
            return if text.starts_with(FIRST_WORD) {
                Ok(None)
            } else {
                Err(format!("it does not begin with \"{FIRST_WORD}\""))
            };
        };
        let field = |name: &str| {
            rest.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
                .ok_or_else(|| format!("\"{name}\" is missing"))
        };
        let number = |name: &str| {
            let value = field(name)?.parse::<f64>().ok().filter(|value| *value > 0.0);
            value.ok_or_else(|| format!("\"{name}\" is not a positive number"))
        };
        let bytes = |name: &str| number(name).map(|value| value as usize);
        let streaming = Streaming::from_name(field("streaming")?)
            .filter(|variant| variant.is_supported())
            .ok_or("\"streaming\" names no kernel of this processor")?;
        Ok(Some(Self {
            origin: Origin::BuiltIn,
            streaming,
            handover_ns: number("handover_ns")?,
            wake_ns: number("wake_ns")?,
            cached_gb_per_s: number("cached_gb_per_s")?,
            stream_gb_per_s: number("stream_gb_per_s")?,
            pair_stream_gb_per_s: number("pair_stream_gb_per_s")?,
            inline_bytes: bytes("inline_bytes")?,
            split_bytes: bytes("split_bytes")?,
            stream_bytes: bytes("stream_bytes")?,
            shared_stream_bytes: bytes("shared_stream_bytes")?,
            chunk_bytes: bytes("chunk_bytes")?,
        }))
    }
}

const FIRST_WORD: &str = "memferry-profile";

/// The first line: a profile is good for this version on this machine with these cores.
fn machine_line() -> String {
    let cores = affinity::allowed_cores().len();
    format!("{FIRST_WORD} {} {cores} {}\n", env!("CARGO_PKG_VERSION"), cpu::facts().model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_profile_is_read_back_as_it_was() {
        let profile =
            Profile { handover_ns: 123.5, split_bytes: usize::MAX, ..Profile::built_in() };
        assert_eq!(Profile::parse(&profile.to_text()), Ok(Some(profile)));
    }

    #[test]
    fn a_profile_of_another_machine_is_measured_anew() {
        let text = format!("{FIRST_WORD} 0.0.0 99 some other processor\n");
        assert_eq!(Profile::parse(&text), Ok(None));
    }

    #[test]
    fn a_file_that_is_no_profile_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        fs::write(&path, "hello").unwrap();
        let error = Profile::load(&ProfileSource::File(path)).unwrap_err().to_string();
        assert!(error.contains("no profile") && error.contains("MEMFERRY_PROFILE"), "{error}");
    }

    #[test]
    fn broken_values_are_refused() {
        let good = Profile::built_in().to_text();
        for (from, to) in [
            ("handover_ns 200", "handover_ns -3"),
            ("handover_ns 200", "handover_ns soon"),
            ("chunk_bytes", "chunk_bites"),
            ("streaming ", "streaming warp"),
        ] {
            assert!(Profile::parse(&good.replace(from, to)).is_err(), "{from} -> {to}");
        }
    }

    #[test]
    fn a_missing_file_is_measured_and_saved() {
        let folder = tempfile::tempdir().unwrap();
        let source = ProfileSource::File(folder.path().join("deep").join("profile"));
        let measured = Profile::load(&source).unwrap();
        assert_eq!(measured.origin, Origin::Measured);
        let saved = Profile::load(&source).unwrap();
        assert!(matches!(saved.origin, Origin::Saved(_)));
        assert_eq!(saved.streaming, measured.streaming);
    }
}
