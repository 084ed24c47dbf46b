//! Functions that several kinds of channels share.

use std::collections::{TryReserveError, VecDeque};

use memferry_sys::sync::thread_local;

use crate::contract::{ExecutionError, Sequence};

/// The last failures of a channel, for `error_of`.
#[derive(Debug, Default)]
pub struct FailureLog(VecDeque<(Sequence, ExecutionError)>);

impl FailureLog {
    /// The number of failures that the contract requires.
    const CAPACITY: usize = 64;

    /// Records a failure; drops the oldest when the log is full.
    pub fn push(&mut self, sequence: Sequence, error: ExecutionError) {
        if self.0.len() == Self::CAPACITY {
            self.0.pop_front();
        }
        self.0.push_back((sequence, error));
    }

    /// The error of a descriptor, if the log still has it.
    pub fn find(&self, sequence: Sequence) -> Option<ExecutionError> {
        self.0.iter().find(|(number, _)| *number == sequence).map(|(_, error)| error.clone())
    }
}

/// A boxed slice of `count` elements; fails if there is no memory for it. A program that has little
/// memory gets an error of its open, and is not aborted.
pub(crate) fn try_collect<T>(
    count: usize,
    element: impl FnMut(usize) -> T,
) -> Result<Box<[T]>, TryReserveError> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(count)?;
    elements.extend((0..count).map(element));
    Ok(elements.into_boxed_slice())
}

thread_local! {
    // The model checker's macro takes no `const`.
    #[allow(clippy::missing_const_for_thread_local)]
    static ENGINE_THREAD: std::cell::Cell<bool> = std::cell::Cell::new(false);
}

/// Marks the calling thread as an engine thread, one that executes transfers. An engine thread
/// never blocks on another engine thread: two of them could wait for each other.
pub fn enter_engine_thread() {
    ENGINE_THREAD.with(|marked| marked.set(true));
}

/// Runs `work` with the calling thread marked as an engine thread, such as a thread that polls a
/// channel: completions run user code, which may drop the last handle of the channel.
pub fn as_engine_thread<R>(work: impl FnOnce() -> R) -> R {
    /// Restores the earlier mark, also when the work unwinds.
    struct EngineThreadGuard(bool);
    impl Drop for EngineThreadGuard {
        fn drop(&mut self) {
            ENGINE_THREAD.with(|marked| marked.set(self.0));
        }
    }
    let _restored = EngineThreadGuard(ENGINE_THREAD.with(|marked| marked.replace(true)));
    work()
}

/// Whether the calling thread is an engine thread.
pub fn is_engine_thread() -> bool {
    ENGINE_THREAD.with(std::cell::Cell::get)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error_and_no_abort() {
        assert!(try_collect(isize::MAX as usize, |_| 0u64).is_err(), "more than can be addressed");
        assert_eq!(*try_collect(3, |index| index * index).unwrap(), [0, 1, 4]);
    }
}
