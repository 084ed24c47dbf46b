//! What several channels need in the same form.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use memferry_sys::sync::{thread, thread_local};

use super::{Channel, ExecutionError, Sequence};

/// The last failures of a channel, for `error_of`.
#[derive(Debug, Default)]
pub struct FailureLog(VecDeque<(Sequence, ExecutionError)>);

impl FailureLog {
    /// As many as the contract asks for.
    const REMEMBERED: usize = 64;

    /// Remembers a failure, and forgets the oldest when there are too many.
    pub fn push(&mut self, sequence: Sequence, error: ExecutionError) {
        if self.0.len() == Self::REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((sequence, error));
    }

    /// The failure of a descriptor, if it is remembered.
    pub fn find(&self, sequence: Sequence) -> Option<ExecutionError> {
        self.0.iter().find(|(number, _)| *number == sequence).map(|(_, error)| error.clone())
    }
}

/// `park` for channels without a thread: polls until the sequence is reached.
pub fn park_by_polling(channel: &dyn Channel, sequence: Sequence, timeout: Duration) -> bool {
    let deadline = Instant::now().checked_add(timeout);
    while channel.completed() < sequence {
        if deadline.is_some_and(|at| Instant::now() >= at) {
            return false;
        }
        if !channel.poll() {
            thread::yield_now();
        }
    }
    true
}

thread_local! {
    // The model checker's macro takes no `const`.
    #[allow(clippy::missing_const_for_thread_local)]
    static ENGINE_THREAD: std::cell::Cell<bool> = std::cell::Cell::new(false);
}

/// Marks the calling thread as one that carries out transfers. Such a thread never waits for
/// another of its kind to end: two of them could wait for each other.
pub fn enter_engine_thread() {
    ENGINE_THREAD.with(|marked| marked.set(true));
}

/// Runs `work` on a thread that carries out transfers meanwhile, such as one that polls a channel: the
/// ends of transfers run the user's code, which may drop the last handle of the channel.
pub fn as_engine_thread<R>(work: impl FnOnce() -> R) -> R {
    /// Sets back what was before, also when the work unwinds.
    struct Restored(bool);
    impl Drop for Restored {
        fn drop(&mut self) {
            ENGINE_THREAD.with(|marked| marked.set(self.0));
        }
    }
    let _restored = Restored(ENGINE_THREAD.with(|marked| marked.replace(true)));
    work()
}

/// Whether the calling thread carries out transfers.
pub fn is_engine_thread() -> bool {
    ENGINE_THREAD.with(std::cell::Cell::get)
}
