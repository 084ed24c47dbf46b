//! Regions of this process that the peer has received.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use memferry_sys::seqpacket::SeqPacketSocket;
use memferry_sys::shared_memory::Protection;

use super::SharedAllocation;
use crate::control::ControlMessage;

/// The maximum number of regions that are shared with one peer; a peer does not map more.
const MAX_REGIONS: usize = 128;

/// The regions that the peer has received, and their protection.
#[derive(Debug, Default)]
pub(crate) struct ExportedRegions {
    regions: HashMap<u32, (Protection, Weak<SharedAllocation>)>,
}

impl ExportedRegions {
    /// Returns whether the peer has a region with at least this protection.
    pub(crate) fn contains(&self, region: &SharedAllocation, access: Protection) -> bool {
        let shared = self.regions.get(&region.id);
        shared.is_some_and(|(shared, _)| *shared == Protection::ReadWrite || *shared == access)
    }

    /// Returns whether the peer has any region.
    pub(crate) fn has_any(&self) -> bool {
        !self.regions.is_empty()
    }

    /// Sends a region's descriptor to the peer, and returns the control message that must follow
    /// it. Returns `None` if it cannot be sent now, or the peer has the maximum number: then
    /// messages take other paths.
    pub(crate) fn share(
        &mut self,
        region: &Arc<SharedAllocation>,
        access: Protection,
        socket: &SeqPacketSocket,
    ) -> Option<ControlMessage> {
        use std::os::fd::AsFd;
        if self.regions.len() >= MAX_REGIONS {
            return None;
        }
        let descriptor = region.descriptor(access).ok()?;
        socket.send(&region.id.to_le_bytes(), &[descriptor.as_fd()]).ok()?;
        self.regions.insert(region.id, (access, Arc::downgrade(region)));
        Some(ControlMessage::ShareRegion {
            region: region.id,
            writable: access == Protection::ReadWrite,
            address: region.address() as u64,
            length: region.length() as u64,
        })
    }

    /// Removes the regions that the application has dropped since, and returns their numbers.
    pub(crate) fn take_released(&mut self) -> Vec<u32> {
        let is_released =
            |weak: &Weak<SharedAllocation>| weak.upgrade().is_none_or(|r| !super::exists(&r));
        let released: Vec<u32> = self
            .regions
            .iter()
            .filter_map(|(number, (_, region))| is_released(region).then_some(*number))
            .collect();
        for number in &released {
            self.regions.remove(number);
        }
        released
    }
}
