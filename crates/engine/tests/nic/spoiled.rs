//! A real card on which frames get lost or damaged: what the driver wrote for the card is changed just
//! before the card is told of it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use memferry_engine::nic::model::Faults;
use memferry_engine::nic::registers::{self as r, transmit};
use memferry_sys::Pages;
use memferry_sys::device::{Device, Direction};
use memferry_sys::pages::page_bytes;

/// The card and what is done to it.
#[derive(Debug)]
pub(crate) struct Spoiled {
    inner: Arc<dyn Device>,
    faults: Faults,
    spare: Pages,
    addresses: Vec<u64>,
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

/// Makes a descriptor one that has no data, and is skipped: a frame of such descriptors is not sent.
const WITHOUT_DATA: u64 = 1 << 29;

/// Pages for damaged copies: more than there can be frames in the ring.
const SPARE_PAGES: usize = 128;

impl Spoiled {
    pub(crate) fn new(inner: Arc<dyn Device>, faults: Faults) -> Self {
        let spare = Pages::new(SPARE_PAGES * page_bytes()).unwrap();
        let mut addresses = vec![0; SPARE_PAGES];
        // SAFETY: its own pages, unmapped before they are freed.
        unsafe { inner.map(spare.as_ptr() as usize, &mut addresses, Direction::Writes) }.unwrap();
        Self { inner, faults, spare, addresses, state: Mutex::default() }
    }

    /// Spoils what is new in the transmit ring.
    fn spoil(&self, tail: u32) {
        let mut state = self.state.lock().unwrap();
        let count = state.length / transmit::BYTES as u32;
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
            if is_turn(self.faults.lose_every) {
                for order in &pieces {
                    // SAFETY: as above.
                    unsafe {
                        order.add(1).write_volatile(order.add(1).read_volatile() | WITHOUT_DATA);
                    };
                }
            } else if is_turn(self.faults.damage_every) {
                // The first piece is the head.
                self.damage(pieces[1], &state);
            }
            pieces.clear();
        }
        state.tail = tail;
    }

    /// Has the card read a damaged copy of a piece, and not the piece.
    fn damage(&self, order: *mut u64, state: &State) {
        let place = state.frames as usize % SPARE_PAGES;
        let copy = self.spare.as_ptr().wrapping_add(place * page_bytes());
        // SAFETY: a descriptor in the ring, which the card does not look at yet; its piece, which is
        // in one page and is not written meanwhile; and a page that is this value's own.
        unsafe {
            let bytes = (order.add(1).read_volatile() & 0xFFFF) as usize;
            std::ptr::copy_nonoverlapping(state.find(order.read_volatile()), copy, bytes);
            copy.write(!copy.read());
            order.write_volatile(self.addresses[place]);
        }
    }
}

impl Drop for Spoiled {
    fn drop(&mut self) {
        // SAFETY: mapped when this was made.
        unsafe { self.inner.unmap(&self.addresses) };
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
    unsafe fn write8(&self, at: usize, value: u8) {
        // SAFETY: passed on.
        unsafe { self.inner.write8(at, value) };
    }
    unsafe fn write16(&self, at: usize, value: u16) {
        // SAFETY: passed on.
        unsafe { self.inner.write16(at, value) };
    }
    unsafe fn write64(&self, at: usize, value: u64) {
        // SAFETY: passed on.
        unsafe { self.inner.write64(at, value) };
    }

    unsafe fn write32(&self, at: usize, value: u32) {
        let mut state = self.state.lock().unwrap();
        match at {
            r::TDBAL => state.ring[0] = value,
            r::TDBAH => state.ring[1] = value,
            r::TDLEN => state.length = value,
            r::CTRL if value & r::CTRL_RESET != 0 => state.tail = 0,
            _ => {}
        }
        drop(state);
        if at == r::TDT {
            self.spoil(value);
        }
        // SAFETY: passed on.
        unsafe { self.inner.write32(at, value) };
    }

    unsafe fn map(&self, start: usize, pages: &mut [u64], direction: Direction) -> io::Result<()> {
        // SAFETY: passed on.
        unsafe { self.inner.map(start, pages, direction) }?;
        let mut state = self.state.lock().unwrap();
        for (index, page) in pages.iter().enumerate() {
            state.pages.insert(*page, start + index * page_bytes());
        }
        Ok(())
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        // First here: the addresses may be used again at once.
        let mut state = self.state.lock().unwrap();
        pages.iter().for_each(|page| assert!(state.pages.remove(page).is_some()));
        drop(state);
        // SAFETY: passed on.
        unsafe { self.inner.unmap(pages) };
    }

    fn is_contiguous(&self) -> bool {
        self.inner.is_contiguous()
    }

    fn reset(&self) -> io::Result<()> {
        self.state.lock().unwrap().tail = 0;
        self.inner.reset()
    }
}
