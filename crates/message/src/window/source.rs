//! Where the lookup gets the translations of peers' pages from. A line is a run of a peer's pages:
//! attached here where they are shareable, or their addresses for system calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};

use crate::region::imported::PeerMapping;
use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::{LineName, Refused, Source};
use memferry_sys::residency;
use memferry_sys::sync::lock;

use super::peer_memory::{PeerMemory, page};

/// The memories of all peers whose windows are attached.
#[derive(Debug, Default)]
pub(crate) struct PeerMemories {
    peers: RwLock<HashMap<ProcessHandle, Arc<PeerMemory>>>,
    /// What keeps the attached lines mapped.
    kept: Mutex<HashMap<LineName, Vec<Arc<PeerMapping>>>>,
}

impl PeerMemories {
    pub(crate) fn add(&self, peer: &Arc<PeerMemory>) {
        let mut peers = self.peers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.insert(peer.process, peer.clone());
    }

    pub(crate) fn remove(&self, process: ProcessHandle) {
        let mut peers = self.peers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.remove(&process);
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Arc<PeerMemory>> {
        let peers = self.peers.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.values().cloned().collect()
    }

    fn find(&self, process: ProcessHandle) -> Option<Arc<PeerMemory>> {
        let peers = self.peers.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.get(&process).cloned()
    }
}

/// Runs of pages that are mapped here one behind the other.
fn near_runs(entries: &[u64]) -> impl Iterator<Item = (usize, usize)> {
    let page_bytes = memferry_sys::pages::page_bytes();
    let follows = move |before: &u64, next: &u64| {
        before & page::NEAR != 0 && *next == before + page_bytes as u64
    };
    entries
        .chunk_by(follows)
        .filter(|run| run[0] & page::NEAR != 0)
        .map(move |run| ((run[0] & !page::FLAGS) as usize, run.len() * page_bytes))
}

impl Source for PeerMemories {
    fn attach(&self, line: LineName, entries: &mut [u64]) -> Result<(), Refused> {
        let peer = self.find(line.process).ok_or(std::io::ErrorKind::NotConnected)?;
        let kept = peer.reach_pages(line.address, entries);
        if !peer.is_self && !kept.is_empty() {
            for (address, length) in near_runs(entries) {
                // Pages that the owner has never touched stay untaken until they are needed.
                let page_bytes = memferry_sys::pages::page_bytes();
                let resident = residency::resident_pages(address, length);
                if resident.is_ok_and(|pages| pages * page_bytes == length) {
                    // Without it every page is a fault when it is first touched.
                    let _ = residency::populate_for_reading(address, length);
                }
            }
            lock(&self.kept).insert(line, kept);
        }
        Ok(())
    }

    fn detach(&self, line: LineName, entries: &[u64]) {
        let Some(kept) = lock(&self.kept).remove(&line) else { return };
        for (address, length) in near_runs(entries) {
            let mapping = kept.iter().find(|mapping| mapping.contains(address, length));
            // Two mappings may lie one behind the other, and their pages look like one run.
            match mapping {
                Some(mapping) => mapping.let_go(address, length),
                None => tracing::debug!("a line over two mappings keeps its page tables"),
            }
        }
    }
}
