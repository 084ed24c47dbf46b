//! Waiting for a state instead of for a time.

use std::thread;
use std::time::{Duration, Instant};

/// Only what hangs takes so long, also on a machine that is busy with other things.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Asks until it is so.
///
/// # Panics
///
/// If it is not so for [`TIMEOUT`].
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    let mut polls = 0u32;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        // Whoever makes it so may need this core.
        polls = polls.saturating_add(1);
        match polls {
            0..1000 => thread::yield_now(),
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
}
