use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

use memferry_sys::Pages;
use memferry_sys::device::Width;
use memferry_sys::pages::page_bytes;

use super::*;
use crate::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use crate::pinning::DmaSegment;

/// A device whose pages have consecutive addresses, or not.
#[derive(Debug)]
struct FakeDevice {
    mapped: Mutex<BTreeSet<u64>>,
    next: AtomicU64,
    is_contiguous: bool,
    is_full: bool,
}

impl FakeDevice {
    fn new(is_contiguous: bool) -> Arc<Self> {
        let (mapped, next) = (Mutex::default(), AtomicU64::new(1 << 20));
        Arc::new(Self { mapped, next, is_contiguous, is_full: false })
    }

    fn mapped(&self) -> usize {
        lock(&self.mapped).len()
    }
}

impl DmaDevice for FakeDevice {
    fn name(&self) -> &str {
        "fake"
    }
    fn read(&self, _at: usize, _width: Width) -> u64 {
        0
    }
    unsafe fn write(&self, _at: usize, _width: Width, _value: u64) {}

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        if self.is_full {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        if !residency::is_mapped(start, pages.len() * page_bytes())
            || (direction == DmaDirection::Bidirectional
                && residency::populate_write(start, pages.len() * page_bytes()).is_err())
        {
            return Err(io::Error::from_raw_os_error(EFAULT));
        }
        let step = page_bytes() as u64 * if self.is_contiguous { 1 } else { 3 };
        for page in pages {
            *page = self.next.fetch_add(step, Ordering::Relaxed);
            lock(&self.mapped).insert(*page);
        }
        self.next.fetch_add(7 * page_bytes() as u64, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        let mut mapped = lock(&self.mapped);
        pages.iter().for_each(|page| assert!(mapped.remove(page), "unmapped twice"));
    }

    fn is_contiguous(&self) -> bool {
        self.is_contiguous
    }

    fn reset(&self) -> io::Result<()> {
        Ok(())
    }
}

fn range(pages: &Pages) -> PageRange {
    PageRange::covering(pages.as_ptr() as usize, pages.len()).unwrap()
}

#[test]
fn pages_that_lie_apart_are_found_one_by_one() {
    let device = FakeDevice::new(false);
    let memory = DmaMappings::new(device.clone());
    let (pages, page) = (Pages::new(20 * page_bytes()).unwrap(), page_bytes() as u64);
    let token = memory.pin(range(&pages), Access::Write).unwrap();
    let first = token.segment(0, u64::MAX).unwrap();
    assert_eq!(first.bytes, page);
    for number in 0..20 {
        let found = token.segment(number * page + 5, u64::MAX).unwrap();
        assert_eq!(found.address, first.address + 3 * number * page + 5);
        assert_eq!(found.bytes, page - 5);
        assert_eq!(token.contiguous(number * page + 5, page - 5), Some(found.address));
        assert_eq!(token.contiguous(number * page + 5, page - 4), None);
    }
    assert_eq!(token.segment(20 * page, 1), None);
    assert_eq!(token.contiguous(20 * page, 1), None);
    memory.unpin(range(&pages), &token);
    assert_eq!(device.mapped(), 0);
}

#[test]
fn pages_that_lie_together_are_one_segment() {
    let memory = DmaMappings::new(FakeDevice::new(true));
    let (pages, page) = (Pages::new(21 * page_bytes()).unwrap(), page_bytes() as u64);
    let token = memory.pin(range(&pages), Access::Write).unwrap();
    let whole = token.segment(7, u64::MAX).unwrap();
    assert_eq!(whole.bytes, 21 * page - 7);
    let part = token.segment(8 * page - 1, 5000).unwrap();
    assert_eq!(part, DmaSegment { address: whole.address + 8 * page - 8, bytes: 5000 });
    assert_eq!(token.contiguous(8 * page - 1, 5000), Some(part.address));
    assert_eq!(token.contiguous(21 * page - 3, 3), Some(whole.address + 21 * page - 10));
    assert_eq!(token.contiguous(21 * page - 3, 4), None);
    assert_eq!(token.contiguous(7, u64::MAX), None);
    assert_eq!(token.segment(21 * page - 3, 10).unwrap().bytes, 3);
    memory.unpin(range(&pages), &token);
}

#[test]
fn two_pins_of_the_same_pages_are_independent() {
    let memory = DmaMappings::new(FakeDevice::new(false));
    let pages = Pages::new(3 * page_bytes()).unwrap();
    let first = memory.pin(range(&pages), Access::Write).unwrap();
    let second = memory.pin(range(&pages), Access::Write).unwrap();
    assert_ne!(first.segment(0, 1), second.segment(0, 1));
    memory.unpin(range(&pages), &first);
    assert_eq!(memory.mapped_counts(), (1, 3));
    memory.unpin(range(&pages), &second);
    assert_eq!(memory.mapped_counts(), (0, 0));
}

#[test]
fn a_device_that_is_cut_off_reaches_nothing_and_gets_nothing() {
    let device = FakeDevice::new(true);
    let memory = DmaMappings::new(device.clone());
    let pages = Pages::new(2 * page_bytes()).unwrap();
    let token = memory.pin(range(&pages), Access::Write).unwrap();
    memory.revoke_access();
    assert!(device.mapped() == 0 && memory.is_revoked());
    let error = memory.pin(range(&pages), Access::Write).unwrap_err();
    assert!(error.to_string().contains("open it again"), "{error}");
    memory.unpin(range(&pages), &token);
}

#[test]
fn refusals_say_what_is_short_or_wrong() {
    let full = FakeDevice { is_full: true, ..Arc::into_inner(FakeDevice::new(true)).unwrap() };
    let memory = DmaMappings::new(Arc::new(full));
    let pages = Pages::new(page_bytes()).unwrap();
    let error = memory.pin(range(&pages), Access::Read).unwrap_err();
    assert_eq!(error, PinError::IovaExhausted);
    assert!(error.is_shortage());
    let memory = DmaMappings::new(FakeDevice::new(true));
    let missing = PageRange::covering(page_bytes(), page_bytes()).unwrap();
    let error = memory.pin(missing, Access::Write).unwrap_err();
    assert_eq!(error, PinError::BadMemory { range: missing });
}

#[test]
fn a_bounded_cache_leaves_nothing_mapped_when_it_ends() {
    let device = FakeDevice::new(false);
    let memory: Arc<DmaMappings> = Arc::new(DmaMappings::new(device.clone()));
    let limits = PinCacheLimits { max_bytes: 8 * page_bytes(), max_entries: 4 };
    let cache = PinCache::new(memory.clone(), limits, InvalidationMode::Explicit).unwrap();
    let pages = Pages::new(64 * page_bytes()).unwrap();
    for number in 0..64 {
        let address = pages.as_ptr() as usize + number * page_bytes();
        let lease = cache.acquire(address, page_bytes(), Access::Write).unwrap();
        let offset = (address - lease.range().start()) as u64;
        assert!(lease.token().segment(offset, 1).is_some());
        assert!(device.mapped() <= 9, "{}", device.mapped());
    }
    drop(cache);
    assert_eq!(device.mapped(), 0);
    assert_eq!(memory.mapped_counts(), (0, 0));
}
