//! Frames that were only late: they land after the driver has taken them for lost.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};

use memferry_engine::completion::Notification;
use memferry_engine::nic::model::{Faults, NicModel};
use memferry_engine::nic::{Settings, registers as r};
use memferry_sys::device::{Device, Direction};

use crate::card;
use crate::rig::{Copy, Rig, until};

/// A card that stalls until the driver is about to stop it, and whose application looks at the
/// variable at that moment.
#[derive(Debug)]
struct Late {
    model: Arc<NicModel>,
    is_armed: AtomicBool,
    variable: AtomicPtr<Notification>,
    /// What the application found.
    found: Mutex<Vec<u64>>,
}

impl Late {
    /// Lets everything land, and uses the variable for something else.
    fn let_land(&self) {
        self.model.set_faults(Faults::default());
        // SAFETY: the test keeps the variable until its transfers are over.
        let variable = unsafe { &*self.variable.load(Ordering::SeqCst) };
        until("the value", || variable.load() != 0);
        self.found.lock().unwrap().push(variable.load());
        variable.store(1000);
    }
}

impl Device for Late {
    fn name(&self) -> &str {
        "late"
    }
    fn read8(&self, at: usize) -> u8 {
        self.model.read8(at)
    }
    fn read16(&self, at: usize) -> u16 {
        self.model.read16(at)
    }
    fn read32(&self, at: usize) -> u32 {
        self.model.read32(at)
    }
    fn read64(&self, at: usize) -> u64 {
        self.model.read64(at)
    }
    unsafe fn write8(&self, at: usize, value: u8) {
        // SAFETY: passed on.
        unsafe { self.model.write8(at, value) };
    }
    unsafe fn write16(&self, at: usize, value: u16) {
        // SAFETY: passed on.
        unsafe { self.model.write16(at, value) };
    }
    unsafe fn write32(&self, at: usize, value: u32) {
        // The first thing that a driver does which stops a card.
        if at == r::IMC && self.is_armed.swap(false, Ordering::SeqCst) {
            self.let_land();
        }
        // SAFETY: passed on.
        unsafe { self.model.write32(at, value) };
    }
    unsafe fn write64(&self, at: usize, value: u64) {
        // SAFETY: passed on.
        unsafe { self.model.write64(at, value) };
    }
    unsafe fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
        // SAFETY: passed on.
        unsafe { self.model.map(start, pages, direction) }
    }
    unsafe fn unmap(&self, pages: &[u64]) {
        // SAFETY: passed on.
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
    let late = Arc::new(Late {
        model: model.clone(),
        is_armed: AtomicBool::new(false),
        variable: AtomicPtr::new(&raw mut variable),
        found: Mutex::default(),
    });
    let mut rig = Rig::new(card::over(late.clone(), Settings::default()), 1 << 16);
    model.set_faults(Faults { stalls: true, ..Faults::default() });
    late.is_armed.store(true, Ordering::SeqCst);
    rig.deliver(&[Copy { from: 0, to: 0, length: 20_000 }], &variable, 1);
    assert_eq!(*late.found.lock().unwrap(), [1]);
    // The application's own value, and not once more that of the transfer.
    assert_eq!(variable.load(), 1000);
    let counters = rig.engine.counters();
    assert_eq!((counters.sent_again, counters.notices), (0, 1), "{counters:?}");
}
