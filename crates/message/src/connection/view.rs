//! The other side's memory as this side gets at it, and copies to and from it.

use std::io;

use memferry_sys::copy;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::cross_memory::{self, Stretch};
use memferry_sys::peer_process::Credentials;
use memferry_sys::shared_memory::Access;

use super::Wire;
use crate::error::Who;
use crate::pieces::{Batch, Cut, Piece, Pieces, range};
use crate::plan::Way;
use crate::region::imported::Mapped;
use crate::ring::cells::Nonsense;
use crate::wire::{Note, PIECE_BYTES, Place};

/// A piece of the other side's memory, as it was described.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Described {
    address: u64,
    length: u64,
    region: u32,
}

/// Memory of the other side, as it was described: copied out of the ring, believed by nobody.
pub(crate) type Description = Pieces<Described>;

/// The other side's memory.
#[derive(Debug)]
pub(crate) enum View {
    /// It is mapped here, or is ours.
    Near {
        /// Where it is in this process.
        pieces: Pieces,
        /// What keeps it there.
        _held: Pieces<Mapped>,
        /// Both ends are in this process, so the two may overlap.
        may_overlap: bool,
    },
    /// It can be reached by system calls.
    Cross {
        /// Whose it is.
        pid: u32,
        /// Where it is there.
        stretches: Pieces<Stretch>,
    },
    /// It cannot be reached.
    Nowhere,
}

/// Why a copy did not work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyError {
    /// Memory is missing.
    Bad(Who),
    /// The kernel refused it, with this error: access is not permitted any more, there is no memory
    /// for it, or the process is gone.
    Refused(i32),
}

impl CopyError {
    /// Whether the kernel would refuse the next copy too.
    fn lasts(self) -> bool {
        matches!(self, Self::Refused(libc::EPERM | libc::EACCES | libc::ENOSYS | libc::ESRCH))
    }
}

impl Wire {
    /// A copy was refused although access was permitted when it was tried at connect. If that lasts,
    /// this side does not try again, and the other side is told.
    #[cold]
    pub(crate) fn note_refusal(&mut self, error: CopyError, access: Access) {
        let (true, CopyError::Refused(errno)) = (error.lasts(), error) else { return };
        match access {
            Access::Read => self.reach.read = false,
            Access::Write => self.reach.write = false,
        }
        let Credentials { pid, uid, .. } = self.peer.id.credentials;
        let error = io::Error::from_raw_os_error(errno);
        self.reach.denied = Some(cross_memory::why_denied(pid, uid, &error));
        tracing::debug!(%error, ?access, "the kernel refuses access to a peer's memory from now on");
        self.post(Note::Reach { read: self.reach.read, write: self.reach.write });
    }
}

/// Copies out what a note says about the memory of a message.
pub(super) fn read(wire: &Wire, place: Place, length: u64) -> Result<Description, Nonsense> {
    match place {
        Place::Piece { address, region } => Ok(Pieces::One(Described { address, length, region })),
        Place::List { list, count } => {
            let pieces = read_list(wire.incoming(list), count as usize);
            let total = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.length));
            if total.is_none_or(|total| total < length) {
                return Err(Nonsense("pieces that are shorter than their message"));
            }
            Ok(Pieces::Many(pieces))
        }
    }
}

/// Finds the memory that the other side has described.
pub(super) fn of(wire: &Wire, described: &Description, access: Access) -> (View, Way) {
    if wire.is_self() {
        let piece = |d: &Described| Piece::target(d.address as *mut u8, d.length as usize);
        let _held = Pieces::Many(Box::default());
        return (View::Near { pieces: described.map(piece), _held, may_overlap: true }, Way::Near);
    }
    let mapped = described.try_map(|d| wire.imported.find(d.region, d.address, d.length, access));
    if let Some(_held) = mapped {
        let pieces = _held.map(|mapped| Piece::target(mapped.address, mapped.length));
        return (View::Near { pieces, _held, may_overlap: false }, Way::Near);
    }
    let permitted = if access == Access::Read { wire.reach.read } else { wire.reach.write };
    if !permitted {
        return (View::Nowhere, Way::None);
    }
    let stretches =
        described.map(|d| Stretch { address: d.address as usize, length: d.length as usize });
    (View::Cross { pid: wire.peer.id.credentials.pid, stretches }, Way::Cross)
}

fn read_list(list: *const u8, count: usize) -> Box<[Described]> {
    let word = |piece: usize, word: usize| {
        let at = list.wrapping_add(piece * PIECE_BYTES + word * 8).cast::<[u8; 8]>();
        // SAFETY: the list was checked to lie inside the space and to have `count` pieces; spans
        // may begin anywhere, so the read is unaligned, and volatile since the other side may
        // write meanwhile.
        u64::from_le_bytes(unsafe { at.read_volatile() })
    };
    (0..count)
        .map(|piece| Described {
            address: word(piece, 0),
            length: word(piece, 1),
            region: word(piece, 2) as u32,
        })
        .collect()
}

