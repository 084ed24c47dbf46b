//! Warnings to standard error: libraries that load a provider do not print why the provider
//! refused.

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

/// The maximum number of different warnings.
const MAX_WARNINGS: usize = 64;

/// Writes a line to standard error, once for each text.
#[expect(clippy::print_stderr, reason = "a provider has no other output to its user")]
pub(crate) fn warn_once(what: impl Display) {
    static WARNED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let line = format!("memferry: {what}");
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    let warned = warned.get_or_insert_default();
    if warned.len() < MAX_WARNINGS && warned.insert(line.clone()) {
        eprintln!("{line}");
    }
}
