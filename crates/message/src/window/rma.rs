//! The execution of one access, step by step: find the memory, publish the access, read the window
//! table, copy.
//!
//! Nothing is held between two steps, so a window can be withdrawn during a long access. The window
//! table is read again for every step, and its content is valid for that step alone.

use memferry_copy::Request;
use memferry_memory::handle::ProcessAddress;
use memferry_memory::lookup::{DataPath, LookupError, Translation};
use memferry_sys::copy::stream::Streaming;
use memferry_sys::cross_memory::IoVec;
use memferry_sys::shared_memory::Protection;

use super::direct::{DirectPlace, DirectWindows};
use super::peer_memory::{PeerMemory, page};
use super::rma_engine::{PeerLookup, RmaEngine};
use super::window_table::{WindowId, WindowInfo};
use super::{PutNotification, Rights};
use crate::completion::CompletionKind;
use crate::connection::{CopyError, PeerBuffer};
use crate::control::OperationId;
use crate::error::{DisconnectReason, Error, MemorySide};
use crate::segments::{Segment, Segments, Sliceable};

/// The maximum number of bytes of a step: less than 1 ms of copying.
const MAX_STEP_BYTES: usize = 4 << 20;
/// Steps from this length are copied by engines too, if there are spare cores.
const MIN_OFFLOAD_BYTES: usize = 256 << 10;
/// The maximum number of lines of the lookup that a step holds.
const MAX_LINES: usize = 16;

/// The direction of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RmaDirection {
    Put,
    Get,
}

impl RmaDirection {
    fn data_path(self) -> DataPath {
        match self {
            Self::Put => DataPath::Receive,
            Self::Get => DataPath::Send,
        }
    }

    fn access(self) -> Protection {
        match self {
            Self::Put => Protection::ReadWrite,
            Self::Get => Protection::ReadOnly,
        }
    }

    pub(crate) fn completion_kind(self) -> CompletionKind {
        match self {
            Self::Put => CompletionKind::Put,
            Self::Get => CompletionKind::Get,
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
pub(crate) struct RmaRequest {
    pub(crate) window: WindowId,
    pub(crate) direction: RmaDirection,
    /// The offset of the first byte in the window.
    pub(crate) offset: u64,
    pub(crate) local: Segment,
    /// The number of bytes copied.
    pub(crate) done: usize,
    pub(crate) notify: Option<PutNotification>,
    /// The operation that completes with the access.
    pub(crate) operation: Option<OperationId>,
}

impl RmaRequest {
    /// Returns whether the access has no data and no notification: it only has a position in the
    /// order.
    fn is_fence(&self) -> bool {
        self.local.length == 0 && self.notify.is_none()
    }
}

/// Whether a thread that executes an access blocks on missing translations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitMode {
    Blocking,
    NonBlocking,
    /// As `NonBlocking`, for a call that only posts the access: it does not touch memory of a peer
    /// that was not accessed before either, because that may not be resident.
    Posting,
}

/// The progress of an access.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RmaProgress {
    Done,
    /// More steps are needed.
    More,
    /// A translation is missing and is being created: the access is to be retried.
    TranslationMiss,
}

/// Bytes of an open window.
#[derive(Clone, Copy)]
pub(super) struct AccessPlace<'a> {
    pub(super) id: WindowId,
    /// The record of the window.
    pub(super) info: &'a WindowInfo,
    pub(super) offset: u64,
    pub(super) length: usize,
}

/// Translated memory of the peer at consecutive addresses, and the lines that hold the
/// translations.
pub(super) struct TranslatedRun<'a> {
    /// The access: see [`page`].
    pub(super) flags: u64,
    /// The address of the first byte: in this process, or in the peer.
    pub(super) address: u64,
    pub(super) length: usize,
    /// `None` if the memory was not looked up: the right to execute accesses keeps it mapped.
    _lines: Option<[Option<Translation<'a>>; MAX_LINES]>,
}

impl RmaEngine {
    /// Executes the next step of an access.
    ///
    /// # Safety
    /// The request's local memory must be valid, for writes if it is a get, and no other thread may
    /// write it (for a get: access it) at the same time.
    pub(crate) unsafe fn step(
        &self,
        peer: &PeerMemory,
        direct: &mut DirectWindows,
        request: &mut RmaRequest,
        wait_mode: WaitMode,
    ) -> Result<RmaProgress, Error> {
        peer.check()?;
        if request.is_fence() {
            return Ok(RmaProgress::Done);
        }
        let info = open_window(peer, request.window)?;
        let remaining = request.local.length - request.done;
        if remaining > 0 {
            let offset = request.offset.wrapping_add(request.done as u64);
            let place = AccessPlace { id: request.window, info: &info, offset, length: remaining };
            let data_path = request.direction.data_path();
            let Some(run) = self.locate(peer, direct, place, data_path, wait_mode)? else {
                return Ok(RmaProgress::TranslationMiss);
            };
            let _visit = peer.begin_access(request.window);
            check_permitted(peer, request, &info, request.direction.right())?;
            // SAFETY: the caller guarantees it.
            unsafe { self.copy(peer, request, &run) }?;
            request.done += run.length;
            if request.done < request.local.length {
                return Ok(RmaProgress::More);
            }
        }
        if let Some(notify) = request.notify {
            if !self.notify(peer, direct, request, notify, wait_mode)? {
                return Ok(RmaProgress::TranslationMiss);
            }
            peer.ring_doorbell();
        }
        peer.check()?;
        Ok(RmaProgress::Done)
    }

