//! The model, driven by hand: registers are written, memory is mapped, words are looked at.

mod copying;
mod faults;
mod halting;
mod registers;
mod stopping;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_sys::Pages;
use memferry_sys::device::{Device, Direction};
use memferry_sys::pages::page_bytes;

use super::super::descriptor::{DESCRIPTOR_BYTES, Descriptor};
use super::super::registers::*;
use super::*;

/// Maps memory of a test, which nobody but the model and the test uses.
fn map(model: &IoatModel, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
    // SAFETY: tests keep their memory until the model has stopped, or have it unmapped before.
    unsafe { model.map(start, pages, direction) }
}

/// Waits for something that happens sooner or later.
fn await_that(what: &str, mut is_so: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < patience, "in vain: {what}");
        std::thread::yield_now();
    }
}

/// Memory that is mapped for the device until it is dropped.
struct Mapped {
    model: Arc<IoatModel>,
    pages: Pages,
    addresses: Vec<u64>,
}

impl Mapped {
    fn new(model: &Arc<IoatModel>, pages: usize) -> Self {
        Self::with(model, pages, Direction::Writes)
    }

    fn with(model: &Arc<IoatModel>, count: usize, direction: Direction) -> Self {
        let pages = Pages::new(count * page_bytes()).unwrap();
        let mut addresses = vec![0; count];
        map(model, pages.as_ptr() as usize, &mut addresses, direction).unwrap();
        Self { model: model.clone(), pages, addresses }
    }

    /// The same with bytes that differ from their neighbours.
    fn patterned(model: &Arc<IoatModel>, count: usize) -> Self {
        let mut memory = Self::new(model, count);
        for (index, byte) in memory.pages.as_mut_slice().iter_mut().enumerate() {
            *byte = (index * 31 + index / 251) as u8;
        }
        memory
    }

    /// The device's address of a byte.
    fn at(&self, byte: usize) -> u64 {
        self.addresses[byte / page_bytes()] + (byte % page_bytes()) as u64
    }

    fn bytes(&self, from: usize, length: usize) -> &[u8] {
        &self.pages.as_slice()[from..from + length]
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.model.end(&self.addresses);
    }
}

/// What a driver does to a device, for tests that are the only driver of theirs.
trait Driving: Device {
    fn set8(&self, at: usize, value: u8) {
        // SAFETY: what is mapped is the test's own memory, and the test reads it when the device is
        // through with it.
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
    fn end(&self, pages: &[u64]) {
        // SAFETY: no other driver has mappings.
        unsafe { self.unmap(pages) };
    }
}

impl Driving for IoatModel {}

/// A channel with a ring of descriptors in two pages and a completion word.
struct Rig {
    model: Arc<IoatModel>,
    channel: usize,
    ring: Mapped,
    word: Mapped,
    /// How many descriptors were put into the ring.
    put: usize,
}

const SLOTS_PER_PAGE: usize = 4096 / DESCRIPTOR_BYTES;

impl Rig {
    /// The first channel of a device, ready to work.
    fn new(model: &Arc<IoatModel>) -> Self {
        Self::on(model, 0)
    }

    fn on(model: &Arc<IoatModel>, channel: usize) -> Self {
        let (ring, word) = (Mapped::new(model, 2), Mapped::new(model, 1));
        let mut rig = Self { model: model.clone(), channel, ring, word, put: 0 };
        rig.start();
        rig
    }

    fn register(&self, offset: usize) -> usize {
        channel_base(self.channel) + offset
    }

    /// Brings the channel from any state to the beginning of an empty chain.
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
        await_that("the end of a reset", || !self.is_in_reset());
    }

    fn is_in_reset(&self) -> bool {
        self.model.read8(self.register(CHANCMD)) & CHANCMD_RESET != 0
    }

    /// The device's address of a descriptor, by its number.
    fn slot(&self, number: usize) -> u64 {
        self.ring.at(number % (2 * SLOTS_PER_PAGE) * DESCRIPTOR_BYTES)
    }

    /// Puts a descriptor behind the others, and says where it is.
    fn put(&mut self, descriptor: Descriptor) -> u64 {
        let next = self.slot(self.put + 1);
        self.put_as_is(descriptor.with_next(next))
    }

    /// The same, with the next of the test's choice.
    fn put_as_is(&mut self, descriptor: Descriptor) -> u64 {
        let number = self.put % (2 * SLOTS_PER_PAGE);
        let slots = self.ring.pages.as_ptr().cast::<Descriptor>();
        // SAFETY: inside the two pages of the ring, at a slot that the device has not been told of.
        unsafe { slots.add(number).write(descriptor) };
        self.put += 1;
        self.slot(number)
    }

    fn ring(&self) {
        self.model.set16(self.register(DMACOUNT), self.put as u16);
    }

    /// Puts one descriptor that tells when it is finished, rings, and waits for that.
    fn run(&mut self, descriptor: Descriptor) {
        let address = self.put(descriptor.with_write_back());
        self.ring();
        self.await_word(address);
    }

    /// The same for one that fails: the errors.
    fn fail(&mut self, descriptor: Descriptor) -> u32 {
        self.put(descriptor.with_write_back());
        self.ring();
        self.await_state(ChannelState::Halted);
        self.errors()
    }

    fn await_word(&self, address: u64) {
        await_that("a completion", || self.word() & CHANSTS_COMPLETED == address);
    }

    fn await_state(&self, state: ChannelState) {
        await_that("a state", || self.state() == Some(state));
    }

    fn word(&self) -> u64 {
        self.atomic_word().load(Ordering::Acquire)
    }

    fn set_word(&self, value: u64) {
        self.atomic_word().store(value, Ordering::Release);
    }

    fn atomic_word(&self) -> &AtomicU64 {
        // SAFETY: the first bytes of a page that lives as long as this, used by atomics only.
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

    fn counters(&self) -> Counters {
        self.model.counters(self.channel)
    }
}

/// Everything is unmapped, and the driver made no mistake.
fn assert_clean(model: &IoatModel) {
    assert_eq!(model.mistakes(), Vec::<String>::new());
    assert_eq!(model.mapped_pages(), 0);
}
