//! Whether pages are in memory, and making them come and stay there.
//!
//! Nothing here keeps state. The kernel counts locks by mapping and not by caller, so whoever locks
//! and unlocks overlapping ranges has to count for itself.

use std::io::{self, Read};
use std::os::fd::AsRawFd;

use rustix::process::{Resource, getrlimit};

use crate::fault::{Call, call, call_c};
use crate::pages::page_bytes;

/// How many pages one look at residency asks about.
const PAGES_PER_LOOK: usize = 4096;

/// Makes every page of a range present and readable, as if each had been read.
pub fn populate_for_reading(address: usize, length: usize) -> io::Result<()> {
    advise(address, length, libc::MADV_POPULATE_READ)
}

/// Makes every page of a range present and writable, as if each had been written, and changes none.
pub fn populate_for_writing(address: usize, length: usize) -> io::Result<()> {
    advise(address, length, libc::MADV_POPULATE_WRITE)
}

/// Whether this kernel knows how to populate (Linux 5.14 and later).
pub fn can_populate() -> bool {
    // A page that is certainly mapped and readable: that of a local variable.
    let here = 0u8;
    let page = (&raw const here as usize) & !(page_bytes() - 1);
    populate_for_reading(page, page_bytes()).is_ok()
}

fn advise(address: usize, length: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: populating changes no byte of any mapping; missing memory is an error.
    let advise = || unsafe { libc::madvise(address as *mut libc::c_void, length, advice) };
    call_c(Call::Madvise, advise)
}

/// Brings a range into memory and keeps it there until it is unlocked or unmapped. After an error a
/// part of the range may be locked.
pub fn lock(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: locking changes no byte; missing memory is an error.
    Ok(call(Call::Mlock, || unsafe { rustix::mm::mlock(address as *mut _, length) })?)
}

/// Undoes [`lock`], however often the range was locked. It stops with an error at the first page
/// that is not mapped.
pub fn unlock(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: unlocking changes no byte; missing memory is an error.
    Ok(unsafe { rustix::mm::munlock(address as *mut _, length) }?)
}

/// How much of a range, which must begin on a page, is in memory now, in pages. An error says that
/// a part of it is not mapped.
pub fn resident_pages(address: usize, length: usize) -> io::Result<usize> {
    let (mut states, mut count, mut done) = ([0u8; PAGES_PER_LOOK], 0, 0);
    while done < length {
        let part = (length - done).min(PAGES_PER_LOOK * page_bytes());
        // SAFETY: one byte is written for each page of `part`, which has no more pages than the
        // array has bytes; the asked range itself is not touched.
        let look =
            || unsafe { libc::mincore((address + done) as *mut _, part, states.as_mut_ptr()) };
        call_c(Call::Mincore, look)?;
        count += states[..part.div_ceil(page_bytes())].iter().filter(|&&s| s & 1 != 0).count();
        done += part;
    }
    Ok(count)
}

/// Whether the page at an address is in memory now; no where nothing is mapped.
pub fn is_resident(address: usize) -> bool {
    resident_pages(address & !(page_bytes() - 1), page_bytes()).is_ok_and(|pages| pages == 1)
}

/// Whether something is mapped at every page of a range, which must begin on a page. Looks at
/// mappings and not at pages, however many there are.
pub fn is_mapped(address: usize, length: usize) -> bool {
    // SAFETY: an asynchronous flush begins and changes nothing; it fails where nothing is mapped.
    unsafe { libc::msync(address as *mut libc::c_void, length, libc::MS_ASYNC) == 0 }
}

/// Whether memory is made of huge pages, judged by a few megabytes in its middle. No where the
/// kernel does not tell (before Linux 6.7).
pub fn is_huge(address: usize, length: usize) -> bool {
    const SAMPLE_BYTES: usize = 4 << 20;
    const HUGE_BYTES: usize = 2 << 20;
    let sample = length.min(SAMPLE_BYTES);
    let start = (address + (length - sample) / 2).next_multiple_of(HUGE_BYTES);
    let end = (start + sample / 2).min(address + length) & !(page_bytes() - 1);
    start < end && huge_until(start, end) >= end
}

