//! Pinning with the kernel: residency, locks, errors with their reasons, and chunks.

use crate::support::child;
use crate::support::recorder;

use std::sync::Arc;

use child::Child;
use memferry_memory::pinning::{
    Access, ChunkSchedule, MlockPinner, PageRange, PinError, PinPipeline, PinToken, PinnedRange,
    Pinner, PopulatePinner,
};
use memferry_sys::pages::{Pages, page_bytes};
use memferry_sys::residency;
use recorder::Recorder;

fn range_of(pages: &Pages) -> PageRange {
    PageRange::covering(pages.as_ptr() as usize, pages.len()).unwrap()
}

fn part(pages: &Pages, first: usize, count: usize) -> PageRange {
    PageRange::covering(pages.as_ptr() as usize + first * page_bytes(), count * page_bytes())
        .unwrap()
}

fn resident(range: PageRange) -> usize {
    residency::resident_pages(range.start(), range.bytes()).unwrap()
}

/// The locked bytes of the mappings in a range, from `/proc/self/smaps`.
fn locked_bytes_in(range: PageRange) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut bytes) = (None, 0);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or("");
        let bounds = first.split_once('-').and_then(|(start, end)| {
            let number = |text| usize::from_str_radix(text, 16).ok();
            PageRange::between(number(start)?, number(end)?)
        });
        // By the flag of the mapping: the kernel's count of bytes is smaller while a forked child
        // of another test shares the pages.
        if let Some(mapping) = bounds {
            inside = range.intersection(mapping);
        } else if first == "VmFlags:" && words.any(|flag| flag == "lo") {
            bytes += inside.map_or(0, |inside| inside.bytes());
        }
    }
    bytes
}

#[test]
fn populated_pages_are_resident() {
    for access in [Access::Read, Access::Write] {
        let pages = Pages::new(32 * page_bytes()).unwrap();
        let token = PopulatePinner.pin(part(&pages, 4, 8), access).unwrap();
        if access == Access::Write {
            assert_eq!(resident(range_of(&pages)), 8);
        }
        PopulatePinner.unpin(part(&pages, 4, 8), &token);
    }
}

#[test]
fn memory_that_is_not_there_or_not_writable_is_bad_memory() {
    let nowhere = PageRange::covering(page_bytes(), 1).unwrap();
    let bad = |range| Err(PinError::BadMemory { range });
    assert_eq!(PopulatePinner.pin(nowhere, Access::Read), bad(nowhere));
    assert_eq!(MlockPinner::new().pin(nowhere, Access::Read), bad(nowhere));
    let pages = Pages::new(2 * page_bytes()).unwrap();
    let second = part(&pages, 1, 1);
    // SAFETY: the call removes access to a page that no code accesses.
    let changed =
        unsafe { libc::mprotect(second.start() as *mut _, second.bytes(), libc::PROT_READ) };
    assert_eq!(changed, 0);
    assert_eq!(PopulatePinner.pin(range_of(&pages), Access::Write), bad(range_of(&pages)));
    assert!(PopulatePinner.pin(range_of(&pages), Access::Read).is_ok());
}

#[test]
fn a_page_in_two_locks_stays_locked_until_both_are_undone() {
    let (lock, pages) = (MlockPinner::new(), Pages::new(16 * page_bytes()).unwrap());
    let (front, back) = (part(&pages, 2, 6), part(&pages, 5, 8));
    let tokens = (lock.pin(front, Access::Write), lock.pin(back, Access::Read));
    assert_eq!(locked_bytes_in(range_of(&pages)), 11 * page_bytes());
    lock.unpin(front, &tokens.0.unwrap());
    assert_eq!(locked_bytes_in(range_of(&pages)), 8 * page_bytes());
    lock.unpin(back, &tokens.1.unwrap());
    assert_eq!(locked_bytes_in(range_of(&pages)), 0);
}

#[test]
fn unpinning_after_a_part_was_unmapped_unlocks_the_rest() {
    let (lock, pages) = (MlockPinner::new(), Pages::new(16 * page_bytes()).unwrap());
    let token = lock.pin(range_of(&pages), Access::Write).unwrap();
    let hole = part(&pages, 3, 2);
    // SAFETY: no code accesses these pages; unmapping the hole again later does no harm.
    assert_eq!(unsafe { libc::munmap(hole.start() as *mut _, hole.bytes()) }, 0);
    lock.unpin(range_of(&pages), &token);
    // SAFETY: the call fills the hole made above, and nothing else.
    let filled = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        libc::mmap(hole.start() as *mut _, hole.bytes(), libc::PROT_READ, flags, -1, 0)
    };
    // Another thread may have got the addresses; then the mapping does not belong to this test.
    if filled as usize == hole.start() {
        assert_eq!(locked_bytes_in(range_of(&pages)), 0);
    } else {
        std::mem::forget(pages);
    }
}

