//! The memory of one peer for accesses to its windows: what is mapped, what system calls access,
//! whether the peer is alive, and the doorbell of notifications.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::LineRun;
use memferry_sys::cross_memory::{self, CrossMemoryDenied};
use memferry_sys::peer_process;
use memferry_sys::seqpacket::SeqPacketSocket;
use memferry_sys::shared_memory::Protection;
use memferry_sys::sync::lock;

use super::rma_queue::RmaQueue;
use super::window_table::{WindowId, WindowInfo, WindowTableView};
use crate::connect::access_probe::PeerAccess;
use crate::connection::ring_doorbell;
use crate::error::{Disconnect, DisconnectReason, Error, PeerName};
use crate::region::imported::ImportedRegions;
use crate::region::imported::PeerMapping;
use crate::ring::layout::ConnectionMemory;
use crate::ring::window_gate::AccessFlag;

/// Above this number, extents of withdrawn windows are removed.
const EXTENT_SWEEP_LIMIT: usize = 1024;

/// A range of a peer's memory that an attached window covers.
#[derive(Debug, Clone, Copy)]
struct AttachedExtent {
    start: u64,
    end: u64,
    region: u32,
    window: WindowId,
}

/// The translation of a page of a peer, as one word of the lookup: an address and these bits.
pub(crate) mod page {
    /// The page is mapped in this process, at the address.
    pub(crate) const MAPPED: u64 = 1;
    /// System calls access the page, at the address in the peer.
    pub(crate) const CROSS_MEMORY: u64 = 2;
    /// The page may be written.
    pub(crate) const WRITABLE: u64 = 4;
    /// The bits that are not part of the address.
    pub(crate) const FLAGS: u64 = 7;
}

/// How the memory of a window is reached.
#[derive(Debug)]
pub(super) struct WindowReach {
    /// The address of the first byte: in this process if it is mapped, else in the peer.
    pub(super) address: u64,
    /// See [`page`].
    pub(super) flags: u64,
    /// What keeps it mapped.
    pub(super) mapping: Option<Arc<PeerMapping>>,
}

/// The memory of a peer.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    /// The peer's number in the lookup.
    pub(crate) process: ProcessHandle,
    pub(crate) windows: Arc<WindowTableView>,
    pub(crate) queue: RmaQueue,
    pub(crate) pid: u32,
    name: PeerName,
    pub(crate) is_self: bool,
    access: PeerAccess,
    connection_memory: ConnectionMemory,
    socket: Option<SeqPacketSocket>,
    process_fd: Option<OwnedFd>,
    alive_at_ns: AtomicU64,
    imported: Arc<ImportedRegions>,
    /// By start address and window number.
    extents: Mutex<BTreeMap<(u64, u32), AttachedExtent>>,
    disconnected: OnceLock<DisconnectReason>,
}

/// The parts of a peer's memory.
#[derive(Debug)]
pub(crate) struct PeerMemoryParts {
    pub(crate) windows: Arc<WindowTableView>,
    pub(crate) pid: u32,
    pub(crate) name: PeerName,
    pub(crate) is_self: bool,
    pub(crate) access: PeerAccess,
    pub(crate) connection_memory: ConnectionMemory,
    pub(crate) socket: Option<SeqPacketSocket>,
    pub(crate) process_fd: Option<OwnedFd>,
    pub(crate) imported: Arc<ImportedRegions>,
}

impl PeerMemory {
    pub(crate) fn new(process: ProcessHandle, parts: PeerMemoryParts) -> Self {
        let PeerMemoryParts {
            windows,
            pid,
            name,
            is_self,
            access,
            connection_memory,
            socket,
            process_fd,
            imported,
        } = parts;
        Self {
            process,
            windows,
            queue: RmaQueue::default(),
            pid,
            name,
            is_self,
            access,
            connection_memory,
            socket,
            process_fd,
            alive_at_ns: AtomicU64::new(0),
            imported,
            extents: Mutex::default(),
            disconnected: OnceLock::new(),
        }
    }

    /// Records the memory of an attached window, as the window table has it. Returns its record,
    /// and whether translations of that memory must be invalidated because it was not recorded
    /// before; `None` if the window is not open.
    pub(crate) fn attach(&self, window: WindowId) -> Option<(WindowInfo, bool)> {
        let mut extents = lock(&self.extents);
        // With the lock: a thread that attaches a later window at the same address also finds the
        // table changed.
        let info = self.windows.read(window)?;
        let (start, end) = (info.address, info.address + info.length);
        if extents.len() > EXTENT_SWEEP_LIMIT {
            extents.retain(|_, extent| self.windows.read(extent.window).is_some());
        }
        let is_known = extents.range(..=(start, u32::MAX)).any(|(_, extent)| {
            extent.start <= start && extent.end >= end && extent.region == info.region
        });
        // An overlapping extent in another region belongs to a withdrawn window.
        extents.retain(|_, extent| {
            extent.end <= start || extent.start >= end || extent.region == info.region
        });
        let extent = AttachedExtent { start, end, region: info.region, window };
        extents.insert((start, window.index), extent);
        Some((info, !is_known))
    }

