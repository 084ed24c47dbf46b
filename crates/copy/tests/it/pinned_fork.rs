//! A forked child inherits an engine with pinned memory: it copies inline, and pins nothing.

use crate::common::pinned;

use crate::common::pattern;
use memferry_copy::Options;
use memferry_engine::testing::polled::AuditingPinner;
use memferry_testing::in_own_process;
use pinned::{end, over};

#[test]
fn a_forked_child_copies_without_a_pin() {
    if !in_own_process() {
        return;
    }
    let (ferry, ledger) = over(AuditingPinner::new());
    let source = pattern(300_000, 1);
    let mut target = vec![0u8; 300_000];
    ferry.copy(&source, &mut target).unwrap();
    let pins = ledger.counts().pins;
    // SAFETY: the child copies, allocates, and leaves by `_exit`; no other thread of this process
    // holds a lock that it needs for that.
    let child = unsafe { libc::fork() };
    if child == 0 {
        target.fill(0);
        let mut fine = ferry.copy(&source, &mut target).is_ok() && target == source;
        target.fill(0);
        let pieces: Vec<_> = source.chunks(1460).collect();
        fine = fine
            && ferry.deliver_with(&pieces, &mut target, Options::new()).is_ok()
            && target == source
            && ledger.counts().pins == pins;
        drop(ferry);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child found a wrong byte, or pinned");
    end(ferry, &ledger);
}
