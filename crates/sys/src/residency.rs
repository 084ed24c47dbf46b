//! Residency of pages: queries, prefaulting and locking.
//!
//! This module has no state. The kernel keeps one lock per page and does not count locks, so a
//! caller that locks and unlocks overlapping ranges must count them itself.

use std::io::{self, Read};
use std::os::fd::AsRawFd;

use rustix::process::{Resource, getrlimit};

use crate::fault::{Call, call, call_c};
use crate::pages::page_bytes;

/// Maximum number of pages of one `mincore`.
const PAGES_PER_MINCORE: usize = 4096;

/// Makes every page of a range resident and readable, as if each had been read.
pub fn populate_read(address: usize, length: usize) -> io::Result<()> {
    advise(address, length, libc::MADV_POPULATE_READ)
}

/// Makes every page of a range resident and writable, as if each had been written. Changes no byte.
pub fn populate_write(address: usize, length: usize) -> io::Result<()> {
    advise(address, length, libc::MADV_POPULATE_WRITE)
}

/// Whether this kernel can populate (Linux 5.14 or later).
pub fn can_populate() -> bool {
    // The page of a local variable is mapped and readable.
    let here = 0u8;
    let page = (&raw const here as usize) & !(page_bytes() - 1);
    populate_read(page, page_bytes()).is_ok()
}

/// Whether the process may read a page, or write to it, as `/proc/self/maps` says; false if that cannot
/// be read. Pages of devices and of the kernel permit accesses and cannot be populated.
pub fn permits(address: usize, is_write: bool) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let mut fields = line.split([' ', '-']);
        let mut bound = || usize::from_str_radix(fields.next()?, 16).ok();
        let (Some(start), Some(end)) = (bound(), bound()) else { return false };
        let rights = fields.next().unwrap_or_default().as_bytes();
        let right =
            if is_write { rights.get(1) == Some(&b'w') } else { rights.first() == Some(&b'r') };
        (start..end).contains(&address) && right
    })
}

fn advise(address: usize, length: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: populating changes no byte of any mapping; unmapped memory is an error.
    let advise = || unsafe { libc::madvise(address as *mut libc::c_void, length, advice) };
    call_c(Call::Madvise, advise)
}

/// Makes a range resident and locks it until it is unlocked or unmapped. After an error a part of
/// the range may be locked.
pub fn lock(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: locking changes no byte; unmapped memory is an error.
    Ok(call(Call::Mlock, || unsafe { rustix::mm::mlock(address as *mut _, length) })?)
}

/// Undoes [`lock`], regardless of how often the range was locked. Stops with an error at the first
/// page that is not mapped.
pub fn unlock(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: unlocking changes no byte; unmapped memory is an error.
    Ok(unsafe { rustix::mm::munlock(address as *mut _, length) }?)
}

/// The number of resident pages of a range that begins on a page boundary. Fails if a part of the
/// range is not mapped.
pub fn resident_pages(address: usize, length: usize) -> io::Result<usize> {
    let (mut states, mut count, mut done) = ([0u8; PAGES_PER_MINCORE], 0, 0);
    while done < length {
        let part = (length - done).min(PAGES_PER_MINCORE * page_bytes());
        // SAFETY: the kernel writes one byte for each page of `part`, which has at most as many
        // pages as the array has bytes, and does not access the queried range.
        let mincore =
            || unsafe { libc::mincore((address + done) as *mut _, part, states.as_mut_ptr()) };
        call_c(Call::Mincore, mincore)?;
        count += states[..part.div_ceil(page_bytes())].iter().filter(|&&s| s & 1 != 0).count();
        done += part;
    }
    Ok(count)
}

/// Whether the page at an address is resident; false if it is not mapped.
pub fn is_resident(address: usize) -> bool {
    resident_pages(address & !(page_bytes() - 1), page_bytes()).is_ok_and(|pages| pages == 1)
}

/// Whether every page of a range that begins on a page boundary is mapped. Checks mappings and not
/// pages, so the cost does not depend on the number of pages.
pub fn is_mapped(address: usize, length: usize) -> bool {
    // SAFETY: `MS_ASYNC` changes nothing; the call fails if a part of the range is not mapped.
    unsafe { libc::msync(address as *mut libc::c_void, length, libc::MS_ASYNC) == 0 }
}

/// Whether a range consists of huge pages, estimated from up to 4 MiB in its middle. False if the
/// kernel cannot report it (before Linux 6.7).
pub fn is_huge(address: usize, length: usize) -> bool {
    const SAMPLE_BYTES: usize = 4 << 20;
    const HUGE_BYTES: usize = 2 << 20;
    let sample = length.min(SAMPLE_BYTES);
    let start = (address + (length - sample) / 2).next_multiple_of(HUGE_BYTES);
    let end = (start + sample / 2).min(address + length) & !(page_bytes() - 1);
    start < end && huge_until(start, end) >= end
}

