//! Tests that drive the model by hand: they write registers, map memory and read words.

mod copying;
mod faults;
mod halting;
mod registers;
mod stopping;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_sys::Pages;
use memferry_sys::device::{DmaDevice, DmaDirection};
use memferry_sys::pages::page_bytes;

use super::*;
use crate::ioat::descriptor::{DESCRIPTOR_BYTES, IoatDescriptor};
use crate::ioat::registers::*;

/// Maps memory of a test, which only the model and the test use.
fn map(
    model: &IoatModel,
    start: usize,
    pages: &mut [u64],
    direction: DmaDirection,
) -> io::Result<()> {
    // SAFETY: tests keep their memory until the model has stopped, or unmap it before.
    unsafe { model.map(start, pages, direction) }
}

/// Polls a condition until it holds.
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(200);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout waiting for {what}");
        std::thread::yield_now();
    }
}

/// Memory that is mapped for the device until it is dropped.
struct MappedPages {
    model: Arc<IoatModel>,
    pages: Pages,
    addresses: Vec<u64>,
}

impl MappedPages {
    fn new(model: &Arc<IoatModel>, pages: usize) -> Self {
        Self::with(model, pages, DmaDirection::Bidirectional)
    }

    fn with(model: &Arc<IoatModel>, count: usize, direction: DmaDirection) -> Self {
        let pages = Pages::new(count * page_bytes()).unwrap();
        let mut addresses = vec![0; count];
        map(model, pages.as_ptr() as usize, &mut addresses, direction).unwrap();
        Self { model: model.clone(), pages, addresses }
    }

    /// Like `new`, with bytes that differ from their neighbours.
    fn patterned(model: &Arc<IoatModel>, count: usize) -> Self {
        let mut memory = Self::new(model, count);
        for (index, byte) in memory.pages.as_mut_slice().iter_mut().enumerate() {
            *byte = (index * 31 + index / 251) as u8;
        }
        memory
    }

    /// The IOVA of a byte.
    fn at(&self, byte: usize) -> u64 {
        self.addresses[byte / page_bytes()] + (byte % page_bytes()) as u64
    }

    fn bytes(&self, from: usize, length: usize) -> &[u8] {
        &self.pages.as_slice()[from..from + length]
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        self.model.unmap_pages(&self.addresses);
    }
}

/// The accesses of a driver, for tests that are the only driver of their device.
trait DriverAccess: DmaDevice {
    fn set8(&self, at: usize, value: u8) {
        // SAFETY: mapped memory is the test's own, and the test reads it when the device has
        // finished.
        unsafe { self.write8(at, value) };
    }
    fn set16(&self, at: usize, value: u16) {
        // SAFETY: as above.
        unsafe { self.write16(at, value) };
    }
    fn set32(&self, at: usize, value: u32) {
        // SAFETY: as above.
        unsafe { self.write32(at, value) };
    }
    fn set64(&self, at: usize, value: u64) {
        // SAFETY: as above.
        unsafe { self.write64(at, value) };
    }
    fn unmap_pages(&self, pages: &[u64]) {
        // SAFETY: no other driver has mappings.
        unsafe { self.unmap(pages) };
    }
}

impl DriverAccess for IoatModel {}

/// A channel with a ring of descriptors in two pages and a completion word.
struct ChannelRig {
    model: Arc<IoatModel>,
    channel: usize,
    ring: MappedPages,
    word: MappedPages,
    /// The number of descriptors that were put into the ring.
    put: usize,
}

const SLOTS_PER_PAGE: usize = 4096 / DESCRIPTOR_BYTES;

impl ChannelRig {
    /// The first channel of a device, ready to run.
    fn new(model: &Arc<IoatModel>) -> Self {
        Self::on(model, 0)
    }

    fn on(model: &Arc<IoatModel>, channel: usize) -> Self {
        let (ring, word) = (MappedPages::new(model, 2), MappedPages::new(model, 1));
        let mut rig = Self { model: model.clone(), channel, ring, word, put: 0 };
        rig.start();
        rig
    }

