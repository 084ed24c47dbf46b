//! The memory of one peer as accesses to its windows reach it: what is mapped here, what system
//! calls reach, whether the peer still lives, and how it is told of a notification.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use memferry_memory::handle::ProcessHandle;
use memferry_sys::cross_memory::{self, Denied};
use memferry_sys::packet_socket::PacketSocket;
use memferry_sys::peer_process;
use memferry_sys::shared_memory::Access;
use memferry_sys::sync::lock;

use super::board::{BoardView, Entry, Name};
use super::lane::Lane;
use crate::connect::reach::Reach;
use crate::connection::ring_doorbell;
use crate::error::{Error, Gone};
use crate::region::imported::Imported;
use crate::region::imported::PeerMapping;
use crate::ring::layout::Memory;
use crate::ring::visit::Visiting;

/// Extents beyond this are looked through for windows that are gone.
const MANY_EXTENTS: usize = 1024;

/// A stretch of a peer's memory that an attached window covers.
#[derive(Debug, Clone, Copy)]
struct Extent {
    start: u64,
    end: u64,
    region: u32,
    window: Name,
}

/// How a page of a peer is reached, as one word of the lookup: an address with these bits in it.
pub(crate) mod page {
    /// It is mapped here, at the address.
    pub(crate) const NEAR: u64 = 1;
    /// System calls reach it, at the address in the peer.
    pub(crate) const CROSS: u64 = 2;
    /// It may be written.
    pub(crate) const WRITABLE: u64 = 4;
    /// The bits that are not address.
    pub(crate) const FLAGS: u64 = 7;
}

/// The memory of a peer.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    /// Its number in the lookup.
    pub(crate) process: ProcessHandle,
    pub(crate) board: Arc<BoardView>,
    pub(crate) lane: Lane,
    pub(crate) pid: u32,
    pub(crate) is_self: bool,
    reach: Reach,
    rings: Memory,
    socket: Option<PacketSocket>,
    alive: Option<OwnedFd>,
    alive_at_ns: AtomicU64,
    imported: Arc<Imported>,
    /// By where they begin, and which window it is.
    extents: Mutex<BTreeMap<(u64, u32), Extent>>,
    gone: OnceLock<Gone>,
}

/// What a peer's memory is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) board: Arc<BoardView>,
    pub(crate) pid: u32,
    pub(crate) is_self: bool,
    pub(crate) reach: Reach,
    pub(crate) rings: Memory,
    pub(crate) socket: Option<PacketSocket>,
    pub(crate) alive: Option<OwnedFd>,
    pub(crate) imported: Arc<Imported>,
}

impl PeerMemory {
    pub(crate) fn new(process: ProcessHandle, parts: Parts) -> Self {
        let Parts { board, pid, is_self, reach, rings, socket, alive, imported } = parts;
        Self {
            process,
            board,
            lane: Lane::default(),
            pid,
            is_self,
            reach,
            rings,
            socket,
            alive,
            alive_at_ns: AtomicU64::new(0),
            imported,
            extents: Mutex::default(),
            gone: OnceLock::new(),
        }
    }

    /// A window is attached: its memory is what the board says. Returns that, and whether anything
    /// else was thought of the memory before, so that translations of it must be forgotten; `None`
    /// if the window is not open.
    pub(crate) fn cover(&self, window: Name) -> Option<(Entry, bool)> {
        let mut extents = lock(&self.extents);
        // With the lock: whoever attaches what came after this window finds the board changed too.
        let entry = self.board.read(window)?;
        let (start, end) = (entry.address, entry.address + entry.length);
        if extents.len() > MANY_EXTENTS {
            extents.retain(|_, extent| self.board.read(extent.window).is_some());
        }
        let is_known = extents.range(..=(start, u32::MAX)).any(|(_, extent)| {
            extent.start <= start && extent.end >= end && extent.region == entry.region
        });
        // What overlaps and lies in another region is of a window that is gone.
        extents.retain(|_, extent| {
            extent.end <= start || extent.start >= end || extent.region == entry.region
        });
        let extent = Extent { start, end, region: entry.region, window };
        extents.insert((start, window.number), extent);
        Some((entry, !is_known))
    }

    /// How the pages of a line are reached, and what must be kept while they are.
    pub(crate) fn reach_pages(&self, first: u64, entries: &mut [u64]) -> Vec<Arc<PeerMapping>> {
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        let last = first + entries.len() as u64 * page_bytes;
        let extents = lock(&self.extents);
        let touching: Vec<Extent> = extents
            .range(..(last, 0))
            .map(|(_, extent)| *extent)
            .filter(|extent| extent.end > first)
            .collect();
        drop(extents);
        let mut kept: Vec<Arc<PeerMapping>> = Vec::new();
        for (index, entry) in entries.iter_mut().enumerate() {
            let address = first + index as u64 * page_bytes;
            // A window may begin or end inside a page.
            let covers =
                |extent: &&Extent| extent.start < address + page_bytes && extent.end > address;
            *entry = match touching.iter().find(covers) {
                None => 0,
                Some(extent) => self.reach_page(address, extent.region, &mut kept),
            };
        }
        kept
    }

