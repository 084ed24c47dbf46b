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

use std::ffi::c_int;
use std::mem::forget;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::extents::Extents;
use super::{BASE, BYTES, EXTENTS, FILE, IS_SHARED, LIMIT, map_private};
use crate::gnu::{real, system};

const PAGE: usize = 4096;

/// The copy for the child, while a fork is under way; 0 if there is none.
static COPY: AtomicUsize = AtomicUsize::new(0);

/// Takes the lock, so that no allocation is half made, and copies the heap.
pub(super) extern "C" fn before() {
    let extents = EXTENTS.lock();
    if IS_SHARED.load(Ordering::Relaxed) {
        let bytes = BYTES.load(Ordering::Relaxed);
        if let Some(copy) = map_private(bytes) {
            // SAFETY: advice on a fresh mapping.
            unsafe { libc::madvise(copy as *mut _, bytes, libc::MADV_HUGEPAGE) };
            match FILE.get() {
                Some(file) => {
                    let source = Source { descriptor: file, start: 0, copy };
                    extents.for_each_used(|offset, bytes| source.copy_data(offset, bytes));
                }
                None => copy_without_file(copy, &extents),
            }
            COPY.store(copy, Ordering::Relaxed);
        }
    }
    // Released by one of the other two handlers.
    forget(extents);
}

/// The same if the program has closed the memfd: the kernel reads the memory of this process.
fn copy_without_file(copy: usize, extents: &Extents) {
    let path = c"/proc/self/mem".as_ptr() as usize;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    // SAFETY: the path is a string. If there is no descriptor, reads from it fail.
    let descriptor = unsafe { system::call(libc::SYS_openat, [0, path, flags, 0, 0, 0]) } as c_int;
    let source = Source { descriptor, start: BASE.load(Ordering::Relaxed), copy };
    extents.for_each_used(|offset, bytes| source.copy_resident(offset, bytes));
    system::close(descriptor);
}

/// From where to where the heap is copied. Only pages that exist are: reading others creates them.
struct Source {
    /// A file that has the contents of the heap from `start` on, whatever access to its pages the program has
    /// forbidden.
    descriptor: c_int,
    start: usize,
    copy: usize,
}

impl Source {
    /// Copies an allocation as far as the memfd has data.
    fn copy_data(&self, offset: usize, bytes: usize) {
        let end = offset + bytes;
        let seek = |at: usize, whence: c_int| {
            let arguments = [self.descriptor as usize, at, whence as usize, 0, 0, 0];
            // SAFETY: a query of the file.
            unsafe { system::call(libc::SYS_lseek, arguments) }
        };
        let mut at = offset;
        while at < end {
            // A kernel that cannot tell has data everywhere.
            let data = match seek(at, libc::SEEK_DATA) {
                error if error == -libc::ENXIO as isize => return,
                data => usize::try_from(data).unwrap_or(at),
            };
            if data >= end {
                return;
            }
            let hole = usize::try_from(seek(data, libc::SEEK_HOLE)).map_or(end, |at| at.min(end));
            self.copy(data, hole - data);
            at = hole;
        }
    }

    /// Copies the pages of an allocation that are in memory; all of them, if some may be in swap space.
    fn copy_resident(&self, offset: usize, bytes: usize) {
        const PAGES: usize = 512;
        let mut found = [0u8; PAGES];
        for at in (offset..offset + bytes).step_by(PAGES * PAGE) {
            let length = (offset + bytes - at).min(PAGES * PAGE);
            let address = BASE.load(Ordering::Relaxed) + at;
            let arguments = [address, length, found.as_mut_ptr() as usize, 0, 0, 0];
            // SAFETY: the kernel writes a byte for each page.
            let is_known = unsafe { system::call(libc::SYS_mincore, arguments) } == 0;
            if !is_known || is_swap_used() {
                found.fill(1);
            }
            let mut page = 0;
            for run in found[..length / PAGE].chunk_by(|one, next| one & 1 == next & 1) {
                if run[0] & 1 != 0 {
                    self.copy(at + page * PAGE, run.len() * PAGE);
                }
                page += run.len();
            }
        }
    }

    /// Copies a range.
    fn copy(&self, offset: usize, bytes: usize) {
        let mut done = 0;
        while done < bytes {
            let (target, from) = (self.copy + offset + done, self.start + offset + done);
            let arguments = [self.descriptor as usize, target, bytes - done, from, 0, 0];
            // SAFETY: the copy is as long as the heap, and nobody else uses it.
            match unsafe { system::call(libc::SYS_pread64, arguments) } {
                read if read > 0 => done += read as usize,
                _ => break,
            }
        }
        let (target, source) = (self.copy + offset, BASE.load(Ordering::Relaxed) + offset);
        // SAFETY: as above; the range is a part of the heap.
        unsafe { real::MEMMOVE.real()(target + done, source + done, bytes - done) };
    }
}

/// Whether the system may have moved pages out of memory.
fn is_swap_used() -> bool {
    // SAFETY: zeros are a value of the structure, which is valid for writes.
    unsafe {
        let mut info: libc::sysinfo = std::mem::zeroed();
        libc::sysinfo(&mut info) != 0 || info.freeswap != info.totalswap
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
    if IS_SHARED.swap(false, Ordering::Relaxed) {
        let file = FILE.take();
        let copy = COPY.swap(0, Ordering::Relaxed);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if let Some(file) = file {
            system::close(file);
        }
        // SAFETY: nothing of this process is at the addresses of the heap.
        let is_moved = unsafe {
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