    fn register(&self, offset: usize) -> usize {
        channel_base(self.channel) + offset
    }

    /// Resets the channel from any state and starts an empty chain.
    fn start(&mut self) {
        self.reset();
        self.put = 0;
        self.set_word(0);
        self.model
            .set16(self.register(CHANCTRL), CHANCTRL_ANY_ERROR_ABORT | CHANCTRL_ERROR_COMPLETION);
        self.model.set64(self.register(CHANCMP), self.word.at(0));
        self.model.set64(self.register(CHAINADDR), self.slot(0));
    }

    fn reset(&self) {
        let errors = self.errors();
        self.model.set32(self.register(CHANERR), errors);
        self.model.set8(self.register(CHANCMD), CHANCMD_RESET);
        wait_until("the end of a reset", || !self.is_in_reset());
    }

    fn is_in_reset(&self) -> bool {
        self.model.read8(self.register(CHANCMD)) & CHANCMD_RESET != 0
    }

    /// The IOVA of a descriptor, by its number.
    fn slot(&self, number: usize) -> u64 {
        self.ring.at(number % (2 * SLOTS_PER_PAGE) * DESCRIPTOR_BYTES)
    }

    /// Appends a descriptor; returns its address.
    fn put(&mut self, descriptor: IoatDescriptor) -> u64 {
        let next = self.slot(self.put + 1);
        self.put_as_is(descriptor.with_next(next))
    }

    /// Appends a descriptor with the `next` of the test's choice.
    fn put_as_is(&mut self, descriptor: IoatDescriptor) -> u64 {
        let number = self.put % (2 * SLOTS_PER_PAGE);
        let slots = self.ring.pages.as_ptr().cast::<IoatDescriptor>();
        // SAFETY: inside the two pages of the ring, at a slot that was not published to the device.
        unsafe { slots.add(number).write(descriptor) };
        self.put += 1;
        self.slot(number)
    }

    fn ring(&self) {
        self.model.set16(self.register(DMACOUNT), self.put as u16);
    }

    /// Runs one descriptor with a completion write, and waits for it.
    fn run(&mut self, descriptor: IoatDescriptor) {
        let address = self.put(descriptor.with_write_back());
        self.ring();
        self.await_word(address);
    }

    /// Runs one descriptor that fails; returns the errors.
    fn fail(&mut self, descriptor: IoatDescriptor) -> u32 {
        self.put(descriptor.with_write_back());
        self.ring();
        self.await_state(ChannelState::Halted);
        self.errors()
    }

    fn await_word(&self, address: u64) {
        wait_until("a completion", || self.word() & CHANSTS_COMPLETED == address);
    }

    fn await_state(&self, state: ChannelState) {
        wait_until("a state", || self.state() == Some(state));
    }

    fn word(&self) -> u64 {
        self.atomic_word().load(Ordering::Acquire)
    }

    fn set_word(&self, value: u64) {
        self.atomic_word().store(value, Ordering::Release);
    }

    fn atomic_word(&self) -> &AtomicU64 {
        // SAFETY: the first bytes of a page that lives as long as this, accessed by atomics only.
        unsafe { AtomicU64::from_ptr(self.word.pages.as_ptr().cast()) }
    }

    fn status(&self) -> u64 {
        self.model.read64(self.register(CHANSTS))
    }

    fn state(&self) -> Option<ChannelState> {
        ChannelState::of(self.status())
    }

    fn errors(&self) -> u32 {
        self.model.read32(self.register(CHANERR))
    }

    fn counters(&self) -> IoatModelCounters {
        self.model.counters(self.channel)
    }
}

/// Asserts that everything is unmapped and the driver violated nothing.
fn assert_clean(model: &IoatModel) {
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
    assert_eq!(model.mapped_pages(), 0);
}
