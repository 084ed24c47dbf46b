//! What is measured once per machine and kept in a file: where the file is, when it is still good,
//! and that it is written whole. What is measured, and how, each measurement knows for itself.
//!
//! What was measured on a busy machine is not kept: built-in values are used, the file says when that
//! was, and whoever comes a minute later measures again.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{env, fs, io};

use memferry_sys::cpu;
use memferry_sys::file_size;
use memferry_sys::folder_lock::lock_folder_of;
use thiserror::Error;

/// Where measured values come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ProfileSource {
    /// As `MEMFERRY_PROFILE` says, else the saved ones, else measure now and save.
    #[default]
    Automatic,
    /// Measure now (at most 200 ms) and save nothing.
    Measure,
    /// No measurement: values that are sensible for most machines.
    BuiltIn,
    /// A saved profile; measured and written there if the file does not exist.
    File(PathBuf),
}

/// How values were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Measured by this process.
    Measured,
    /// Read from a file.
    Saved(PathBuf),
    /// Not measured.
    BuiltIn,
    /// Measured, and not believed for this reason: the values are built in. Measured again later.
    NotKept(String),
}

/// Why there are no measured values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotMeasured {
    /// This process cannot measure.
    Impossible,
    /// What was measured cannot be believed, for this reason.
    Unreliable(String),
}

/// The most of the time that others may have had the processors while something was measured.
const MOST_CONTENTION: f64 = 0.1;

/// An error if others had the processors for so much of the time that what was measured meanwhile cannot
/// be believed.
pub fn check_contention(share: f64) -> Result<(), NotMeasured> {
    if share <= MOST_CONTENTION {
        return Ok(());
    }
    let percent = 100.0 * share;
    let why =
        format!("the machine was busy: others had the processors for {percent:.0} % of the time");
    Err(NotMeasured::Unreliable(why))
}

/// An error if a CPU quota stopped this process for so much of the time that a measurement that found too
/// little did so for that reason.
pub fn check_throttling(share: f64) -> Result<(), NotMeasured> {
    if share <= MOST_CONTENTION {
        return Ok(());
    }
    let percent = 100.0 * share;
    let why = format!(
        "a CPU quota throttled this process for up to {percent:.0} % of the time: too little could be \
         measured"
    );
    Err(NotMeasured::Unreliable(why))
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

/// Values that are measured once and kept in a file.
pub trait Saved: Sized {
    /// The first word of the file.
    const FIRST_WORD: &'static str;

    /// The file, beside the one that was named by hand or that is usual.
    fn path(named: &Path, by_hand: bool) -> PathBuf;

    /// How many cores the values are good for.
    fn cores() -> usize;

    /// Values that are sensible for most machines.
    fn built_in() -> Self;

    /// Measures, or says why not: then nothing is saved.
    fn measure() -> Result<Self, NotMeasured>;

    /// What is wrong with values that no machine has. Such values are not kept, whether they are
    /// measured or found in a file.
    fn implausible(&self) -> Option<String> {
        None
    }

    /// Says how the values were found.
    fn found(self, origin: Origin) -> Self;

    /// The values as lines of a name and a value each.
    fn to_entries(&self) -> String;

    /// The values from such lines, or what is wrong with them.
    fn from_entries(entries: &Entries<'_>) -> Result<Self, String>;
}

/// The values that a source stands for.
pub fn load<S: Saved>(source: &ProfileSource) -> Result<S, ProfileError> {
    match source {
        ProfileSource::Automatic => automatic(),
        ProfileSource::Measure => Ok(measure_or_built_in()),
        ProfileSource::BuiltIn => Ok(S::built_in()),
        ProfileSource::File(path) => read_or_measure(&S::path(path, true)),
    }
}

/// Measures, and saves the result at the usual place if that can be written.
pub fn remeasure<S: Saved>() -> S {
    let measured = measure::<S>();
    if let (Ok(values), Some(path)) = (&measured, default_path::<S>()) {
        let _ = save(values, &path);
    }
    or_built_in(measured)
}

/// Where the values are saved unless told otherwise.
pub fn default_path<S: Saved>() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    Some(S::path(&cache.join("memferry").join("profile"), false))
}

/// Writes the values whole or not at all.
pub fn save<S: Saved>(values: &S, path: &Path) -> io::Result<()> {
    write(&to_text(values), path)
}

fn write(text: &str, path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    // A limit of the size of files is no reason to end the program.
    let written = file_size::grow(|| fs::write(&partial, text));
    written.and_then(|()| fs::rename(&partial, path)).inspect_err(|_| {
        let _ = fs::remove_file(&partial);
    })
}

fn automatic<S: Saved>() -> Result<S, ProfileError> {
    Ok(match env::var_os("MEMFERRY_PROFILE") {
        Some(word) if word == "off" => S::built_in(),
        Some(word) if word == "measure" => measure_or_built_in(),
        Some(path) => read_or_measure(&S::path(Path::new(&path), true))?,
        // Without a place to save this process measures for itself; a broken file at the usual
        // place is our own, and is replaced.
        None => default_path::<S>()
            .and_then(|path| read_or_measure(&path).ok())
            .unwrap_or_else(remeasure),
    })
}

fn measure_or_built_in<S: Saved>() -> S {
    or_built_in(measure())
}

/// Measures, and believes what comes out only if it can be.
fn measure<S: Saved>() -> Result<S, NotMeasured> {
    let measured = S::measure().and_then(|values| match values.implausible() {
        Some(why) => Err(NotMeasured::Unreliable(why)),
        None => Ok(values),
    });
    if let Err(NotMeasured::Unreliable(why)) = &measured {
        let profile = S::FIRST_WORD;
        tracing::warn!(
            profile,
            why,
            "measured values are not kept, and built-in ones are used; `memferry doctor --measure` \
             measures again"
        );
    }
    measured
}

fn or_built_in<S: Saved>(measured: Result<S, NotMeasured>) -> S {
    match measured {
        Ok(values) => values,
        Err(NotMeasured::Impossible) => S::built_in(),
        Err(NotMeasured::Unreliable(why)) => S::built_in().found(Origin::NotKept(why)),
    }
}

/// How long to wait for others who measure. Tests do not depend on how busy the machine is.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// How long nobody tries again after values were not kept: on a machine that stays busy not every
/// process should measure in vain.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// A saved profile of another machine is measured anew, a missing one for the first time.
fn read_or_measure<S: Saved>(path: &Path) -> Result<S, ProfileError> {
    if let Some(values) = read(path)? {
        return Ok(values);
    }
    // Processes that start together would disturb each other's measurements: one at a time.
    if let Some(folder) = path.parent() {
        let _ = fs::create_dir_all(folder);
    }
    let _turn = lock_folder_of(path, PATIENCE);
    // Whoever had the turn before has measured for all.
    if let Some(values) = read(path)? {
        return Ok(values);
    }
    let measured = measure();
    let text = match &measured {
        Ok(values) => to_text(values),
        Err(NotMeasured::Unreliable(why)) => not_kept_text::<S>(why, SystemTime::now()),
        Err(NotMeasured::Impossible) => return Ok(S::built_in()),
    };
    match write(&text, path) {
        Err(error) if measured.is_ok() => Err(ProfileError::Io { path: path.to_owned(), error }),
        _ => Ok(or_built_in(measured)),
    }
}

/// What is in the file. `None` if there is none, if it is of another machine or version, or if it is time
/// to measure again.
fn read<S: Saved>(path: &Path) -> Result<Option<S>, ProfileError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ProfileError::Io { path: path.to_owned(), error }),
    };
    if let Some(why) = not_kept_lately::<S>(&text, SystemTime::now()) {
        return Ok(Some(S::built_in().found(Origin::NotKept(why))));
    }
    match from_text::<S>(&text) {
        Ok(values) => Ok(values.map(|values| values.found(Origin::Saved(path.to_owned())))),
        Err(problem) => Err(ProfileError::Malformed { path: path.to_owned(), problem }),
    }
}

