//! Memory that a device reaches: pinned by its mappings, and found again page by page.
//!
//! A device has addresses of its own, and neighbouring pages need not be neighbours there. So each
//! pin gets a stretch of a linear space that is used once and never again; the pin's token is where
//! that stretch begins. What lies behind a page of the linear space is found by the
//! [`Lookup`]: a small cache in front of the tables of all pins. How much is pinned at a time is
//! bounded by the [pin-down cache](crate::pin_cache) in front of this.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memferry_sys::device::code::{EFAULT, ENOMEM, ENOSPC};
use memferry_sys::device::{Device, Direction};
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;
use memferry_sys::sync::lock;

use crate::handle::{ProcessHandle, VirtualMemoryHandle};
use crate::lookup::{Counters, Geometry, LineName, Lookup, Refused, Route, Settings, Source};
use crate::pinning::{Access, PageRange, PinError, Pinner, Token};

/// 4096 pages, 8 to a line, 4 lines to a set: 44 KiB for 16 MiB in flight.
const SHAPE: Geometry = match Geometry::new(4096, 8, 4) {
    Ok(shape) => shape,
    Err(_) => panic!("a shape that can be had"),
};

/// What is done to memory, for errors.
const WHAT: &str = "mapping memory for a device";

/// The memory of a device, or of several that share their mappings.
#[derive(Debug)]
pub struct DevicePages {
    lookup: Lookup<Arc<Pins>>,
    pins: Arc<Pins>,
    process: ProcessHandle,
    /// Where the next pin begins in the linear space.
    next: AtomicU64,
    /// Held while the device is cut off.
    cutting: Mutex<()>,
}

/// All pins, by where they begin in the linear space.
#[derive(Debug)]
struct Pins {
    device: Arc<dyn Device>,
    pages: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    pins: BTreeMap<u64, Box<[u64]>>,
    /// The device has lost all access, and gets none again.
    is_cut_off: bool,
}

/// Memory that lies in one stretch for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Where it begins for the device.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
}

impl DevicePages {
    /// The memory of a device, of which nothing is mapped yet.
    pub fn new(device: Arc<dyn Device>) -> io::Result<Self> {
        let pins = Arc::new(Pins { device, pages: Mutex::default() });
        let lookup = Lookup::new(Settings::dynamic(SHAPE), pins.clone())?;
        let process = lookup.add_process().map_err(io::Error::other)?;
        let (next, cutting) = (AtomicU64::new(SHAPE.line_bytes()), Mutex::default());
        Ok(Self { lookup, pins, process, next, cutting })
    }

    /// Where the device finds pinned memory: the byte `offset` bytes behind the start of a pin, and
    /// those behind it that lie in one stretch with it, at most `most`. `None` if there is no such
    /// pin, or it is shorter.
    pub fn find(&self, token: Token, offset: u64, most: u64, route: Route) -> Option<Stretch> {
        let page = page_bytes() as u64;
        let at = token.0.checked_add(offset)?;
        let inside = at % page;
        let mut stretch: Option<Stretch> = None;
        let mut bytes = 0;
        while bytes < most {
            let handle = VirtualMemoryHandle { process: self.process, address: at + bytes };
            let translation = match self.lookup.translate(handle, route) {
                Ok(translation) => translation,
                // What is found is given; whoever wants more finds out next time.
                Err(_) => break,
            };
            for entry in translation.rest() {
                let expected = stretch.map_or(entry + inside, |known| known.address + bytes);
                let begins = if bytes == 0 { inside } else { 0 };
                if entry == 0 || entry + begins != expected || bytes >= most {
                    return stretch.map(|known| Stretch { bytes: bytes.min(most), ..known });
                }
                stretch.get_or_insert(Stretch { address: expected, bytes: 0 });
                bytes += page - begins;
            }
        }
        stretch.map(|known| Stretch { bytes: bytes.min(most), ..known })
    }

    /// What the lookup has counted.
    pub fn counters(&self) -> Counters {
        self.lookup.counters()
    }

    /// How many pins there are, and of how many pages.
    pub fn pinned(&self) -> (usize, usize) {
        let book = lock(&self.pins.pages);
        (book.pins.len(), book.pins.values().map(|pages| pages.len()).sum())
    }

    /// Takes all memory away from the device, whoever still has it pinned, and pins none any more:
    /// for a device that does not stop in any other way.
    pub fn cut_off(&self) {
        let _cutting = lock(&self.cutting);
        lock(&self.pins.pages).is_cut_off = true;
        let next = || lock(&self.pins.pages).pins.pop_first();
        while let Some((start, pages)) = next() {
            self.end(start, &pages);
        }
    }

