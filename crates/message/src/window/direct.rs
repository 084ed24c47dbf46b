//! The direct way to a window: where its memory is follows from where it begins. Memory of a
//! shareable region is mapped here as a whole; other memory is at its owner's address, for system
//! calls. So no page has to be looked up.
//!
//! What was found out is remembered for each window, under the right to execute accesses to the peer
//! ([`RmaQueueGuard`](super::rma_queue::RmaQueueGuard)), so that an access takes no lock for it.

use std::collections::HashMap;
use std::sync::Arc;

#[cfg(doc)]
use super::peer_memory::page;
use super::peer_memory::{PeerMemory, WindowReach};
use super::rma::WaitMode;
use super::translation_backend::populate;
use super::window_table::{WindowId, WindowInfo};
use crate::region::imported::PeerMapping;

/// The largest mapping or window that is accessed directly. The page tables of a larger one could
/// take more than 32 MiB, which the lookup limits to what is in use.
const MAX_DIRECT_BYTES: u64 = 16 << 30;

/// Memory is met in chunks: at its first access, the page tables of a mapped chunk are filled.
const CHUNK_BYTES: u64 = 256 << 10;

/// The number of windows that are remembered. Others are found again at their next access.
const MAX_WINDOWS: usize = 1024;

/// Where bytes of a window are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DirectPlace {
    /// Here: flags as in [`page`], and the address of the first byte.
    Found { flags: u64, address: u64 },
    /// In memory of the peer that was not met before: it may not be resident, and a call that only
    /// posts an access must not wait for it.
    NotMet,
    /// They have to be looked up.
    Unknown,
}

/// The windows of one peer that are accessed directly.
#[derive(Debug, Default)]
pub(crate) struct DirectWindows {
    /// The one that was accessed last.
    latest: Option<DirectWindow>,
    /// By the number of the window.
    others: HashMap<u32, DirectWindow>,
}

/// A window that is accessed directly.
#[derive(Debug)]
struct DirectWindow {
    id: WindowId,
    /// Its record when this was made. The owner may write another one at any time: every access
    /// compares them, and no address is computed from a record that was not checked here.
    info: WindowInfo,
    /// The address of the window's first byte: in this process, or in the peer.
    address: u64,
    flags: u64,
    /// `None` for memory that is not mapped here by this library.
    mapping: Option<Arc<PeerMapping>>,
    /// The address of the first chunk: where the mapping begins, or the window.
    base: u64,
    /// One bit for each chunk, set once it was met.
    met: Vec<u64>,
}

impl DirectWindows {
    /// The place of bytes of an open window, of which `info` is the record.
    #[inline]
    pub(super) fn place(
        &mut self,
        peer: &PeerMemory,
        (id, info): (WindowId, &WindowInfo),
        (offset, length): (u64, usize),
        wait_mode: WaitMode,
    ) -> DirectPlace {
        let is_known = |window: &DirectWindow| window.id == id && window.info == *info;
        if !self.latest.as_ref().is_some_and(is_known) && self.find(peer, id, info).is_none() {
            return DirectPlace::Unknown;
        }
        match &mut self.latest {
            Some(window) => window.place(offset, length, wait_mode),
            None => DirectPlace::Unknown,
        }
    }

    /// Makes a window the latest. `None` if it is not within reach, or too large.
    #[cold]
    fn find(&mut self, peer: &PeerMemory, id: WindowId, info: &WindowInfo) -> Option<()> {
        let known = self.others.remove(&id.index);
        let window = match known.filter(|window| window.id == id && window.info == *info) {
            Some(window) => window,
            None => DirectWindow::new(peer, id, info)?,
        };
        if self.others.len() >= MAX_WINDOWS {
            self.others.clear();
        }
        if let Some(before) = self.latest.replace(window)
            && before.id.index != id.index
        {
            self.others.insert(before.id.index, before);
        }
        Some(())
    }

    /// Forgets windows in a region that its owner has shared or unmapped.
    pub(super) fn forget_region(&mut self, region: u32) {
        self.latest = self.latest.take().filter(|window| window.info.region != region);
        self.others.retain(|_, window| window.info.region != region);
    }
}

