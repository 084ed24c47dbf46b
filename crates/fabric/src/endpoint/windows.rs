//! Memory that others access: what this station exposes, and what it has attached of its peers.

use std::collections::HashMap;
use std::sync::Mutex;

use memferry_message::{Error, Peer, RawMemory, RemoteWindow, Window};

use super::Station;
use crate::abi::*;
use crate::guard::{Code, Result};
use crate::memory::Region;

/// More attached windows than this are forgotten and looked for again.
const MOST_ATTACHED: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Windows {
    exposed: Mutex<HashMap<u64, Window<RawMemory>>>,
    attached: Mutex<HashMap<(Peer, u64), RemoteWindow>>,
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

    /// Nobody accesses the memory of a key after this. Whoever is in the middle is waited for.
    pub(crate) fn withdraw(&self, key: u64) {
        let window = self.windows.exposed.lock().unwrap().remove(&key);
        drop(window);
    }

    /// Lets `access` use the window of a peer that has a key. A window that was withdrawn meanwhile is
    /// looked for once more: its owner may have given the key to other memory.
    pub(super) fn with_window<T>(
        &self,
        peer: Peer,
        key: u64,
        access: impl Fn(&RemoteWindow) -> std::result::Result<T, Error>,
    ) -> Result<T> {
        let known = self.windows.attached.lock().unwrap().get(&(peer, key)).cloned();
        if let Some(window) = known {
            match access(&window) {
                Err(Error::Withdrawn) => {}
                outcome => return Ok(outcome?),
            }
        }
        if !self.messages.is_connected(peer)? {
            // Moved on here as well: a program may only try again.
            self.messages.progress();
            return Err(Code(FI_EAGAIN));
        }
        let window = self.messages.attach_key(peer, key).map_err(|error| match error {
            Error::Withdrawn => Code(FI_ENOKEY),
            error => Code::from(&error),
        })?;
        let mut attached = self.windows.attached.lock().unwrap();
        if attached.len() >= MOST_ATTACHED {
            attached.clear();
        }
        attached.insert((peer, key), window.clone());
        drop(attached);
        Ok(access(&window)?)
    }
}
