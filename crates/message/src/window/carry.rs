//! One access, piece by piece: translate, say that the window is visited, ask its board, copy.
//!
//! Between two pieces nothing is held, so that a window can be withdrawn in the middle of a long
//! access. What the board says is asked again for every piece and believed for that piece alone.

use memferry_copy::Request;
use memferry_memory::handle::VirtualMemoryHandle;
use memferry_memory::lookup::{LookupError, Route, Translation};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::cross_memory::Stretch;
use memferry_sys::shared_memory::Access;

use super::board::{Entry, Name};
use super::peer_memory::{PeerMemory, page};
use super::windows::{PeerLookup, Windows};
use super::{Notify, Rights};
use crate::connection::{CopyError, View};
use crate::error::{Error, Gone, Who};
use crate::pieces::{Cut, Piece, Pieces};
use crate::report::ReportKind;
use crate::wire::Number;

/// The most that is copied before the board is asked again: less than a millisecond's work.
const PIECE_BYTES: usize = 4 << 20;
/// Pieces from this length on are copied by the engines too, where cores are spare.
const ENGINE_BYTES: usize = 256 << 10;
/// The most lines of the lookup that are held at a time.
const MOST_LINES: usize = 16;

/// Which way the data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Put,
    Get,
}

impl Direction {
    fn route(self) -> Route {
        match self {
            Self::Put => Route::Receive,
            Self::Get => Route::Send,
        }
    }

    fn access(self) -> Access {
        match self {
            Self::Put => Access::Write,
            Self::Get => Access::Read,
        }
    }

    pub(crate) fn kind(self) -> ReportKind {
        match self {
            Self::Put => ReportKind::Put,
            Self::Get => ReportKind::Get,
        }
    }

    pub(crate) fn right(self) -> Rights {
        match self {
            Self::Put => Rights::WRITE,
            Self::Get => Rights::READ,
        }
    }
}

/// An access.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) window: Name,
    pub(crate) direction: Direction,
    /// Where it begins in the window.
    pub(crate) offset: u64,
    pub(crate) local: Piece,
    /// Bytes done.
    pub(crate) done: usize,
    pub(crate) notify: Option<Notify>,
    /// The operation that ends with it.
    pub(crate) number: Option<Number>,
}

impl Job {
    /// Nothing to copy and nothing to tell: only a place in the order.
    fn is_fence(&self) -> bool {
        self.local.length == 0 && self.notify.is_none()
    }
}

/// Whether whoever carries an access out waits for translations that are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    Waits,
    Never,
}

/// How far an access is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// There is more to do.
    More,
    /// A translation is missing and is being made: it was dropped, and is to be tried again.
    Missed,
}

/// Memory of the peer that is translated, one behind the other, and the lines that hold it.
struct Run<'a> {
    /// How it is reached: see [`page`].
    flags: u64,
    /// Where it begins: here, or in the peer.
    address: u64,
    length: usize,
    _lines: [Option<Translation<'a>>; MOST_LINES],
}

impl Windows {
    /// Carries out the next piece of an access.
    ///
    /// # Safety
    /// The job's local memory must be valid, for writes if it is a get, and nobody else may write
    /// it (if it is a get: access it) meanwhile.
    pub(crate) unsafe fn step(
        &self,
        peer: &PeerMemory,
        job: &mut Job,
        patience: Patience,
    ) -> Result<Progress, Error> {
        peer.check()?;
        if job.is_fence() {
            return Ok(Progress::Done);
        }
        let entry = open_entry(peer, job.window)?;
        let left = job.local.length - job.done;
        if left > 0 {
            let address = entry.address.wrapping_add(job.offset).wrapping_add(job.done as u64);
            let route = job.direction.route();
            let Some(run) = self.translate(peer, address, left, route, patience)? else {
                return Ok(Progress::Missed);
            };
            let _visit = peer.visit(job.window);
            permitted(peer, job, &entry)?;
            // SAFETY: passed on.
            unsafe { self.copy(peer, job, &run) }?;
            job.done += run.length;
            if job.done < job.local.length {
                return Ok(Progress::More);
            }
        }
        if let Some(notify) = job.notify {
            if !self.notify(peer, job, notify, patience)? {
                return Ok(Progress::Missed);
            }
            peer.ring();
        }
        peer.check()?;
        Ok(Progress::Done)
    }

