//! Memory that is not mapped, for an engine with pinned memory. Alone in its process, so that no
//! other thread maps anything into the hole.

use crate::common::pinned;

use crate::common::pattern;
use memferry_copy::{Error, Request};
use memferry_engine::ExecutionError;
use memferry_engine::testing::polled::AuditingPinner;
use memferry_sys::pages::page_bytes;
use memferry_testing::in_own_process;
use pinned::{end, over, pages};

#[test]
fn memory_that_is_not_there_is_an_error_that_says_where() {
    if !in_own_process() {
        return;
    }
    let (ferry, ledger) = over(AuditingPinner::new());
    let (source, mut target) = (pages(64, 1), pages(64, 2));
    let hole = source.as_ptr().wrapping_add(40 * page_bytes());
    // SAFETY: a page of this test's own, which is not accessed any more.
    assert_eq!(unsafe { libc::munmap(hole.cast(), page_bytes()) }, 0);
    let to = target.as_mut_slice().as_mut_ptr();
    // SAFETY: the engine pins before it accesses anything; the hole is intended.
    let error = unsafe { ferry.run_raw(Request::copy(source.as_ptr(), to, source.len())) };
    let Err(Error::Execution(ExecutionError::BadMemory { address, done_bytes })) = error else {
        panic!("{error:?}");
    };
    assert_eq!(address, hole as u64);
    // Chunks have 16 pages. The third has the hole; the bytes before the hole are copied all the
    // same.
    assert_eq!(done_bytes as usize, 48 * page_bytes());
    for (first, count) in [(0, 40), (48, 16)] {
        let (from, length) = (first * page_bytes(), count * page_bytes());
        let expected = &pattern(64 * page_bytes(), 1)[from..from + length];
        assert!(target.as_slice()[from..from + length] == *expected, "pages from {first} on");
    }
    end(ferry, &ledger);
}
