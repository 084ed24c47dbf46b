//! Profiles that are measured once per machine and stored in a file: the path of the file, its
//! validity, and its atomic replacement. Each profile defines its own values and their measurement.
//!
//! Values that were measured on a busy machine are not stored: the process uses built-in values,
//! the file records the time, and a process that starts 60 s later measures again.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, fs, io};

use memferry_sys::cpu;
use memferry_sys::dir_lock::lock_parent_dir;
use memferry_sys::file_size;
use memferry_sys::settings::{self, switch};
use thiserror::Error;

/// The source of measured values.
///
/// ```
/// use memferry::Ferry;
/// use memferry::engine::cpu::ProfileSource;
///
/// let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).build()?; // measures nothing
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ProfileSource {
    /// As set by `MEMFERRY_PROFILE`; by default a saved profile, or measure now and save.
    #[default]
    Automatic,
    /// Measure now (at most 200 ms) and save nothing.
    Measure,
    /// Values that suit most machines, without a measurement.
    BuiltIn,
    /// A saved profile; measured and written there if the file does not exist.
    File(PathBuf),
}

/// The origin of values.
///
/// ```
/// use memferry::engine::cpu::{CpuProfile, ProfileOrigin, ProfileSource};
///
/// let profile = CpuProfile::load(&ProfileSource::BuiltIn)?;
/// assert_eq!(profile.origin, ProfileOrigin::BuiltIn);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProfileOrigin {
    /// Measured by this process.
    Measured,
    /// Read from a file.
    Saved(PathBuf),
    /// Not measured.
    BuiltIn,
    /// Measured and rejected for this reason: the values are built in. A later process measures
    /// again.
    Rejected(String),
}

/// The reason why there are no measured values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MeasureError {
    /// This process cannot measure.
    Impossible,
    /// The measured values are not reliable, for this reason.
    Unreliable(String),
}

/// The maximum share of time that other processes may have the processors during a measurement.
const MAX_CONTENTION: f64 = 0.1;

/// Returns an error if other processes had the processors for so much of the time that values
/// measured during it are unreliable.
pub fn check_contention(share: f64) -> Result<(), MeasureError> {
    if share <= MAX_CONTENTION {
        return Ok(());
    }
    let percent = 100.0 * share;
    let why = format!(
        "the machine was busy: other processes had the processors for {percent:.0} % of the time"
    );
    Err(MeasureError::Unreliable(why))
}

/// Returns an error if a CPU quota throttled this process for so much of the time that an
/// incomplete measurement is due to the quota.
pub fn check_throttling(share: f64) -> Result<(), MeasureError> {
    if share <= MAX_CONTENTION {
        return Ok(());
    }
    let percent = 100.0 * share;
    let why = format!(
        "a CPU quota throttled this process for up to {percent:.0} % of the time: too little could be \
         measured"
    );
    Err(MeasureError::Unreliable(why))
}

/// A profile could not be read.
///
/// ```
/// use memferry::engine::cpu::{CpuProfile, ProfileError, ProfileSource};
///
/// let folder = ProfileSource::File(std::env::temp_dir());
/// assert!(matches!(CpuProfile::load(&folder), Err(ProfileError::Io { .. })));
/// ```
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
        /// The error of the system call.
        error: io::Error,
    },
    /// The file is no profile.
    #[error(
        "{path} is no profile: {problem}; unset MEMFERRY_PROFILE, or let it name a file that may be written"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
}

/// Values that are measured once and stored in a file.
pub trait StoredProfile: Sized {
    /// The first word of the file.
    const MAGIC: &'static str;

    /// The path of the file, derived from `named`: set by the user (`by_hand`), or the default.
    fn path(named: &Path, by_hand: bool) -> PathBuf;

    /// The number of cores that the values apply to.
    fn cores() -> usize;

    /// Values that suit most machines.
    fn built_in() -> Self;

    /// Measures, or returns why not: then nothing is saved.
    fn measure() -> Result<Self, MeasureError>;

    /// The reason why the values are implausible for any machine. Such values are rejected, both
    /// measured and read from a file.
    fn implausible(&self) -> Option<String> {
        None
    }

    /// Sets the origin of the values.
    fn with_origin(self, origin: ProfileOrigin) -> Self;

    /// The values as lines with a name and a value each.
    fn to_fields(&self) -> String;