    /// Translates memory of a peer, as much of it as lies one behind the other. `None`: not there
    /// yet.
    fn translate<'a>(
        &'a self,
        peer: &PeerMemory,
        address: u64,
        most: usize,
        route: Route,
        patience: Patience,
    ) -> Result<Option<Run<'a>>, Error> {
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        let lookup: &PeerLookup = &self.lookup;
        let most = most.min(PIECE_BYTES) as u64;
        let mut lines = [const { None }; MOST_LINES];
        let (mut flags, mut start, mut length) = (0, 0, 0);
        for line in &mut lines {
            let at = VirtualMemoryHandle { process: peer.process, address: address + length };
            // What comes behind the first line is asked for, but not waited for.
            let found = match (length, patience) {
                (1.., _) => match lookup.find_ahead(at, route) {
                    Some(found) => Ok(found),
                    None => break,
                },
                (0, Patience::Waits) => lookup.translate(at, route),
                (0, Patience::Never) => lookup.try_translate(at, route),
            };
            let found = match found {
                Ok(found) => found,
                // A full table that is being made anew has holes for a moment.
                Err(LookupError::Missed | LookupError::Forgotten | LookupError::NotPrepared(_)) => {
                    return Ok(None);
                }
                Err(error) => return Err(refused(peer, &error)),
            };
            let (word, in_page) = (found.entry(), (address + length) % page_bytes);
            let at = (word & !page::FLAGS) + in_page;
            if length == 0 {
                (flags, start) = (word & page::FLAGS, at);
                if flags == 0 {
                    return Err(peer.unreachable());
                }
            } else if word & page::FLAGS != flags || at != start + length {
                break;
            }
            let mut pages = 1;
            while length + pages * page_bytes - in_page < most
                && found.page(pages as usize) == Some(word + pages * page_bytes)
            {
                pages += 1;
            }
            let is_whole_line = found.page(pages as usize).is_none();
            length = (length + pages * page_bytes - in_page).min(most);
            *line = Some(found);
            if length == most || !is_whole_line {
                break;
            }
        }
        Ok(Some(Run { flags, address: start, length: length as usize, _lines: lines }))
    }

    /// # Safety
    /// As for [`Windows::step`]; the run is translated and the window visited.
    unsafe fn copy(&self, peer: &PeerMemory, job: &Job, run: &Run<'_>) -> Result<(), Error> {
        let local = [job.local.part(job.done, run.length)];
        let access = job.direction.access();
        if access == Access::Write && run.flags & page::WRITABLE == 0 {
            return Err(peer.unreachable());
        }
        if run.flags & page::NEAR != 0 && run.length >= ENGINE_BYTES && self.has_spare_cores() {
            // SAFETY: as below.
            if unsafe { copy_by_engines(local[0].address, run, access) } {
                return Ok(());
            }
        }
        let view = run.view(peer);
        let streaming: Option<Streaming> =
            (job.local.length as u64 >= self.stream_bytes).then_some(self.streaming);
        // SAFETY: the local memory by the caller's promise; the view is held by the run.
        unsafe { view.copy(&local, 0, run.length as u64, access, streaming) }
            .map_err(|error| copy_failed(peer, error))
    }

    /// Sets the variable of a notification. `false`: its page is not translated yet.
    fn notify(
        &self,
        peer: &PeerMemory,
        job: &Job,
        notify: Notify,
        patience: Patience,
    ) -> Result<bool, Error> {
        let entry = open_entry(peer, job.window)?;
        let address = entry.address.wrapping_add(notify.offset);
        let Some(run) = self.translate(peer, address, 8, Route::Receive, patience)? else {
            return Ok(false);
        };
        let _visit = peer.visit(job.window);
        permitted(peer, job, &entry)?;
        if run.flags & page::WRITABLE == 0 || run.length < 8 {
            return Err(peer.unreachable());
        }
        if run.flags & page::NEAR != 0 {
            let word = run.address as *const std::sync::atomic::AtomicU64;
            if !word.is_aligned() {
                return Err(Error::BadMemory(Who::Theirs));
            }
            // SAFETY: eight bytes of a mapped page that the run holds, on a boundary of eight;
            // atomics may be shared with anybody. Release: whoever sees the value sees the data.
            unsafe { (*word).store(notify.value, std::sync::atomic::Ordering::Release) };
            return Ok(true);
        }
        let value = notify.value.to_ne_bytes();
        let local = [Piece::source(value.as_ptr(), 8)];
        // SAFETY: eight bytes of this function's.
        unsafe { run.view(peer).copy(&local, 0, 8, Access::Write, None) }
            .map_err(|error| copy_failed(peer, error))?;
        Ok(true)
    }
}