    /// The extents that overlap a range.
    fn extents_over(&self, first: u64, last: u64) -> Vec<AttachedExtent> {
        let extents = lock(&self.extents);
        let before_end = extents.range(..(last, 0)).map(|(_, extent)| *extent);
        before_end.filter(|extent| extent.end > first).collect()
    }

    /// Translates a line of which one region, or none, covers consecutive pages: as a run, and with
    /// the mapping that must be kept. `None` if the pages have to be translated one by one.
    pub(crate) fn translate_run(
        &self,
        first: u64,
        pages: usize,
    ) -> Option<(LineRun, Option<Arc<PeerMapping>>)> {
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        let last = first + pages as u64 * page_bytes;
        let touching = self.extents_over(first, last);
        let region = touching.first()?.region;
        let mut covered = touching[0].start..touching[0].start;
        for extent in &touching {
            // In the order of their starts: a gap of whole pages ends the run.
            let gap_end = extent.start & !(page_bytes - 1);
            if extent.region != region || gap_end > covered.end.next_multiple_of(page_bytes) {
                return None;
            }
            covered.end = covered.end.max(extent.end);
        }
        // A window may begin or end inside a page.
        let from = (covered.start.max(first) - first) / page_bytes;
        let to = (covered.end.min(last) - first).div_ceil(page_bytes);
        let mut mappings = Vec::new();
        let mut word = |page| self.translate_page(first + page * page_bytes, region, &mut mappings);
        let (entry, end) = (word(from), word(to - 1));
        // Both ends in one mapping: all of it is.
        let is_run = entry != 0 && end == entry + (to - 1 - from) * page_bytes;
        let run = LineRun { first: entry, step: page_bytes, pages: from as usize..to as usize };
        (is_run && mappings.len() <= 1).then(|| (run, mappings.pop()))
    }

    /// Translates the pages of a line, and returns the mappings that must be kept.
    pub(crate) fn translate_pages(&self, first: u64, entries: &mut [u64]) -> Vec<Arc<PeerMapping>> {
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        let touching = self.extents_over(first, first + entries.len() as u64 * page_bytes);
        let mut mappings: Vec<Arc<PeerMapping>> = Vec::new();
        for (index, entry) in entries.iter_mut().enumerate() {
            let address = first + index as u64 * page_bytes;
            // A window may begin or end inside a page.
            let covers = |extent: &&AttachedExtent| {
                extent.start < address + page_bytes && extent.end > address
            };
            *entry = match touching.iter().find(covers) {
                None => 0,
                Some(extent) => self.translate_page(address, extent.region, &mut mappings),
            };
        }
        mappings
    }

    fn translate_page(
        &self,
        address: u64,
        region: u32,
        mappings: &mut Vec<Arc<PeerMapping>>,
    ) -> u64 {
        if self.is_self {
            return address | page::MAPPED | page::WRITABLE;
        }
        if let Some((mapping, offset, access)) = self.imported.page(region, address) {
            let at = mapping.as_ptr() as u64 + offset;
            debug_assert!(at & page::FLAGS == 0, "regions are page-aligned");
            if !mappings.iter().any(|known| Arc::ptr_eq(known, &mapping)) {
                mappings.push(mapping);
            }
            return at
                | page::MAPPED
                | if access == Protection::ReadWrite { page::WRITABLE } else { 0 };
        }
        let writable = if self.access.write { page::WRITABLE } else { 0 };
        if self.access.read || self.access.write {
            address | page::CROSS_MEMORY | writable
        } else {
            0
        }
    }

    /// How the memory of a window is reached; `None` if it is not, or not as a whole.
    pub(super) fn reach(&self, info: &WindowInfo) -> Option<WindowReach> {
        let (region, address, length) = (info.region, info.address, info.length);
        if self.is_self {
            let flags = page::MAPPED | page::WRITABLE;
            return Some(WindowReach { address, flags, mapping: None });
        }
        if let Some((mapping, offset, access)) = self.imported.range(region, address, length) {
            let writable = if access == Protection::ReadWrite { page::WRITABLE } else { 0 };
            let (address, flags) = (mapping.as_ptr() as u64 + offset, page::MAPPED | writable);
            return Some(WindowReach { address, flags, mapping: Some(mapping) });
        }
        let writable = if self.access.write { page::WRITABLE } else { 0 };
        let flags = page::CROSS_MEMORY | writable;
        let is_permitted = self.access.read || self.access.write;
        is_permitted.then_some(WindowReach { address, flags, mapping: None })
    }

