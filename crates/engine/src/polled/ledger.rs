//! A pinner that pins nothing and writes everything down, for an engine that looks things up.
//!
//! It refuses what a device's driver would refuse: memory that is not mapped, more than a limit, and,
//! if so told, a call now and then. Its pins are named by rising numbers, so that one which is over
//! is never taken for another.

use std::collections::HashMap;
use std::sync::Mutex;

use memferry_memory::pinning::{Access, PageRange, PinError, Pinner, Token};
use memferry_sys::residency;
use memferry_sys::sync::lock;

use crate::contract::{Descriptor, Operation, PinnedAt};

/// The kernel's number for "busy".
const EBUSY: i32 = 16;

/// What is pinned, and for what.
#[derive(Debug)]
pub struct PinLedger {
    book: Mutex<Book>,
    most_bytes: usize,
    fails_every: Option<u64>,
}

#[derive(Debug, Default)]
struct Book {
    pinned: HashMap<u64, (PageRange, Access)>,
    pinned_bytes: usize,
    asked: u64,
    counts: LedgerCounts,
}

/// What a ledger has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Pins that were made.
    pub pins: u64,
    /// Pins that are over.
    pub unpins: u64,
    /// Pins that were refused.
    pub refused: u64,
    /// Descriptors of which something was not pinned when they began.
    pub unpinned_descriptors: u64,
    /// Descriptors of which something was unpinned while they were carried out. This is the worst
    /// that can happen to a device.
    pub torn_descriptors: u64,
    /// Ends of pins that never began, or that began with another range.
    pub wrong_unpins: u64,
}

impl PinLedger {
    /// An empty ledger.
    pub fn new() -> Self {
        Self { book: Mutex::default(), most_bytes: usize::MAX, fails_every: None }
    }

    /// Refuses to have more than this pinned at a time. Overlapping pins count twice.
    pub fn limit(mut self, most_bytes: usize) -> Self {
        self.most_bytes = most_bytes;
        self
    }

    /// Refuses one pin in so many, for no reason.
    pub fn failing_every(mut self, calls: u64) -> Self {
        self.fails_every = Some(calls);
        self
    }

    /// What it has seen so far.
    pub fn counts(&self) -> LedgerCounts {
        lock(&self.book).counts
    }

    /// How much is pinned now.
    pub fn pinned_bytes(&self) -> usize {
        lock(&self.book).pinned_bytes
    }

    /// What is not pinned of a descriptor's memory, if anything is not.
    pub(super) fn objection(&self, descriptor: &Descriptor) -> Option<&'static str> {
        let mut book = lock(&self.book);
        let objection = book.objection(descriptor);
        book.counts.unpinned_descriptors += u64::from(objection.is_some());
        objection
    }

    /// Looks once more when the bytes were moved.
    pub(super) fn count_if_gone(&self, descriptor: &Descriptor) {
        let mut book = lock(&self.book);
        let gone = book.objection(descriptor).is_some();
        book.counts.torn_descriptors += u64::from(gone);
    }
}

impl Default for PinLedger {
    fn default() -> Self {
        Self::new()
    }
}

impl Book {
    fn objection(&self, descriptor: &Descriptor) -> Option<&'static str> {
        let holds = |place: Option<PinnedAt>, needed: Access| {
            place.is_some_and(|place| {
                let pin = self.pinned.get(&place.token.0);
                pin.is_some_and(|(range, access)| *range == place.range && *access >= needed)
            })
        };
        // Not by the rules of those who pin: a mistake there shall be seen here.
        let (reads_source, written) = match descriptor.operation() {
            Operation::Copy | Operation::Move => (true, Access::Write),
            Operation::Fill => (false, Access::Write),
            Operation::Compare => (true, Access::Read),
        };
        if descriptor.length() == 0 {
            return None;
        }
        if reads_source && !holds(descriptor.pinned_source(), Access::Read) {
            return Some("the source is not pinned");
        }
        (!holds(descriptor.pinned_target(), written)).then_some("the target is not pinned")
    }
}

impl Pinner for PinLedger {
    fn name(&self) -> &'static str {
        "ledger"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<Token, PinError> {
        let mut book = lock(&self.book);
        book.asked += 1;
        let failing = self.fails_every.is_some_and(|every| book.asked.is_multiple_of(every));
        let outcome = if failing {
            Err(PinError::Refused { what: "pinning on a bad day", code: EBUSY })
        } else if !residency::is_mapped(range.start(), range.bytes()) {
            Err(PinError::BadMemory { range })
        } else if book.pinned_bytes + range.bytes() > self.most_bytes {
            Err(PinError::MemlockLimit {
                limit_bytes: self.most_bytes as u64,
                locked_bytes: book.pinned_bytes as u64,
                asked_bytes: range.bytes() as u64,
            })
        } else {
            Ok(())
        };
        if let Err(error) = outcome {
            book.counts.refused += 1;
            return Err(error);
        }
        book.counts.pins += 1;
        book.pinned_bytes += range.bytes();
        let token = book.counts.pins;
        book.pinned.insert(token, (range, access));
        Ok(Token(token))
    }

    fn unpin(&self, range: PageRange, token: Token) {
        let mut book = lock(&self.book);
        book.counts.unpins += 1;
        match book.pinned.remove(&token.0) {
            Some((pinned, _)) if pinned == range => book.pinned_bytes -= range.bytes(),
            _ => book.counts.wrong_unpins += 1,
        }
    }

    fn follows_mapping(&self) -> bool {
        false
    }
}
