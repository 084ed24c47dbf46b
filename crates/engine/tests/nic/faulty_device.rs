//! A real card with lost and corrupted frames: the descriptors that the driver wrote are changed
//! just before the doorbell.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use memferry_engine::nic::registers::{self as r, transmit};
use memferry_engine::testing::nic_model::NicFaults;
use memferry_sys::Pages;
use memferry_sys::device::{DmaDevice, DmaDirection, Width};
use memferry_sys::pages::page_bytes;

/// The card and the injected faults.
#[derive(Debug)]
pub(crate) struct FaultyDevice {
    inner: Arc<dyn DmaDevice>,
    faults: NicFaults,
    spare: Pages,
    addresses: Vec<u64>,
    state: Mutex<FaultyDeviceState>,
}

#[derive(Debug, Default)]
struct FaultyDeviceState {
    /// The host addresses of pages, by their IOVA.
    pages: BTreeMap<u64, usize>,
    ring: [u32; 2],
    length: u32,
    tail: u32,
    frames: u64,
}

/// Marks a descriptor without data, which the card skips: a frame of such descriptors is not sent.
const WITHOUT_DATA: u64 = 1 << 29;

/// The number of pages for corrupted copies: more than frames fit into the ring.
const SPARE_PAGES: usize = 128;

impl FaultyDevice {
    pub(crate) fn new(inner: Arc<dyn DmaDevice>, faults: NicFaults) -> Self {
        let spare = Pages::new(SPARE_PAGES * page_bytes()).unwrap();
        let mut addresses = vec![0; SPARE_PAGES];
        // SAFETY: its own pages, unmapped before they are freed.
        unsafe { inner.map(spare.as_ptr() as usize, &mut addresses, DmaDirection::Bidirectional) }
            .unwrap();
        Self { inner, faults, spare, addresses, state: Mutex::default() }
    }

    /// Injects faults into the new descriptors of the transmit ring.
    fn inject_faults(&self, tail: u32) {
        let mut state = self.state.lock().unwrap();
        let count = state.length / transmit::BYTES as u32;
        let (mut at, mut descriptors) = (state.tail, Vec::new());
        while at != tail {
            let base = u64::from(state.ring[1]) << 32 | u64::from(state.ring[0]);
            let descriptor =
                state.find(base + u64::from(at) * transmit::BYTES as u64).cast::<u64>();
            descriptors.push(descriptor);
            at = (at + 1) % count;
            // SAFETY: a descriptor in the ring, which the card does not read yet.
            if unsafe { descriptor.add(1).read_volatile() } & transmit::END == 0 {
                continue;
            }
            state.frames += 1;
            let is_turn =
                |every: Option<u64>| every.is_some_and(|n| state.frames.is_multiple_of(n));
            if is_turn(self.faults.lose_every) {
                for descriptor in &descriptors {
                    // SAFETY: as above.
                    unsafe {
                        descriptor
                            .add(1)
                            .write_volatile(descriptor.add(1).read_volatile() | WITHOUT_DATA);
                    };
                }
            } else if is_turn(self.faults.damage_every) {
                // The first descriptor is the header.
                self.damage(descriptors[1], &state);
            }
            descriptors.clear();
        }
        state.tail = tail;
    }

    /// Makes the card read a corrupted copy instead of a fragment.
    fn damage(&self, descriptor: *mut u64, state: &FaultyDeviceState) {
        let slot = state.frames as usize % SPARE_PAGES;
        let copy = self.spare.as_ptr().wrapping_add(slot * page_bytes());
        // SAFETY: a descriptor in the ring, which the card does not read yet; its fragment, which
        // is in one page and is not written during the call; and a page that is this value's own.
        unsafe {
            let bytes = (descriptor.add(1).read_volatile() & 0xFFFF) as usize;
            std::ptr::copy_nonoverlapping(state.find(descriptor.read_volatile()), copy, bytes);
            copy.write(!copy.read());
            descriptor.write_volatile(self.addresses[slot]);
        }
    }
}

impl Drop for FaultyDevice {
    fn drop(&mut self) {
        // SAFETY: `new` mapped these addresses.
        unsafe { self.inner.unmap(&self.addresses) };
    }
}

impl FaultyDeviceState {
    fn find(&self, address: u64) -> *mut u8 {
        let page = page_bytes() as u64;
        let start = self.pages[&(address & !(page - 1))];
        (start + (address % page) as usize) as *mut u8
    }
}

impl DmaDevice for FaultyDevice {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read(&self, at: usize, width: Width) -> u64 {
        self.inner.read(at, width)
    }

    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        let (mut state, word) = (self.state.lock().unwrap(), value as u32);
        match at {
            r::TDBAL => state.ring[0] = word,
            r::TDBAH => state.ring[1] = word,
            r::TDLEN => state.length = word,
            r::CTRL if word & r::CTRL_RESET != 0 => state.tail = 0,
            _ => {}
        }
        drop(state);
        if at == r::TDT {
            self.inject_faults(word);
        }
        // SAFETY: the caller's guarantee.
        unsafe { self.inner.write(at, width, value) };
    }

    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        // SAFETY: the caller's guarantee.
        unsafe { self.inner.map(start, pages, direction) }?;
        let mut state = self.state.lock().unwrap();
        for (index, page) in pages.iter().enumerate() {
            state.pages.insert(*page, start + index * page_bytes());
        }
        Ok(())
    }

    unsafe fn unmap(&self, pages: &[u64]) {
        // Removed here first: the addresses may be reused at once.
        let mut state = self.state.lock().unwrap();
        pages.iter().for_each(|page| assert!(state.pages.remove(page).is_some()));
        drop(state);
        // SAFETY: the caller's guarantee.
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