impl DirectWindow {
    fn new(peer: &PeerMemory, id: WindowId, info: &WindowInfo) -> Option<Self> {
        let WindowReach { address, flags, mapping } = peer.reach(info)?;
        let (base, bytes) = match &mapping {
            Some(mapping) => (mapping.as_ptr() as u64, mapping.len() as u64),
            None => (address, info.length),
        };
        if bytes > MAX_DIRECT_BYTES || address.checked_add(info.length).is_none() {
            return None;
        }
        let met = vec![0; bytes.div_ceil(CHUNK_BYTES).div_ceil(64) as usize];
        Some(Self { id, info: *info, address, flags, mapping, base, met })
    }

    #[inline]
    fn place(&mut self, offset: u64, length: usize, wait_mode: WaitMode) -> DirectPlace {
        // The caller checks the bounds again when the access is published, with an error for the
        // user. Here they keep every address inside of the window.
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= self.info.length);
        if !inside || length == 0 {
            return DirectPlace::Unknown;
        }
        let address = self.address + offset;
        let first = (address - self.base) / CHUNK_BYTES;
        let last = (address + length as u64 - 1 - self.base) / CHUNK_BYTES;
        for chunk in first..=last {
            if self.met[chunk as usize / 64] & 1 << (chunk % 64) == 0 {
                if self.mapping.is_none() && wait_mode == WaitMode::Posting {
                    return DirectPlace::NotMet;
                }
                self.meet(chunk);
            }
        }
        DirectPlace::Found { flags: self.flags, address }
    }

    /// The first access to a chunk.
    #[cold]
    fn meet(&mut self, chunk: u64) {
        self.met[chunk as usize / 64] |= 1 << (chunk % 64);
        if let Some(mapping) = &self.mapping {
            let start = (chunk * CHUNK_BYTES) as usize;
            let length = (CHUNK_BYTES as usize).min(mapping.len() - start);
            populate(mapping.as_ptr() as usize + start, length);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Rights;
    use super::super::peer_memory::page;
    use super::*;

    const ID: WindowId = WindowId { index: 3, generation: 1 };

    /// A window that begins inside a chunk and is reached by system calls.
    fn window(length: u64) -> DirectWindow {
        let address = 0x7000_0000_1234;
        let info = WindowInfo { address, length, region: 7, rights: Rights::READ_WRITE, key: None };
        let met = vec![0; length.div_ceil(CHUNK_BYTES).div_ceil(64) as usize];
        let flags = page::CROSS_MEMORY | page::WRITABLE;
        DirectWindow { id: ID, info, address, flags, mapping: None, base: address, met }
    }

    #[test]
    fn no_place_is_outside_of_the_window() {
        let mut window = window(1000);
        for (offset, length) in [(1000, 1), (999, 2), (0, 1001), (u64::MAX, 1), (u64::MAX, 8)] {
            let place = window.place(offset, length, WaitMode::Blocking);
            assert_eq!(place, DirectPlace::Unknown, "{offset}, {length}");
        }
        let found = |address| DirectPlace::Found { flags: window_flags(), address };
        assert_eq!(window.place(999, 1, WaitMode::Blocking), found(0x7000_0000_1234 + 999));
        assert_eq!(window.place(0, 1000, WaitMode::Blocking), found(0x7000_0000_1234));
    }

    fn window_flags() -> u64 {
        page::CROSS_MEMORY | page::WRITABLE
    }

    #[test]
    fn a_call_that_posts_does_not_touch_what_was_not_met() {
        let mut window = window(200 * CHUNK_BYTES);
        let is_found = |place| matches!(place, DirectPlace::Found { .. });
        let last = 200 * CHUNK_BYTES - 8;
        assert_eq!(window.place(last, 8, WaitMode::Posting), DirectPlace::NotMet);
        assert!(is_found(window.place(last, 8, WaitMode::NonBlocking)));
        assert!(is_found(window.place(last, 8, WaitMode::Posting)));
        // Over the border to a chunk that was not met.
        let border = 199 * CHUNK_BYTES - 4;
        assert_eq!(window.place(border, 8, WaitMode::Posting), DirectPlace::NotMet);
        assert!(is_found(window.place(border, 8, WaitMode::Blocking)));
        assert!(is_found(window.place(border, 8, WaitMode::Posting)));
    }

    #[test]
    fn windows_of_a_changed_region_are_forgotten() {
        let mut windows = DirectWindows { latest: Some(window(10)), others: HashMap::new() };
        windows.others.insert(3, window(10));
        windows.forget_region(8);
        assert!(windows.latest.is_some() && windows.others.len() == 1);
        windows.forget_region(7);
        assert!(windows.latest.is_none() && windows.others.is_empty());
    }
}
