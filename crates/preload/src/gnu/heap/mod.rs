//! A heap in memory that peers can map, for allocations from a threshold on (`memferry run
//! --shared-heap`). It is one sealed memfd, mapped once: an address is an offset plus a constant, so that
//! a peer that has mapped the memfd finds every allocation.
//!
//! `calls` has the functions of the `malloc` family, `extents` says which parts are used, `fork` gives
//! children a private copy, `advice` has `madvise`. Memory that is freed goes back to the system, at the latest when there is
//! more than [`MAX_DIRTY_BYTES`] of it.

#[cfg(not(test))]
mod advice;
mod calls;
mod extents;
mod fork;
mod lock;

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memferry_sys::descriptor_cell::DescriptorCell;

use self::extents::{Extents, GRANULE, table_bytes};
use self::lock::Lock;
use super::real;
use super::system;

use self::calls::has_own_allocator;

#[cfg(not(test))]
pub(super) use self::calls::find_allocator;

/// The variable with the size from which allocations lie in the heap.
pub(super) const VARIABLE: &str = "MEMFERRY_SHARED_HEAP";

/// Free memory that is kept for the next allocation.
const MAX_DIRTY_BYTES: usize = 64 << 20;
/// Free memory of this size goes back at once.
const MAX_KEPT_BYTES: usize = 32 << 20;
/// The largest heap.
const MAX_HEAP_BYTES: usize = 1 << 40;

/// The first address of the heap.
static BASE: AtomicUsize = AtomicUsize::new(0);
/// Its length; 0 without a heap, so that no address lies in it.
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// The size from which allocations lie in it.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Whether it is the memfd's memory. If not, there is no heap, or it is the private copy of a child.
static IS_SHARED: AtomicBool = AtomicBool::new(false);
/// The memfd, unless the program has closed its number or uses that for another file.
static FILE: DescriptorCell = DescriptorCell::empty();
static EXTENTS: Lock<Extents> = Lock::new(Extents::empty());

/// Creates the heap. What does not work is reported, and the program runs without it.
pub(super) fn start(value: &str) {
    let Some(limit) = value.parse::<usize>().ok().filter(|limit| *limit >= 4096) else {
        return system::report(&[
            VARIABLE,
            " is not a number of bytes from 4096 on: no shared heap",
        ]);
    };
    if has_own_allocator() {
        return system::report(&["the program brings its own malloc: no shared heap"]);
    }
    match create(heap_bytes()) {
        Ok(()) => LIMIT.store(limit, Ordering::Release),
        Err(reason) => system::report(&["no shared heap: ", reason]),
    }
}

/// Twice the memory of the machine: addresses cost nothing.
fn heap_bytes() -> usize {
    // SAFETY: zeros are a value of the structure, which is valid for writes.
    let total = unsafe {
        let mut info: libc::sysinfo = std::mem::zeroed();
        libc::sysinfo(&mut info);
        (info.totalram as usize).saturating_mul(info.mem_unit as usize)
    };
    total.clamp(1 << 30, MAX_HEAP_BYTES / 2).next_power_of_two() * 2
}

fn create(bytes: usize) -> Result<(), &'static str> {
    for (limit, reason) in [
        (libc::RLIMIT_AS, "the address space is limited (ulimit -v)"),
        (libc::RLIMIT_FSIZE, "the size of files is limited (ulimit -f)"),
    ] {
        let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the structure is valid for writes.
        let is_known = unsafe { libc::getrlimit(limit, &mut found) } == 0;
        if is_known && found.rlim_cur != libc::RLIM_INFINITY {
            return Err(reason);
        }
    }
    // A fork needs as many addresses for its copy, which a kernel without overcommitment may refuse.
    let copy = map_private(bytes).ok_or("the kernel does not overcommit memory")?;
    // SAFETY: the mapping was made here, and nobody uses it.
    unsafe { libc::munmap(copy as *mut _, bytes) };
    // SAFETY: the handlers are functions of this library, which stays. They are registered first of all,
    // so that they are closest to the fork: the program's own handlers run around them.
    if unsafe {
        libc::pthread_atfork(Some(fork::before), Some(fork::in_parent), Some(fork::in_child))
    } != 0
    {
        return Err("no memory for handlers of fork");
    }
    let descriptor = memory_file(bytes).ok_or("the kernel gives no memory file (memfd_create)")?;
    let table = map_private(table_bytes(bytes)).ok_or("no memory for its table")?;
    let base = map_shared(descriptor, bytes).ok_or("it cannot be mapped")?;
    // SAFETY: the table is fresh, zeroed memory of the right size, which stays.
    *EXTENTS.lock() = unsafe { Extents::new(table as *mut u8, base, bytes) };
    FILE.set(descriptor);
    IS_SHARED.store(true, Ordering::Relaxed);
    BASE.store(base, Ordering::Relaxed);
    BYTES.store(bytes, Ordering::Release);
    Ok(())
}

