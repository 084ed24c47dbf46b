//! Warnings to standard error: libraries that load a provider do not print why the provider
//! refused.

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::Mutex;

use memferry_sys::fork::PerProcess;

/// The maximum number of different warnings.
const MAX_WARNINGS: usize = 64;

/// Writes a line to standard error, once for each text.
#[expect(clippy::print_stderr, reason = "a provider has no other output to its user")]
pub(crate) fn warn_once(what: impl Display) {
    static WARNED: PerProcess<Mutex<HashSet<String>>> = PerProcess::new();
    let line = format!("memferry: {what}");
    let mut warned = WARNED.lock();
    if warned.len() < MAX_WARNINGS && warned.insert(line.clone()) {
        eprintln!("{line}");
    }
}
