//! Registering ordinary memory with a device, any number of times.
//!
//! A driver registers a page once, and unregisters what was registered together. Pins overlap: the
//! pin-down cache pins a larger range while a smaller one inside it is in use. So this keeps a map of
//! what is registered, registers only what is missing, counts who uses each piece, and unregisters a
//! piece when nobody does. A copy must stay inside one piece: [`Registrar::piece_end`] tells where it
//! ends. A piece is of page frames: when the mapping changes while it is in use, it is not shared any
//! more.
//!
//! What its owner has registered ([`Pinner::pin_bytes`]) is one piece of exactly its bytes: the driver
//! keeps count of bytes, not of pages, and pieces may share a page. Its mapping does not change.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use memferry_memory::pinning::{Access, PageRange, PinError, Pinner, Token};
use memferry_sys::cuda::{Driver, DriverError, code};
use memferry_sys::sync::lock;
use memferry_sys::{fork, residency};

/// What is registered with one device.
#[derive(Debug)]
pub(super) struct Registrar {
    driver: Arc<dyn Driver>,
    book: Mutex<Book>,
    fork_generation: u64,
}

#[derive(Debug, Default)]
struct Book {
    /// By their first address. Pieces never overlap.
    pieces: BTreeMap<usize, Piece>,
    pins: HashMap<u64, Pin>,
    last_pin: u64,
}

#[derive(Debug)]
struct Pin {
    /// The first addresses of its pieces.
    starts: Vec<usize>,
    /// It is of an owner who says when the memory goes.
    is_owner: bool,
}

#[derive(Debug)]
struct Piece {
    end: usize,
    users: usize,
    may_be_written: bool,
    /// Somebody else registered it, and will unregister it.
    is_theirs: bool,
    /// How many of the users are owners who say when it goes.
    owners: usize,
    /// Other memory may be at its addresses by now: it is for those who use it already.
    is_outdated: bool,
}

impl Registrar {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        fork::watch();
        Self { driver, book: Mutex::default(), fork_generation: fork::generation() }
    }

    /// Up to where one copy may go that begins at an address; `None` where nothing is registered.
    pub(super) fn piece_end(&self, address: u64) -> Option<u64> {
        let book = lock(&self.book);
        let (_, piece) = book.pieces.range(..=address as usize).next_back()?;
        (piece.end as u64 > address).then_some(piece.end as u64)
    }

    /// Whether the driver knows both ends of a range as registered memory, whoever has registered it.
    fn is_known_to_driver(&self, address: usize, length: usize) -> bool {
        let is_host = |address: usize| self.driver.is_device(address as u64) == Some(false);
        length > 0 && is_host(address) && is_host(address + (length - 1))
    }

    /// Registers bytes that nobody has registered.
    fn register(&self, start: usize, bytes: usize, access: Access) -> Result<Piece, DriverError> {
        let piece = |may_be_written, is_theirs| Piece {
            end: start + bytes,
            users: 0,
            may_be_written,
            is_theirs,
            owners: 0,
            is_outdated: false,
        };
        let error = match self.driver.register(start, bytes, false) {
            Ok(()) => return Ok(piece(true, false)),
            Err(error) => error,
        };
        match error.code {
            // The application's own, from one end to the other.
            code::ALREADY_REGISTERED if self.is_known_to_driver(start, bytes) => {
                Ok(piece(true, true))
            }
            // Memory that may not be written.
            code::INVALID_VALUE
                if access == Access::Read && self.driver.facts().registers_read_only =>
            {
                self.driver.register(start, bytes, true)?;
                Ok(piece(false, false))
            }
            _ => Err(error),
        }
    }

    /// Unregisters a piece that no pin has any more, or none had yet: pins outlive copies.
    fn unregister(&self, start: usize, piece: &Piece) {
        if !piece.is_theirs
            // SAFETY: leases are held until the device has passed the copies that they are for.
            && let Err(error) = unsafe { self.driver.unregister(start) }
        {
            // A device that is lost, or a process that ends.
            tracing::debug!(%error, "memory could not be unregistered");
        }
    }
}

impl Book {
    /// The first addresses of the pieces that have bytes of a range.
    fn inside(&self, from: usize, to: usize) -> Vec<usize> {
        let before = self.pieces.range(..from).next_back();
        let inside = self.pieces.range(from..to);
        let all = before.into_iter().chain(inside).filter(|(_, piece)| piece.end > from);
        all.map(|(&start, _)| start).collect()
    }

