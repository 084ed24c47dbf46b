//! A model of an I/OAT device, for machines without one.
//!
//! It is a device to its driver: registers of the right widths, and threads that follow chains of
//! descriptors in memory. It is as strict as it may be: it reaches nothing but what was mapped for
//! it, every page of that under an address of its own; it halts where a real device would at best
//! read the wrong memory; and it keeps a list of what no driver should do ([`IoatModel::mistakes`]).
//! [`Faults`] makes it fail as devices do.
//!
//! Interrupts, and what is in the configuration space of the bus, are not in the model.

mod access;
mod channel;
mod faults;
mod memory;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::ops::Add;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use memferry_sys::device::{Device, Direction};
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use faults::{EFAULT, EINVAL, EIO, ENOMEM, ENOSPC, ETIMEDOUT, Faults, When};

use super::registers;
use access::Settings;
use channel::{Channel, Registers};
use faults::Script;
use memory::Memory;

/// What a channel has done since the model was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Descriptors that were finished.
    pub descriptors: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Completion words that were written.
    pub write_backs: u64,
    /// Errors that ended a chain.
    pub halts: u64,
    /// Times that the channel stopped and said nothing.
    pub stalls: u64,
    /// Times that the count of descriptors was written.
    pub doorbells: u64,
}

impl Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors + other.descriptors,
            bytes: self.bytes + other.bytes,
            write_backs: self.write_backs + other.write_backs,
            halts: self.halts + other.halts,
            stalls: self.stalls + other.stalls,
            doorbells: self.doorbells + other.doorbells,
        }
    }
}

/// What kind of device the model is.
#[derive(Debug, Clone)]
pub struct ModelBuilder {
    name: String,
    channels: usize,
    transfer_power: u8,
    fills: bool,
    version: u8,
    is_contiguous: bool,
    faults: Faults,
}

impl ModelBuilder {
    /// What it is called.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.into();
        self
    }

    /// How many channels it has, 31 at most. One unless told otherwise.
    #[must_use]
    pub fn channels(mut self, channels: usize) -> Self {
        self.channels = channels;
        self
    }

    /// What it says of its largest transfer: the power of two, from 12 on. 20 unless told otherwise,
    /// which is 1 MiB.
    #[must_use]
    pub fn transfer_power(mut self, power: u8) -> Self {
        self.transfer_power = power;
        self
    }

    /// Whether it knows how to fill. It does unless told otherwise.
    #[must_use]
    pub fn fills(mut self, fills: bool) -> Self {
        self.fills = fills;
        self
    }

    /// Its version, with the major number in the upper four bits. 3.3 unless told otherwise.
    #[must_use]
    pub fn version(mut self, version: u8) -> Self {
        self.version = version;
        self
    }

    /// Whether the pages of a mapping have addresses one behind the other, as an IOMMU makes them, so
    /// that a descriptor may go from one into the next. They do not unless told otherwise.
    #[must_use]
    pub fn contiguous(mut self, is_contiguous: bool) -> Self {
        self.is_contiguous = is_contiguous;
        self
    }

    /// How it misbehaves from the start.
    #[must_use]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// The device, with a thread for each channel.
    ///
    /// # Panics
    /// If there are too many channels, or the system gives no threads.
    pub fn build(self) -> Arc<IoatModel> {
        assert!(self.channels <= usize::from(registers::CHANCNT_COUNT), "at most 31 channels");
        let largest = registers::largest_transfer_bytes(self.transfer_power);
        let shared = Arc::new(Shared {
            channels: (0..self.channels).map(|_| Channel::new()).collect(),
            memory: Memory::new(self.is_contiguous),
            script: Mutex::new(Script::new(self.faults)),
            settings: Mutex::default(),
            mistakes: Mutex::default(),
            is_dead: AtomicBool::new(false),
            largest_transfer_bytes: largest.unwrap_or(page_bytes() as u64),
            options: self,
        });
        let spawn = |number| {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("model-ioat-{number}"))
                .spawn(move || shared.run(number))
                .expect("a thread for a channel of the model")
        };
        let threads = (0..shared.channels.len()).map(spawn).collect();
        let model = IoatModel { shared, threads };
        model.set_faults(model.faults());
        Arc::new(model)
    }
}

/// A model of an I/OAT device. See the module's description.
#[derive(Debug)]
pub struct IoatModel {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the channels' threads have in common. Whoever has the lock of a channel may take any other,
/// and nobody who has another takes that of a channel.
#[derive(Debug)]
struct Shared {
    options: ModelBuilder,
    largest_transfer_bytes: u64,
    channels: Vec<Channel>,
    memory: Memory,
    script: Mutex<Script>,
    settings: Mutex<Settings>,
    mistakes: Mutex<Vec<String>>,
    is_dead: AtomicBool,
}

impl IoatModel {
    /// A device with one channel that works.
    pub fn new() -> Arc<Self> {
        Self::builder().build()
    }