/// The first line: values are good for this version on this machine with these cores.
fn machine_line<S: Saved>() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("{} {version} {} {}\n", S::FIRST_WORD, S::cores(), cpu::facts().model)
}

/// The contents of the file.
pub fn to_text<S: Saved>(values: &S) -> String {
    machine_line::<S>() + &values.to_entries()
}

/// Reads the contents of a file; `None` if it is of another machine or version, or if nobody can believe
/// the values.
pub fn from_text<S: Saved>(text: &str) -> Result<Option<S>, String> {
    match text.strip_prefix(&machine_line::<S>()) {
        Some(entries) if Entries(entries).find(NOT_KEPT).is_some() => Ok(None),
        Some(entries) => {
            let values = S::from_entries(&Entries(entries))?;
            let Some(why) = values.implausible() else { return Ok(Some(values)) };
            tracing::warn!(profile = S::FIRST_WORD, why, "saved values are refused");
            Ok(None)
        }
        None if text.split_whitespace().next() == Some(S::FIRST_WORD) => Ok(None),
        None => Err(format!("it does not begin with \"{}\"", S::FIRST_WORD)),
    }
}

/// The entry that says when values were not kept, in seconds since 1970, and why.
const NOT_KEPT: &str = "not_kept";

/// The contents of a file that says that values were not kept.
fn not_kept_text<S: Saved>(why: &str, now: SystemTime) -> String {
    format!("{}{NOT_KEPT} {} {why}\n", machine_line::<S>(), seconds(now))
}

/// Why values were not kept, if that was a short while ago.
fn not_kept_lately<S: Saved>(text: &str, now: SystemTime) -> Option<String> {
    let entries = Entries(text.strip_prefix(&machine_line::<S>())?);
    let (then, why) = entries.find(NOT_KEPT)?.split_once(' ')?;
    // A clock that was set back makes it a time to come.
    let ago = seconds(now).checked_sub(then.parse().ok()?)?;
    (ago < RETRY_AFTER.as_secs()).then(|| why.to_owned())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Lines of a name and a value each.
#[derive(Debug, Clone, Copy)]
pub struct Entries<'a>(&'a str);

impl<'a> Entries<'a> {
    /// The value of a name, if it is there.
    pub fn find(&self, name: &str) -> Option<&'a str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
    }

    /// The value of a name that must be there.
    pub fn word(&self, name: &str) -> Result<&'a str, String> {
        self.find(name).ok_or_else(|| format!("\"{name}\" is missing"))
    }

    /// A positive number that must be there.
    pub fn number(&self, name: &str) -> Result<f64, String> {
        let value = self.word(name)?.parse::<f64>().ok();
        let positive = value.filter(|value| value.is_finite() && *value > 0.0);
        positive.ok_or_else(|| format!("\"{name}\" is not a positive number"))
    }
}

#[cfg(test)]
mod tests;