    /// Parses the values from such lines, or returns what is wrong with them.
    fn from_fields(entries: &ProfileFields<'_>) -> Result<Self, String>;
}

/// Loads the values from a source.
pub fn load<S: StoredProfile>(source: &ProfileSource) -> Result<S, ProfileError> {
    match source {
        ProfileSource::Automatic => automatic(),
        ProfileSource::Measure => Ok(measure_or_built_in()),
        ProfileSource::BuiltIn => Ok(S::built_in()),
        ProfileSource::File(path) => from_named_file(&S::path(path, true)),
    }
}

/// Measures, and saves the result at the default path if that is writable.
pub fn remeasure<S: StoredProfile>() -> S {
    let measured = measure::<S>();
    if let (Ok(values), Some(path)) = (&measured, default_path::<S>()) {
        let _ = create_parent(&path).and_then(|()| save(values, &path));
    }
    or_built_in(measured)
}

/// Where the values are saved unless told otherwise. The folder is created below the user's cache folder
/// when values are saved.
pub fn default_path<S: StoredProfile>() -> Option<PathBuf> {
    default_name().map(|name| S::path(&name, false))
}

/// The default path of values for all cores.
fn default_name() -> Option<PathBuf> {
    // The specification of these variables says to ignore relative paths.
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| {
            // No home folder is created for a user who has none.
            let home = env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_dir())?;
            Some(home.join(".cache"))
        })?;
    Some(cache.join("memferry").join("profile"))
}

/// The values that a process on `cores` cores, which are all, has saved at the default path; `None` if there
/// are none, or if the user wants others. Measures nothing.
pub fn saved_for_all<S: StoredProfile>(cores: usize) -> Option<S> {
    let named = settings::value_of("MEMFERRY_PROFILE");
    let is_default = named.is_none_or(|named| {
        named.to_str().and_then(|word| switch::parse(word.trim())) == Some(true)
    });
    if is_default { saved_for(&default_name()?, cores) } else { None }
}

fn saved_for<S: StoredProfile>(path: &Path, cores: usize) -> Option<S> {
    let text = fs::read_to_string(path).ok()?;
    parse(&text, &machine_line_for::<S>(cores)).ok().flatten()
}

/// Creates the folder of a file, for files in the user's cache folder.
fn create_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// Whether the folder of a file exists. If it does not, that is reported once per process: a folder that
/// the user named is not created, because a wrong name would leave folders in unexpected places.
fn has_parent(path: &Path) -> bool {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    // A name without a folder is a file in the current one. What is wrong with a folder that exists shows
    // when the file is read.
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => return true,
    };
    if !matches!(folder.try_exists(), Ok(false)) {
        return true;
    }
    if !REPORTED.swap(true, Ordering::Relaxed) {
        let line = format!(
            "memferry: measured values are not saved as {}: the folder {} does not exist; create it, or let \
             MEMFERRY_PROFILE name another file\n",
            path.display(),
            folder.display()
        );
        // A closed output is no error.
        let _ = io::stderr().write_all(line.as_bytes());
    }
    false
}

/// Writes the values whole or not at all. The folder must exist.
pub fn save<S: StoredProfile>(values: &S, path: &Path) -> io::Result<()> {
    write(&to_text(values), path)
}

fn write(text: &str, path: &Path) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    // A file size limit must fail the write, not kill the process.
    let written = file_size::grow(|| fs::write(&partial, text));
    written.and_then(|()| fs::rename(&partial, path)).inspect_err(|_| {
        let _ = fs::remove_file(&partial);
    })
}

fn automatic<S: StoredProfile>() -> Result<S, ProfileError> {
    let named = settings::value_of("MEMFERRY_PROFILE");
    let word = named.as_deref().and_then(OsStr::to_str).unwrap_or_default().trim();
    match (named.as_deref(), switch::parse(word)) {
        (Some(_), Some(false)) => Ok(S::built_in()),
        (Some(_), None) if word.eq_ignore_ascii_case("measure") => Ok(measure_or_built_in()),
        (Some(path), None) => from_named_file(&S::path(Path::new(path), true)),
        // Without a place to save this process measures for itself; a broken file at the usual
        // place is our own, and is replaced.
        (None, _) | (_, Some(true)) => Ok(default_path::<S>()
            .and_then(|path| {
                let _ = create_parent(&path);
                read_or_measure(&path).ok()
            })
            .unwrap_or_else(remeasure)),
    }
}

/// The values in a file that the user named. Without its folder this process measures for itself.
fn from_named_file<S: StoredProfile>(path: &Path) -> Result<S, ProfileError> {
    if has_parent(path) { read_or_measure(path) } else { Ok(measure_or_built_in()) }
}

fn measure_or_built_in<S: StoredProfile>() -> S {
    or_built_in(measure())
}

/// Measures, and rejects implausible values.
fn measure<S: StoredProfile>() -> Result<S, MeasureError> {
    let measured = S::measure().and_then(|values| match values.implausible() {
        Some(why) => Err(MeasureError::Unreliable(why)),
        None => Ok(values),
    });
    if let Err(MeasureError::Unreliable(why)) = &measured {
        let profile = S::MAGIC;
        tracing::warn!(
            profile,
            why,
            "rejecting measured values and using built-in ones; `memferry doctor --measure` \
             measures again"
        );
    }
    measured
}

fn or_built_in<S: StoredProfile>(measured: Result<S, MeasureError>) -> S {
    match measured {
        Ok(values) => values,
        Err(MeasureError::Impossible) => S::built_in(),
        Err(MeasureError::Unreliable(why)) => {
            S::built_in().with_origin(ProfileOrigin::Rejected(why))
        }
    }
}

