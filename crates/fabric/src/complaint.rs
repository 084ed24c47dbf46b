//! What people must read although nobody asked: libraries that load a provider keep silent about why it
//! refused, and say something else instead.

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

/// Different complaints that are remembered.
const MOST: usize = 64;

/// Writes a line to the standard error output, each one once.
#[expect(clippy::print_stderr, reason = "a provider has no other way to its user")]
pub(crate) fn complain(what: impl Display) {
    static SAID: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let line = format!("memferry: {what}");
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    let said = said.get_or_insert_default();
    if said.len() < MOST && said.insert(line.clone()) {
        eprintln!("{line}");
    }
}
