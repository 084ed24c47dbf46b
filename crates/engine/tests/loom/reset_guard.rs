//! The doorbells of two channels beside a reset of their device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use loom::thread;
use memferry_engine::pci::reset_guard::ResetGuard;

use crate::model;

/// A device that knows whether its channels were started since it was reset. Loom does not track it.
#[derive(Debug, Default)]
struct Device {
    is_resetting: AtomicBool,
    resets: AtomicU64,
    bad_rings: AtomicU64,
}

impl Device {
    /// A doorbell of a channel that was started after `resets` resets.
    fn ring(&self, resets: u64) {
        let is_old = self.resets.load(Ordering::SeqCst) != resets;
        thread::yield_now();
        if is_old || self.is_resetting.load(Ordering::SeqCst) {
            self.bad_rings.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn reset(&self) {
        self.is_resetting.store(true, Ordering::SeqCst);
        thread::yield_now();
        self.resets.fetch_add(1, Ordering::SeqCst);
        self.is_resetting.store(false, Ordering::SeqCst);
    }
}

#[test]
fn no_doorbell_is_rung_during_a_reset_or_for_a_chain_that_it_ended() {
    model(3, || {
        let (guard, device) = (Arc::new(ResetGuard::new(2)), Arc::new(Device::default()));
        let channels = [0, 1].map(|channel| {
            let (guard, device) = (guard.clone(), device.clone());
            thread::spawn(move || {
                let has_rung = guard.ring(channel, 0, || device.ring(0));
                // A channel that was reset is started again.
                let (held, resets) = guard.hold();
                assert_eq!(device.resets.load(Ordering::SeqCst), resets);
                drop(held);
                assert!(has_rung || resets == 1);
                assert!(guard.ring(channel, resets, || device.ring(resets)) || guard.resets() == 1);
            })
        });
        guard.reset(|| device.reset());
        channels.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(device.bad_rings.load(Ordering::SeqCst), 0);
    });
}
