//! A model of an I/OAT device, for machines without one.
//!
//! It is a device to its driver: registers of the right widths, and threads that follow chains of
//! descriptors in memory. It is strict: it accesses only memory that was mapped for it, every page
//! of that at an address of its own; it halts where a real device might read the wrong memory; and
//! it records protocol violations of the driver ([`IoatModel::protocol_violations`]).
//! [`IoatFaults`] injects the failures of devices.
//!
//! It raises interrupts by eventfds, and can lose them, raise them early or for no reason
//! ([`InterruptFaults`](crate::testing::interrupts::InterruptFaults)). It has no configuration space.

mod access;
mod channel;
mod faults;
#[cfg(test)]
mod tests;
mod worker;

use std::io;
use std::ops::Add;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::device::{DmaDevice, DmaDirection, Width};
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

pub use faults::{EFAULT, EINVAL, EIO, ENOMEM, ENOSPC, ETIMEDOUT, FaultSchedule, IoatFaults};
pub(crate) use faults::{PATIENCE, SHORT_PATIENCE};

use crate::ioat::{IoatEngine, registers};
use crate::testing::interrupts::ModelInterrupts;
use crate::testing::iova_memory::IovaMemory;
use access::DeviceRegisters;
use channel::{ChannelRegisters, IoatModelChannel};
use faults::IoatFaultScript;

impl IoatEngine {
    /// Creates the engine over a model of a device.
    pub fn over_model(model: Arc<IoatModel>) -> io::Result<Self> {
        // SAFETY: a model behaves as it should, and callers that write its registers or end its
        // mappings give the guarantees of those unsafe calls.
        unsafe { Self::over(&[model]) }
    }
}

/// The counters of a channel since the model was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoatModelCounters {
    /// Finished descriptors.
    pub descriptors: u64,
    /// Bytes copied or filled.
    pub bytes: u64,
    /// Completion words written.
    pub write_backs: u64,
    /// Errors that ended a chain.
    pub halts: u64,
    /// Times that the channel stopped without a report.
    pub stalls: u64,
    /// Writes of the descriptor count.
    pub doorbells: u64,
    /// The time in nanoseconds from doorbells to the end of the last descriptor that they announced, of
    /// a model that polls.
    pub turnaround_ns: u64,
}

impl Add for IoatModelCounters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors + other.descriptors,
            bytes: self.bytes + other.bytes,
            write_backs: self.write_backs + other.write_backs,
            halts: self.halts + other.halts,
            stalls: self.stalls + other.stalls,
            doorbells: self.doorbells + other.doorbells,
            turnaround_ns: self.turnaround_ns + other.turnaround_ns,
        }
    }
}

/// The properties of the modelled device.
#[derive(Debug, Clone)]
pub struct IoatModelBuilder {
    name: String,
    channels: usize,
    transfer_power: u8,
    fills: bool,
    version: u8,
    is_contiguous: bool,
    is_polling: bool,
    faults: IoatFaults,
}

impl IoatModelBuilder {
    /// Sets the name.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the number of channels, 31 at most; 1 by default.
    #[must_use]
    pub fn channels(mut self, channels: usize) -> Self {
        self.channels = channels;
        self
    }

    /// Sets the maximum transfer as a power of two, from 12 on; 20 by default, which is 1 MiB.
    #[must_use]
    pub fn transfer_power(mut self, power: u8) -> Self {
        self.transfer_power = power;
        self
    }

    /// Sets whether it supports fills; true by default.
    #[must_use]
    pub fn fills(mut self, fills: bool) -> Self {
        self.fills = fills;
        self
    }

    /// Sets the version, with the major number in the upper four bits; 3.3 by default.
    #[must_use]
    pub fn version(mut self, version: u8) -> Self {
        self.version = version;
        self
    }

    /// Sets whether the pages of a mapping have contiguous addresses, as behind an IOMMU, so that a
    /// descriptor may cross from one page into the next; false by default.
    #[must_use]
    pub fn contiguous(mut self, is_contiguous: bool) -> Self {
        self.is_contiguous = is_contiguous;
        self
    }

    /// Sets the time of every descriptor, as the fault [`IoatFaults::delay`] does, and makes the threads
    /// poll: what a copy takes longer is the driver's, and the hand-over between two cores.
    #[must_use]
    pub fn service(mut self, time: std::time::Duration) -> Self {
        self.is_polling = true;
        self.faults.delay = time;
        self
    }

    /// Sets the initial faults.
    #[must_use]
    pub fn faults(mut self, faults: IoatFaults) -> Self {
        self.faults = faults;
        self
    }