    /// The first addresses of the pieces inside a range, and what lies between them.
    fn survey(&self, range: PageRange) -> (Vec<usize>, Vec<Range<usize>>) {
        let starts = self.inside(range.start(), range.end());
        let (mut gaps, mut at) = (Vec::new(), range.start());
        for start in &starts {
            gaps.push(at..*start);
            at = self.pieces[start].end;
        }
        gaps.push(at..range.end());
        gaps.retain(|gap| !gap.is_empty());
        (starts, gaps)
    }

    /// Counts one more pin in, of these pieces.
    fn enter(&mut self, starts: Vec<usize>, is_owner: bool) -> Token {
        for start in &starts {
            if let Some(piece) = self.pieces.get_mut(start) {
                piece.users += 1;
                piece.owners += usize::from(is_owner);
            }
        }
        self.last_pin += 1;
        self.pins.insert(self.last_pin, Pin { starts, is_owner });
        Token(self.last_pin)
    }
}

impl Pinner for Registrar {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        if fork::generation() != self.fork_generation {
            let what = "registering memory with a GPU of the parent process";
            return Err(PinError::Unsupported { what, cure: "open the GPU in this process" });
        }
        let mut book = lock(&self.book);
        let (mut starts, gaps) = book.survey(range);
        if access == Access::Write && starts.iter().any(|at| !book.pieces[at].may_be_written) {
            let what = "writing to memory while it is registered for reading";
            return Err(PinError::Unsupported {
                what,
                cure: "it is copied in other ways meanwhile",
            });
        }
        if starts.iter().any(|at| book.pieces[at].is_outdated) {
            let what = "registering memory while what was there before is in use";
            return Err(PinError::Unsupported {
                what,
                cure: "it is copied in other ways meanwhile",
            });
        }
        let mut new = Vec::new();
        for gap in gaps {
            match self.register(gap.start, gap.len(), access) {
                Ok(piece) => new.push((gap.start, piece)),
                Err(error) => {
                    new.iter().for_each(|(start, piece)| self.unregister(*start, piece));
                    return Err(refusal(error, PageRange::covering(gap.start, gap.len())?));
                }
            }
        }
        starts.extend(new.iter().map(|(start, _)| *start));
        book.pieces.extend(new);
        Ok(book.enter(starts, false))
    }

    fn pin_bytes(&self, address: usize, length: usize, access: Access) -> Result<Token, PinError> {
        let range = PageRange::covering(address, length)?;
        if fork::generation() != self.fork_generation {
            let what = "registering memory with a GPU of the parent process";
            return Err(PinError::Unsupported { what, cure: "open the GPU in this process" });
        }
        let mut book = lock(&self.book);
        let there = book.inside(address, address + length);
        let fits = |start: &usize| {
            let piece = &book.pieces[start];
            let is_usable = !piece.is_outdated && (piece.may_be_written || access <= Access::Read);
            is_usable && *start <= address && address + length <= piece.end
        };
        match there[..] {
            [] => {}
            // What others have pinned before may be larger, and is not the owner's then.
            [start] if fits(&start) => {
                let is_owner = book.pieces[&start].owners > 0;
                return Ok(book.enter(vec![start], is_owner));
            }
            _ => {
                return Err(PinError::Unsupported {
                    what: "registering memory of which a part is registered",
                    cure: "register all of it at once, or parts that do not overlap",
                });
            }
        }
        let piece = self.register(address, length, access);
        let piece = piece.map_err(|error| refusal(error, range))?;
        book.pieces.insert(address, piece);
        Ok(book.enter(vec![address], true))
    }

    fn is_pinned_by_others(&self, address: usize, length: usize) -> bool {
        if fork::generation() != self.fork_generation {
            return false;
        }
        // What is ours goes when the last of its pins does, and a copy that has none would not keep it.
        let is_ours = |book: &Book| {
            let there = book.inside(address, address.saturating_add(length));
            there.iter().any(|start| !book.pieces[start].is_theirs)
        };
        !is_ours(&lock(&self.book)) && self.is_known_to_driver(address, length)
    }

    fn unpin(&self, _range: PageRange, token: Token) {
        if fork::generation() != self.fork_generation {
            return;
        }
        let mut book = lock(&self.book);
        let Some(Pin { starts, is_owner }) = book.pins.remove(&token.0) else { return };
        for start in starts {
            let Some(piece) = book.pieces.get_mut(&start) else { continue };
            piece.users -= 1;
            // Without its owner, nobody but the kernel says when its memory goes.
            piece.owners -= usize::from(is_owner);
            if piece.users == 0
                && let Some(piece) = book.pieces.remove(&start)
            {
                self.unregister(start, &piece);
            }
        }
    }

    fn outdate(&self, range: PageRange) {
        if fork::generation() != self.fork_generation {
            return;
        }
        let mut book = lock(&self.book);
        for start in book.inside(range.start(), range.end()) {
            if let Some(piece) = book.pieces.get_mut(&start) {
                piece.is_outdated |= piece.owners == 0;
            }
        }
    }

    fn follows_mapping(&self) -> bool {
        false
    }

    fn shares_frames(&self) -> bool {
        true
    }
}