    /// A device of another kind.
    pub fn builder() -> ModelBuilder {
        ModelBuilder {
            name: "a model of an I/OAT device".into(),
            channels: 1,
            transfer_power: 20,
            fills: true,
            version: 0x33,
            is_contiguous: false,
            faults: Faults::default(),
        }
    }

    /// How it misbehaves now.
    pub fn faults(&self) -> Faults {
        lock(&self.shared.script).faults
    }

    /// Makes it misbehave in another way from now on, and counts anew. When a device has died, it
    /// touches nothing any more when this returns.
    pub fn set_faults(&self, faults: Faults) {
        let shared = &self.shared;
        if faults.is_dead {
            // Before the rest of the script, so that nothing goes on without the faults of before.
            shared.is_dead.store(true, Ordering::SeqCst);
            shared.channels.iter().for_each(|channel| channel.stop(Registers::die));
        }
        *lock(&shared.script) = Script::new(faults);
        if !faults.is_dead && shared.is_dead.load(Ordering::SeqCst) {
            shared.power_on();
            shared.is_dead.store(false, Ordering::SeqCst);
        }
    }

    /// What a driver has done that no driver should do: nothing, it is hoped.
    pub fn mistakes(&self) -> Vec<String> {
        lock(&self.shared.mistakes).clone()
    }

    /// How many pages are mapped for it.
    pub fn mapped_pages(&self) -> usize {
        self.shared.memory.mapped_pages()
    }

    /// What a channel has done.
    ///
    /// # Panics
    /// If there is no such channel.
    pub fn counters(&self, channel: usize) -> Counters {
        self.shared.channels[channel].counters()
    }

    /// What all channels have done.
    pub fn all_counters(&self) -> Counters {
        let each = self.shared.channels.iter().map(Channel::counters);
        each.fold(Counters::default(), Counters::add)
    }
}

impl Shared {
    fn power_on(&self) {
        self.channels.iter().for_each(|channel| channel.stop(Registers::power_on));
        *lock(&self.settings) = Settings::default();
    }
}

/// Whether the pages can be pinned: as pinning does, this brings them in.
fn can_pin(start: usize, bytes: usize, direction: Direction) -> bool {
    match direction {
        _ if !residency::can_populate() => residency::is_mapped(start, bytes),
        Direction::Reads => residency::populate_for_reading(start, bytes).is_ok(),
        Direction::Writes => residency::populate_for_writing(start, bytes).is_ok(),
    }
}

impl Device for IoatModel {
    fn name(&self) -> &str {
        &self.shared.options.name
    }

    fn read8(&self, at: usize) -> u8 {
        self.shared.read(at, 1) as u8
    }

    fn read16(&self, at: usize) -> u16 {
        self.shared.read(at, 2) as u16
    }

    fn read32(&self, at: usize) -> u32 {
        self.shared.read(at, 4) as u32
    }

    fn read64(&self, at: usize) -> u64 {
        self.shared.read(at, 8)
    }

    unsafe fn write8(&self, at: usize, value: u8) {
        self.shared.write(at, 1, value.into());
    }

    unsafe fn write16(&self, at: usize, value: u16) {
        self.shared.write(at, 2, value.into());
    }

    unsafe fn write32(&self, at: usize, value: u32) {
        self.shared.write(at, 4, value.into());
    }

    unsafe fn write64(&self, at: usize, value: u64) {
        self.shared.write(at, 8, value);
    }

    unsafe fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
        let error = |code| Err(io::Error::from_raw_os_error(code));
        let (refused, limit) = {
            let mut script = lock(&self.shared.script);
            (script.refuses_map(), script.faults.most_mapped_bytes)
        };
        if let Some(code) = refused {
            return error(code);
        }
        if pages.is_empty() || !start.is_multiple_of(page_bytes()) {
            self.shared.mistake(format!("{} pages from {start:#x} on were mapped", pages.len()));
            return error(EINVAL);
        }
        if !can_pin(start, pages.len() * page_bytes(), direction) {
            return error(EFAULT);
        }
        let most_pages = limit.map_or(usize::MAX, |bytes| bytes / page_bytes());
        match self.shared.memory.map(start, pages, direction, most_pages) {
            true => Ok(()),
            false => error(ENOMEM),
        }
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        for address in self.shared.memory.unmap(pages) {
            self.shared.mistake(format!("{address:#x} was unmapped, which is not mapped"));
        }
    }

    fn is_contiguous(&self) -> bool {
        self.shared.memory.is_contiguous
    }

    fn reset(&self) -> io::Result<()> {
        let shared = &self.shared;
        if shared.is_dead.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        shared.power_on();
        if lock(&shared.script).refuses_reset() {
            shared.channels.iter().for_each(|channel| channel.stop(Registers::hang));
            return Err(io::Error::from_raw_os_error(ETIMEDOUT));
        }
        Ok(())
    }
}

impl Drop for IoatModel {
    fn drop(&mut self) {
        self.shared.channels.iter().for_each(Channel::close);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