/// The end of the run of huge pages that begins at `start`, which is on a page boundary.
fn huge_until(start: usize, end: usize) -> usize {
    /// The kernel's `pm_scan_arg`.
    #[repr(C)]
    #[derive(Default)]
    struct PagemapScanArgs {
        size: u64,
        flags: u64,
        start: u64,
        end: u64,
        walk_end: u64,
        vec: u64,
        vec_len: u64,
        max_pages: u64,
        category_inverted: u64,
        category_mask: u64,
        category_anyof_mask: u64,
        return_mask: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct PageRegion {
        start: u64,
        end: u64,
        categories: u64,
    }
    const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
    const PAGE_IS_HUGE: u64 = 1 << 6;
    let Ok(map) = std::fs::File::open("/proc/self/pagemap") else { return start };
    let mut region = PageRegion::default();
    let mut scan = PagemapScanArgs {
        size: size_of::<PagemapScanArgs>() as u64,
        start: start as u64,
        end: end as u64,
        vec: &raw mut region as u64,
        vec_len: 1,
        category_mask: PAGE_IS_HUGE,
        return_mask: PAGE_IS_HUGE,
        ..PagemapScanArgs::default()
    };
    // SAFETY: the kernel reads and writes the argument and writes at most one region, as `vec_len`
    // says. It does not access the queried memory.
    let found = unsafe { libc::ioctl(map.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
    if found == 1 && region.start as usize == start { region.end as usize } else { start }
}

/// The number of bytes that this process may lock; `None` if no limit is set or it has
/// `CAP_IPC_LOCK`.
pub fn lock_limit_bytes() -> Option<u64> {
    /// The bit of `CAP_IPC_LOCK` in the effective capabilities.
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let capabilities = status_field("CapEff:", 16).unwrap_or(0);
    if capabilities & CAP_IPC_LOCK != 0 { None } else { getrlimit(Resource::Memlock).current }
}

/// The number of bytes that this process has locked by [`lock`].
pub fn locked_bytes() -> u64 {
    status_field("VmLck:", 10).unwrap_or(0) * 1024
}

/// The number of bytes of this process that the kernel has pinned for registered buffers and
/// devices.
pub fn pinned_bytes() -> u64 {
    status_field("VmPin:", 10).unwrap_or(0) * 1024
}

fn status_field(name: &str, radix: u32) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(line.split_whitespace().next()?, radix).ok()
}

/// The maximum number of mappings of a process.
pub fn max_map_count() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    // The kernel's default, if the setting cannot be read.
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530)
}

/// The number of mappings of this process; 0 if it cannot be read. Reads all of `/proc/self/maps`:
/// only for error messages.
pub fn map_count() -> u64 {
    // Uses a buffer on the stack: callers run after a mapping has failed.
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
        populate_write(at, 16 * page_bytes()).unwrap();
        assert_eq!(resident_pages(at, pages.len()).unwrap(), 16);
        assert!(is_resident(at + 5) && !is_resident(at + 16 * page_bytes()));
        assert!(can_populate());
    }

    #[test]
    fn residency_of_more_pages_than_one_look_takes_is_counted() {
        let pages = Pages::new((PAGES_PER_MINCORE + 10) * page_bytes()).unwrap();
        let last = pages.as_ptr() as usize + (PAGES_PER_MINCORE + 5) * page_bytes();
        populate_write(last, page_bytes()).unwrap();
        assert_eq!(resident_pages(pages.as_ptr() as usize, pages.len()).unwrap(), 1);
    }

    #[test]
    fn missing_memory_is_neither_mapped_nor_resident() {
        let pages = Pages::new(page_bytes()).unwrap();
        assert!(is_mapped(pages.as_ptr() as usize, page_bytes()));
        // The first pages of an address space are never mapped.
        let at = page_bytes();
        assert!(!is_mapped(at, page_bytes()) && !is_resident(at));
        assert!(populate_read(at, page_bytes()).is_err());
        assert!(lock(at, page_bytes()).is_err());
    }

    #[test]
    fn locked_bytes_rise_with_a_lock_and_maps_are_counted() {
        let pages = Pages::new(8 * page_bytes()).unwrap();
        let at = pages.as_ptr() as usize;
        lock(at, pages.len()).unwrap();
        // Other tests lock no memory for longer than this one, so at least these pages are counted.
        assert!(locked_bytes() >= pages.len() as u64);
        unlock(at, pages.len()).unwrap();
        assert!(map_count() > 10 && map_count() < max_map_count());
    }

    #[test]
    fn ordinary_pages_are_not_huge_and_memory_that_is_not_there_is_nothing() {
        let mut pages = Pages::new(8 << 20).unwrap();
        // SAFETY: the advice concerns memory of this test.
        unsafe { libc::madvise(pages.as_ptr().cast(), pages.len(), libc::MADV_NOHUGEPAGE) };
        pages.as_mut_slice().fill(1);
        assert!(!is_huge(pages.as_ptr() as usize, pages.len()));
        assert!(!is_huge(0, 8 << 20));
        assert!(!is_huge(pages.as_ptr() as usize, 0));
    }
}