impl View {
    /// Copies a range from the other side's memory to `local`, or (with `Access::Write`) to it.
    ///
    /// # Safety
    /// The local pieces must be valid there: for writes when reading from the other side, for
    /// reads when writing to it.
    pub(crate) unsafe fn copy(
        &self,
        local: &[Piece],
        offset: u64,
        length: u64,
        access: Access,
        streaming: Option<Streaming>,
    ) -> Result<(), CopyError> {
        match self {
            Self::Near { pieces, may_overlap, .. } => {
                let theirs = range(pieces.as_slice(), offset, length);
                let ours = range(local, offset, length);
                let streaming = streaming.filter(|_| !may_overlap);
                // SAFETY: ours by the caller's promise; theirs are mapped, and the view keeps
                // them so.
                unsafe {
                    match access {
                        Access::Read => copy_lists(theirs, ours, *may_overlap, streaming),
                        Access::Write => copy_lists(ours, theirs, *may_overlap, streaming),
                    }
                }
                Ok(())
            }
            Self::Cross { pid, stretches } => {
                cross(*pid, local, stretches.as_slice(), offset, length, access)
            }
            Self::Nowhere => Err(CopyError::Refused(0)),
        }
    }

    /// The address, if all of it is one piece that is mapped here.
    pub(crate) fn near_address(&self) -> Option<*mut u8> {
        match self {
            Self::Near { pieces: Pieces::One(piece), .. } => Some(piece.address),
            _ => None,
        }
    }
}

/// Copies from some pieces to others of the same total length.
///
/// # Safety
/// All of `from` must be valid for reads, all of `to` for writes.
unsafe fn copy_lists(
    mut from: impl Iterator<Item = Piece>,
    mut to: impl Iterator<Item = Piece>,
    may_overlap: bool,
    streaming: Option<Streaming>,
) {
    let (mut source, mut target) = (from.next(), to.next());
    while let (Some(s), Some(t)) = (source, target) {
        let length = s.length.min(t.length);
        // SAFETY: inside both pieces.
        unsafe {
            match streaming {
                _ if may_overlap => copy::overlapping(t.address, s.address, length),
                Some(streaming) => streaming.copy(t.address, s.address, length),
                None => copy::cached(t.address, s.address, length),
            }
        }
        let rest = |piece: Piece| {
            (piece.length > length).then(|| piece.part(length, piece.length - length))
        };
        source = rest(s).or_else(|| from.next());
        target = rest(t).or_else(|| to.next());
    }
}

/// Copies by system calls, as many as it takes.
fn cross(
    pid: u32,
    local: &[Piece],
    remote: &[Stretch],
    offset: u64,
    length: u64,
    access: Access,
) -> Result<(), CopyError> {
    let mut done = 0;
    while done < length {
        let (offset, length) = (offset + done, length - done);
        let theirs = Batch::new(range(remote, offset, length));
        let ours = Batch::new(range(local, offset, length).map(Piece::stretch));
        match cross_copy(pid, &ours, &theirs, access) {
            Ok(0) => return Err(CopyError::Bad(Who::Theirs)),
            Ok(more) => done += more as u64,
            Err(error) => {
                return Err(match error.raw_os_error() {
                    Some(libc::EFAULT) => CopyError::Bad(whose_fault(pid, &ours, &theirs, access)),
                    errno => CopyError::Refused(errno.unwrap_or(0)),
                });
            }
        }
    }
    Ok(())
}

/// Copies between stretches of this process and of the other.
fn cross_copy(pid: u32, ours: &Batch, theirs: &Batch, access: Access) -> io::Result<usize> {
    // SAFETY: ours belong to an operation that is under way, whose owner vouched for them until its
    // end; the other side has described its memory for this.
    unsafe {
        match access {
            Access::Read => cross_memory::read(pid, theirs.as_slice(), ours.as_slice()),
            Access::Write => cross_memory::write(pid, theirs.as_slice(), ours.as_slice()),
        }
    }
}

/// A fault does not say on which side it was: tries the side alone that is only read. The other one
/// may be there and not be writable.
fn whose_fault(pid: u32, ours: &Batch, theirs: &Batch, access: Access) -> Who {
    let mut byte = 0u8;
    let into = Batch::new([Piece::target(&raw mut byte, 1).stretch()].into_iter());
    let (pid, from, other) = match access {
        Access::Read => (pid, theirs, Who::Ours),
        Access::Write => (std::process::id(), ours, Who::Theirs),
    };
    match (cross_copy(pid, &into, from, Access::Read), other) {
        (Ok(1), other) => other,
        (_, Who::Ours) => Who::Theirs,
        (_, Who::Theirs) => Who::Ours,
    }
}
