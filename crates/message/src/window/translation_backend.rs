//! The translation backend of the lookup for peers' pages. A line is a run of a peer's pages:
//! mapped in this process if they are shareable, or addresses for system calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};

use crate::region::imported::PeerMapping;
use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::{AttachError, LineKey, LineRun, TranslationBackend};
use memferry_sys::residency;
use memferry_sys::sync::lock;

use super::peer_memory::{PeerMemory, page};

/// The memory of all peers whose windows are attached.
#[derive(Debug, Default)]
pub(crate) struct PeerTranslationBackend {
    peers: RwLock<HashMap<ProcessHandle, Arc<PeerMemory>>>,
    /// The mappings of the attached lines.
    mappings: Mutex<HashMap<LineKey, Vec<Arc<PeerMapping>>>>,
}

impl PeerTranslationBackend {
    pub(crate) fn add(&self, peer: &Arc<PeerMemory>) {
        let mut peers = self.peers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.insert(peer.process, peer.clone());
    }

    pub(crate) fn remove(&self, process: ProcessHandle) {
        let mut peers = self.peers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.remove(&process);
    }

    /// The memory of all peers.
    pub(crate) fn all(&self) -> Vec<Arc<PeerMemory>> {
        let peers = self.peers.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.values().cloned().collect()
    }

    fn find(&self, process: ProcessHandle) -> Option<Arc<PeerMemory>> {
        let peers = self.peers.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.get(&process).cloned()
    }
}

/// Runs of pages that are mapped at consecutive addresses.
fn mapped_runs(entries: &[u64]) -> impl Iterator<Item = (usize, usize)> {
    let page_bytes = memferry_sys::pages::page_bytes();
    let follows = move |before: &u64, next: &u64| {
        before & page::MAPPED != 0 && *next == before + page_bytes as u64
    };
    entries
        .chunk_by(follows)
        .filter(|run| run[0] & page::MAPPED != 0)
        .map(move |run| ((run[0] & !page::FLAGS) as usize, run.len() * page_bytes))
}

/// The longest run that is populated when it is attached. Of longer lines only a part may be used.
const MAX_POPULATE_BYTES: usize = 2 << 20;

/// Fills the page tables of mapped memory, if all its pages exist.
pub(super) fn populate(address: usize, length: usize) {
    let page_bytes = memferry_sys::pages::page_bytes();
    // Pages that the owner has never touched are not allocated before they are needed.
    let resident = residency::resident_pages(address, length);
    if resident.is_ok_and(|pages| pages * page_bytes == length) {
        // Without this call, the first access to each page causes a fault.
        let _ = residency::populate_read(address, length);
    }
}

/// The address in this process and the length of a mapped run.
fn mapped_range(run: &LineRun) -> (usize, usize) {
    let address = (run.first & !page::FLAGS) as usize;
    (address, run.pages.len() * memferry_sys::pages::page_bytes())
}

impl TranslationBackend for PeerTranslationBackend {
    fn attach_run(&self, line: LineKey, pages: usize) -> Result<Option<LineRun>, AttachError> {
        let peer = self.find(line.process).ok_or(std::io::ErrorKind::NotConnected)?;
        let Some((run, mapping)) = peer.translate_run(line.address, pages) else {
            return Ok(None);
        };
        if let Some(mapping) = mapping {
            let (address, length) = mapped_range(&run);
            if length <= MAX_POPULATE_BYTES {
                populate(address, length);
            }
            lock(&self.mappings).insert(line, vec![mapping]);
        }
        Ok(Some(run))
    }

    fn detach_run(&self, line: LineKey, run: &LineRun) {
        let Some(mappings) = lock(&self.mappings).remove(&line) else { return };
        let (address, length) = mapped_range(run);
        mappings.iter().for_each(|mapping| mapping.drop_ptes(address, length));
    }

    fn attach(&self, line: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
        let peer = self.find(line.process).ok_or(std::io::ErrorKind::NotConnected)?;
        let mappings = peer.translate_pages(line.address, entries);
        if !peer.is_self && !mappings.is_empty() {
            for (address, length) in mapped_runs(entries) {
                populate(address, length);
            }
            lock(&self.mappings).insert(line, mappings);
        }
        Ok(())
    }

    fn detach(&self, line: LineKey, entries: &[u64]) {
        let Some(mappings) = lock(&self.mappings).remove(&line) else { return };
        for (address, length) in mapped_runs(entries) {
            let mapping = mappings.iter().find(|mapping| mapping.contains(address, length));
            // Two mappings may be adjacent, so that their pages form one run.
            match mapping {
                Some(mapping) => mapping.drop_ptes(address, length),
                None => tracing::debug!("page tables of a line over two mappings are not dropped"),
            }
        }
    }
}
