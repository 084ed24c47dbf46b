//! Memory that others access: what this station exposes, and what it has attached of its peers.

use std::collections::HashMap;
use std::sync::Mutex;

use memferry_message::{Peer, RawMemory, RemoteWindow, Window};

use super::Station;
use crate::abi::*;
use crate::guard::{Code, Result};
use crate::memory::Region;

/// More attached windows than this are forgotten and looked for again.
const MOST_ATTACHED: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Windows {
    exposed: Mutex<HashMap<u64, Window<RawMemory>>>,
    /// Held by whoever waits for peers to let go of memory.
    withdrawing: Mutex<()>,
    attached: Mutex<HashMap<(Peer, u64), RemoteWindow>>,
}

/// How memory of a peer is reached.
#[derive(Debug)]
pub(super) enum Reach {
    /// It is attached.
    Window(RemoteWindow),
    /// Its owner is on another host, and asked for every access.
    Carried,
}

impl Station {
    /// Exposes memory under a key, if others may access it at all.
    ///
    /// # Safety
    /// The memory must stay valid until it is withdrawn.
    pub(crate) unsafe fn expose(&self, key: u64, region: &Region) -> Result {
        let Some(rights) = region.rights else { return Ok(()) };
        let (address, length) = (region.piece.address, region.piece.length);
        // SAFETY: passed on.
        let window = unsafe { self.messages.expose_key(address, length, rights, key) }?;
        self.windows.exposed.lock().unwrap().insert(key, window);
        Ok(())
    }

    /// Nobody accesses the memory of a key after this. Whoever is in the middle is waited for; if that
    /// takes too long, nobody can begin another access, and this must be called again.
    pub(crate) fn withdraw(&self, key: u64) -> Result {
        let _alone = self.windows.withdrawing.lock().unwrap();
        let Some(window) = self.windows.exposed.lock().unwrap().remove(&key) else { return Ok(()) };
        window.withdraw().map(drop).map_err(|held| {
            tracing::warn!(key, "{held}");
            self.windows.exposed.lock().unwrap().insert(key, held.window);
            Code(FI_EBUSY)
        })
    }

    /// The same for all memory.
    pub(super) fn withdraw_all(&self) -> Result {
        let keys: Vec<_> = self.windows.exposed.lock().unwrap().keys().copied().collect();
        keys.into_iter().try_for_each(|key| self.withdraw(key))?;
        // Whoever withdraws one in another thread has ended.
        let _alone = self.windows.withdrawing.lock().unwrap();
        let is_empty = self.windows.exposed.lock().unwrap().is_empty();
        if is_empty { Ok(()) } else { Err(Code(FI_EBUSY)) }
    }

    /// How the memory of a peer that has a key is reached. A window that was withdrawn meanwhile is
    /// looked for once more: its owner may have given the key to other memory.
    pub(super) fn reach(&self, peer: Peer, key: u64) -> Result<Reach> {
        let known = self.windows.attached.lock().unwrap().get(&(peer, key)).cloned();
        if let Some(window) = known.filter(RemoteWindow::is_open) {
            return Ok(Reach::Window(window));
        }
        if self.messages.carried_number(peer).is_some() {
            return Ok(Reach::Carried);
        }
        if !self.messages.is_connected(peer)? {
            // Moved on here as well: a program may only try again.
            self.messages.progress();
            return Err(Code(FI_EAGAIN));
        }
        let window = self.messages.attach_key(peer, key)?;
        let mut attached = self.windows.attached.lock().unwrap();
        if attached.len() >= MOST_ATTACHED {
            attached.clear();
        }
        attached.insert((peer, key), window.clone());
        Ok(Reach::Window(window))
    }
}
