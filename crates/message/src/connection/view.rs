//! The other side's memory as this side gets at it, and copies to and from it.

use memferry_sys::copy;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::cross_memory::Stretch;
use memferry_sys::shared_memory::Access;

use super::{Wire, cross_copy};
use crate::error::Who;
use crate::pieces::{Piece, Pieces, range};
use crate::plan::Way;
use crate::region::imported::Mapped;
use crate::ring::cells::Nonsense;
use crate::wire::{PIECE_BYTES, Place};

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
        _held: Vec<Mapped>,
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
    /// The kernel does not permit it any more, or the process is gone.
    Refused,
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
    let described = described.as_slice();
    if wire.is_self() {
        let piece = |d: &Described| Piece::target(d.address as *mut u8, d.length as usize);
        let pieces: Vec<_> = described.iter().map(piece).collect();
        let pieces = Pieces::new(&pieces);
        return (View::Near { pieces, _held: Vec::new(), may_overlap: true }, Way::Near);
    }
    let mapped: Option<Vec<Mapped>> = described
        .iter()
        .map(|d| wire.imported.find(d.region, d.address, d.length, access))
        .collect();
    if let Some(held) = mapped {
        let pieces: Vec<_> = held
            .iter()
            .zip(described)
            .map(|(mapped, d)| Piece::target(mapped.address, d.length as usize))
            .collect();
        let pieces = Pieces::new(&pieces);
        return (View::Near { pieces, _held: held, may_overlap: false }, Way::Near);
    }
    let permitted = if access == Access::Read { wire.reach.read } else { wire.reach.write };
    if !permitted {
        return (View::Nowhere, Way::None);
    }
    let stretches: Vec<_> = described
        .iter()
        .map(|d| Stretch { address: d.address as usize, length: d.length as usize })
        .collect();
    let pid = wire.peer.credentials.pid;
    (View::Cross { pid, stretches: Pieces::new(&stretches) }, Way::Cross)
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
                let (from, to): (Vec<_>, Vec<_>) = match access {
                    Access::Read => (theirs.collect(), ours.collect()),
                    Access::Write => (ours.collect(), theirs.collect()),
                };
                // SAFETY: ours by the caller's promise; theirs are mapped, and the view keeps
                // them so.
                unsafe { copy_lists(&from, &to, *may_overlap, streaming) };
                Ok(())
            }
            Self::Cross { pid, stretches } => {
                let remote: Vec<_> = range(stretches.as_slice(), offset, length).collect();
                cross(*pid, local, offset, &remote, length, access)
            }
            Self::Nowhere => Err(CopyError::Refused),
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

/// Copies from one list of pieces to another of the same total length.
///
/// # Safety
/// All of `from` must be valid for reads, all of `to` for writes.
unsafe fn copy_lists(
    from: &[Piece],
    to: &[Piece],
    may_overlap: bool,
    streaming: Option<Streaming>,
) {
    let (mut f, mut t) = (0, 0);
    let (mut f_done, mut t_done) = (0, 0);
    while f < from.len() && t < to.len() {
        let length = (from[f].length - f_done).min(to[t].length - t_done);
        // SAFETY: inside both pieces.
        unsafe {
            let (source, target) = (from[f].address.add(f_done), to[t].address.add(t_done));
            match streaming {
                _ if may_overlap => copy::overlapping(target, source, length),
                Some(streaming) => streaming.copy(target, source, length),
                None => copy::cached(target, source, length),
            }
        }
        f_done += length;
        t_done += length;
        if f_done == from[f].length {
            (f, f_done) = (f + 1, 0);
        }
        if t_done == to[t].length {
            (t, t_done) = (t + 1, 0);
        }
    }
}

/// Copies by system calls, as many as it takes.
fn cross(
    pid: u32,
    local: &[Piece],
    offset: u64,
    remote: &[Stretch],
    length: u64,
    access: Access,
) -> Result<(), CopyError> {
    let mut done = 0;
    while done < length {
        let rest: Vec<_>;
        let remote = if done == 0 {
            remote
        } else {
            rest = range(remote, done, length - done).collect();
            &rest[..]
        };
        match cross_copy(pid, local, offset + done, remote, length - done, access) {
            Ok(0) => return Err(CopyError::Bad(Who::Theirs)),
            Ok(more) => done += more,
            Err(error) => {
                return Err(match error.raw_os_error() {
                    Some(libc::EFAULT) => CopyError::Bad(whose_fault(pid, remote, access)),
                    _ => CopyError::Refused,
                });
            }
        }
    }
    Ok(())
}

/// A fault does not say on which side it was: try the other side alone.
fn whose_fault(pid: u32, remote: &[Stretch], _access: Access) -> Who {
    let mut byte = 0u8;
    let local = [Piece::target(&raw mut byte, 1)];
    let first = remote.iter().find(|stretch| stretch.length > 0);
    let remote = first.map(|first| Stretch { length: 1, ..*first });
    match remote.map(|remote| cross_copy(pid, &local, 0, &[remote], 1, Access::Read)) {
        Some(Ok(1)) => Who::Ours,
        _ => Who::Theirs,
    }
}
