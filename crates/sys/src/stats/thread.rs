//! The block of the calling thread.
//!
//! The library runs in threads of other people's programs, which may have no memory left, and a thread-local value with
//! a destructor needs memory: the C library aborts the process if there is none. So nothing here has a destructor, and
//! the page finds out by itself which threads have ended.

use std::cell::Cell;
use std::ptr::null;
use std::sync::atomic::AtomicU64;

use super::kinds::ThreadCounters;
use super::page;

thread_local! {
    /// The counters of this thread; null before the first use. It needs no destructor, so an access is a load.
    static CURRENT: Cell<*const ThreadCounters> = const { Cell::new(null()) };
}

/// Counts something by the counters of the calling thread.
#[inline(always)]
pub fn thread<R>(count: impl FnOnce(&ThreadCounters) -> R) -> R {
    let current = CURRENT.get();
    let counters = if current.is_null() { open() } else { current };
    // SAFETY: the page is never unmapped, and it frees the block of a thread only after the thread has ended. Spare
    // counters are static.
    count(unsafe { &*counters })
}

#[cold]
#[inline(never)]
fn open() -> *const ThreadCounters {
    // SAFETY: reads the number of the calling thread.
    let id = unsafe { libc::syscall(libc::SYS_gettid) } as u64;
    let mut name = [0u8; MAX_NAME_BYTES];
    // SAFETY: the kernel writes a name with its zero byte, at most this long.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = str::from_utf8(name).unwrap_or_default();
    let in_page = page::current().and_then(|page| page.allocate_thread(id, name));
    let counters = in_page.map_or_else(|| spare(id), |counters| counters.as_ptr().cast_const());
    CURRENT.set(counters);
    counters
}

/// The length of a thread's name, with its zero byte.
const MAX_NAME_BYTES: usize = 16;

const SPARE_COUNT: usize = 64;
const WORDS: usize = size_of::<ThreadCounters>() / 8;
const _: () = assert!(align_of::<ThreadCounters>() == align_of::<AtomicU64>());

/// Counters for a thread without a place in the page. Nobody reads them, so threads may share them; there are many, so
/// that threads seldom do, and do not take lines from each other.
fn spare(thread: u64) -> *const ThreadCounters {
    static SPARE: [[AtomicU64; WORDS]; SPARE_COUNT] =
        [const { [const { AtomicU64::new(0) }; WORDS] }; SPARE_COUNT];
    // The type consists of atomics of this kind alone.
    SPARE[thread as usize % SPARE_COUNT].as_ptr().cast()
}

/// Makes the calling thread, the only one of a forked child, open a block of its own.
pub(super) fn forget_current() {
    CURRENT.set(null());
}
