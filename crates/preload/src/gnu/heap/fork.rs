//! What happens to the heap when the program forks. A child must see the memory as it was, and the parent
//! must never see what the child writes; but the heap is shared memory, which the two would share.
//!
//! So the heap is not in children at all (`MADV_DONTFORK`). Before the fork the parent copies the used
//! part into private memory, and the child moves that copy to the heap's addresses. From then on the child's
//! heap is ordinary memory, and its own children are made as usual.
//!
//! What other threads write during the copy may be in it or not, as with any fork. What happened before the
//! call of `fork`, in the thread that calls it or ordered before by a lock that it holds, is in it: these
//! handlers run after those of the program before the fork, and before them after it.
//!
//! Children that are made without the handlers, by `_Fork` or the `clone` system call, do not have the heap,
//! and end with a fault if they use it. Those of `vfork` and `posix_spawn` use the parent's memory until they
//! execute another program.

use std::mem::forget;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{BASE, BYTES, DESCRIPTOR, EXTENTS, LIMIT, map_private};
use crate::gnu::{real, system};

/// The copy for the child, while a fork is under way; 0 if there is none.
static COPY: AtomicUsize = AtomicUsize::new(0);

/// Takes the lock, so that no allocation is half made, and copies the heap.
pub(super) extern "C" fn before() {
    let extents = EXTENTS.lock();
    if DESCRIPTOR.load(Ordering::Relaxed) >= 0 {
        let bytes = BYTES.load(Ordering::Relaxed);
        if let Some(copy) = map_private(bytes) {
            // SAFETY: advice on a fresh mapping.
            unsafe { libc::madvise(copy as *mut _, bytes, libc::MADV_HUGEPAGE) };
            extents.for_each_used(|offset, bytes| copy_used(copy, offset, bytes));
            COPY.store(copy, Ordering::Relaxed);
        }
    }
    // Released by one of the other two handlers.
    forget(extents);
}

/// Copies the pages of an allocation that exist. Reading the others would create them.
fn copy_used(copy: usize, offset: usize, bytes: usize) {
    let (base, file) = (BASE.load(Ordering::Relaxed), DESCRIPTOR.load(Ordering::Relaxed));
    let end = offset + bytes;
    let mut at = offset;
    while at < end {
        // SAFETY: a query of the file.
        let (data, hole) = unsafe {
            let data = libc::lseek(file, at as libc::off_t, libc::SEEK_DATA);
            if data < 0 && *libc::__errno_location() == libc::ENXIO {
                return;
            }
            // A kernel that cannot tell has data everywhere.
            let data = if data < 0 { at } else { data as usize };
            let hole = libc::lseek(file, data as libc::off_t, libc::SEEK_HOLE);
            (data, if hole < 0 { end } else { hole as usize })
        };
        if data >= end {
            return;
        }
        let length = hole.min(end) - data;
        // SAFETY: the range is a part of the heap, and the copy is as long as the heap.
        unsafe { real::MEMMOVE.real()(copy + data, base + data, length) };
        at = data + length;
    }
}

/// Drops the copy, which is the child's.
pub(super) extern "C" fn in_parent() {
    let copy = COPY.swap(0, Ordering::Relaxed);
    if copy != 0 {
        // SAFETY: the mapping was made for the child, and nobody here uses it.
        unsafe { libc::munmap(copy as *mut _, BYTES.load(Ordering::Relaxed)) };
    }
    EXTENTS.unlock();
}

/// Moves the copy to the addresses of the heap.
pub(super) extern "C" fn in_child() {
    let (base, bytes) = (BASE.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
    let file = DESCRIPTOR.swap(-1, Ordering::Relaxed);
    if file >= 0 {
        let copy = COPY.swap(0, Ordering::Relaxed);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: nothing of this process is at the addresses of the heap; the descriptor is closed once.
        let is_moved = unsafe {
            libc::close(file);
            copy != 0
                && libc::mremap(copy as *mut _, bytes, bytes, flags, base as *mut libc::c_void)
                    != libc::MAP_FAILED
        };
        if !is_moved {
            system::report(&["no memory for a copy of the shared heap in a child, which ends"]);
            // SAFETY: the child cannot go on without its memory.
            unsafe { libc::_exit(127) };
        }
        // The child's allocations have no reason to lie there.
        LIMIT.store(usize::MAX, Ordering::Relaxed);
    }
    EXTENTS.unlock();
}
