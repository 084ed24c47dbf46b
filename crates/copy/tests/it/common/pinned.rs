//! Ferries over an engine that audits what is pinned for it.

use std::sync::Arc;

use memferry_copy::{Ferry, PinLimits, RegistrationStatistics};
use memferry_engine::Engine;
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;

pub(crate) const ENGINE: &str = "polled-pinned";

/// A ferry that submits everything to this engine.
pub(crate) fn over_engine(engine: Arc<dyn Engine>, limits: PinLimits) -> Ferry {
    let builder = crate::common::builder().engine(engine, 1).capacity(1 << 12);
    builder.split_bytes(0).inline_bytes(0).pin_limits(limits).build().unwrap()
}

/// A ferry over an engine that needs pinned memory, and its auditing pinner.
pub(crate) fn over(ledger: AuditingPinner) -> (Ferry, Arc<AuditingPinner>) {
    let ledger = Arc::new(ledger);
    let engine = Arc::new(PolledEngine::pinned_by(ledger.clone()));
    (over_engine(engine, PinLimits::default()), ledger)
}

pub(crate) fn pinning(ferry: &Ferry) -> RegistrationStatistics {
    ferry.statistics().pinning(ENGINE).expect("an engine that needs pinned memory").clone()
}

/// Drops the last handle of a ferry: nothing may be pinned after that, and the engine must never
/// have seen a descriptor whose memory was not.
pub(crate) fn end(ferry: Ferry, ledger: &AuditingPinner) {
    drop(ferry);
    let counts = ledger.counts();
    assert_eq!(counts.pins, counts.unpins, "{counts:?}");
    assert_eq!(ledger.pinned_bytes(), 0);
    assert_eq!((counts.unpinned_descriptors, counts.unpinned_in_flight), (0, 0), "{counts:?}");
    assert_eq!(counts.invalid_unpins, 0);
}

/// Lets the pins of pages be cached, also where the kernel does not report unmapped memory.
pub(crate) fn keep(ferry: &Ferry, pages: &Pages) {
    // SAFETY: the pages of a test outlive all of its copies, and nothing else is mapped at their
    // addresses.
    unsafe { ferry.mark_unmonitored(pages.as_ptr(), pages.len()) };
}

/// Memory on pages of its own, so that a test can count them.
pub(crate) fn pages(count: usize, seed: u64) -> Pages {
    let mut pages = Pages::new(count * page_bytes()).unwrap();
    let length = pages.len();
    pages.as_mut_slice().copy_from_slice(&crate::common::pattern(length, seed));
    pages
}