/// A memfd that nobody can shrink or grow, and only this user can open again.
fn memory_file(bytes: usize) -> Option<c_int> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let name = c"memferry-heap".as_ptr();
    // SAFETY: the name ends with a zero; the descriptor is closed once if anything fails.
    unsafe {
        let mut descriptor = libc::memfd_create(name, flags | libc::MFD_NOEXEC_SEAL);
        if descriptor < 0 {
            descriptor = libc::memfd_create(name, flags);
        }
        if descriptor < 0 {
            return None;
        }
        if let Some(high) = duplicate_high(descriptor) {
            libc::close(descriptor);
            descriptor = high;
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let is_ready = libc::ftruncate(descriptor, bytes as libc::off_t) == 0
            && libc::fchmod(descriptor, 0o600) == 0
            && libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) == 0;
        if !is_ready {
            libc::close(descriptor);
            return None;
        }
        Some(descriptor)
    }
}

/// Duplicates a descriptor to a number that programs hardly choose: they expect the lowest ones, and
/// scripts pick hundreds for their locks. Numbers above 1023 would make each fork copy a larger table.
fn duplicate_high(descriptor: c_int) -> Option<c_int> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writes.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    let end = limit.rlim_cur.min(1024) as c_int;
    (end.saturating_sub(64).max(3)..end).rev().find_map(|number| {
        // SAFETY: creates a descriptor, which is the caller's.
        let found = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, number) };
        (found >= 0).then_some(found)
    })
}

/// Maps the memfd. Children do not have the mapping: they would share what they write.
fn map_shared(descriptor: c_int, bytes: usize) -> Option<usize> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // A place that is aligned for huge pages.
    const HUGE: usize = 2 << 20;
    // SAFETY: the reserved range is fresh; the mapping replaces a part of it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let room = libc::mmap(ptr::null_mut(), bytes + HUGE, libc::PROT_NONE, flags, -1, 0);
        if room == libc::MAP_FAILED {
            return None;
        }
        let base = (room as usize).next_multiple_of(HUGE);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let mapped = libc::mmap(base as *mut _, bytes, access, flags, descriptor, 0);
        if mapped == libc::MAP_FAILED || libc::madvise(mapped, bytes, libc::MADV_DONTFORK) != 0 {
            libc::munmap(room, bytes + HUGE);
            return None;
        }
        // Where the system grants them for shared memory.
        libc::madvise(mapped, bytes, libc::MADV_HUGEPAGE);
        Some(base)
    }
}

/// Maps private memory of zeros.
fn map_private(bytes: usize) -> Option<usize> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0) };
    (mapped != libc::MAP_FAILED).then_some(mapped as usize)
}

/// Gives the pages of a range back to the system. Afterwards they are zero.
fn discard(offset: usize, bytes: usize) -> bool {
    let address = BASE.load(Ordering::Relaxed) + offset;
    let advice = match IS_SHARED.load(Ordering::Relaxed) {
        true => libc::MADV_REMOVE,
        false => libc::MADV_DONTNEED,
    };
    // SAFETY: the range is a part of the heap that no allocation has.
    unsafe { system::call(libc::SYS_madvise, [address, bytes, advice as usize, 0, 0, 0]) == 0 }
}

/// Allocates; null if the heap is full.
fn allocate(bytes: usize, alignment: usize, is_zeroed: bool) -> *mut u8 {
    let allocation = EXTENTS.lock().allocate(bytes, alignment);
    let Some(allocation) = allocation else { return ptr::null_mut() };
    let address = BASE.load(Ordering::Relaxed) + allocation.offset;
    if is_zeroed && allocation.is_dirty {
        // SAFETY: the allocation has as many bytes.
        unsafe { real::MEMSET.real()(address, 0, bytes) };
    }
    address as *mut u8
}

/// The offset of an allocation of this heap. Anything else in the heap is an error of the program.
fn offset_of(address: *const u8) -> Option<usize> {
    let offset = (address as usize).wrapping_sub(BASE.load(Ordering::Relaxed));
    (offset < BYTES.load(Ordering::Acquire)).then_some(offset)
}

fn free(offset: usize) {
    let mut extents = EXTENTS.lock();
    let Some(bytes) = extents.usable(offset) else { wrong_pointer() };
    let is_clean = bytes >= MAX_KEPT_BYTES && discard(offset, bytes.next_multiple_of(GRANULE));
    extents.free(offset, is_clean);
    if extents.dirty_bytes() > MAX_DIRTY_BYTES {
        extents.clean(discard);
    }
}

fn wrong_pointer() -> ! {
    system::report(&["free or realloc of an address that was not allocated, or was freed before"]);
    // SAFETY: the C library ends programs in the same way.
    unsafe { libc::abort() }
}

/// Tells libraries in this process, such as Memferry's provider for libfabric, where the heap is. Returns
/// its memfd, which stays the heap's, or -1 if there is none or the program has closed it.
///
/// # Safety
/// Both pointers must be valid for writes.
#[cfg(not(test))]
#[unsafe(no_mangle)]
unsafe extern "C" fn memferry_shared_heap(base: *mut usize, bytes: *mut usize) -> c_int {
    // SAFETY: the caller guarantees the pointers.
    unsafe {
        *base = BASE.load(Ordering::Relaxed);
        *bytes = BYTES.load(Ordering::Relaxed);
    }
    FILE.get().unwrap_or(-1)
}