    fn reach_page(&self, address: u64, region: u32, kept: &mut Vec<Arc<PeerMapping>>) -> u64 {
        if self.is_self {
            return address | page::NEAR | page::WRITABLE;
        }
        if let Some((mapping, offset, access)) = self.imported.page(region, address) {
            let at = mapping.as_ptr() as u64 + offset;
            debug_assert!(at & page::FLAGS == 0, "regions begin on pages");
            if !kept.iter().any(|known| Arc::ptr_eq(known, &mapping)) {
                kept.push(mapping);
            }
            return at | page::NEAR | if access == Access::Write { page::WRITABLE } else { 0 };
        }
        let writable = if self.reach.write { page::WRITABLE } else { 0 };
        if self.reach.read || self.reach.write { address | page::CROSS | writable } else { 0 }
    }

    /// Whether anything leads to memory in a region (0: in none). One that is shareable may be
    /// mapped a little later.
    pub(crate) fn can_reach(&self, region: u32) -> bool {
        self.is_self || region != 0 || self.reach.read || self.reach.write
    }

    /// What to say where no way leads to it.
    pub(crate) fn unreachable(&self) -> Error {
        match self.reach.denied {
            Some(Denied::Ended) => self.without_memory(),
            denied => Error::Unreachable(denied),
        }
    }

    /// What to say of a process through which the kernel found no memory. It is most likely about to end: its
    /// memory goes before its descriptors do, and that may take long. But one whose first thread alone has ended
    /// looks the same at first, and lives on. Those of its threads that have memory still may be about to end.
    #[cold]
    pub(crate) fn without_memory(&self) -> Error {
        const LONGEST: Duration = Duration::from_secs(1);
        let deadline = Instant::now() + LONGEST;
        loop {
            match self.check_now() {
                Err(gone) => return gone,
                Ok(()) if !cross_memory::has_memory(self.pid) => {
                    return Error::PeerGone(Gone::Ended);
                }
                Ok(()) if Instant::now() > deadline => {
                    return Error::Unreachable(Some(Denied::Ended));
                }
                Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// The extents that lie in a region, which is mapped from now on or is gone.
    pub(crate) fn extents_of(&self, region: u32) -> Vec<(u64, u64)> {
        let extents = lock(&self.extents);
        let inside = extents.values().filter(|extent| extent.region == region);
        inside.map(|extent| (extent.start, extent.end - extent.start)).collect()
    }

    /// Says that a window is being accessed, for as long as the value lives. Ask the board after
    /// this: the owner closes the window first and then looks for visits.
    #[inline]
    pub(crate) fn visit(&self, window: Name) -> Visit<'_> {
        let visiting = self.rings.own_visits();
        visiting.begin(window.number);
        Visit(visiting)
    }

    /// Tells the owner that a variable was set, if it sleeps.
    pub(crate) fn ring(&self) {
        ring_doorbell(&self.rings, self.socket.as_ref());
    }

    /// Whether the owner has ended the connection, as a visitor finds after it has said that it
    /// visits.
    #[inline]
    pub(crate) fn has_owner_ended(&self) -> bool {
        !self.is_self && self.rings.has_other_ended()
    }

    /// The connection has ended.
    pub(crate) fn retire(&self, gone: Gone) {
        let _ = self.gone.set(gone);
    }

    /// An error if the peer is gone. Looked at by the system now and then: a process that ended a
    /// moment ago is noticed soon enough.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Error> {
        const MOMENT_NS: u64 = 10_000_000;
        if let Some(gone) = self.gone.get() {
            return Err(Error::PeerGone(gone.clone()));
        }
        let now = memferry_sys::clock::coarse_ns();
        if now.saturating_sub(self.alive_at_ns.load(Ordering::Relaxed)) < MOMENT_NS {
            return Ok(());
        }
        self.check_now()?;
        self.alive_at_ns.store(now, Ordering::Relaxed);
        Ok(())
    }

    /// The same, asked of the system.
    #[cold]
    pub(crate) fn check_now(&self) -> Result<(), Error> {
        if let Some(gone) = self.gone.get() {
            return Err(Error::PeerGone(gone.clone()));
        }
        if self.is_self {
            return Ok(());
        }
        let is_alive = |socket: &PacketSocket| {
            peer_process::is_alive(self.alive.as_ref().map(AsFd::as_fd), socket.as_fd())
        };
        let gone = match &self.socket {
            _ if self.rings.has_other_ended() => Gone::Closed,
            Some(socket) if !is_alive(socket) => Gone::Ended,
            _ => return Ok(()),
        };
        // From now on nobody takes it for alive because it was a moment ago.
        self.retire(gone.clone());
        Err(Error::PeerGone(gone))
    }
}

/// A window is being accessed.
#[derive(Debug)]
pub(crate) struct Visit<'a>(&'a Visiting);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
