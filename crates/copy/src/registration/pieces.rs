//! Pinning a long transfer piece by piece, so that the engine works on the first bytes while later
//! pages are still being pinned.
//!
//! Source and target are pinned independently of each other, each in pieces that end with a page:
//! otherwise pieces of a shifted copy would share pages, and the cache would pin these again and
//! again. Pieces grow, and one that the cache has in a larger region lasts as long as that region.

use std::sync::Arc;

use memferry_engine::MemoryKind;
use memferry_engine::completion::Order;
use memferry_engine::contract::{Channel, Pins};
use memferry_memory::pin_cache::Lease;
use memferry_memory::pinning::{Access, ChunkSchedule, PageRange};
use memferry_sys::pages::page_bytes;

use super::{Registration, Unpinned};
use crate::parts::Cut;

/// Up to this many pages it takes no longer to pin everything than to begin.
const AT_ONCE_PAGES: usize = 8;

/// The most pages of a piece.
const MOST_PAGES: usize = 1024;

/// The orders of a transfer in parts. Each step pins what it needs and claims what it hands out:
/// whoever takes the orders one by one, submitting each, lets the engine work meanwhile.
#[derive(Debug)]
pub(crate) struct PinnedPieces<'a> {
    registration: &'a Registration,
    cut: Cut<'a>,
    channel: Arc<dyn Channel>,
    self_driving: bool,
    source: Side,
    target: Side,
    /// The pinned notification variable.
    variable: Option<Arc<Lease>>,
    /// Where the next order begins, and where the chunk ends that was claimed for it.
    at: u64,
    claimed: u64,
}

impl<'a> PinnedPieces<'a> {
    /// # Safety
    /// As for [`Ferry::start`](crate::Ferry::start), for the orders; nobody else may claim chunks
    /// while there are more to come.
    pub(crate) unsafe fn new(
        registration: &'a Registration,
        cut: Cut<'a>,
        channel: Arc<dyn Channel>,
        variable: Option<Arc<Lease>>,
    ) -> Self {
        let request = cut.request;
        let needed = |kind, access: Option<Access>| access.filter(|_| kind == MemoryKind::Host);
        let source = needed(request.source_memory, request.operation.source_access());
        let target = needed(request.target_memory, Some(request.operation.target_access()));
        Self {
            registration,
            cut,
            channel,
            self_driving: cut.capabilities.self_driving,
            source: Side::new(request.source, request.length, source),
            target: Side::new(request.target, request.length, target),
            variable,
            at: 0,
            claimed: 0,
        }
    }

    /// Pins what comes next of both sides; says up to where it is pinned.
    fn pin(&mut self) -> Result<u64, Unpinned> {
        let source = self.source.cover(self.at, self.registration)?;
        let target = self.target.cover(self.at, self.registration)?;
        Ok(source.min(target))
    }
}

impl Iterator for PinnedPieces<'_> {
    type Item = Order;

    fn next(&mut self) -> Option<Order> {
        if self.at == self.claimed {
            let work = self.cut.completion.work().expect("parts belong to chunked work");
            let chunk = work.claim_front()?;
            (self.at, self.claimed) = (chunk.offset, chunk.offset + chunk.length);
        }
        let (from, pinned) = (self.at, self.pin());
        match pinned {
            Ok(pinned) => {
                self.at = pinned.min(self.claimed);
                assert!(self.at > from, "a pinned piece has bytes");
                let variable = self.variable.clone();
                let pins =
                    Pins { source: self.source.lease(), target: self.target.lease(), variable };
                let mut parts = Vec::new();
                // SAFETY: promised to `new`; the range is in the claimed chunk, and `at` moved on.
                unsafe { self.cut.extend(&mut parts, from..self.at, Some(&Arc::new(pins))) };
                Some(Order::many(self.channel.clone(), self.self_driving, parts))
            }
            Err(unpinned) => {
                // The rest of the chunk, so that a pinner which refuses everything is not asked for
                // every page.
                self.at = self.claimed;
                // SAFETY: as above.
                let part = unsafe { self.cut.part(from, self.claimed - from) };
                Some(self.registration.without_pins(part, unpinned))
            }
        }
    }
}

/// The source or the target of a transfer, and how far it is pinned.
#[derive(Debug)]
struct Side {
    address: u64,
    length: u64,
    /// `None`: it need not be pinned.
    access: Option<Access>,
    /// What holds the bytes before `ready`, as far as they are still to come.
    lease: Option<Arc<Lease>>,
    ready: u64,
    next_pages: usize,
}

impl Side {
    fn new(address: u64, length: u64, access: Option<Access>) -> Self {
        let at_once = length <= (AT_ONCE_PAGES * page_bytes()) as u64;
        let next_pages = if at_once { AT_ONCE_PAGES + 1 } else { 1 };
        Self { address, length, access, lease: None, ready: 0, next_pages }
    }

    fn lease(&self) -> Option<Arc<Lease>> {
        self.lease.clone()
    }

    /// Sees to it that the byte at `offset` is pinned. Returns up to where it and those behind it
    /// are.
    fn cover(&mut self, offset: u64, registration: &Registration) -> Result<u64, Unpinned> {
        let Some(access) = self.access else { return Ok(self.length) };
        if self.lease.is_none() || offset >= self.ready {
            self.lease = None;
            let (start, length) = (self.address + offset, self.piece_end(offset) - offset);
            let lease = match registration.pin(start, length, access) {
                // What lies before a hole can be had without it.
                Err(Unpinned::Missing { address }) if address > start => {
                    registration.pin(start, address - start, access)?
                }
                outcome => outcome?,
            };
            self.ready = (lease.range().end() as u64 - self.address).min(self.length);
            self.next_pages = (2 * self.next_pages).min(MOST_PAGES);
            self.lease = Some(Arc::new(lease));
        }
        Ok(self.ready)
    }

    /// Where the next piece ends.
    fn piece_end(&self, offset: u64) -> u64 {
        let (first_pages, most_pages) = (self.next_pages, MOST_PAGES);
        let schedule = ChunkSchedule::Progressive { first_pages, most_pages };
        let (start, length) = (self.address + offset, self.length - offset);
        let rest = PageRange::covering(start as usize, length as usize).ok();
        let piece = rest.and_then(|rest| schedule.chunks(rest).next());
        // What is no range of pages at all is left to the pinner to refuse.
        piece.map_or(self.length, |piece| (piece.end() as u64 - self.address).min(self.length))
    }
}
