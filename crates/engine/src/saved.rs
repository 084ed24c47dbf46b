//! What is measured once per machine and kept in a file: where the file is, when it is still good,
//! and that it is written whole. What is measured, and how, each measurement knows for itself.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, io};

use memferry_sys::cpu;
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

    /// Measures. `None` where this process cannot: then nothing is saved.
    fn measure() -> Option<Self>;

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
    let Some(values) = S::measure() else { return S::built_in() };
    if let Some(path) = default_path::<S>() {
        let _ = save(&values, &path);
    }
    values
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
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    fs::write(&partial, to_text(values))?;
    fs::rename(&partial, path).inspect_err(|_| {
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
    S::measure().unwrap_or_else(S::built_in)
}

/// How long to wait for others who measure.
const PATIENCE: Duration = Duration::from_secs(2);

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
    let Some(values) = S::measure() else { return Ok(S::built_in()) };
    save(&values, path).map_err(|error| ProfileError::Io { path: path.to_owned(), error })?;
    Ok(values)
}

/// What is in the file. `None` if there is none, or if it is of another machine or version.
fn read<S: Saved>(path: &Path) -> Result<Option<S>, ProfileError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ProfileError::Io { path: path.to_owned(), error }),
    };
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

/// Reads the contents of a file; `None` if it is of another machine or version.
pub fn from_text<S: Saved>(text: &str) -> Result<Option<S>, String> {
    match text.strip_prefix(&machine_line::<S>()) {
        Some(entries) => S::from_entries(&Entries(entries)).map(Some),
        None if text.split_whitespace().next() == Some(S::FIRST_WORD) => Ok(None),
        None => Err(format!("it does not begin with \"{}\"", S::FIRST_WORD)),
    }
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
