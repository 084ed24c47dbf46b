//! Running a part of a test in a forked child.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// A forked child of the test.
pub(crate) struct Child(libc::pid_t);

impl Child {
    /// Forks and runs `work` in the child, which ends with it.
    pub(crate) fn run(work: impl FnOnce()) -> Self {
        // SAFETY: the child runs `work` alone. It may allocate, because the C library keeps its
        // allocator usable in the child, and it leaves by `_exit` without unwinding into the test.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "no child could be made");
        if pid == 0 {
            let worked = catch_unwind(AssertUnwindSafe(work)).is_ok();
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(i32::from(!worked)) };
        }
        Self(pid)
    }

    /// Waits for the child, which must have worked.
    pub(crate) fn join(self) {
        let mut status = 0;
        // SAFETY: waits for a child of our own, once.
        let waited = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        assert_eq!((waited, status), (self.0, 0), "the child failed: see its message above");
    }
}

/// Takes away the privilege to lock without limit, and sets a limit. For children.
#[allow(dead_code)]
pub(crate) fn limit_locked_memory(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: changes limits and user of this process, a child made for it.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit), 0);
        if libc::geteuid() == 0 {
            assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
        }
    }
}

/// Makes mappings until the process may have no more, and leaves them. For children.
#[allow(dead_code)]
pub(crate) fn use_up_all_mappings() {
    let page = memferry_sys::pages::page_bytes();
    let most = memferry_sys::residency::most_maps() as usize;
    let map = |protection, address: usize, length, fixed| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
        // SAFETY: maps fresh memory, or replaces a part of what the next lines mapped.
        unsafe { libc::mmap(address as *mut _, length, protection, flags, -1, 0) }
    };
    let start = map(libc::PROT_NONE, 0, 2 * most * page, 0);
    assert_ne!(start, libc::MAP_FAILED);
    for number in 0..most {
        // Neighbours with other protection cannot be one mapping.
        let at = start as usize + 2 * number * page;
        if map(libc::PROT_READ, at, page, libc::MAP_FIXED) == libc::MAP_FAILED {
            return;
        }
    }
    panic!("all mappings could be made");
}