    /// Whether the device has lost all access.
    pub fn is_cut_off(&self) -> bool {
        lock(&self.pins.pages).is_cut_off
    }

    fn end(&self, start: u64, pages: &[u64]) {
        self.lookup.forget(self.process, start, (pages.len() * page_bytes()) as u64);
        // SAFETY: mapped by `map` for a pin that was just taken out of the book.
        unsafe { self.pins.device.unmap(pages) };
    }

    /// Pins are independent of each other, so memory that is only read may be mapped for writing,
    /// and is wherever it can be: pages of a private mapping that are only read by a pin change their
    /// place when the program writes to them, and the device would go on reading the old ones.
    fn map(&self, range: PageRange, access: Access) -> io::Result<Box<[u64]>> {
        let mut pages = vec![0; range.pages()].into_boxed_slice();
        let device = &self.pins.device;
        // SAFETY: the device is told to touch pinned memory by descriptors alone, and whoever makes
        // one vouches for its memory until it is over; pins outlive their descriptors.
        let mut map = |direction| unsafe { device.map(range.start(), &mut pages, direction) };
        match map(Direction::Writes) {
            Err(error) if error.raw_os_error() == Some(EFAULT) && access < Access::Write => {
                map(Direction::Reads)?;
            }
            mapped => mapped?,
        }
        Ok(pages)
    }
}

impl Pinner for DevicePages {
    fn name(&self) -> &'static str {
        "device"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        if lock(&self.pins.pages).is_cut_off {
            return Err(PinError::Unsupported {
                what: WHAT,
                cure: "the device failed and has lost its access to memory: open it again",
            });
        }
        // Whole lines, so that no line holds pages of two pins, and one that is nobody's behind them.
        let linear =
            (range.bytes() as u64).next_multiple_of(SHAPE.line_bytes()) + SHAPE.line_bytes();
        let pages = self.map(range, access).map_err(|error| cause(range, access, &error))?;
        let start = self.next.fetch_add(linear, Ordering::Relaxed);
        let mut book = lock(&self.pins.pages);
        if book.is_cut_off {
            drop(book);
            // SAFETY: mapped a few lines above.
            unsafe { self.pins.device.unmap(&pages) };
            return Err(PinError::Refused { what: WHAT, code: ENOSPC });
        }
        book.pins.insert(start, pages);
        Ok(Token(start))
    }

    fn unpin(&self, _range: PageRange, token: Token) {
        let pages = lock(&self.pins.pages).pins.remove(&token.0);
        match pages {
            Some(pages) => self.end(token.0, &pages),
            // Whoever cuts the device off is ending it, and must be done when this returns.
            None => drop(lock(&self.cutting)),
        }
    }

    fn follows_mapping(&self) -> bool {
        false
    }
}

impl Source for Pins {
    fn attach(&self, line: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        let book = lock(&self.pages);
        let pin = book.pins.range(..=line.address).next_back();
        let (start, pages) = pin.ok_or(io::ErrorKind::NotFound)?;
        let first = ((line.address - start) / page_bytes() as u64) as usize;
        let rest = pages.get(first..).filter(|rest| !rest.is_empty());
        for (entry, page) in entries.iter_mut().zip(rest.ok_or(io::ErrorKind::NotFound)?) {
            *entry = *page;
        }
        Ok(())
    }

    fn detach(&self, _line: LineName, _entries: &[u64]) {}
}

fn cause(range: PageRange, access: Access, error: &io::Error) -> PinError {
    match error.raw_os_error() {
        // Some memory is sound and cannot be pinned all the same, such as that of shared files.
        Some(EFAULT) if is_sound(range, access) => PinError::Refused { what: WHAT, code: EFAULT },
        Some(EFAULT) => PinError::BadMemory { range },
        Some(ENOMEM) => match residency::lock_limit_bytes() {
            Some(limit_bytes) => PinError::MemlockLimit {
                limit_bytes,
                locked_bytes: residency::locked_bytes(),
                asked_bytes: range.bytes() as u64,
            },
            None => PinError::OutOfMemory,
        },
        Some(ENOSPC) => PinError::DeviceAddresses,
        code => PinError::Refused { what: WHAT, code: code.unwrap_or(0) },
    }
}

fn is_sound(range: PageRange, access: Access) -> bool {
    let (start, bytes) = (range.start(), range.bytes());
    match access {
        Access::Write => residency::populate_for_writing(start, bytes).is_ok(),
        Access::Read | Access::Watch => residency::populate_for_reading(start, bytes).is_ok(),
    }
}

#[cfg(test)]
mod tests;
