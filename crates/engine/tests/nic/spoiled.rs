//! A real card on which frames get lost or damaged: what the driver wrote for the card is changed just
//! before the card is told of it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use memferry_engine::nic::model::Faults;
use memferry_engine::nic::registers::{self as r, transmit};
use memferry_sys::device::{Device, Direction};
use memferry_sys::pages::page_bytes;

/// The card and what is done to it.
#[derive(Debug)]
pub(crate) struct Spoiled {
    inner: Arc<dyn Device>,
    faults: Faults,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where pages are in this process, by what the card calls them.
    pages: BTreeMap<u64, usize>,
    ring: [u32; 2],
    length: u32,
    tail: u32,
    frames: u64,
}

/// An address that no page is mapped at: the card cannot read there.
const NOWHERE: u64 = 16;

impl Spoiled {
    pub(crate) fn new(inner: Arc<dyn Device>, faults: Faults) -> Self {
        Self { inner, faults, state: Mutex::default() }
    }

    /// Spoils what is new in the transmit ring, and says which bytes were changed.
    fn spoil(&self, tail: u32) -> Vec<*mut u8> {
        let mut state = self.state.lock().unwrap();
        let count = state.length / transmit::BYTES as u32;
        let mut changed = Vec::new();
        let (mut at, mut pieces) = (state.tail, Vec::new());
        while at != tail {
            let base = u64::from(state.ring[1]) << 32 | u64::from(state.ring[0]);
            let order = state.find(base + u64::from(at) * transmit::BYTES as u64).cast::<u64>();
            pieces.push(order);
            at = (at + 1) % count;
            // SAFETY: a descriptor in the ring, which the card does not look at yet.
            if unsafe { order.add(1).read_volatile() } & transmit::END == 0 {
                continue;
            }
            state.frames += 1;
            let is_turn =
                |every: Option<u64>| every.is_some_and(|n| state.frames.is_multiple_of(n));
            // The first piece is the head.
            let piece = pieces[1];
            if is_turn(self.faults.lose_every) {
                // SAFETY: as above.
                unsafe { piece.write_volatile(NOWHERE) };
            } else if is_turn(self.faults.damage_every) {
                // SAFETY: as above; the source of a piece, which is put right again below.
                let source = state.find(unsafe { piece.read_volatile() });
                // SAFETY: as above.
                unsafe { source.write_volatile(!source.read_volatile()) };
                changed.push(source);
            }
            pieces.clear();
        }
        state.tail = tail;
        changed
    }
}

impl State {
    fn find(&self, address: u64) -> *mut u8 {
        let page = page_bytes() as u64;
        let start = self.pages[&(address & !(page - 1))];
        (start + (address % page) as usize) as *mut u8
    }
}

impl Device for Spoiled {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read8(&self, at: usize) -> u8 {
        self.inner.read8(at)
    }
    fn read16(&self, at: usize) -> u16 {
        self.inner.read16(at)
    }
    fn read32(&self, at: usize) -> u32 {
        self.inner.read32(at)
    }
    fn read64(&self, at: usize) -> u64 {
        self.inner.read64(at)
    }
    fn write8(&self, at: usize, value: u8) {
        self.inner.write8(at, value);
    }
    fn write16(&self, at: usize, value: u16) {
        self.inner.write16(at, value);
    }
    fn write64(&self, at: usize, value: u64) {
        self.inner.write64(at, value);
    }

    fn write32(&self, at: usize, value: u32) {
        let mut state = self.state.lock().unwrap();
        match at {
            r::TDBAL => state.ring[0] = value,
            r::TDBAH => state.ring[1] = value,
            r::TDLEN => state.length = value,
            r::CTRL if value & r::CTRL_RESET != 0 => state.tail = 0,
            _ => {}
        }
        drop(state);
        let changed = if at == r::TDT { self.spoil(value) } else { Vec::new() };
        self.inner.write32(at, value);
        // An emulated card has read everything by now.
        for byte in changed {
            // SAFETY: changed above.
            unsafe { byte.write_volatile(!byte.read_volatile()) };
        }
    }

    fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
        self.inner.map(start, pages, direction)?;
        let mut state = self.state.lock().unwrap();
        for (index, page) in pages.iter().enumerate() {
            state.pages.insert(*page, start + index * page_bytes());
        }
        Ok(())
    }

    fn unmap(&self, pages: &[u64]) {
        self.inner.unmap(pages);
        let mut state = self.state.lock().unwrap();
        pages.iter().for_each(|page| drop(state.pages.remove(page)));
    }

    fn is_contiguous(&self) -> bool {
        self.inner.is_contiguous()
    }

    fn reset(&self) -> io::Result<()> {
        self.state.lock().unwrap().tail = 0;
        self.inner.reset()
    }
}