/// The maximum wait for another process that measures. Tests use a long one, because the machine
/// may be busy.
const LOCK_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// The time after a rejected measurement in which no process measures again, so that on a machine
/// that stays busy not every process measures without result.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Reads a saved profile; measures if there is none or it is of another machine.
fn read_or_measure<S: StoredProfile>(path: &Path) -> Result<S, ProfileError> {
    if let Some(values) = read(path)? {
        return Ok(values);
    }
    // Processes that start together would disturb each other's measurements: one at a time.
    let _turn = lock_parent_dir(path, LOCK_TIMEOUT);
    // The process that held the lock before has measured for all.
    if let Some(values) = read(path)? {
        return Ok(values);
    }
    let measured = measure();
    let text = match &measured {
        Ok(values) => to_text(values),
        Err(MeasureError::Unreliable(why)) => rejected_text::<S>(why, SystemTime::now()),
        Err(MeasureError::Impossible) => return Ok(S::built_in()),
    };
    match write(&text, path) {
        Err(error) if measured.is_ok() => Err(ProfileError::Io { path: path.to_owned(), error }),
        _ => Ok(or_built_in(measured)),
    }
}

/// Reads the file. `None` if there is none, if it is of another machine or version, or if it is
/// time to measure again.
fn read<S: StoredProfile>(path: &Path) -> Result<Option<S>, ProfileError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ProfileError::Io { path: path.to_owned(), error }),
    };
    if let Some(why) = recently_rejected::<S>(&text, SystemTime::now()) {
        return Ok(Some(S::built_in().with_origin(ProfileOrigin::Rejected(why))));
    }
    match from_text::<S>(&text) {
        Ok(values) => {
            Ok(values.map(|values| values.with_origin(ProfileOrigin::Saved(path.to_owned()))))
        }
        Err(problem) => Err(ProfileError::Malformed { path: path.to_owned(), problem }),
    }
}

/// The first line: the version, cores and machine that the values apply to.
fn machine_line<S: StoredProfile>() -> String {
    machine_line_for::<S>(S::cores())
}

fn machine_line_for<S: StoredProfile>(cores: usize) -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("{} {version} {cores} {}\n", S::MAGIC, cpu::info().model)
}

/// The contents of the file.
pub fn to_text<S: StoredProfile>(values: &S) -> String {
    machine_line::<S>() + &values.to_fields()
}

/// Parses the contents of a file; `None` if it is of another machine or version, or if the values
/// are implausible.
pub fn from_text<S: StoredProfile>(text: &str) -> Result<Option<S>, String> {
    parse(text, &machine_line::<S>())
}

fn parse<S: StoredProfile>(text: &str, machine_line: &str) -> Result<Option<S>, String> {
    match text.strip_prefix(machine_line) {
        Some(fields) if ProfileFields(fields).find(REJECTED_FIELD).is_some() => Ok(None),
        Some(fields) => {
            let values = S::from_fields(&ProfileFields(fields))?;
            let Some(why) = values.implausible() else { return Ok(Some(values)) };
            tracing::warn!(profile = S::MAGIC, why, "rejecting implausible saved values");
            Ok(None)
        }
        None if text.split_whitespace().next() == Some(S::MAGIC) => Ok(None),
        None => Err(format!("it does not begin with \"{}\"", S::MAGIC)),
    }
}

/// The field with the time at which values were rejected, in seconds since 1970, and the reason.
const REJECTED_FIELD: &str = "not_kept";

/// The contents of a file that records rejected values.
fn rejected_text<S: StoredProfile>(why: &str, now: SystemTime) -> String {
    format!("{}{REJECTED_FIELD} {} {why}\n", machine_line::<S>(), seconds(now))
}

/// The reason why values were rejected, if that was less than 60 s ago.
fn recently_rejected<S: StoredProfile>(text: &str, now: SystemTime) -> Option<String> {
    let fields = ProfileFields(text.strip_prefix(&machine_line::<S>())?);
    let (rejected_at, why) = fields.find(REJECTED_FIELD)?.split_once(' ')?;
    // After the clock was set back, the recorded time is in the future.
    let ago = seconds(now).checked_sub(rejected_at.parse().ok()?)?;
    (ago < RETRY_AFTER.as_secs()).then(|| why.to_owned())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Lines with a name and a value each.
#[derive(Debug, Clone, Copy)]
pub struct ProfileFields<'a>(&'a str);

impl<'a> ProfileFields<'a> {
    /// The value of a name, if present.
    pub fn find(&self, name: &str) -> Option<&'a str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
    }

    /// The value of a required name.
    pub fn word(&self, name: &str) -> Result<&'a str, String> {
        self.find(name).ok_or_else(|| format!("\"{name}\" is missing"))
    }

    /// A required positive number.
    pub fn number(&self, name: &str) -> Result<f64, String> {
        let value = self.word(name)?.parse::<f64>().ok();
        let positive = value.filter(|value| value.is_finite() && *value > 0.0);
        positive.ok_or_else(|| format!("\"{name}\" is not a positive number"))
    }
}

#[cfg(test)]
mod tests;
