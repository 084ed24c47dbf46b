//! Signals that end the program while the terminal is its own. The terminal is given back first, and the program then
//! ends by the signal, as its parent expects.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

const SIGNALS: [i32; 4] = [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT];

/// How long the program may wait for a key before it looks for a signal: a signal does not end the wait.
pub(super) const MAX_WAIT: Duration = Duration::from_millis(100);

/// The signal that came; 0 for none.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: i32) {
    RECEIVED.store(signal, Ordering::Relaxed);
}

/// Notes signals from now on, in place of ending by them.
pub(super) fn catch() {
    for signal in SIGNALS {
        // SAFETY: the handler stores one word.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
}

/// Whether a signal came.
pub(super) fn is_received() -> bool {
    RECEIVED.load(Ordering::Relaxed) != 0
}

/// Ends the program by the signal that came, if one did.
pub(super) fn end() {
    let signal = RECEIVED.load(Ordering::Relaxed);
    if signal != 0 {
        // SAFETY: by default these signals end the process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}
