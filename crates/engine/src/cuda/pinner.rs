//! Registration of host memory with a device, any number of times.
//!
//! A driver registers a page once, and unregisters a registration as a whole. Pins overlap: the pin
//! cache pins a larger range while a smaller one inside it is in use. So the pinner keeps a map of
//! registrations, registers only what is missing, counts the pins of each registration, and
//! unregisters it with its last pin. A copy must stay inside one registration:
//! [`CudaPinner::registration_end`] returns where that ends. A registration consists of page
//! frames: when the mapping changes while it is in use, it becomes stale and is not shared any
//! more.
//!
//! Memory that its owner has registered ([`Pinner::pin_bytes`]) is one registration of exactly its
//! bytes: the driver counts bytes, not pages, and registrations may share a page. Its mapping does
//! not change.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use memferry_memory::pinning::{Access, PageRange, PinError, PinToken, Pinner};
use memferry_sys::cuda::{CudaDriver, DriverError, code};
use memferry_sys::fork::OwnerProcess;
use memferry_sys::residency;
use memferry_sys::sync::lock;

/// The pinner of one device.
#[derive(Debug)]
pub(super) struct CudaPinner {
    driver: Arc<dyn CudaDriver>,
    map: Mutex<RegistrationMap>,
    owner: OwnerProcess,
}

#[derive(Debug, Default)]
struct RegistrationMap {
    /// By start address. Registrations never overlap.
    registrations: BTreeMap<usize, DriverRegistration>,
    pins: HashMap<u64, Pin>,
    last_pin: u64,
}

#[derive(Debug)]
struct Pin {
    /// The start addresses of its registrations.
    starts: Vec<usize>,
    /// The pin belongs to an owner, who unregisters before the memory is unmapped.
    is_owner: bool,
}

#[derive(Debug)]
struct DriverRegistration {
    end: usize,
    refcount: usize,
    is_writable: bool,
    /// Another library registered it, and will unregister it.
    is_foreign: bool,
    /// The number of pins that belong to owners, who unregister before the memory is unmapped.
    owners: usize,
    /// Other memory may be mapped at its addresses now: only existing pins may use it.
    is_stale: bool,
}

impl CudaPinner {
    pub(super) fn new(driver: Arc<dyn CudaDriver>) -> Self {
        Self { driver, map: Mutex::default(), owner: OwnerProcess::current() }
    }

    /// The end of a copy that starts at an address; `None` if the address is not registered.
    pub(super) fn registration_end(&self, address: u64) -> Option<u64> {
        let map = lock(&self.map);
        let (_, registration) = map.registrations.range(..=address as usize).next_back()?;
        (registration.end as u64 > address).then_some(registration.end as u64)
    }

    /// Whether the driver reports both ends of a range as registered host memory, by any
    /// registrant.
    fn is_known_to_driver(&self, address: usize, length: usize) -> bool {
        let is_host = |address: usize| self.driver.is_device(address as u64) == Some(false);
        length > 0 && is_host(address) && is_host(address + (length - 1))
    }

    /// Registers bytes that this pinner has not registered.
    fn register(
        &self,
        start: usize,
        bytes: usize,
        access: Access,
    ) -> Result<DriverRegistration, DriverError> {
        let registration = |is_writable, is_foreign| DriverRegistration {
            end: start + bytes,
            refcount: 0,
            is_writable,
            is_foreign,
            owners: 0,
            is_stale: false,
        };
        let error = match self.driver.register(start, bytes, false) {
            Ok(()) => return Ok(registration(true, false)),
            Err(error) => error,
        };
        match error.code {
            // The application has registered the whole range itself.
            code::ALREADY_REGISTERED if self.is_known_to_driver(start, bytes) => {
                Ok(registration(true, true))
            }
            // The memory is read-only.
            code::INVALID_VALUE
                if access == Access::Read && self.driver.info().registers_read_only =>
            {
                self.driver.register(start, bytes, true)?;
                Ok(registration(false, false))
            }
            _ => Err(error),
        }
    }

    /// Unregisters a registration that has no pin: pins outlive copies.
    fn unregister(&self, start: usize, registration: &DriverRegistration) {
        if !registration.is_foreign
            // SAFETY: leases are held until the device has finished the copies that they are for.
            && let Err(error) = unsafe { self.driver.unregister(start) }
        {
            // The device is lost, or the process exits.
            tracing::debug!(%error, "memory could not be unregistered");
        }
    }
}

