//! Regions of this process that the peer has been given.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use memferry_sys::packet_socket::PacketSocket;
use memferry_sys::shared_memory::Access;

use super::Region;
use crate::wire::Note;

/// The most regions that are shared with one peer at a time; it would not map more.
const MOST_REGIONS: usize = 128;

/// What the peer has been given, and with which right.
#[derive(Debug, Default)]
pub(crate) struct Exported {
    regions: HashMap<u32, (Access, Weak<Region>)>,
}

impl Exported {
    /// Whether the peer has a region with at least this right.
    pub(crate) fn has(&self, region: &Region, access: Access) -> bool {
        let given = self.regions.get(&region.number);
        given.is_some_and(|(given, _)| *given == Access::Write || *given == access)
    }

    /// Whether the peer has any.
    pub(crate) fn is_any(&self) -> bool {
        !self.regions.is_empty()
    }

    /// Sends a region's descriptor to the peer, and returns the note that must follow it. `None`
    /// if it cannot be sent now, or the peer has enough of them: then do without.
    pub(crate) fn share(
        &mut self,
        region: &Arc<Region>,
        access: Access,
        socket: &PacketSocket,
    ) -> Option<Note> {
        use std::os::fd::AsFd;
        if self.regions.len() >= MOST_REGIONS {
            return None;
        }
        let descriptor = region.descriptor(access).ok()?;
        socket.send(&region.number.to_le_bytes(), &[descriptor.as_fd()]).ok()?;
        self.regions.insert(region.number, (access, Arc::downgrade(region)));
        Some(Note::Share {
            region: region.number,
            writable: access == Access::Write,
            address: region.address() as u64,
            length: region.length() as u64,
        })
    }

    /// Regions that the application has dropped since: the peer may forget them.
    pub(crate) fn take_dropped(&mut self) -> Vec<u32> {
        let is_gone = |weak: &Weak<Region>| weak.upgrade().is_none_or(|r| !super::exists(&r));
        let gone: Vec<u32> = self
            .regions
            .iter()
            .filter_map(|(number, (_, region))| is_gone(region).then_some(*number))
            .collect();
        for number in &gone {
            self.regions.remove(number);
        }
        gone
    }
}