    /// Returns whether memory in a region (0: in none) can be accessed. A shareable region may be
    /// mapped a little later.
    pub(crate) fn can_reach(&self, region: u32) -> bool {
        self.is_self || region != 0 || self.access.read || self.access.write
    }

    /// The error of inaccessible memory.
    pub(crate) fn unreachable_error(&self) -> Error {
        match self.access.denied {
            Some(CrossMemoryDenied::Exited) => self.no_memory_error(),
            denied => Error::Unreachable(denied),
        }
    }

    /// The error for a process in which the kernel found no memory. It is most likely exiting:
    /// memory is freed before descriptors are closed, and that may take long. A process whose main
    /// thread alone has exited looks the same at first, but continues. Its remaining threads may be
    /// exiting too.
    #[cold]
    pub(crate) fn no_memory_error(&self) -> Error {
        const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
        let deadline = Instant::now() + EXIT_TIMEOUT;
        loop {
            match self.check_now() {
                Err(reason) => return reason,
                Ok(()) if !cross_memory::has_memory(self.pid) => {
                    return self.disconnect_error(DisconnectReason::Exited);
                }
                Ok(()) if Instant::now() > deadline => {
                    return Error::Unreachable(Some(CrossMemoryDenied::Exited));
                }
                Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// The extents in a region that was mapped or freed.
    pub(crate) fn extents_of(&self, region: u32) -> Vec<(u64, u64)> {
        let extents = lock(&self.extents);
        let inside = extents.values().filter(|extent| extent.region == region);
        inside.map(|extent| (extent.start, extent.end - extent.start)).collect()
    }

    /// Publishes an access to a window, until the guard is dropped. The caller must read the window
    /// table after this: the owner closes the window first and then checks for accesses.
    #[inline]
    pub(crate) fn begin_access(&self, window: WindowId) -> AccessGuard<'_> {
        let access = self.connection_memory.own_access();
        access.begin(window.index);
        AccessGuard(access)
    }

    /// Wakes the owner after a variable was set, if it sleeps.
    pub(crate) fn ring_doorbell(&self) {
        ring_doorbell(&self.connection_memory, self.socket.as_ref());
    }

    /// Returns whether the owner has closed the connection. Called after the access was published.
    #[inline]
    pub(crate) fn is_owner_closed(&self) -> bool {
        !self.is_self && self.connection_memory.is_peer_closed()
    }

    /// Records that the connection has ended.
    pub(crate) fn mark_disconnected(&self, reason: DisconnectReason) {
        let _ = self.disconnected.set(reason);
    }

    /// Fails if the peer is disconnected. Makes a system call at most every 10 ms, so an exit is
    /// detected that late.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Error> {
        const ALIVE_RECHECK_NS: u64 = 10_000_000;
        if let Some(reason) = self.disconnected.get() {
            return Err(self.disconnect_error(reason.clone()));
        }
        let now = memferry_sys::clock::coarse_ns();
        if now.saturating_sub(self.alive_at_ns.load(Ordering::Relaxed)) < ALIVE_RECHECK_NS {
            return Ok(());
        }
        self.check_now()?;
        self.alive_at_ns.store(now, Ordering::Relaxed);
        Ok(())
    }

    /// As [`PeerMemory::check`], always with the system call.
    #[cold]
    pub(crate) fn check_now(&self) -> Result<(), Error> {
        if let Some(reason) = self.disconnected.get() {
            return Err(self.disconnect_error(reason.clone()));
        }
        if self.is_self {
            return Ok(());
        }
        let is_alive = |socket: &SeqPacketSocket| {
            peer_process::is_alive(self.process_fd.as_ref().map(AsFd::as_fd), socket.as_fd())
        };
        let reason = match &self.socket {
            _ if self.connection_memory.is_peer_closed() => DisconnectReason::Closed,
            Some(socket) if !is_alive(socket) => DisconnectReason::Exited,
            _ => return Ok(()),
        };
        // Further checks fail without waiting for the recheck interval.
        self.mark_disconnected(reason.clone());
        Err(self.disconnect_error(reason))
    }

    #[cold]
    pub(crate) fn disconnect_error(&self, reason: DisconnectReason) -> Error {
        Error::PeerDisconnected(Disconnect::new(self.name.clone(), reason))
    }
}

/// A published access to a window.
#[derive(Debug)]
pub(crate) struct AccessGuard<'a>(&'a AccessFlag);

impl Drop for AccessGuard<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