    /// Finds memory of a window, as far as its addresses are consecutive: directly, or by the lookup.
    /// Returns `None` if a translation is missing.
    #[inline]
    pub(super) fn locate<'a>(
        &'a self,
        peer: &PeerMemory,
        direct: &mut DirectWindows,
        place: AccessPlace<'_>,
        data_path: DataPath,
        wait_mode: WaitMode,
    ) -> Result<Option<TranslatedRun<'a>>, Error> {
        let AccessPlace { id, info, offset, length } = place;
        if self.is_direct {
            let length = length.min(MAX_STEP_BYTES);
            match direct.place(peer, (id, info), (offset, length), wait_mode) {
                DirectPlace::Found { flags, address } => {
                    return Ok(Some(TranslatedRun { flags, address, length, _lines: None }));
                }
                DirectPlace::NotMet => return Ok(None),
                DirectPlace::Unknown => {}
            }
        }
        self.translate(peer, info.address.wrapping_add(offset), length, data_path, wait_mode)
    }

    /// Translates memory of a peer by the lookup, as far as its addresses are consecutive. Returns
    /// `None` on a miss.
    fn translate<'a>(
        &'a self,
        peer: &PeerMemory,
        address: u64,
        max_bytes: usize,
        data_path: DataPath,
        wait_mode: WaitMode,
    ) -> Result<Option<TranslatedRun<'a>>, Error> {
        let page_bytes = memferry_sys::pages::page_bytes() as u64;
        let lookup: &PeerLookup = &self.lookup;
        let max = max_bytes.min(MAX_STEP_BYTES) as u64;
        let mut lines = [const { None }; MAX_LINES];
        let (mut flags, mut start, mut length) = (0, 0, 0);
        for line in &mut lines {
            let at = ProcessAddress { process: peer.process, address: address + length };
            // Later lines are prefetched, and not waited for.
            let found = match (length, wait_mode) {
                (1.., _) => match lookup.find_or_prefetch(at, data_path) {
                    Some(found) => Ok(found),
                    None => break,
                },
                (0, WaitMode::Blocking) => lookup.translate(at, data_path),
                (0, _) => lookup.try_translate(at, data_path),
            };
            let found = match found {
                Ok(found) => found,
                // A flat table that is being rebuilt has gaps.
                Err(
                    LookupError::NotCached
                    | LookupError::Invalidated
                    | LookupError::NotPreloaded(_),
                ) => {
                    return Ok(None);
                }
                Err(error) => return Err(lookup_failed(peer, &error)),
            };
            let (word, in_page) = (found.entry(), (address + length) % page_bytes);
            let at = (word & !page::FLAGS) + in_page;
            if length == 0 {
                (flags, start) = (word & page::FLAGS, at);
                if flags == 0 {
                    return Err(peer.unreachable_error());
                }
            } else if word & page::FLAGS != flags || at != start + length {
                break;
            }
            let max_pages = (max - length + in_page).div_ceil(page_bytes);
            let pages = found.run_length(page_bytes, max_pages as usize);
            let is_whole_line = pages == found.pages_left();
            length = (length + pages as u64 * page_bytes - in_page).min(max);
            *line = Some(found);
            if length == max || !is_whole_line {
                break;
            }
        }
        let _lines = Some(lines);
        Ok(Some(TranslatedRun { flags, address: start, length: length as usize, _lines }))
    }

    /// # Safety
    /// As for [`RmaEngine::step`]; the run is translated and the access published.
    unsafe fn copy(
        &self,
        peer: &PeerMemory,
        request: &RmaRequest,
        run: &TranslatedRun<'_>,
    ) -> Result<(), Error> {
        let local = [request.local.slice(request.done, run.length)];
        let access = request.direction.access();
        if access == Protection::ReadWrite && run.flags & page::WRITABLE == 0 {
            return Err(peer.unreachable_error());
        }
        if run.flags & page::MAPPED != 0
            && run.length >= MIN_OFFLOAD_BYTES
            && self.has_spare_cores()
        {
            // SAFETY: as below.
            if unsafe { copy_with_engines(local[0].address, run, access) } {
                return Ok(());
            }
        }
        let buffer = run.peer_buffer(peer);
        let streaming: Option<Streaming> =
            (request.local.length as u64 >= self.stream_bytes).then_some(self.streaming);
        // SAFETY: the caller guarantees the local memory; the run keeps the peer's mapped.
        unsafe { buffer.copy(&local, 0, run.length as u64, access, streaming) }
            .map_err(|error| copy_failed(peer, error))
    }

    /// Sets the variable of a notification. Returns `false` if its page is not translated yet.
    fn notify(
        &self,
        peer: &PeerMemory,
        direct: &mut DirectWindows,
        request: &RmaRequest,
        notify: PutNotification,
        wait_mode: WaitMode,
    ) -> Result<bool, Error> {
        let info = open_window(peer, request.window)?;
        let place =
            AccessPlace { id: request.window, info: &info, offset: notify.offset, length: 8 };
        let Some(run) = self.locate(peer, direct, place, DataPath::Receive, wait_mode)? else {
            return Ok(false);
        };
        let _visit = peer.begin_access(request.window);
        check_permitted(peer, request, &info, request.direction.right())?;
        if run.flags & page::WRITABLE == 0 || run.length < 8 {
            return Err(peer.unreachable_error());
        }
        if run.flags & page::MAPPED != 0 {
            let word = run.address as *const std::sync::atomic::AtomicU64;
            if !word.is_aligned() {
                return Err(Error::BadMemory(MemorySide::Peer));
            }
            // SAFETY: eight bytes of a mapped page that the run holds, aligned to eight; atomics
            // may be shared with other processes. Release: a reader of the value also reads the
            // data.
            unsafe { (*word).store(notify.value, std::sync::atomic::Ordering::Release) };
            return Ok(true);
        }
        let value = notify.value.to_ne_bytes();
        let local = [Segment::source(value.as_ptr(), 8)];
        // SAFETY: eight bytes of a local variable.
        unsafe { run.peer_buffer(peer).copy(&local, 0, 8, Protection::ReadWrite, None) }
            .map_err(|error| copy_failed(peer, error))?;
        Ok(true)
    }
}

