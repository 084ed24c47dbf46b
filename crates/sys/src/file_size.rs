//! The limit of the size of files (`ulimit -f`), which counts for shared memory too.
//!
//! A process that would exceed it is ended by `SIGXFSZ` unless it does something about that signal.
//! No call of a library may end the program, so the signal is kept from the calling thread while a
//! file grows, and the limit becomes an error.

use std::io;
use std::mem::MaybeUninit;

use rustix::process::{Resource, getrlimit};

/// Runs `grow`, which makes a file longer. Where that would exceed the limit, the error names it
/// and what to do.
pub fn grow<T>(grow: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let withheld = Withheld::new();
    let result = grow();
    let is_limit = |error: &io::Error| error.raw_os_error() == Some(libc::EFBIG);
    match result {
        Err(error) if is_limit(&error) => {
            withheld.consume();
            Err(match getrlimit(Resource::Fsize).current {
                Some(limit) => io::Error::new(
                    io::ErrorKind::FileTooLarge,
                    format!(
                        "the limit of the size of files is {limit} bytes, which counts for shared \
                         memory too: raise it (`ulimit -f`, LimitFSIZE=)"
                    ),
                ),
                None => error,
            })
        }
        result => result,
    }
}

/// While this lives, `SIGXFSZ` does not reach the calling thread. The kernel sends it to the thread
/// that makes the call.
struct Withheld {
    before: libc::sigset_t,
    was_pending: bool,
}

fn the_signal() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call makes a set of it, to which the second adds a signal.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGXFSZ);
        set.assume_init()
    }
}

impl Withheld {
    fn new() -> Self {
        let (mut before, mut pending) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: sets of this function: one is read, the others are written whole.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &the_signal(), before.as_mut_ptr());
            libc::sigemptyset(pending.as_mut_ptr());
            libc::sigpending(pending.as_mut_ptr());
            let was_pending = libc::sigismember(pending.as_ptr(), libc::SIGXFSZ) == 1;
            Self { before: before.assume_init(), was_pending }
        }
    }

    /// Takes the signal that the kernel has just sent. One that was there before is not ours.
    fn consume(&self) {
        if !self.was_pending {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: reads a set and a time; nothing is asked about the signal.
            unsafe { libc::sigtimedwait(&the_signal(), std::ptr::null_mut(), &now) };
        }
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        // SAFETY: reads the set that was there before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
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
            // SAFETY: writes the whole set; nothing is changed.
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