impl RegistrationMap {
    /// The start addresses of the registrations that overlap a range.
    fn overlapping(&self, from: usize, to: usize) -> Vec<usize> {
        let before = self.registrations.range(..from).next_back();
        let inside = self.registrations.range(from..to);
        let all =
            before.into_iter().chain(inside).filter(|(_, registration)| registration.end > from);
        all.map(|(&start, _)| start).collect()
    }

    /// The start addresses of the registrations inside a range, and the gaps between them.
    fn covered_and_gaps(&self, range: PageRange) -> (Vec<usize>, Vec<Range<usize>>) {
        let starts = self.overlapping(range.start(), range.end());
        let (mut gaps, mut at) = (Vec::new(), range.start());
        for start in &starts {
            gaps.push(at..*start);
            at = self.registrations[start].end;
        }
        gaps.push(at..range.end());
        gaps.retain(|gap| !gap.is_empty());
        (starts, gaps)
    }

    /// Adds a pin of these registrations.
    fn add_pin(&mut self, starts: Vec<usize>, is_owner: bool) -> PinToken {
        for start in &starts {
            if let Some(registration) = self.registrations.get_mut(start) {
                registration.refcount += 1;
                registration.owners += usize::from(is_owner);
            }
        }
        self.last_pin += 1;
        self.pins.insert(self.last_pin, Pin { starts, is_owner });
        PinToken::new(self.last_pin)
    }
}

impl Pinner for CudaPinner {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        if !self.owner.is_current() {
            let what = "registering memory with a GPU of the parent process";
            return Err(PinError::Unsupported { what, fix: "open the GPU in this process" });
        }
        let mut map = lock(&self.map);
        let (mut starts, gaps) = map.covered_and_gaps(range);
        if access == Access::Write && starts.iter().any(|at| !map.registrations[at].is_writable) {
            let what = "pinning memory for writing while it is registered read-only";
            return Err(PinError::Unsupported {
                what,
                fix: "it is copied without registration until then",
            });
        }
        if starts.iter().any(|at| map.registrations[at].is_stale) {
            let what = "registering memory while a registration of its previous mapping is in use";
            return Err(PinError::Unsupported {
                what,
                fix: "it is copied without registration until then",
            });
        }
        let mut new = Vec::new();
        for gap in gaps {
            match self.register(gap.start, gap.len(), access) {
                Ok(registration) => new.push((gap.start, registration)),
                Err(error) => {
                    new.iter()
                        .for_each(|(start, registration)| self.unregister(*start, registration));
                    return Err(pin_error(error, PageRange::covering(gap.start, gap.len())?));
                }
            }
        }
        starts.extend(new.iter().map(|(start, _)| *start));
        map.registrations.extend(new);
        Ok(map.add_pin(starts, false))
    }

    fn pin_bytes(
        &self,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<PinToken, PinError> {
        let range = PageRange::covering(address, length)?;
        if !self.owner.is_current() {
            let what = "registering memory with a GPU of the parent process";
            return Err(PinError::Unsupported { what, fix: "open the GPU in this process" });
        }
        let mut map = lock(&self.map);
        let overlapping = map.overlapping(address, address + length);
        let fits = |start: &usize| {
            let registration = &map.registrations[start];
            let is_usable =
                !registration.is_stale && (registration.is_writable || access <= Access::Read);
            is_usable && *start <= address && address + length <= registration.end
        };
        match overlapping[..] {
            [] => {}
            // A registration by another pin may be larger; then this pin is not an owner's.
            [start] if fits(&start) => {
                let is_owner = map.registrations[&start].owners > 0;
                return Ok(map.add_pin(vec![start], is_owner));
            }
            _ => {
                return Err(PinError::Unsupported {
                    what: "registering memory of which a part is registered",
                    fix: "register all of it at once, or parts that do not overlap",
                });
            }
        }
        let registration = self.register(address, length, access);
        let registration = registration.map_err(|error| pin_error(error, range))?;
        map.registrations.insert(address, registration);
        Ok(map.add_pin(vec![address], true))
    }

    fn is_pinned_by_others(&self, address: usize, length: usize) -> bool {
        if !self.owner.is_current() {
            return false;
        }
        // The pinner's own registrations end with their last pin, and a copy without a pin would
        // not keep them.
        let is_own = |map: &RegistrationMap| {
            let overlapping = map.overlapping(address, address.saturating_add(length));
            overlapping.iter().any(|start| !map.registrations[start].is_foreign)
        };
        !is_own(&lock(&self.map)) && self.is_known_to_driver(address, length)
    }

    fn unpin(&self, _range: PageRange, token: &PinToken) {
        if !self.owner.is_current() {
            return;
        }
        let mut map = lock(&self.map);
        let Some(Pin { starts, is_owner }) = map.pins.remove(&token.number()) else { return };
        for start in starts {
            let Some(registration) = map.registrations.get_mut(&start) else { continue };
            registration.refcount -= 1;
            // Without its owner, only the kernel reports that its memory is unmapped.
            registration.owners -= usize::from(is_owner);
            if registration.refcount == 0
                && let Some(registration) = map.registrations.remove(&start)
            {
                self.unregister(start, &registration);
            }
        }
    }

    fn invalidate(&self, range: PageRange) {
        if !self.owner.is_current() {
            return;
        }
        let mut map = lock(&self.map);
        for start in map.overlapping(range.start(), range.end()) {
            if let Some(registration) = map.registrations.get_mut(&start) {
                registration.is_stale |= registration.owners == 0;
            }
        }
    }

    fn tracks_mapping(&self) -> bool {
        false
    }

    fn shares_pages(&self) -> bool {
        true
    }
}

