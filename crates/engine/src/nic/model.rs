//! A model of the card, for tests where there is no card: its registers, a thread that follows the
//! rings as the datasheet says, and faults on demand. It knows only the addresses that were mapped
//! for it. The driver is tried over a real implementation of the card in a virtual machine as well.

mod memory;
mod worker;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use memferry_sys::device::{Device, Direction};
use memferry_sys::sync::lock;

use self::memory::Memory;
use super::registers as r;

/// What is to go wrong. Frames are counted from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Every frame whose number is a multiple of this is lost.
    pub lose_every: Option<u64>,
    /// Of every frame whose number is a multiple of this, a byte of the payload is changed.
    pub damage_every: Option<u64>,
    /// Nothing is sent any more, until the card is reset.
    pub stalls: bool,
    /// The card is gone: all registers read as ones.
    pub gone: bool,
    /// Mapping memory is refused with this error of the kernel.
    pub refuses_memory: Option<i32>,
}

/// What the model has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sightings {
    /// Frames that were sent, lost ones too.
    pub frames: u64,
    /// What no driver may do, in words.
    pub mistakes: Vec<String>,
}

/// The model.
#[derive(Debug)]
pub struct NicModel {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A register was written.
    bell: Condvar,
}

#[derive(Debug, Default)]
struct State {
    registers: HashMap<usize, u32>,
    memory: Memory,
    faults: Faults,
    sightings: Sightings,
    is_ending: bool,
}

impl NicModel {
    /// A card with nothing wrong.
    pub fn new() -> Arc<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), bell: Condvar::new() });
        let worker = shared.clone();
        let thread = std::thread::Builder::new()
            .name("nic-model".into())
            .spawn(move || worker.run())
            .expect("a thread for the model");
        Arc::new(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Lets things go wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
        self.shared.bell.notify_all();
    }

    /// What it has seen so far.
    pub fn sightings(&self) -> Sightings {
        self.state().sightings.clone()
    }

    /// How many pages are mapped.
    pub fn mapped_pages(&self) -> usize {
        self.state().memory.mapped_pages()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }
}

impl State {
    fn get(&self, at: usize) -> u32 {
        self.registers.get(&at).copied().unwrap_or(0)
    }

    fn set(&mut self, at: usize, value: u32) {
        self.registers.insert(at, value);
    }

    fn mistake(&mut self, text: String) {
        self.sightings.mistakes.push(text);
    }

    fn write(&mut self, at: usize, value: u32) {
        match at {
            r::STATUS | r::ICR => self.mistake(format!("a write to register {at:#x}")),
            r::CTRL if value & r::CTRL_RESET != 0 => self.begin_anew(),
            r::RDBAL | r::TDBAL if !value.is_multiple_of(128) => {
                self.mistake(format!("a ring at {value:#x}, which is not aligned"));
            }
            r::RDLEN | r::TDLEN if !value.is_multiple_of(128) => {
                self.mistake(format!("a ring of {value} bytes"));
            }
            r::PSRCTL | r::RFCTL | r::RDBAL | r::RDBAH | r::RDLEN
                if self.get(r::RCTL) & r::RCTL_ENABLE != 0 =>
            {
                self.mistake(format!("register {at:#x} is written while the card receives"));
            }
            _ => self.set(at, value),
        }
    }

    fn begin_anew(&mut self) {
        self.registers.clear();
        self.faults.stalls = false;
    }
}

impl Device for NicModel {
    fn name(&self) -> &str {
        "model"
    }

    fn read32(&self, at: usize) -> u32 {
        let state = self.state();
        if state.faults.gone { u32::MAX } else { state.get(at) }
    }

    unsafe fn write32(&self, at: usize, value: u32) {
        let mut state = self.state();
        if !state.faults.gone {
            state.write(at, value);
        }
        drop(state);
        self.shared.bell.notify_all();
    }

    fn read8(&self, at: usize) -> u8 {
        self.wrong_width(at) as u8
    }
    fn read16(&self, at: usize) -> u16 {
        self.wrong_width(at) as u16
    }
    fn read64(&self, at: usize) -> u64 {
        self.wrong_width(at)
    }
    unsafe fn write8(&self, at: usize, _value: u8) {
        self.wrong_width(at);
    }
    unsafe fn write16(&self, at: usize, _value: u16) {
        self.wrong_width(at);
    }
    unsafe fn write64(&self, at: usize, _value: u64) {
        self.wrong_width(at);
    }

    unsafe fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
        let mut state = self.state();
        match state.faults.refuses_memory {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => state.memory.map(start, pages, direction),
        }
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        let mut state = self.state();
        if !state.memory.unmap(pages) {
            state.mistake("memory is unmapped that is not mapped".into());
        }
    }

    fn is_contiguous(&self) -> bool {
        false
    }

    fn reset(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.faults.gone {
            return Err(io::ErrorKind::NotConnected.into());
        }
        state.begin_anew();
        Ok(())
    }
}

impl NicModel {
    /// All registers have 32 bits.
    fn wrong_width(&self, at: usize) -> u64 {
        self.state().mistake(format!("register {at:#x} is accessed with another width"));
        u64::MAX
    }
}

impl Drop for NicModel {
    fn drop(&mut self) {
        self.state().is_ending = true;
        self.shared.bell.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}