/// A driver's refusal in the words of those who pin.
fn refusal(error: DriverError, range: PageRange) -> PinError {
    match error.code {
        code::OUT_OF_MEMORY => PinError::OutOfMemory,
        _ if !residency::is_mapped(range.start(), range.bytes()) => PinError::BadMemory { range },
        code::ALREADY_REGISTERED => PinError::Unsupported {
            what: "registering memory of which the application has registered a part",
            cure: "register all of it, or nothing",
        },
        _ => PinError::Unsupported {
            what: "registering this memory with the GPU",
            cure: "mapped files and memory of devices are copied through a ring instead",
        },
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cuda::model::{Faults, ModelDevice};
    use memferry_sys::Pages;
    use memferry_sys::pages::page_bytes;

    const COUNT: usize = 16;

    /// A registrar over a model, and sixteen pages.
    fn place(faults: Faults) -> (Arc<ModelDevice>, Registrar, Pages) {
        let model = ModelDevice::with_faults(faults);
        let registrar = Registrar::new(model.clone());
        (model, registrar, Pages::new(COUNT * page_bytes()).unwrap())
    }

    fn range(pages: &Pages, from: usize, to: usize) -> PageRange {
        let start = pages.as_ptr() as usize;
        PageRange::between(start + from * page_bytes(), start + to * page_bytes()).unwrap()
    }

    /// Where the piece of each page ends, in pages; 0 for those that are not registered.
    fn ends(registrar: &Registrar, pages: &Pages) -> [usize; COUNT] {
        let start = pages.as_ptr() as u64;
        std::array::from_fn(|page| {
            let end = registrar.piece_end(start + (page * page_bytes()) as u64);
            end.map_or(0, |end| (end - start) as usize / page_bytes())
        })
    }

    #[test]
    fn pins_that_overlap_share_pieces_and_each_piece_goes_with_its_last_pin() {
        let (model, registrar, pages) = place(Faults::default());
        let ranges = [(2, 5), (8, 10), (4, 9), (0, 16), (2, 5)];
        let ranges = ranges.map(|(from, to)| range(&pages, from, to));
        let pin = |range| registrar.pin(range, Access::Write).unwrap();
        let tokens = ranges.map(pin);
        let all = [2, 2, 5, 5, 5, 8, 8, 8, 10, 10, 16, 16, 16, 16, 16, 16];
        assert_eq!(ends(&registrar, &pages), all);
        assert_eq!(model.sightings().registrations, 5);
        let unpin = |index: usize| registrar.unpin(ranges[index], tokens[index]);
        unpin(3);
        let mut left = all;
        left[..2].fill(0);
        left[10..].fill(0);
        assert_eq!(ends(&registrar, &pages), left);
        unpin(2);
        left[5..8].fill(0);
        assert_eq!(ends(&registrar, &pages), left);
        unpin(0);
        assert_eq!(ends(&registrar, &pages), left, "a second pin of the same range is left");
        unpin(4);
        unpin(1);
        assert_eq!(ends(&registrar, &pages), [0; COUNT]);
        assert_eq!(model.sightings().unregistrations, 5);
    }

    #[test]
    fn a_pin_of_which_a_part_is_refused_leaves_nothing_behind() {
        // The second part of the last pin is the fourth registration.
        let faults = Faults { refuses_registrations: Some(4), ..Faults::default() };
        let (model, registrar, pages) = place(faults);
        let kept = [(2, 4), (8, 10)].map(|(from, to)| range(&pages, from, to));
        let tokens = kept.map(|range| registrar.pin(range, Access::Read).unwrap());
        let before = ends(&registrar, &pages);
        let refused = registrar.pin(range(&pages, 0, 16), Access::Read);
        assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
        assert_eq!(ends(&registrar, &pages), before);
        assert_eq!(model.sightings().unregistrations, 1, "the part that was not refused");
        kept.iter().zip(tokens).for_each(|(range, token)| registrar.unpin(*range, token));
        assert_eq!(ends(&registrar, &pages), [0; COUNT]);
        let seen = model.sightings();
        assert_eq!(seen.registrations, seen.unregistrations);
    }

    #[test]
    fn memory_that_is_registered_for_reading_is_pinned_again_only_for_reading() {
        let (_model, registrar, pages) = place(Faults::default());
        let (first, all) = (range(&pages, 0, 4), range(&pages, 0, 8));
        let read_only = Piece {
            end: first.end(),
            users: 1,
            may_be_written: false,
            is_theirs: true,
            owners: 0,
            is_outdated: false,
        };
        lock(&registrar.book).pieces.insert(first.start(), read_only);
        for range in [first, all] {
            let refused = registrar.pin(range, Access::Write);
            assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
            let token = registrar.pin(range, Access::Read).unwrap();
            registrar.unpin(range, token);
        }
        let rest = range(&pages, 4, 8);
        assert!(registrar.pin(rest, Access::Write).is_ok());
    }

    #[test]
    fn what_is_registered_of_memory_that_changed_is_not_taken_for_what_is_there_now() {
        let (_model, registrar, pages) = place(Faults::default());
        let (whole, half) = (range(&pages, 0, 8), range(&pages, 4, 8));
        let token = registrar.pin(whole, Access::Write).unwrap();
        let other = registrar.pin(range(&pages, 8, 10), Access::Write).unwrap();
        registrar.outdate(half);
        for range in [half, range(&pages, 0, 2), range(&pages, 7, 9)] {
            let refused = registrar.pin(range, Access::Read);
            assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
        }
        assert!(registrar.pin(range(&pages, 8, 12), Access::Read).is_ok(), "beside it");
        registrar.unpin(whole, token);
        registrar.unpin(range(&pages, 8, 10), other);
        assert!(registrar.pin(half, Access::Write).is_ok(), "the last who used it is gone");
    }

    #[test]
    fn what_its_owner_has_left_is_outdated_as_other_memory_when_its_mapping_changes() {
        let (_model, registrar, pages) = place(Faults::default());
        let (owned, all) = (range(&pages, 4, 8), range(&pages, 0, 16));
        let owner = registrar.pin_bytes(owned.start(), owned.bytes(), Access::Write).unwrap();
        let cached = registrar.pin(all, Access::Write).unwrap();
        registrar.outdate(owned);
        let again = registrar.pin(owned, Access::Write).expect("its owner says when it goes");
        registrar.unpin(owned, again);
        registrar.unpin(owned, owner);
        registrar.outdate(owned);
        let refused = registrar.pin(owned, Access::Write);
        assert!(matches!(refused, Err(PinError::Unsupported { .. })), "{refused:?}");
        registrar.unpin(all, cached);
        assert!(registrar.pin(owned, Access::Write).is_ok(), "the last who used it is gone");
    }

    #[test]
    fn what_is_pinned_here_is_never_taken_for_what_others_have_pinned() {
        let (model, registrar, pages) = place(Faults::default());
        let (first, second) = (range(&pages, 0, 4), range(&pages, 8, 12));
        let is_theirs =
            |range: PageRange| registrar.is_pinned_by_others(range.start() + 5, range.bytes() - 10);
        model.register(second.start(), second.bytes(), false).unwrap();
        assert!(!is_theirs(first) && is_theirs(second));
        let pin = registrar.pin_bytes(first.start(), first.bytes(), Access::Write).unwrap();
        assert!(!is_theirs(first), "it goes with its pin, and must be kept by one");
        let theirs = registrar.pin_bytes(second.start(), second.bytes(), Access::Write).unwrap();
        assert!(is_theirs(second));
        registrar.unpin(first, pin);
        registrar.unpin(second, theirs);
        assert_eq!(model.registered(), [(second.start(), second.bytes())]);
    }

    #[test]
    fn memory_that_somebody_else_registered_is_used_and_not_unregistered() {
        let (model, registrar, pages) = place(Faults::default());
        let all = range(&pages, 0, 16);
        model.register(all.start(), all.bytes(), false).unwrap();
        let token = registrar.pin(all, Access::Write).unwrap();
        assert_eq!(ends(&registrar, &pages), [16; COUNT]);
        registrar.unpin(all, token);
        assert_eq!(ends(&registrar, &pages), [0; COUNT]);
        let seen = model.sightings();
        assert_eq!((seen.registrations, seen.unregistrations), (1, 0));
    }
}