#[test]
fn a_lock_beyond_the_limit_says_limit_use_and_wish() {
    Child::run(|| {
        child::limit_locked_memory(16 * page_bytes() as u64);
        let (lock, pages) = (MlockPinner::new(), Pages::new(32 * page_bytes()).unwrap());
        let token = lock.pin(part(&pages, 0, 10), Access::Write).unwrap();
        let error = lock.pin(part(&pages, 10, 20), Access::Write).unwrap_err();
        let expected = PinError::MemlockLimit {
            limit_bytes: 16 * page_bytes() as u64,
            locked_bytes: 10 * page_bytes() as u64,
            requested_bytes: 20 * page_bytes() as u64,
        };
        assert_eq!(error, expected);
        let text = error.to_string();
        assert!(text.contains("ulimit -l") && text.contains("LimitMEMLOCK="), "{text}");
        // A failed pin leaves nothing pinned, and the existing pin can be undone and repeated.
        lock.unpin(part(&pages, 0, 10), &token);
        assert_eq!(residency::locked_bytes(), 0);
        lock.pin(part(&pages, 0, 16), Access::Write).unwrap();
    })
    .join();
}

#[test]
fn a_lock_that_would_need_too_many_mappings_says_so() {
    let pages = Pages::new(8 * page_bytes()).unwrap();
    Child::run(|| {
        child::use_up_all_mappings();
        let error = MlockPinner::new().pin(part(&pages, 3, 1), Access::Write).unwrap_err();
        let most = residency::max_map_count();
        assert!(
            matches!(error, PinError::MapCount { map_count, max_map_count }
            if max_map_count == most && map_count + 2 > most),
            "{error}"
        );
    })
    .join();
}

#[test]
fn a_forked_child_locks_for_itself_and_leaves_the_parents_pins_alone() {
    let lock: Arc<dyn Pinner> = Arc::new(MlockPinner::new());
    let pages = Pages::new(8 * page_bytes()).unwrap();
    let pinned = PinnedRange::new(&lock, range_of(&pages), Access::Write).unwrap();
    Child::run(|| {
        drop(pinned);
        let own = PinnedRange::new(&lock, part(&pages, 0, 2), Access::Write).unwrap();
        assert_eq!(locked_bytes_in(range_of(&pages)), 2 * page_bytes());
        drop(own);
        assert_eq!(locked_bytes_in(range_of(&pages)), 0);
    })
    .join();
}

#[test]
fn chunks_cover_the_bytes_and_stay_pinned_until_each_is_dropped() {
    let recorder = Arc::new(Recorder::new());
    let (address, length) = (10 * page_bytes() + 100, 20 * page_bytes());
    let schedule = ChunkSchedule::Progressive { first_pages: 1, max_pages: 8 };
    let mut overlapped =
        PinPipeline::new(recorder.clone(), address, length, Access::Read, schedule).unwrap();
    assert_eq!(recorder.pinned(), []);
    let first = overlapped.next().unwrap().unwrap();
    assert_eq!((first.address, first.length), (address, page_bytes() - 100));
    assert_eq!(recorder.pinned(), [first.pinned.range()]);
    let mut chunks = vec![first];
    chunks.extend(overlapped.map(Result::unwrap));
    assert_eq!(
        chunks.iter().map(|chunk| chunk.pinned.range().pages()).collect::<Vec<_>>(),
        [1, 2, 4, 8, 6]
    );
    let mut at = address;
    for chunk in &chunks {
        assert_eq!(chunk.address, at);
        at += chunk.length;
    }
    assert_eq!(at, address + length);
    while let Some(chunk) = chunks.pop() {
        assert!(recorder.is_pinned(chunk.pinned.token().number()));
        assert_eq!(recorder.pinned().len(), chunks.len() + 1);
    }
    assert_eq!(recorder.pinned(), []);
}

#[test]
fn an_error_in_a_later_chunk_leaves_the_earlier_ones_pinned() {
    let recorder = Arc::new(Recorder::with_max_bytes(4 * page_bytes()));
    let schedule = ChunkSchedule::Fixed { pages: 2 };
    let (address, length) = (page_bytes(), 20 * page_bytes());
    let all = || PinPipeline::new(recorder.clone(), address, length, Access::Read, schedule);
    let mut overlapped = all().unwrap();
    let kept = [overlapped.next().unwrap().unwrap(), overlapped.next().unwrap().unwrap()];
    assert!(matches!(overlapped.next(), Some(Err(PinError::MemlockLimit { .. }))));
    assert!(overlapped.next().is_none());
    drop(overlapped);
    assert_eq!(recorder.pinned().len(), kept.len());
    drop(kept);
    assert!(all().unwrap().collect::<Result<Vec<_>, _>>().is_err());
    assert_eq!(recorder.pinned(), []);
}

#[test]
fn a_device_can_bring_its_own_pinner() {
    #[derive(Debug)]
    struct DevicePinner;
    impl Pinner for DevicePinner {
        fn name(&self) -> &'static str {
            "device"
        }
        fn pin(&self, range: PageRange, _access: Access) -> Result<PinToken, PinError> {
            Ok(PinToken::new(range.start() as u64))
        }
        fn unpin(&self, range: PageRange, token: &PinToken) {
            assert_eq!(range.start() as u64, token.number());
        }
        fn tracks_mapping(&self) -> bool {
            false
        }
    }
    let device: Arc<dyn Pinner> = Arc::new(DevicePinner);
    let pinned =
        PinnedRange::new(&device, PageRange::covering(page_bytes(), 1).unwrap(), Access::Read);
    assert_eq!(pinned.unwrap().token().number(), page_bytes() as u64);
}
