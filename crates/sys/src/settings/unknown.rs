//! The check for unknown variables. It runs once per process, when the first ferry or endpoint is opened;
//! afterwards it is one load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, mem};

use super::variables::{PREFIX, is_known, nearest};
use crate::shared_memory::{Protection, SealedMemory};

/// Set by the first check. A child process inherits it with the memory of its parent.
static CHECKED: AtomicBool = AtomicBool::new(false);

/// Names the unknown `MEMFERRY_` variables of the environment on the standard error output, once per
/// process, each with the known variable of the nearest name.
pub fn check_variables() {
    if !CHECKED.load(Ordering::Relaxed) && !CHECKED.swap(true, Ordering::Relaxed) {
        // The environment as the program was started with. Walking `environ` would race with a `setenv` of the C
        // program around this library.
        report(&fs::read("/proc/self/environ").unwrap_or_default());
    }
}

/// Makes later calls of [`check_variables`] do nothing. For processes whose parent has checked the same
/// environment.
pub fn skip_variable_check() {
    CHECKED.store(true, Ordering::Relaxed);
}

#[cold]
fn report(environment: &[u8]) {
    let lines = complaints(environment);
    if !lines.is_empty() && !is_marked() {
        mark();
        // One write, so that lines of several processes do not mix, and without a lock, which a process that forks
        // now would leave to its child for ever. A closed output is no error.
        // SAFETY: the bytes are valid for reads.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, lines.as_ptr().cast(), lines.len()) };
    }
}

/// The variable with the unknown variables that a starter of this process has named already, separated by
/// commas: of many processes with one environment, such as the ranks of a job, none names them again.
pub const CHECKED_VARIABLES: &str = "MEMFERRY_CHECKED_VARIABLES";

/// The value of [`CHECKED_VARIABLES`] for processes that this one starts with its environment: all unknown
/// variables. `None` if there are none.
pub fn checked_variables() -> Option<String> {
    let unknown = unknown_names(&fs::read("/proc/self/environ").unwrap_or_default());
    (!unknown.is_empty()).then(|| unknown.join(","))
}

/// A line for each unknown variable of an environment that no other process has named.
fn complaints(environment: &[u8]) -> String {
    let variables = entries(environment).find(|(name, _)| name == CHECKED_VARIABLES);
    let checked = variables.map(|(_, value)| value).unwrap_or_default();
    let is_new = |name: &&String| checked.split(',').all(|known| known != name.as_str());
    unknown_names(environment).iter().filter(is_new).map(|name| complaint(name)).collect()
}

/// The unknown variables of an environment, sorted by name.
fn unknown_names(environment: &[u8]) -> Vec<String> {
    let names = entries(environment).map(|(name, _)| name);
    let mut unknown: Vec<String> =
        names.filter(|name| name.starts_with(PREFIX) && !is_known(name)).collect();
    unknown.sort();
    unknown
}

/// The names and values of an environment. Entries are `NAME=value` and end with a zero byte.
fn entries(environment: &[u8]) -> impl Iterator<Item = (String, String)> {
    environment.split(|byte| *byte == 0).map(|entry| {
        let entry = String::from_utf8_lossy(entry);
        let (name, value) = entry.split_once('=').unwrap_or((&*entry, ""));
        (name.to_owned(), value.to_owned())
    })
}

fn complaint(name: &str) -> String {
    let suggestion = match nearest(name) {
        Some(meant) => format!("did you mean {meant}?"),
        None => "docs/reference/settings.md lists all".to_owned(),
    };
    format!("memferry: unknown variable {}; {suggestion}\n", name.escape_debug())
}

/// The name of a mapping that marks a process as checked. A process can have several copies of this code,
/// each with its own [`CHECKED`]: the C library and the provider, for example. The mapping is visible to
/// all of them and ends with the program, and it exists only if there was something to report.
const MARK: &str = "memferry-variables-checked";

fn is_marked() -> bool {
    fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains(MARK))
}

fn mark() {
    let mapping = SealedMemory::new(MARK, 1).and_then(|memory| memory.map(Protection::ReadOnly));
    mem::forget(mapping);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(names: &[&str]) -> String {
        let entries: Vec<String> = names.iter().map(|name| format!("{name}=1\0")).collect();
        complaints(entries.concat().as_bytes())
    }

    #[test]
    fn an_unknown_variable_is_named_with_the_nearest_right_name() {
        assert_eq!(
            said(&["PATH", "MEMFERRY_EAGR_BYTES", "MEMFERRY_CMA", "MEMFERRY_TEST_X"]),
            "memferry: unknown variable MEMFERRY_EAGR_BYTES; did you mean MEMFERRY_EAGER_BYTES?\n"
        );
    }

    #[test]
    fn a_name_unlike_all_others_is_named_without_a_suggestion() {
        let said = said(&["MEMFERRY_VERBOSITY_LEVEL"]);
        assert!(said.starts_with("memferry: unknown variable MEMFERRY_VERBOSITY_LEVEL; docs/"));
    }

    #[test]
    fn known_variables_and_those_of_others_are_not_named() {
        assert_eq!(said(&["HOME", "memferry_gpu", "OMPI_MEMFERRY_X", "MEMFERRY_SKIP_LOG"]), "");
    }

    #[test]
    fn a_variable_that_the_starter_has_named_is_not_named_again() {
        let environment =
            b"MEMFERRY_EAGR=1\0MEMFERRY_CHECKED_VARIABLES=MEMFERRY_X,MEMFERRY_EAGR\0MEMFERRY_NEW=1\0";
        assert_eq!(unknown_names(environment), ["MEMFERRY_EAGR", "MEMFERRY_NEW"]);
        assert_eq!(complaints(environment), complaint("MEMFERRY_NEW"));
    }

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        assert!(said(&["MEMFERRY_\x1b[2J"]).contains("MEMFERRY_\\u{1b}[2J"));
    }

    #[test]
    fn a_mark_is_visible_to_all_copies_of_the_check_in_the_process() {
        assert!(!is_marked());
        mark();
        assert!(is_marked());
    }
}
