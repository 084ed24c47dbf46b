//! Noticing that this process is a forked child, in which the parent's threads do not exist.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// How many forks lie between the first process that asked and this one. Whoever starts threads
/// remembers the number; when it differs later, those threads are in another process.
#[inline]
pub fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Starts counting forks; call before the first [`generation`].
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler only adds to an atomic, which is allowed between fork and exec, and
        // a function is valid for the life of the process.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