/// Up to where memory that begins on a page is made of huge pages.
fn huge_until(start: usize, end: usize) -> usize {
    /// The kernel's argument of this call.
    #[repr(C)]
    #[derive(Default)]
    struct Scan {
        size: u64,
        flags: u64,
        start: u64,
        end: u64,
        walk_end: u64,
        regions: u64,
        region_count: u64,
        most_pages: u64,
        inverted: u64,
        all_of: u64,
        any_of: u64,
        told: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Region {
        start: u64,
        end: u64,
        categories: u64,
    }
    const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
    const IS_HUGE: u64 = 1 << 6;
    let Ok(map) = std::fs::File::open("/proc/self/pagemap") else { return start };
    let mut region = Region::default();
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        start: start as u64,
        end: end as u64,
        regions: &raw mut region as u64,
        region_count: 1,
        all_of: IS_HUGE,
        told: IS_HUGE,
        ..Scan::default()
    };
    // SAFETY: the kernel reads and writes the argument, and writes one region at most, for which
    // there is room. The memory that is asked about is not touched.
    let found = unsafe { libc::ioctl(map.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
    if found == 1 && region.start as usize == start { region.end as usize } else { start }
}

/// How many bytes this process may lock, `None` where there is no limit for it: none is set, or it
/// holds the capability to lock as it likes.
pub fn lock_limit_bytes() -> Option<u64> {
    /// The bit of `CAP_IPC_LOCK` in the capabilities of a thread.
    const MAY_LOCK: u64 = 1 << 14;
    let capabilities = status_field("CapEff:", 16).unwrap_or(0);
    if capabilities & MAY_LOCK != 0 { None } else { getrlimit(Resource::Memlock).current }
}

/// How many bytes this process has locked by [`lock`] now.
pub fn locked_bytes() -> u64 {
    status_field("VmLck:", 10).unwrap_or(0) * 1024
}

/// How many bytes the kernel holds of this process for others: registered buffers, devices.
pub fn pinned_bytes() -> u64 {
    status_field("VmPin:", 10).unwrap_or(0) * 1024
}

fn status_field(name: &str, radix: u32) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(line.split_whitespace().next()?, radix).ok()
}

/// How many mappings a process may have.
pub fn most_maps() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    // The kernel's own value where the setting cannot be read.
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530)
}

/// How many mappings this process has now, 0 where that cannot be seen. Reads the whole list: for
/// messages to people.
pub fn maps_now() -> u64 {
    // Needs no memory of its own: it is asked when no mapping can be made any more.
    let count = |mut file: std::fs::File| {
        let (mut text, mut lines) = ([0u8; 16 << 10], 0);
        while let Ok(length @ 1..) = file.read(&mut text) {
            lines += text[..length].iter().filter(|&&byte| byte == b'\n').count() as u64;
        }
        lines
    };
    std::fs::File::open("/proc/self/maps").map_or(0, count)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;

    #[test]
    fn pages_are_resident_once_they_are_populated() {
        let pages = Pages::new(64 * page_bytes()).unwrap();
        let at = pages.as_ptr() as usize;
        assert_eq!(resident_pages(at, pages.len()).unwrap(), 0);
        assert!(!is_resident(at));
        populate_for_writing(at, 16 * page_bytes()).unwrap();
        assert_eq!(resident_pages(at, pages.len()).unwrap(), 16);
        assert!(is_resident(at + 5) && !is_resident(at + 16 * page_bytes()));
        assert!(can_populate());
    }

    #[test]
    fn residency_of_more_pages_than_one_look_takes_is_counted() {
        let pages = Pages::new((PAGES_PER_LOOK + 10) * page_bytes()).unwrap();
        let last = pages.as_ptr() as usize + (PAGES_PER_LOOK + 5) * page_bytes();
        populate_for_writing(last, page_bytes()).unwrap();
        assert_eq!(resident_pages(pages.as_ptr() as usize, pages.len()).unwrap(), 1);
    }

    #[test]
    fn missing_memory_is_neither_mapped_nor_resident() {
        let pages = Pages::new(page_bytes()).unwrap();
        assert!(is_mapped(pages.as_ptr() as usize, page_bytes()));
        // The first pages of an address space are never mapped.
        let at = page_bytes();
        assert!(!is_mapped(at, page_bytes()) && !is_resident(at));
        assert!(populate_for_reading(at, page_bytes()).is_err());
        assert!(lock(at, page_bytes()).is_err());
    }

    #[test]
    fn locked_bytes_rise_with_a_lock_and_maps_are_counted() {
        let pages = Pages::new(8 * page_bytes()).unwrap();
        let at = pages.as_ptr() as usize;
        lock(at, pages.len()).unwrap();
        // Other tests lock nothing for longer than this one: at least these pages are counted.
        assert!(locked_bytes() >= pages.len() as u64);
        unlock(at, pages.len()).unwrap();
        assert!(maps_now() > 10 && maps_now() < most_maps());
    }

    #[test]
    fn ordinary_pages_are_not_huge_and_memory_that_is_not_there_is_nothing() {
        let mut pages = Pages::new(8 << 20).unwrap();
        // SAFETY: advice about memory that is ours.
        unsafe { libc::madvise(pages.as_ptr().cast(), pages.len(), libc::MADV_NOHUGEPAGE) };
        pages.as_mut_slice().fill(1);
        assert!(!is_huge(pages.as_ptr() as usize, pages.len()));
        assert!(!is_huge(0, 8 << 20));
        assert!(!is_huge(pages.as_ptr() as usize, 0));
    }
}
