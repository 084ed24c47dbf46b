//! References to memory: encoded by one side, resolved by the other.

use std::sync::Arc;

use memferry_sys::shared_memory::Protection;

use super::Connection;
use super::peer_buffer::{self, PeerBuffer, RemoteSegments};
use crate::connect::access_probe::OwnProbe;
use crate::control::{BufferRef, ControlMessage, SEGMENT_BYTES};
use crate::plan::AccessMethod;
use crate::region::{self, SharedAllocation, heap};
use crate::ring::cells::ProtocolError;
use crate::segments::Segment;

impl Connection {
    /// Encodes a reference to memory of this side, and shares the regions that the memory lies in.
    /// Returns `None` when the segment list does not fit into the bounce ring now.
    pub(crate) fn encode_buffer(
        &mut self,
        segments: &[Segment],
        access: Protection,
    ) -> Result<Option<BufferRef>, ProtocolError> {
        if let [segment] = segments {
            let region = self.shared_region_id(segment, access);
            return Ok(Some(BufferRef::Contiguous { address: segment.address as u64, region }));
        }
        let mut list = Vec::with_capacity(segments.len() * SEGMENT_BYTES);
        for segment in segments {
            let region = self.shared_region_id(segment, access);
            list.extend((segment.address as u64).to_le_bytes());
            list.extend((segment.length as u64).to_le_bytes());
            list.extend(u64::from(region).to_le_bytes());
        }
        // Sharing a region may have taken the last cell.
        if !self.has_credit()? {
            return Ok(None);
        }
        let Some(span) = self.alloc_bounce(list.len())? else { return Ok(None) };
        // SAFETY: the span belongs to this side until the cell that refers to it is written.
        unsafe { std::ptr::copy_nonoverlapping(list.as_ptr(), self.outgoing(span), list.len()) };
        Ok(Some(BufferRef::SegmentList { list: span, count: segments.len() as u32 }))
    }

    /// The number of the region that a segment lies in, after sharing it with the peer; 0 for none.
    pub(super) fn shared_region_id(&mut self, segment: &Segment, access: Protection) -> u32 {
        if self.is_self() {
            return 0;
        }
        let Some(region) = self.shareable_region(segment) else { return 0 };
        if self.exported.contains(&region, access) {
            return region.id;
        }
        self.unshare_released();
        let share = |socket| self.exported.share(&region, access, socket);
        match self.socket.as_ref().and_then(share) {
            Some(message) => {
                self.send_control(message);
                region.id
            }
            None => 0,
        }
    }

    /// The region that a segment lies in, if there is one and the peer may have it.
    pub(crate) fn shareable_region(&self, segment: &Segment) -> Option<Arc<SharedAllocation>> {
        let region = region::find(segment.address, segment.length)?;
        let is_known = || self.exported.contains(&region, Protection::ReadOnly);
        (!region.is_heap() || is_known() || self.may_have_heap()).then_some(region)
    }

    /// Whether the peer may have the shared heap of this process.
    fn may_have_heap(&self) -> bool {
        let is_written = self.own_probe.as_ref().is_some_and(OwnProbe::is_written);
        heap::is_for(self.peer.id.credentials, &self.access, is_written)
    }

    /// Reports a peer that will not get the heap, once it has probed this process.
    pub(crate) fn report_refused_heap(&self) {
        if !self.may_have_heap() {
            heap::report_refusal(self.peer.id.credentials);
        }
    }

    /// Reports freed regions to the peer.
    pub(crate) fn unshare_released(&mut self) {
        for region in self.exported.take_released() {
            self.send_control(ControlMessage::UnshareRegion { region });
        }
    }

    /// Maps a region that the peer has shared.
    pub(crate) fn import(
        &mut self,
        region: u32,
        access: Protection,
        address: u64,
        length: u64,
    ) -> Result<(), ProtocolError> {
        // Without the mapping, messages take other paths.
        let Some(descriptor) = self.take_descriptor(region)? else { return Ok(()) };
        self.imported
            .add(region, access, address, length, descriptor)
            .map_err(|_| ProtocolError("region not sealed, or shorter than declared"))
    }

    /// Unmaps a region of the peer.
    pub(crate) fn remove_import(&mut self, region: u32) {
        self.imported.remove(region);
    }

    /// Copies out the buffer reference of a message of `length` bytes. Must be done before the ring
    /// advances over the cell.
    pub(crate) fn decode_buffer(
        &mut self,
        buffer: BufferRef,
        length: u64,
    ) -> Result<RemoteSegments, ProtocolError> {
        let description = peer_buffer::decode(self, buffer, length)?;
        if let BufferRef::SegmentList { list, .. } = buffer {
            self.release_bounce(list);
        }
        Ok(description)
    }

    /// Resolves the memory that the peer has described.
    pub(crate) fn peer_buffer(
        &self,
        described: &RemoteSegments,
        access: Protection,
    ) -> (PeerBuffer, AccessMethod) {
        peer_buffer::resolve(self, described, access)
    }

    /// How the peer accesses memory of this side, with the regions shared so far.
    pub(crate) fn peer_access_method(
        &self,
        segments: &[Segment],
        access: Protection,
    ) -> AccessMethod {
        let mapped = |segment: &Segment| {
            self.shareable_region(segment)
                .is_some_and(|region| self.exported.contains(&region, access))
        };
        let (read, write) = self.peer_access_to_us;
        let cross_memory = if access == Protection::ReadOnly { read } else { write };
        if self.is_self() || segments.iter().all(mapped) {
            AccessMethod::Mapped
        } else if cross_memory {
            AccessMethod::CrossMemory
        } else {
            AccessMethod::None
        }
    }
}
