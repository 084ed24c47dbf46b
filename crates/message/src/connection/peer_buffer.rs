//! Access to the peer's memory: resolving it, and copies to and from it.

use std::io;

use memferry_sys::copy;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::cross_memory::{self, IoVec};
use memferry_sys::peer_process::Credentials;
use memferry_sys::shared_memory::Protection;

use super::Connection;
use crate::control::{BufferRef, ControlMessage, SEGMENT_BYTES};
use crate::error::MemorySide;
use crate::plan::AccessMethod;
use crate::region::imported::MappedSegment;
use crate::ring::cells::ProtocolError;
use crate::segments::{IoVecBatch, Segment, Segments, Sliceable, range};

/// A segment of the peer's memory, as the peer described it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteSegment {
    address: u64,
    length: u64,
    region: u32,
}

/// Memory of the peer as the peer described it: copied out of the ring, and not validated.
pub(crate) type RemoteSegments = Segments<RemoteSegment>;

/// The peer's memory, as this process accesses it.
#[derive(Debug)]
pub(crate) enum PeerBuffer {
    /// Mapped in this process, or memory of this process.
    Mapped {
        /// The segments in this address space.
        segments: Segments,
        /// The references that keep them mapped.
        _held: Segments<MappedSegment>,
        /// Both ends are in this process, so source and target may overlap.
        may_overlap: bool,
    },
    /// Accessed by system calls.
    CrossMemory {
        /// The peer's pid.
        pid: u32,
        /// The segments in the peer's address space.
        iovecs: Segments<IoVec>,
    },
    /// Not accessible.
    Unreachable,
}

/// The cause of a failed copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyError {
    /// The memory of that side is not mapped, or not with the needed protection.
    Fault(MemorySide),
    /// The kernel refused the copy, with this error: access is no longer permitted, memory is
    /// exhausted, or the process has exited.
    Refused(i32),
}

impl CopyError {
    /// Returns whether the kernel would refuse the next copy too.
    fn is_permanent(self) -> bool {
        matches!(self, Self::Refused(libc::EPERM | libc::EACCES | libc::ENOSYS | libc::ESRCH))
    }
}

impl Connection {
    /// Records a copy that was refused although the access probe at connect succeeded. If the error
    /// is permanent, this side does not try again, and reports its access to the peer.
    #[cold]
    pub(crate) fn record_refusal(&mut self, error: CopyError, access: Protection) {
        let (true, CopyError::Refused(errno)) = (error.is_permanent(), error) else { return };
        match access {
            Protection::ReadOnly => self.access.read = false,
            Protection::ReadWrite => self.access.write = false,
        }
        let Credentials { pid, uid, .. } = self.peer.id.credentials;
        let error = io::Error::from_raw_os_error(errno);
        self.access.denied = Some(cross_memory::denial_reason(pid, uid, &error));
        tracing::debug!(%error, ?access, "the kernel refuses further access to a peer's memory");
        self.send_control(ControlMessage::AccessCaps {
            read: self.access.read,
            write: self.access.write,
        });
    }
}

/// Copies a buffer reference out of a control message and of the bounce ring.
pub(super) fn decode(
    connection: &Connection,
    buffer: BufferRef,
    length: u64,
) -> Result<RemoteSegments, ProtocolError> {
    match buffer {
        BufferRef::Contiguous { address, region } => {
            Ok(Segments::One(RemoteSegment { address, length, region }))
        }
        BufferRef::SegmentList { list, count } => {
            let segments = read_segments(connection.incoming(list), count as usize);
            let total =
                segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.length));
            if total.is_none_or(|total| total < length) {
                return Err(ProtocolError("segment list shorter than its message"));
            }
            Ok(Segments::Many(segments))
        }
    }
}

/// Resolves the memory that the peer has described.
pub(super) fn resolve(
    connection: &Connection,
    described: &RemoteSegments,
    access: Protection,
) -> (PeerBuffer, AccessMethod) {
    if connection.is_self() {
        let segment = |d: &RemoteSegment| Segment::target(d.address as *mut u8, d.length as usize);
        let _held = Segments::Many(Box::default());
        return (
            PeerBuffer::Mapped { segments: described.map(segment), _held, may_overlap: true },
            AccessMethod::Mapped,
        );
    }
    let mapped =
        described.try_map(|d| connection.imported.find(d.region, d.address, d.length, access));
    if let Some(_held) = mapped {
        let segments = _held.map(|mapped| Segment::target(mapped.address, mapped.length));
        return (PeerBuffer::Mapped { segments, _held, may_overlap: false }, AccessMethod::Mapped);
    }
    let permitted = if access == Protection::ReadOnly {
        connection.access.read
    } else {
        connection.access.write
    };
    if !permitted {
        return (PeerBuffer::Unreachable, AccessMethod::None);
    }
    let iovecs =
        described.map(|d| IoVec { address: d.address as usize, length: d.length as usize });
    (
        PeerBuffer::CrossMemory { pid: connection.peer.id.credentials.pid, iovecs },
        AccessMethod::CrossMemory,
    )
}

fn read_segments(list: *const u8, count: usize) -> Box<[RemoteSegment]> {
    let word = |segment: usize, word: usize| {
        let at = list.wrapping_add(segment * SEGMENT_BYTES + word * 8).cast::<[u8; 8]>();
        // SAFETY: the list was checked to lie inside the bounce ring and to have `count` segments;
        // spans may begin anywhere, so the read is unaligned, and volatile because the peer may
        // write at the same time.
        u64::from_le_bytes(unsafe { at.read_volatile() })
    };
    (0..count)
        .map(|segment| RemoteSegment {
            address: word(segment, 0),
            length: word(segment, 1),
            region: word(segment, 2) as u32,
        })
        .collect()
}

