//! Accesses to memory of a window that is mapped in this process: atomic operations of the caller run on it
//! directly.

use memferry_memory::lookup::DataPath;

use super::direct::DirectWindows;
use super::peer_memory::{PeerMemory, page};
use super::rma::{AccessPlace, RmaDirection, RmaRequest, WaitMode, check_permitted, open_window};
use super::rma_engine::RmaEngine;
use super::{RemoteWindow, Rights};
use crate::error::Error;
use crate::segments::Segment;

impl RemoteWindow {
    /// Calls `access` with the address of `length` bytes of the window in this process, and returns its
    /// result. Returns `None`, without a call, if the bytes are not mapped here, their translation is not
    /// known yet, or another access to the peer is before this one.
    ///
    /// The memory is shared: `access` may use atomic instructions and raw copies only, and no reference.
    #[doc(hidden)]
    pub fn with_mapped<T>(
        &self,
        offset: u64,
        length: usize,
        rights: Rights,
        access: impl FnOnce(*mut u8) -> T,
    ) -> Result<Option<T>, Error> {
        self.port.check_fork()?;
        if length == 0 {
            return Ok(None);
        }
        let given = self.rights();
        if !given.include(rights) {
            return Err(Error::NotPermitted { asked: rights, given });
        }
        let request = self.request(
            RmaDirection::Put,
            offset,
            Segment::source(std::ptr::NonNull::<u8>::dangling().as_ptr(), length),
            None,
        );
        self.check_inside(offset, length as u64)?;
        let peer = self.memory();
        let Some(mut guard) = peer.queue.try_begin() else { return Ok(None) };
        peer.check()?;
        let engine = self.rma_engine();
        engine.with_translated(
            peer,
            guard.direct(),
            &request,
            rights,
            |run_flags, address, run_length| {
                let needed = page::MAPPED | page::WRITABLE;
                (run_flags & needed == needed && run_length == length)
                    .then(|| access(address as *mut u8))
            },
        )
    }
}

impl RmaEngine {
    /// Translates the bytes of a request and publishes the access while `body` runs with the translation: its
    /// flags, address and length. `None` if the translation is not known yet.
    fn with_translated<T>(
        &self,
        peer: &PeerMemory,
        direct: &mut DirectWindows,
        request: &RmaRequest,
        rights: Rights,
        body: impl FnOnce(u64, u64, usize) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let info = open_window(peer, request.window)?;
        let place = AccessPlace {
            id: request.window,
            info: &info,
            offset: request.offset,
            length: request.local.length,
        };
        let wait = WaitMode::NonBlocking;
        let Some(run) = self.locate(peer, direct, place, DataPath::Receive, wait)? else {
            return Ok(None);
        };
        let _visit = peer.begin_access(request.window);
        check_permitted(peer, request, &info, rights)?;
        Ok(body(run.flags, run.address, run.length))
    }
}
