//! The file size limit (`RLIMIT_FSIZE`, `ulimit -f`), which also applies to shared memory.
//!
//! The kernel sends `SIGXFSZ` to a thread that exceeds the limit, and the default action ends the
//! process. A library call must not end the program, so the calling thread blocks the signal while
//! a file grows, and the limit becomes an error.

use std::io;
use std::mem::MaybeUninit;

use rustix::process::{Resource, getrlimit};

/// Runs `grow`, which extends a file. If the extension exceeds the limit, the error states the
/// limit and how to raise it.
pub fn grow<T>(grow: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let blocked = BlockedSigxfsz::new();
    let result = grow();
    let is_limit = |error: &io::Error| error.raw_os_error() == Some(libc::EFBIG);
    match result {
        Err(error) if is_limit(&error) => {
            blocked.consume();
            Err(match getrlimit(Resource::Fsize).current {
                Some(limit) => io::Error::new(
                    io::ErrorKind::FileTooLarge,
                    format!(
                        "the file size limit is {limit} bytes, and it applies to shared memory \
                         too: raise it (`ulimit -f`, LimitFSIZE=)"
                    ),
                ),
                None => error,
            })
        }
        result => result,
    }
}

/// Blocks `SIGXFSZ` on the calling thread until it is dropped. The kernel sends the signal to the
/// thread that makes the call.
struct BlockedSigxfsz {
    old_mask: libc::sigset_t,
    was_pending: bool,
}

fn sigxfsz_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set before `sigaddset` and `assume_init` use it.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGXFSZ);
        set.assume_init()
    }
}

impl BlockedSigxfsz {
    fn new() -> Self {
        let (mut before, mut pending) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: all sets are local variables. `pthread_sigmask` writes all of `before`,
        // `sigemptyset` and `sigpending` write all of `pending`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &sigxfsz_set(), before.as_mut_ptr());
            libc::sigemptyset(pending.as_mut_ptr());
            libc::sigpending(pending.as_mut_ptr());
            let was_pending = libc::sigismember(pending.as_ptr(), libc::SIGXFSZ) == 1;
            Self { old_mask: before.assume_init(), was_pending }
        }
    }

    /// Consumes the signal that the kernel has just sent. A signal that was pending before belongs
    /// to the application and stays pending.
    fn consume(&self) {
        if !self.was_pending {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the call reads a set and a time that live until it returns; the null pointer
            // means that no signal information is written.
            unsafe { libc::sigtimedwait(&sigxfsz_set(), std::ptr::null_mut(), &now) };
        }
    }
}

impl Drop for BlockedSigxfsz {
    fn drop(&mut self) {
        // SAFETY: the call reads the set that `new` has saved.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.old_mask, std::ptr::null_mut()) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_about_the_limit_passes_unchanged() {
        assert_eq!(grow(|| Ok(7)).unwrap(), 7);
        let other = grow(|| Err::<(), _>(io::Error::from_raw_os_error(libc::ENOSPC))).unwrap_err();
        assert_eq!(other.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn the_mask_of_the_thread_is_as_before() {
        let mask = || {
            let mut mask = MaybeUninit::uninit();
            // SAFETY: the call writes the whole set, and a null set changes no mask.
            unsafe {
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
                libc::sigismember(mask.as_ptr(), libc::SIGXFSZ)
            }
        };
        let before = mask();
        grow(|| {
            assert_eq!(mask(), 1);
            Ok(())
        })
        .unwrap();
        assert_eq!(mask(), before);
    }
}
