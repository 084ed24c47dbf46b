//! Frames that are only late: they arrive after the driver has counted them as lost.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};

use memferry_engine::completion::Notification;
use memferry_engine::nic::{NicConfig, registers as r};
use memferry_engine::testing::nic_model::{NicFaults, NicModel};
use memferry_sys::device::{DmaDevice, DmaDirection, Width};

use crate::card;
use crate::rig::{NicRig, TestCopy, wait_until};

/// A card that stalls until the driver is about to stop it, and whose application reads the
/// variable at that time.
#[derive(Debug)]
struct LateDevice {
    model: Arc<NicModel>,
    is_armed: AtomicBool,
    variable: AtomicPtr<Notification>,
    /// The values that the application read.
    observed: Mutex<Vec<u64>>,
}

impl LateDevice {
    /// Lets all frames arrive, and reuses the variable for another value.
    fn complete_stalled(&self) {
        self.model.set_faults(NicFaults::default());
        // SAFETY: the test keeps the variable until its transfers are complete.
        let variable = unsafe { &*self.variable.load(Ordering::SeqCst) };
        wait_until("the value", || variable.load() != 0);
        self.observed.lock().unwrap().push(variable.load());
        variable.store(1000);
    }
}

impl DmaDevice for LateDevice {
    fn name(&self) -> &str {
        "late"
    }
    fn read(&self, at: usize, width: Width) -> u64 {
        self.model.read(at, width)
    }
    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        // The first register that a driver writes to stop a card.
        if at == r::IMC && self.is_armed.swap(false, Ordering::SeqCst) {
            self.complete_stalled();
        }
        // SAFETY: the caller's guarantee.
        unsafe { self.model.write(at, width, value) };
    }
    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.map(start, pages, direction) }
    }
    unsafe fn unmap(&self, pages: &[u64]) {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.unmap(pages) };
    }
    fn is_contiguous(&self) -> bool {
        self.model.is_contiguous()
    }
    fn reset(&self) -> io::Result<()> {
        self.model.reset()
    }
}

#[test]
fn what_landed_late_is_not_sent_again() {
    let mut variable = Notification::new(0);
    let model = NicModel::new();
    let late = Arc::new(LateDevice {
        model: model.clone(),
        is_armed: AtomicBool::new(false),
        variable: AtomicPtr::new(&raw mut variable),
        observed: Mutex::default(),
    });
    let mut rig = NicRig::new(card::over(late.clone(), NicConfig::default()), 1 << 16);
    model.set_faults(NicFaults { stalls: true, ..NicFaults::default() });
    late.is_armed.store(true, Ordering::SeqCst);
    rig.deliver(&[TestCopy { from: 0, to: 0, length: 20_000 }], &variable, 1);
    assert_eq!(*late.observed.lock().unwrap(), [1]);
    // The application's own value, and not that of the transfer again.
    assert_eq!(variable.load(), 1000);
    let counters = rig.engine.counters();
    assert_eq!((counters.retransmits, counters.notification_writes), (0, 1), "{counters:?}");
}
