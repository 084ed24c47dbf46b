//! Whether a piece of code makes system calls, on the calling thread.
//!
//! The kernel delivers a signal in place of a system call while a byte in memory says so (syscall user
//! dispatch, since Linux 5.11, on x86). The handler clears the byte and makes the thread repeat the
//! call, so every piece is charged with at most one.

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::cell::Cell;
    use std::ptr;
    use std::sync::atomic::{AtomicU8, Ordering};

    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    const ON: libc::c_ulong = 1;
    const OFF: libc::c_ulong = 0;
    const ALLOW: u8 = 0;
    const BLOCK: u8 = 1;
    /// The length of the instruction `syscall`.
    const SYSCALL_BYTES: i64 = 2;

    /// The byte that the kernel reads. One thread at a time counts.
    static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);
    static IN_USE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// Counts on the thread that created it.
    pub(in super::super) struct SyscallCounter {
        previous: libc::sigaction,
        _alone: std::sync::MutexGuard<'static, ()>,
        /// The dispatch is the thread's.
        _not_send: std::marker::PhantomData<Cell<*const u8>>,
    }

    /// What the kernel writes for this signal; `libc` does not name the fields.
    #[repr(C)]
    struct SysInfo {
        header: [libc::c_int; 4],
        call_address: usize,
        number: libc::c_int,
    }

    extern "C" fn on_call(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        SELECTOR.store(ALLOW, Ordering::SeqCst);
        // SAFETY: the kernel passes both for this signal, and they are of these types.
        unsafe {
            let number = (*info.cast::<SysInfo>()).number;
            let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            registers[libc::REG_RAX as usize] = i64::from(number);
            registers[libc::REG_RIP as usize] -= SYSCALL_BYTES;
        }
    }

    fn set_dispatch(mode: libc::c_ulong, selector: *const AtomicU8) -> bool {
        // SAFETY: the selector lives as long as the program; with `OFF` it is null, as it must be.
        let done = unsafe {
            libc::prctl(
                PR_SET_SYSCALL_USER_DISPATCH,
                mode,
                0 as libc::c_ulong,
                0 as libc::c_ulong,
                selector,
            )
        };
        done == 0
    }

    impl SyscallCounter {
        /// `None` if the kernel cannot do that.
        pub(in super::super) fn new() -> Option<Self> {
            let alone = IN_USE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            // SAFETY: zero is valid for these structures of integers and pointers.
            let (mut action, mut previous): (libc::sigaction, libc::sigaction) =
                unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
            action.sa_flags = libc::SA_SIGINFO;
            action.sa_sigaction = on_call as *const () as usize;
            // SAFETY: the handler is async-signal-safe: it changes one atomic and its own context.
            if unsafe { libc::sigaction(libc::SIGSYS, &raw const action, &raw mut previous) } != 0 {
                return None;
            }
            let counter = Self { previous, _alone: alone, _not_send: std::marker::PhantomData };
            set_dispatch(ON, &raw const SELECTOR).then_some(counter)
        }

        /// Runs `work`; returns also whether it made a system call.
        pub(in super::super) fn watch<R>(&self, work: impl FnOnce() -> R) -> (R, bool) {
            SELECTOR.store(BLOCK, Ordering::SeqCst);
            let result = work();
            (result, SELECTOR.swap(ALLOW, Ordering::SeqCst) == ALLOW)
        }
    }

    impl Drop for SyscallCounter {
        fn drop(&mut self) {
            SELECTOR.store(ALLOW, Ordering::SeqCst);
            set_dispatch(OFF, ptr::null());
            // SAFETY: the action that was there before.
            unsafe { libc::sigaction(libc::SIGSYS, &raw const self.previous, ptr::null_mut()) };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    /// Counts nothing on this processor.
    pub(in super::super) struct SyscallCounter;

    impl SyscallCounter {
        pub(in super::super) fn new() -> Option<Self> {
            None
        }

        pub(in super::super) fn watch<R>(&self, work: impl FnOnce() -> R) -> (R, bool) {
            (work(), false)
        }
    }
}

pub(super) use imp::SyscallCounter;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_is_seen_and_still_made() {
        let Some(counter) = SyscallCounter::new() else { return };
        // SAFETY: the call has no arguments.
        let (process, has_called) = counter.watch(|| unsafe { libc::getppid() });
        assert!(has_called && process > 0);
        let (sum, has_called) =
            counter.watch(|| (0..100u64).map(std::hint::black_box).sum::<u64>());
        assert_eq!((sum, has_called), (4950, false));
    }
}
