//! A forked child inherits the ferry but not its threads: it copies inline, and transfers of the
//! parent are reported as lost instead of waited for.

use crate::common::{builder, pattern};
use memferry_copy::{Error, Options, Request};
use memferry_engine::ExecutionError;
use memferry_testing::in_own_process;

#[test]
fn a_child_can_copy_and_never_hangs() {
    if !in_own_process() {
        return;
    }
    let ferry = builder().spin_ns(0).build().unwrap();
    let source = pattern(64 << 20, 1);
    let mut target = vec![0u8; 64 << 20];
    let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len());
    // SAFETY: both vectors live until after the wait below.
    let running = unsafe { ferry.start_raw(request) }.unwrap();
    // SAFETY: the child only copies memory, allocates, and exits by `_exit`; the other threads of
    // this test process hold no lock of ours while they sleep or copy.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let reachable = match running.wait() {
            Ok(_) => true,
            Err(error) => error == Error::Execution(ExecutionError::Forked),
        };
        let mut fine = reachable && running.check().is_some();
        for length in [10usize, 4096, 100_000, 4 << 20] {
            let mut copy = vec![0u8; length];
            fine &= ferry.copy(&source[..length], &mut copy).is_ok() && copy == source[..length];
            // SAFETY: the child's own memory, awaited at once.
            let cookie =
                unsafe { ferry.icopy_cookie_raw(source.as_ptr(), copy.as_mut_ptr(), length) };
            fine &= cookie.and_then(|cookie| ferry.wait(cookie)).is_ok();
            copy.fill(0);
            let pieces: Vec<_> = source[..length].chunks(1460).collect();
            let options = Options::new().no_caller_assist();
            fine &=
                ferry.deliver_with(&pieces, &mut copy, options).is_ok() && copy == source[..length];
        }
        drop(ferry);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child found a wrong byte or a wrong answer");
    running.wait().unwrap();
    assert!(target == source);
}