impl TranslatedRun<'_> {
    fn peer_buffer(&self, peer: &PeerMemory) -> PeerBuffer {
        if self.flags & page::MAPPED != 0 {
            let segments = Segments::One(Segment::target(self.address as *mut u8, self.length));
            let _held = Segments::Many(Box::default());
            return PeerBuffer::Mapped { segments, _held, may_overlap: peer.is_self };
        }
        let iovec = IoVec { address: self.address as usize, length: self.length };
        PeerBuffer::CrossMemory { pid: peer.pid, iovecs: Segments::One(iovec) }
    }
}

/// Copies between local memory and mapped memory of a peer with the engines of this process.
/// Returns `false` if no engine did.
///
/// # Safety
/// As for [`RmaEngine::step`], for the length of the run, which must be mapped.
unsafe fn copy_with_engines(local: *mut u8, run: &TranslatedRun<'_>, access: Protection) -> bool {
    let peer = run.address as *mut u8;
    let (source, target) = match access {
        Protection::ReadWrite => (local, peer),
        Protection::ReadOnly => (peer, local),
    };
    let Some(ferry) = crate::port::ferry() else { return false };
    // SAFETY: the caller guarantees the memory; the wait ends before the run is released.
    let started = unsafe { ferry.start_raw(Request::copy(source, target, run.length)) };
    started.is_ok_and(|transfer| transfer.wait().is_ok())
}

/// Reads the record of a window, or returns the cause why there is none.
pub(super) fn open_window(peer: &PeerMemory, window: WindowId) -> Result<WindowInfo, Error> {
    match peer.windows.read(window) {
        Some(info) => Ok(info),
        None => peer.check_now().and(Err(Error::Withdrawn)),
    }
}

/// Checks in the window table whether an access is permitted, after it was published.
pub(super) fn check_permitted(
    peer: &PeerMemory,
    request: &RmaRequest,
    before: &WindowInfo,
    asked: Rights,
) -> Result<(), Error> {
    // An owner that has closed the connection checks for accesses once after that, and not again.
    if peer.is_owner_closed() {
        return peer.check_now().and(Err(Error::Withdrawn));
    }
    let info = open_window(peer, request.window)?;
    if info != *before {
        // A correct owner never changes an open window.
        return Err(Error::Withdrawn);
    }
    if !info.rights.include(asked) {
        return Err(Error::NotPermitted { asked, given: info.rights });
    }
    let inside =
        |offset: u64, length: u64| offset.checked_add(length).is_some_and(|end| end <= info.length);
    let bytes = request.local.length as u64;
    if !inside(request.offset, bytes) || request.notify.is_some_and(|n| !inside(n.offset, 8)) {
        let (offset, window_bytes) = (request.offset, info.length);
        return Err(crate::ValidationError::OutsideWindow { offset, bytes, window_bytes }.into());
    }
    Ok(())
}

/// The error of a failed translation.
fn lookup_failed(peer: &PeerMemory, error: &LookupError) -> Error {
    match peer.check_now() {
        Err(gone) => gone,
        Ok(()) => match error {
            LookupError::Stale(_) => peer.disconnect_error(DisconnectReason::Exited),
            _ => peer.unreachable_error(),
        },
    }
}

/// The error of a failed copy.
fn copy_failed(peer: &PeerMemory, error: CopyError) -> Error {
    match (peer.check_now(), error) {
        (Err(error), _) => error,
        (Ok(()), CopyError::Fault(side)) => Error::BadMemory(side),
        (Ok(()), CopyError::Refused(libc::ESRCH)) => peer.no_memory_error(),
        (Ok(()), CopyError::Refused(_)) => peer.unreachable_error(),
    }
}
