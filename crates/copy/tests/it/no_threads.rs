//! A process that cannot start threads: the caller copies alone.

use memferry_copy::{Ferry, Options, Request};
use memferry_testing::in_own_process;

/// Makes the start of threads fail from now on, for this thread.
fn refuse_threads() {
    let plain = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let is = |call: libc::c_long, jt: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf: 0,
        k: call as u32,
    };
    let mut program = [
        plain(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is(libc::SYS_clone3, 2),
        is(libc::SYS_clone, 1),
        plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: restricts this thread and those it starts; the filter is copied.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Runs a test on a thread of its own, whose filter ends with it.
fn without_threads(test: impl FnOnce() + Send) {
    let run = || {
        refuse_threads();
        assert!(std::thread::Builder::new().spawn(|| ()).is_err());
        test();
    };
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
}

#[test]
fn copies_are_done_by_the_caller_where_no_thread_can_be_started() {
    if !in_own_process() {
        return;
    }
    without_threads(|| {
        let ferry = Ferry::new().unwrap();
        for bytes in [1usize, 4096, 1 << 20, 33 << 20] {
            let source: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
            let mut target = vec![0u8; bytes];
            ferry.copy(&source, &mut target).unwrap();
            assert!(source == target, "{bytes} bytes");
            // Even those with `no_caller_assist`.
            let mut target = vec![0u8; bytes];
            let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), bytes)
                .with(Options::new().no_caller_assist());
            // SAFETY: both are kept until after the wait.
            unsafe { ferry.start_raw(request) }.unwrap().wait().unwrap();
            assert!(source == target, "{bytes} bytes by nobody else");
        }
    });
}

#[test]
fn channels_that_were_asked_for_and_cannot_be_had_name_the_gate() {
    if !in_own_process() {
        return;
    }
    without_threads(|| {
        let error = Ferry::builder().channels(2).build().unwrap_err().to_string();
        assert!(error.contains("ulimit -u") && error.contains("seccomp"), "{error}");
    });
}