/// Converts an error of the driver into a pin error.
fn pin_error(error: DriverError, range: PageRange) -> PinError {
    match error.code {
        code::OUT_OF_MEMORY => PinError::OutOfMemory,
        _ if !residency::is_mapped(range.start(), range.bytes()) => PinError::BadMemory { range },
        code::ALREADY_REGISTERED => PinError::Unsupported {
            what: "registering memory that the application has registered in part",
            fix: "register all of it, or nothing",
        },
        _ => PinError::Unsupported {
            what: "registering this memory with the GPU",
            fix: "mapped files and device memory are copied through staging buffers instead",
        },
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::testing::cuda_model::{CudaFaults, CudaModel};
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;

    const COUNT: usize = 16;

    /// A pinner over a model, and sixteen pages.
    fn set_up(faults: CudaFaults) -> (Arc<CudaModel>, CudaPinner, Pages) {
        let model = CudaModel::with_faults(faults);
        let pinner = CudaPinner::new(model.clone());
        (model, pinner, Pages::new(COUNT * page_bytes()).unwrap())
    }

    fn range(pages: &Pages, from: usize, to: usize) -> PageRange {
        let start = pages.as_ptr() as usize;
        PageRange::between(start + from * page_bytes(), start + to * page_bytes()).unwrap()
    }

    /// The end of the registration of each page, in pages; 0 for pages that are not registered.
    fn ends(pinner: &CudaPinner, pages: &Pages) -> [usize; COUNT] {
        let start = pages.as_ptr() as u64;
        std::array::from_fn(|page| {
            let end = pinner.registration_end(start + (page * page_bytes()) as u64);
            end.map_or(0, |end| (end - start) as usize / page_bytes())
        })
    }

    #[test]
    fn pins_that_overlap_share_pieces_and_each_piece_goes_with_its_last_pin() {
        let (model, pinner, pages) = set_up(CudaFaults::default());
        let ranges = [(2, 5), (8, 10), (4, 9), (0, 16), (2, 5)];
        let ranges = ranges.map(|(from, to)| range(&pages, from, to));
        let pin = |range| pinner.pin(range, Access::Write).unwrap();
        let tokens = ranges.map(pin);
        let all = [2, 2, 5, 5, 5, 8, 8, 8, 10, 10, 16, 16, 16, 16, 16, 16];
        assert_eq!(ends(&pinner, &pages), all);
        assert_eq!(model.stats().registrations, 5);
        let unpin = |index: usize| pinner.unpin(ranges[index], &tokens[index]);
        unpin(3);
        let mut left = all;
        left[..2].fill(0);
        left[10..].fill(0);
        assert_eq!(ends(&pinner, &pages), left);
        unpin(2);
        left[5..8].fill(0);
        assert_eq!(ends(&pinner, &pages), left);
        unpin(0);
        assert_eq!(ends(&pinner, &pages), left, "a second pin of the same range is left");
        unpin(4);
        unpin(1);
        assert_eq!(ends(&pinner, &pages), [0; COUNT]);
        assert_eq!(model.stats().unregistrations, 5);
    }

    #[test]
    fn a_pin_of_which_a_part_is_refused_leaves_nothing_behind() {
        // The second part of the last pin is the fourth registration.
        let faults = CudaFaults { refuses_registrations: Some(4), ..CudaFaults::default() };
        let (model, pinner, pages) = set_up(faults);
        let pinned = [(2, 4), (8, 10)].map(|(from, to)| range(&pages, from, to));
        let tokens = pinned.map(|range| pinner.pin(range, Access::Read).unwrap());
        let before = ends(&pinner, &pages);
        let refused = pinner.pin(range(&pages, 0, 16), Access::Read);
        assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
        assert_eq!(ends(&pinner, &pages), before);
        assert_eq!(model.stats().unregistrations, 1, "the part that was registered");
        pinned.iter().zip(tokens).for_each(|(range, token)| pinner.unpin(*range, &token));
        assert_eq!(ends(&pinner, &pages), [0; COUNT]);
        let seen = model.stats();
        assert_eq!(seen.registrations, seen.unregistrations);
    }

    #[test]
    fn memory_that_is_registered_for_reading_is_pinned_again_only_for_reading() {
        let (_model, pinner, pages) = set_up(CudaFaults::default());
        let (first, all) = (range(&pages, 0, 4), range(&pages, 0, 8));
        let read_only = DriverRegistration {
            end: first.end(),
            refcount: 1,
            is_writable: false,
            is_foreign: true,
            owners: 0,
            is_stale: false,
        };
        lock(&pinner.map).registrations.insert(first.start(), read_only);
        for range in [first, all] {
            let refused = pinner.pin(range, Access::Write);
            assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
            let token = pinner.pin(range, Access::Read).unwrap();
            pinner.unpin(range, &token);
        }
        let rest = range(&pages, 4, 8);
        assert!(pinner.pin(rest, Access::Write).is_ok());
    }

    #[test]
    fn what_is_registered_of_memory_that_changed_is_not_taken_for_what_is_there_now() {
        let (_model, pinner, pages) = set_up(CudaFaults::default());
        let (whole, half) = (range(&pages, 0, 8), range(&pages, 4, 8));
        let token = pinner.pin(whole, Access::Write).unwrap();
        let other = pinner.pin(range(&pages, 8, 10), Access::Write).unwrap();
        pinner.invalidate(half);
        for range in [half, range(&pages, 0, 2), range(&pages, 7, 9)] {
            let refused = pinner.pin(range, Access::Read);
            assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
        }
        assert!(pinner.pin(range(&pages, 8, 12), Access::Read).is_ok(), "next to it");
        pinner.unpin(whole, &token);
        pinner.unpin(range(&pages, 8, 10), &other);
        assert!(pinner.pin(half, Access::Write).is_ok(), "the last pin is removed");
    }

    #[test]
    fn what_its_owner_has_left_is_outdated_as_other_memory_when_its_mapping_changes() {
        let (_model, pinner, pages) = set_up(CudaFaults::default());
        let (owned, all) = (range(&pages, 4, 8), range(&pages, 0, 16));
        let owner = pinner.pin_bytes(owned.start(), owned.bytes(), Access::Write).unwrap();
        let cached = pinner.pin(all, Access::Write).unwrap();
        pinner.invalidate(owned);
        let again = pinner
            .pin(owned, Access::Write)
            .expect("its owner unregisters it before it is unmapped");
        pinner.unpin(owned, &again);
        pinner.unpin(owned, &owner);
        pinner.invalidate(owned);
        let refused = pinner.pin(owned, Access::Write);
        assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
        pinner.unpin(all, &cached);
        assert!(pinner.pin(owned, Access::Write).is_ok(), "the last pin is removed");
    }

    #[test]
    fn what_is_pinned_here_is_never_taken_for_what_others_have_pinned() {
        let (model, pinner, pages) = set_up(CudaFaults::default());
        let (first, second) = (range(&pages, 0, 4), range(&pages, 8, 12));
        let is_foreign =
            |range: PageRange| pinner.is_pinned_by_others(range.start() + 5, range.bytes() - 10);
        model.register(second.start(), second.bytes(), false).unwrap();
        assert!(!is_foreign(first) && is_foreign(second));
        let pin = pinner.pin_bytes(first.start(), first.bytes(), Access::Write).unwrap();
        assert!(!is_foreign(first), "it ends with its pin, so a copy needs a pin");
        let foreign = pinner.pin_bytes(second.start(), second.bytes(), Access::Write).unwrap();
        assert!(is_foreign(second));
        pinner.unpin(first, &pin);
        pinner.unpin(second, &foreign);
        assert_eq!(model.registered(), [(second.start(), second.bytes())]);
    }

    #[test]
    fn memory_that_somebody_else_registered_is_used_and_not_unregistered() {
        let (model, pinner, pages) = set_up(CudaFaults::default());
        let all = range(&pages, 0, 16);
        model.register(all.start(), all.bytes(), false).unwrap();
        let token = pinner.pin(all, Access::Write).unwrap();
        assert_eq!(ends(&pinner, &pages), [16; COUNT]);
        pinner.unpin(all, &token);
        assert_eq!(ends(&pinner, &pages), [0; COUNT]);
        let seen = model.stats();
        assert_eq!((seen.registrations, seen.unregistrations), (1, 0));
    }
}