impl Run<'_> {
    fn view(&self, peer: &PeerMemory) -> View {
        if self.flags & page::NEAR != 0 {
            let pieces = Pieces::One(Piece::target(self.address as *mut u8, self.length));
            let _held = Pieces::Many(Box::default());
            return View::Near { pieces, _held, may_overlap: peer.is_self };
        }
        let stretch = Stretch { address: self.address as usize, length: self.length };
        View::Cross { pid: peer.pid, stretches: Pieces::One(stretch) }
    }
}

/// Copies between local memory and mapped memory of a peer with all engines of this process. `false`:
/// nobody did.
///
/// # Safety
/// As for [`Windows::step`], for the length of the run, which must be near.
unsafe fn copy_by_engines(local: *mut u8, run: &Run<'_>, access: Access) -> bool {
    let theirs = run.address as *mut u8;
    let (source, target) = match access {
        Access::Write => (local, theirs),
        Access::Read => (theirs, local),
    };
    let Some(ferry) = crate::port::ferry() else { return false };
    // SAFETY: passed on; the wait is over before the run is let go.
    let started = unsafe { ferry.start(Request::copy(source, target, run.length)) };
    started.is_ok_and(|transfer| transfer.wait().is_ok())
}

/// What the board says of a window, or why there is none.
fn open_entry(peer: &PeerMemory, window: Name) -> Result<Entry, Error> {
    match peer.board.read(window) {
        Some(entry) => Ok(entry),
        None => peer.check_now().and(Err(Error::Withdrawn)),
    }
}

/// Asks the board whether an access is permitted, now that the owner can see the visit.
fn permitted(peer: &PeerMemory, job: &Job, before: &Entry) -> Result<(), Error> {
    // An owner that has ended the connection looks for visits after that, and then no more.
    if peer.has_owner_ended() {
        return peer.check_now().and(Err(Error::Withdrawn));
    }
    let entry = open_entry(peer, job.window)?;
    if entry != *before {
        // No correct owner changes an open window.
        return Err(Error::Withdrawn);
    }
    if !entry.rights.include(job.direction.right()) {
        return Err(Error::NotPermitted { asked: job.direction.right(), given: entry.rights });
    }
    let inside = |offset: u64, length: u64| {
        offset.checked_add(length).is_some_and(|end| end <= entry.length)
    };
    let bytes = job.local.length as u64;
    if !inside(job.offset, bytes) || job.notify.is_some_and(|n| !inside(n.offset, 8)) {
        let (offset, window_bytes) = (job.offset, entry.length);
        return Err(crate::ValidationError::OutsideWindow { offset, bytes, window_bytes }.into());
    }
    Ok(())
}

/// What a refused translation means.
fn refused(peer: &PeerMemory, error: &LookupError) -> Error {
    match peer.check_now() {
        Err(gone) => gone,
        Ok(()) => match error {
            LookupError::Stale(_) => Error::PeerGone(Gone::Ended),
            _ => peer.unreachable(),
        },
    }
}

/// What a failed copy means.
fn copy_failed(peer: &PeerMemory, error: CopyError) -> Error {
    match (peer.check_now(), error) {
        (Err(gone), _) => gone,
        (Ok(()), CopyError::Bad(who)) => Error::BadMemory(who),
        (Ok(()), CopyError::Refused(libc::ESRCH)) => peer.without_memory(),
        (Ok(()), CopyError::Refused(_)) => peer.unreachable(),
    }
}
