//! A model of the card, for machines without one: its registers, a thread that follows the rings as
//! the datasheet says, and fault injection. It can access only addresses that were mapped for it.
//! The driver is also tested with an emulated card in a virtual machine.

mod memory;
mod worker;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::device::{DmaDevice, DmaDirection, Width};
use memferry_sys::sync::lock;

use self::memory::NicModelMemory;
use crate::nic::{NicConfig, NicEngine, registers as r};
use crate::testing::interrupts::ModelInterrupts;
use crate::testing::ioat_model::{PATIENCE, SHORT_PATIENCE};

impl NicEngine {
    /// Creates the engine over a model of a card.
    pub fn over_model(model: Arc<NicModel>, config: NicConfig) -> io::Result<Self> {
        // SAFETY: a model behaves as it should, and callers that write its registers or end its
        // mappings give the guarantees of those unsafe calls.
        unsafe { Self::over(model, config) }
    }
}

/// The injected faults. Frames are counted from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicFaults {
    /// Every frame whose number is a multiple of this is lost.
    pub lose_every: Option<u64>,
    /// A payload byte of every frame whose number is a multiple of this is corrupted.
    pub damage_every: Option<u64>,
    /// The card sends nothing until it is reset.
    pub stalls: bool,
    /// The card is removed: all registers read as ones.
    pub is_removed: bool,
    /// Mapping memory fails with this kernel error.
    pub refuses_memory: Option<i32>,
}

/// The observations of the model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NicModelStats {
    /// Frames sent, lost ones included.
    pub frames: u64,
    /// Protocol violations of the driver.
    pub protocol_violations: Vec<String>,
}

/// The model.
#[derive(Debug)]
pub struct NicModel {
    shared: Arc<NicModelShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct NicModelShared {
    state: Mutex<NicModelState>,
    interrupts: ModelInterrupts,
    /// Notified when a register is written.
    doorbell: Condvar,
}

#[derive(Debug, Default)]
struct NicModelState {
    registers: HashMap<usize, u32>,
    memory: NicModelMemory,
    faults: NicFaults,
    stats: NicModelStats,
    is_ending: bool,
}

impl NicModel {
    /// Creates a card without faults.
    pub fn new() -> Arc<Self> {
        let shared = Arc::new(NicModelShared {
            state: Mutex::default(),
            interrupts: ModelInterrupts::default(),
            doorbell: Condvar::new(),
        });
        let worker = shared.clone();
        let thread = std::thread::Builder::new()
            .name("nic-model".into())
            .spawn(move || worker.run())
            .expect("a thread for the model");
        Arc::new(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Replaces the faults.
    pub fn set_faults(&self, faults: NicFaults) {
        self.state().faults = faults;
        self.shared.doorbell.notify_all();
    }

    /// The interrupts.
    pub fn interrupts(&self) -> &ModelInterrupts {
        &self.shared.interrupts
    }

    /// The observations so far.
    pub fn stats(&self) -> NicModelStats {
        self.state().stats.clone()
    }

    /// The number of mapped pages.
    pub fn mapped_pages(&self) -> usize {
        self.state().memory.mapped_pages()
    }

    fn state(&self) -> MutexGuard<'_, NicModelState> {
        lock(&self.shared.state)
    }
}

impl NicModelState {
    fn get(&self, at: usize) -> u32 {
        self.registers.get(&at).copied().unwrap_or(0)
    }

    fn set(&mut self, at: usize, value: u32) {
        self.registers.insert(at, value);
    }

    fn record_violation(&mut self, text: String) {
        self.stats.protocol_violations.push(text);
    }

    /// Records an access that is not 32 bits wide, the width of all registers.
    fn check_width(&mut self, at: usize, width: Width) -> bool {
        if width != Width::Bits32 {
            self.record_violation(format!("register {at:#x} is not accessed with 32 bits"));
        }
        width == Width::Bits32
    }

    fn write(&mut self, at: usize, value: u32) {
        match at {
            r::STATUS | r::ICR => self.record_violation(format!("a write to register {at:#x}")),
            r::CTRL if value & r::CTRL_RESET != 0 => self.reset(),
            r::RDBAL | r::TDBAL if !value.is_multiple_of(128) => {
                self.record_violation(format!("a ring at {value:#x} is not aligned"));
            }
            r::RDLEN | r::TDLEN if !value.is_multiple_of(128) => {
                self.record_violation(format!("a ring of {value} bytes is not a multiple of 128"));
            }
            r::PSRCTL | r::RFCTL | r::RDBAL | r::RDBAH | r::RDLEN
                if self.get(r::RCTL) & r::RCTL_ENABLE != 0 =>
            {
                self.record_violation(format!(
                    "register {at:#x} is written while the card receives"
                ));
            }
            r::IMC => self.set(r::IMS, self.get(r::IMS) & !value),
            r::IMS => self.set(r::IMS, self.get(r::IMS) | value),
            _ => self.set(at, value),
        }
    }

    /// Whether a sent frame raises the first vector now; masks it again if the driver wants that.
    fn takes_interrupt(&mut self) -> bool {
        let is_raised = self.get(r::IMS) & r::INTERRUPT_TRANSMITTED != 0
            && self.get(r::IVAR) == r::IVAR_TRANSMIT_VECTOR_0;
        if is_raised && self.get(r::CTRL_EXT) & r::CTRL_EXT_AUTO_MASK != 0 {
            self.set(r::IMS, self.get(r::IMS) & !self.get(r::EIAC));
        }
        is_raised
    }

    fn reset(&mut self) {
        self.registers.clear();
        self.faults.stalls = false;
    }
}

impl DmaDevice for NicModel {
    fn name(&self) -> &str {
        "a model of a network card"
    }

    fn read(&self, at: usize, width: Width) -> u64 {
        let mut state = self.state();
        state.check_width(at, width);
        if state.faults.is_removed { u64::MAX } else { state.get(at).into() }
    }

    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        let mut state = self.state();
        if state.check_width(at, width) && !state.faults.is_removed {
            state.write(at, value as u32);
        }
        drop(state);
        self.shared.doorbell.notify_all();
    }

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        let mut state = self.state();
        match state.faults.refuses_memory {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => state.memory.map(start, pages, direction),
        }
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        let mut state = self.state();
        if !state.memory.unmap(pages) {
            state.record_violation("unmapping memory that is not mapped".into());
        }
    }

    fn is_contiguous(&self) -> bool {
        false
    }

    fn connect_interrupts(&self, count: usize) -> io::Result<Vec<Arc<EventFd>>> {
        self.shared.interrupts.connect(count.min(1))
    }

    fn patience(&self) -> Duration {
        // While frames are lost, each costs a timeout.
        const LOSSY_PATIENCE: Duration = Duration::from_secs(5);
        match self.state().faults {
            NicFaults { stalls: true, .. } | NicFaults { is_removed: true, .. } => SHORT_PATIENCE,
            NicFaults { lose_every: None, damage_every: None, .. } => PATIENCE,
            _ => LOSSY_PATIENCE,
        }
    }

    fn reset(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.faults.is_removed {
            return Err(io::ErrorKind::NotConnected.into());
        }
        state.reset();
        Ok(())
    }
}

impl Drop for NicModel {
    fn drop(&mut self) {
        self.state().is_ending = true;
        self.shared.doorbell.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}
