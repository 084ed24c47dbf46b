//! Runs a part of a test in a forked child.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// A forked child of the test.
pub(crate) struct Child(libc::pid_t);

impl Child {
    /// Forks and runs `work` in the child, which exits afterwards.
    pub(crate) fn run(work: impl FnOnce()) -> Self {
        // SAFETY: the child runs only `work`. It may allocate, because the C library keeps its
        // allocator usable in the child, and it exits by `_exit` without unwinding into the test.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            let succeeded = catch_unwind(AssertUnwindSafe(work)).is_ok();
            // SAFETY: exits this process at once.
            unsafe { libc::_exit(i32::from(!succeeded)) };
        }
        Self(pid)
    }

    /// Waits for the child, which must succeed.
    pub(crate) fn join(self) {
        let mut status = 0;
        // SAFETY: waits for a child of this process, once.
        let waited = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        assert_eq!((waited, status), (self.0, 0), "the child failed: see its message above");
    }
}

/// Sets a limit of locked memory and drops the privilege to exceed it. Only for children.
#[allow(dead_code)]
pub(crate) fn limit_locked_memory(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the calls change limits and user of this process, which is a child of the test.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit), 0);
        if libc::geteuid() == 0 {
            assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
        }
    }
}

/// Maps memory until the process has reached its limit of mappings. Only for children.
#[allow(dead_code)]
pub(crate) fn use_up_all_mappings() {
    let page = memferry_sys::pages::page_bytes();
    let max_maps = memferry_sys::residency::max_map_count() as usize;
    let map = |protection, address: usize, length, fixed| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
        // SAFETY: maps new memory, or replaces a part of the memory that is mapped below.
        unsafe { libc::mmap(address as *mut _, length, protection, flags, -1, 0) }
    };
    let start = map(libc::PROT_NONE, 0, 2 * max_maps * page, 0);
    assert_ne!(start, libc::MAP_FAILED);
    for number in 0..max_maps {
        // Adjacent ranges with different protection cannot be one mapping.
        let at = start as usize + 2 * number * page;
        if map(libc::PROT_READ, at, page, libc::MAP_FIXED) == libc::MAP_FAILED {
            return;
        }
    }
    panic!("the limit of mappings was not reached");
}