    /// Creates the device, with a thread for each channel.
    ///
    /// # Panics
    /// If there are too many channels, or a thread cannot be started.
    pub fn build(self) -> Arc<IoatModel> {
        assert!(self.channels <= usize::from(registers::CHANCNT_COUNT), "at most 31 channels");
        let max_bytes = registers::max_transfer_bytes(self.transfer_power);
        let shared = Arc::new(IoatModelShared {
            channels: (0..self.channels).map(|_| IoatModelChannel::new(self.is_polling)).collect(),
            memory: IovaMemory::new(self.is_contiguous),
            script: Mutex::new(IoatFaultScript::new(self.faults)),
            registers: Mutex::default(),
            violations: Mutex::default(),
            interrupts: ModelInterrupts::default(),
            is_removed: AtomicBool::new(false),
            max_transfer_bytes: max_bytes.unwrap_or(page_bytes() as u64),
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
    shared: Arc<IoatModelShared>,
    threads: Vec<JoinHandle<()>>,
}

/// The state that the channels' threads share. Lock order: a thread that holds the lock of a
/// channel may take any other lock here; a thread that holds another lock must not take that of a
/// channel.
#[derive(Debug)]
struct IoatModelShared {
    options: IoatModelBuilder,
    max_transfer_bytes: u64,
    channels: Vec<IoatModelChannel>,
    memory: IovaMemory,
    script: Mutex<IoatFaultScript>,
    registers: Mutex<DeviceRegisters>,
    violations: Mutex<Vec<String>>,
    interrupts: ModelInterrupts,
    is_removed: AtomicBool,
}

impl IoatModel {
    /// Creates a device with one channel and no faults.
    pub fn new() -> Arc<Self> {
        Self::builder().build()
    }

    /// Creates a builder for a device with other properties.
    pub fn builder() -> IoatModelBuilder {
        IoatModelBuilder {
            name: "a model of an I/OAT device".into(),
            channels: 1,
            transfer_power: 20,
            fills: true,
            version: 0x33,
            is_contiguous: false,
            is_polling: false,
            faults: IoatFaults::default(),
        }
    }

    /// The current faults.
    pub fn faults(&self) -> IoatFaults {
        lock(&self.shared.script).faults
    }

    /// Replaces the faults and restarts the counts. After the removal of the device, it accesses no
    /// memory when this returns.
    pub fn set_faults(&self, faults: IoatFaults) {
        let shared = &self.shared;
        if faults.is_removed {
            // Before the rest of the script, so that nothing runs without the earlier faults.
            shared.is_removed.store(true, Ordering::SeqCst);
            shared.channels.iter().for_each(|channel| channel.stop(ChannelRegisters::remove));
        }
        *lock(&shared.script) = IoatFaultScript::new(faults);
        if !faults.is_removed && shared.is_removed.load(Ordering::SeqCst) {
            shared.power_on();
            shared.is_removed.store(false, Ordering::SeqCst);
        }
    }

    /// The interrupts.
    pub fn interrupts(&self) -> &ModelInterrupts {
        &self.shared.interrupts
    }

    /// The protocol violations of the driver; empty for a correct driver.
    pub fn protocol_violations(&self) -> Vec<String> {
        for (number, channel) in self.shared.channels.iter().enumerate() {
            for why in channel.take_late_violations() {
                let text = format!("the doorbell of channel {number} was written: {why}");
                self.shared.record_violation(text);
            }
        }
        lock(&self.shared.violations).clone()
    }

    /// The number of mapped pages.
    pub fn mapped_pages(&self) -> usize {
        self.shared.memory.mapped_pages()
    }

    /// The counters of a channel.
    ///
    /// # Panics
    /// If there is no such channel.
    pub fn counters(&self, channel: usize) -> IoatModelCounters {
        self.shared.channels[channel].counters()
    }

    /// The counters of all channels together.
    pub fn all_counters(&self) -> IoatModelCounters {
        let each = self.shared.channels.iter().map(IoatModelChannel::counters);
        each.fold(IoatModelCounters::default(), IoatModelCounters::add)
    }
}

impl IoatModelShared {
    fn power_on(&self) {
        self.channels.iter().for_each(|channel| channel.stop(ChannelRegisters::power_on));
        *lock(&self.registers) = DeviceRegisters::default();
    }
}

/// Whether the pages can be pinned; prefaults them, as pinning does.
fn can_pin(start: usize, bytes: usize, direction: DmaDirection) -> bool {
    match direction {
        _ if !residency::can_populate() => residency::is_mapped(start, bytes),
        DmaDirection::ToDevice => residency::populate_read(start, bytes).is_ok(),
        DmaDirection::Bidirectional => residency::populate_write(start, bytes).is_ok(),
    }
}

impl DmaDevice for IoatModel {
    fn name(&self) -> &str {
        &self.shared.options.name
    }

    fn read(&self, at: usize, width: Width) -> u64 {
        self.shared.read(at, width as usize)
    }

    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        self.shared.write(at, width as usize, value);
    }

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        let error = |code| Err(io::Error::from_raw_os_error(code));
        let (map_error, limit) = {
            let mut script = lock(&self.shared.script);
            (script.refuses_map(), script.faults.max_mapped_bytes)
        };
        if let Some(code) = map_error {
            return error(code);
        }
        if pages.is_empty() || !start.is_multiple_of(page_bytes()) {
            self.shared
                .record_violation(format!("{} pages were mapped from {start:#x}", pages.len()));
            return error(EINVAL);
        }
        if !can_pin(start, pages.len() * page_bytes(), direction) {
            return error(EFAULT);
        }
        let max_pages = limit.map_or(usize::MAX, |bytes| bytes / page_bytes());
        match self.shared.memory.map(start, pages, direction, max_pages) {
            true => Ok(()),
            false => error(ENOMEM),
        }
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        for address in self.shared.memory.unmap(pages) {
            self.shared.record_violation(format!("{address:#x} was unmapped, but is not mapped"));
        }
    }

    fn is_contiguous(&self) -> bool {
        self.shared.memory.is_contiguous
    }

    fn connect_interrupts(&self, count: usize) -> io::Result<Vec<Arc<EventFd>>> {
        self.shared.interrupts.connect(count.min(self.shared.channels.len()))
    }

    fn patience(&self) -> Duration {
        lock(&self.shared.script).patience
    }

    fn reset(&self) -> io::Result<()> {
        let shared = &self.shared;
        if shared.is_removed.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        shared.power_on();
        if lock(&shared.script).refuses_reset() {
            shared.channels.iter().for_each(|channel| channel.stop(ChannelRegisters::hang));
            return Err(io::Error::from_raw_os_error(ETIMEDOUT));
        }
        Ok(())
    }
}

impl Drop for IoatModel {
    fn drop(&mut self) {
        self.shared.channels.iter().for_each(IoatModelChannel::close);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
