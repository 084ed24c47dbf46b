//! Filters of system calls (seccomp), as in containers.

/// Makes these system calls fail with `error` from now on, for this thread and those it starts.
pub fn refuse(calls: &[libc::c_long], error: i32) {
    install(calls, error, 0);
}

/// The same, for all threads of this process.
pub fn refuse_in_process(calls: &[libc::c_long], error: i32) {
    install(calls, error, libc::SECCOMP_FILTER_FLAG_TSYNC);
}

fn install(calls: &[libc::c_long], error: i32, flags: libc::c_ulong) {
    let plain = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The number of the call is the first field of the filter's input.
    let mut program = vec![plain(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (at, call) in calls.iter().enumerate() {
        program.push(libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            // Jumps over those that follow, and the instruction that permits everything else.
            jt: (calls.len() - at) as u8,
            jf: 0,
            k: *call as u32,
        });
    }
    program.push(plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    program.push(plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | error as u32));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: changes what threads of this process may do; the program is copied.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
