//! The two kinds of caches, over pinners that need no device.

use std::sync::Arc;

use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;

use super::*;
use crate::pinning::{PageRange, PinToken, PopulatePinner};

/// Refuses everything.
#[derive(Debug)]
struct RefusingPinner;

impl Pinner for RefusingPinner {
    fn name(&self) -> &'static str {
        "refusing"
    }

    fn pin(&self, _range: PageRange, _access: Access) -> Result<PinToken, PinError> {
        Err(PinError::OutOfMemory)
    }

    fn unpin(&self, _range: PageRange, _token: &PinToken) {}

    fn tracks_mapping(&self) -> bool {
        true
    }
}

fn touched() -> (Pages, u64, u64) {
    let mut pages = Pages::new(4 * page_bytes()).unwrap();
    pages.as_mut_slice().fill(1);
    let (address, length) = (pages.as_ptr() as u64, pages.len() as u64);
    (pages, address, length)
}

#[test]
fn refusals_are_counted_and_unmapped_memory_is_no_refusal() {
    let limits = PinCacheLimits::default();
    let cache = RegistrationCache::exclusive(Arc::new(RefusingPinner), limits).unwrap();
    let (pages, address, length) = touched();
    assert!(cache.acquire_optional(address, length, Access::Read).is_none());
    assert_eq!(cache.statistics().failures, 0);
    assert_eq!(cache.acquire(address, length, Access::Read).err(), Some(PinError::OutOfMemory));
    cache.count_fallback(length);
    let statistics = cache.statistics();
    assert_eq!((statistics.failures, statistics.fallback_bytes), (1, length));
    assert_eq!(statistics.last_error, Some(PinError::OutOfMemory));

    let cache = RegistrationCache::exclusive(Arc::new(PopulatePinner), limits).unwrap();
    drop(pages);
    // Another thread may map memory at these addresses meanwhile; then there is no error at all.
    let _ = cache.acquire(address, length, Access::Read);
    assert_eq!(cache.statistics().failures, 0);
}

#[test]
fn memory_that_its_owner_registered_stays_registered_until_it_is_unregistered_as_often() {
    let limits = PinCacheLimits::default();
    let cache = RegistrationCache::exclusive(Arc::new(PopulatePinner), limits).unwrap();
    let (_pages, address, length) = touched();
    let (at, bytes) = (address as usize, length as usize);
    for _ in 0..2 {
        // SAFETY: the memory outlives both registrations.
        assert!(unsafe { cache.register(at, bytes) }.unwrap().is_none());
    }
    assert!(cache.acquire(address, length, Access::Write).unwrap().is_cached());
    cache.unregister(at, bytes);
    cache.invalidate(at, bytes);
    assert!(cache.find(address, Access::Write).is_some(), "the second registration counts");
    cache.unregister(at, bytes);
    assert!(cache.find(address, Access::Write).is_none());
}

#[test]
fn with_other_users_of_the_device_only_owners_register_memory() {
    let limits = PinCacheLimits::default();
    let cache = RegistrationCache::shared(Arc::new(PopulatePinner), limits).unwrap();
    let (_pages, address, length) = touched();
    let (at, bytes) = (address as usize, length as usize);
    assert!(!cache.may_acquire(address, length));
    assert!(cache.acquire(address, length, Access::Read).is_err());
    assert_eq!(cache.record_use(address, length), ReuseHint::FirstUse);
    // SAFETY: the memory outlives the registration.
    assert!(unsafe { cache.register(at, bytes) }.unwrap().is_none());
    assert_eq!(cache.reuse_hint(address, length), ReuseHint::Reused);
    let found = cache.find(address, Access::Write);
    assert!(matches!(found, Some(RegistrationRef::Region(region)) if region.end() == at + bytes));
    cache.unregister(at, bytes);
    assert!(cache.find(address, Access::Write).is_none());
    cache.set_sole_user();
    assert!(cache.acquire(address, length, Access::Read).is_ok());
}