impl PeerBuffer {
    /// Copies a range from the peer's memory to `local`, or (with `Protection::ReadWrite`) from
    /// `local` to the peer's memory.
    ///
    /// # Safety
    /// The local segments must be valid there: for writes when reading from the peer, for reads
    /// when writing to it.
    pub(crate) unsafe fn copy(
        &self,
        local: &[Segment],
        offset: u64,
        length: u64,
        access: Protection,
        streaming: Option<Streaming>,
    ) -> Result<(), CopyError> {
        match self {
            Self::Mapped { segments, may_overlap, .. } => {
                let peer = range(segments.as_slice(), offset, length);
                let ours = range(local, offset, length);
                let streaming = streaming.filter(|_| !may_overlap);
                // SAFETY: the caller guarantees the local segments; the peer's are mapped, and this
                // buffer keeps them so.
                unsafe {
                    match access {
                        Protection::ReadOnly => copy_lists(peer, ours, *may_overlap, streaming),
                        Protection::ReadWrite => copy_lists(ours, peer, *may_overlap, streaming),
                    }
                }
                Ok(())
            }
            Self::CrossMemory { pid, iovecs } => {
                copy_cross_memory(*pid, local, iovecs.as_slice(), offset, length, access)
            }
            Self::Unreachable => Err(CopyError::Refused(0)),
        }
    }

    /// The address, if the whole buffer is one segment that is mapped in this process.
    pub(crate) fn mapped_address(&self) -> Option<*mut u8> {
        match self {
            Self::Mapped { segments: Segments::One(segment), .. } => Some(segment.address),
            _ => None,
        }
    }
}

/// Copies between two lists of segments of the same total length.
///
/// # Safety
/// All of `from` must be valid for reads, all of `to` for writes.
unsafe fn copy_lists(
    mut from: impl Iterator<Item = Segment>,
    mut to: impl Iterator<Item = Segment>,
    may_overlap: bool,
    streaming: Option<Streaming>,
) {
    let (mut source, mut target) = (from.next(), to.next());
    while let (Some(s), Some(t)) = (source, target) {
        let length = s.length.min(t.length);
        // SAFETY: the range lies inside both segments.
        unsafe {
            match streaming {
                _ if may_overlap => copy::overlapping(t.address, s.address, length),
                Some(streaming) => streaming.copy(t.address, s.address, length),
                None => copy::cached(t.address, s.address, length),
            }
        }
        let rest = |segment: Segment| {
            (segment.length > length).then(|| segment.slice(length, segment.length - length))
        };
        source = rest(s).or_else(|| from.next());
        target = rest(t).or_else(|| to.next());
    }
}

/// Copies by system calls, as many as are needed.
fn copy_cross_memory(
    pid: u32,
    local: &[Segment],
    remote: &[IoVec],
    offset: u64,
    length: u64,
    access: Protection,
) -> Result<(), CopyError> {
    let mut done = 0;
    while done < length {
        let (offset, length) = (offset + done, length - done);
        let peer = IoVecBatch::new(range(remote, offset, length));
        let local_iovecs = IoVecBatch::new(range(local, offset, length).map(Segment::iovec));
        match cross_copy_once(pid, &local_iovecs, &peer, access) {
            Ok(0) => return Err(CopyError::Fault(MemorySide::Peer)),
            Ok(more) => done += more as u64,
            Err(error) => {
                return Err(match error.raw_os_error() {
                    Some(libc::EFAULT) => {
                        CopyError::Fault(faulting_side(pid, &local_iovecs, &peer, access))
                    }
                    errno => CopyError::Refused(errno.unwrap_or(0)),
                });
            }
        }
    }
    Ok(())
}

/// Copies between vectors of this process and of the peer, by one system call.
fn cross_copy_once(
    pid: u32,
    local: &IoVecBatch,
    peer: &IoVecBatch,
    access: Protection,
) -> io::Result<usize> {
    // SAFETY: the local memory belongs to an operation in flight, whose owner guarantees that it is
    // valid until the operation completes; the peer has described its memory for this copy.
    unsafe {
        match access {
            Protection::ReadOnly => cross_memory::read(pid, peer.as_slice(), local.as_slice()),
            Protection::ReadWrite => cross_memory::write(pid, peer.as_slice(), local.as_slice()),
        }
    }
}

/// Returns the side that caused a fault, which the kernel does not report: reads one byte of the
/// side that is only read. The other side may be mapped and not be writable.
fn faulting_side(
    pid: u32,
    local: &IoVecBatch,
    peer: &IoVecBatch,
    access: Protection,
) -> MemorySide {
    let mut byte = 0u8;
    let into = IoVecBatch::new([Segment::target(&raw mut byte, 1).iovec()].into_iter());
    let (pid, from, other) = match access {
        Protection::ReadOnly => (pid, peer, MemorySide::Local),
        Protection::ReadWrite => (std::process::id(), local, MemorySide::Peer),
    };
    match (cross_copy_once(pid, &into, from, Protection::ReadOnly), other) {
        (Ok(1), other) => other,
        (_, MemorySide::Local) => MemorySide::Peer,
        (_, MemorySide::Peer) => MemorySide::Local,
    }
}
