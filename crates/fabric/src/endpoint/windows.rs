//! Memory for RMA: the windows that this endpoint exposes, and those of peers that it has attached.

use std::collections::HashMap;
use std::sync::Mutex;

use memferry_message::{Peer, RawMemory, RemoteWindow, Window};

use super::EndpointCore;
use crate::abi::*;
use crate::guard::{FiError, Result};
use crate::mr::MrRange;

/// At this number, the attached windows are dropped and attached again on use.
const MAX_ATTACHED: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct RmaWindows {
    exposed: Mutex<HashMap<u64, Window<RawMemory>>>,
    /// Held while a thread waits for peers to finish accesses.
    withdrawing: Mutex<()>,
    attached: Mutex<HashMap<(Peer, u64), RemoteWindow>>,
}

/// The access to a peer's memory.
#[derive(Debug)]
pub(super) enum RmaRoute {
    /// Through an attached window.
    Window(RemoteWindow),
    /// The owner is on another host, and executes every access.
    Remote,
}

impl EndpointCore {
    /// Exposes memory under a key, if peers may access it at all.
    ///
    /// # Safety
    /// The memory must stay valid until it is withdrawn.
    pub(crate) unsafe fn expose(&self, key: u64, region: &MrRange) -> Result {
        let Some(rights) = region.rights else { return Ok(()) };
        let (address, length) = (region.segment.address, region.segment.length);
        // SAFETY: the caller guarantees it.
        let window = unsafe { self.messages.expose_key(address, length, rights, key) }?;
        self.windows.exposed.lock().unwrap().insert(key, window);
        Ok(())
    }

    /// Withdraws the memory of a key. A running access is waited for; if that times out, no other
    /// access can start, and this must be called again.
    pub(crate) fn withdraw(&self, key: u64) -> Result {
        let _guard = self.windows.withdrawing.lock().unwrap();
        let Some(window) = self.windows.exposed.lock().unwrap().remove(&key) else { return Ok(()) };
        window.withdraw().map(drop).map_err(|busy| {
            tracing::warn!(key, "{busy}");
            self.windows.exposed.lock().unwrap().insert(key, busy.window);
            FiError(FI_EBUSY)
        })
    }

    /// Withdraws all memory.
    pub(super) fn withdraw_all(&self) -> Result {
        let keys: Vec<_> = self.windows.exposed.lock().unwrap().keys().copied().collect();
        keys.into_iter().try_for_each(|key| self.withdraw(key))?;
        // Withdrawals of other threads are complete.
        let _guard = self.windows.withdrawing.lock().unwrap();
        let is_empty = self.windows.exposed.lock().unwrap().is_empty();
        if is_empty { Ok(()) } else { Err(FiError(FI_EBUSY)) }
    }

    /// Fails with `FI_EAGAIN` while a peer is not connected, and starts the connect.
    pub(super) fn check_connected(&self, peer: Peer) -> Result {
        if self.messages.remote_id(peer).is_some() || self.messages.is_connected(peer)? {
            return Ok(());
        }
        // Makes progress, because a program may only retry.
        self.progress_for_retry();
        Err(FiError(FI_EAGAIN))
    }

    /// The access to a peer's memory with a key. A window that was withdrawn is searched for again:
    /// its owner may use the key for other memory.
    pub(super) fn rma_route(&self, peer: Peer, key: u64) -> Result<RmaRoute> {
        let known = self.windows.attached.lock().unwrap().get(&(peer, key)).cloned();
        if let Some(window) = known.filter(RemoteWindow::is_open) {
            return Ok(RmaRoute::Window(window));
        }
        if self.messages.remote_id(peer).is_some() {
            return Ok(RmaRoute::Remote);
        }
        self.check_connected(peer)?;
        let window = self.messages.attach_key(peer, key)?;
        let mut attached = self.windows.attached.lock().unwrap();
        if attached.len() >= MAX_ATTACHED {
            attached.clear();
        }
        attached.insert((peer, key), window.clone());
        Ok(RmaRoute::Window(window))
    }
}
