//! The calls of an endpoint for those who keep their own books: operations are posted with a context
//! and end in reports, which one call collects for all of them. The libfabric provider stands on
//! these.

use std::time::{Duration, Instant};

use crate::carrier::{CarriedAccess, Carrier};
use crate::endpoint::Endpoint;
use crate::envelope::{Envelope, Wanted};
use crate::error::Error;
use crate::pieces::Piece;
use crate::port::{Peer, State};
use crate::report::{Ending, Report};
use crate::window::{RawMemory, RemoteWindow, Rights, Window};

impl Endpoint {
    /// A peer by its name. It is connected when the first message to it needs that, and nobody waits
    /// for it: messages are kept in order meanwhile.
    pub fn know(&self, name: &str) -> Result<Peer, Error> {
        self.port().check_fork()?;
        self.port().enter().know(name)
    }

    /// Whether a known peer is connected. If it is not, it is called: ask again later.
    pub fn is_connected(&self, peer: Peer) -> Result<bool, Error> {
        self.port().check_fork()?;
        self.port().enter().reach_out(peer)
    }

    /// Exposes raw memory under a key that the caller chooses, so that peers find it without a
    /// handle. Nothing keeps two windows from having the same key: then either is found.
    ///
    /// # Safety
    /// As for [`Endpoint::expose_raw`].
    pub unsafe fn expose_key(
        &self,
        address: *mut u8,
        length: usize,
        rights: Rights,
        key: u64,
    ) -> Result<Window<RawMemory>, Error> {
        // SAFETY: passed on.
        let memory = unsafe { RawMemory::new(address, length) };
        self.port().expose(memory, rights, Some(key)).map_err(|failed| failed.error)
    }

    /// Attaches the window of a connected peer that has a key.
    pub fn attach_key(&self, peer: Peer, key: u64) -> Result<RemoteWindow, Error> {
        self.port().attach_key(peer, key)
    }

    /// Takes back [`Endpoint::know`]. Messages that wait for the connection end.
    pub fn forget(&self, peer: Peer) {
        if self.port().check_fork().is_ok() {
            self.port().enter().forget(peer);
        }
    }

    /// Lets somebody carry messages to and from other hosts.
    pub fn carry(&self, carrier: Box<dyn Carrier>) -> Result<(), Error> {
        self.port().check_fork()?;
        self.port().enter().carry(carrier)
    }

    /// The peer that the carrier has this number for.
    pub fn know_carried(&self, number: u64) -> Result<Peer, Error> {
        self.port().check_fork()?;
        self.port().enter().know_carried(number)
    }

    /// The carrier's number for a peer, if it is on another host.
    pub fn carried_number(&self, peer: Peer) -> Option<u64> {
        self.port().enter().carried_number(peer)
    }

    /// Begins to read or write memory of a peer on another host. It ends in a report.
    ///
    /// # Safety
    /// Until it has ended, the memory of this side must stay valid, unchanged if it is read from,
    /// and nobody else may access it if it is written to.
    pub unsafe fn post_carried(
        &self,
        peer: Peer,
        access: &CarriedAccess,
        ending: Ending,
    ) -> Result<(), Error> {
        self.port().check_fork()?;
        // SAFETY: passed on.
        unsafe { self.port().enter().access_carried(peer, access, ending) }
    }

    /// Begins a send that ends in a report. If it is over at once, that is returned instead (nothing
    /// for a quiet one that ended well).
    ///
    /// # Safety
    /// Until it has ended, the memory must stay valid and unchanged.
    #[inline]
    pub unsafe fn post_send(
        &self,
        to: Peer,
        envelope: Envelope,
        pieces: &[Piece],
        ending: Ending,
    ) -> Result<Option<Report>, Error> {
        // SAFETY: passed on.
        unsafe { self.port().post_send(to, envelope, pieces, ending) }
    }

    /// Sends bytes, a copy of them if they cannot be sent at once. There is no report.
    #[inline]
    pub fn inject(&self, to: Peer, envelope: Envelope, bytes: &[u8]) -> Result<(), Error> {
        self.port().inject(to, envelope, bytes)
    }

    /// Moves messages on until everything that was injected has left this process, at most so long.
    /// Returns whether it has. For those who are about to close the endpoint.
    pub fn flush(&self, timeout: Duration) -> bool {
        if self.port().check_fork().is_err() {
            return true;
        }
        let deadline = Instant::now().checked_add(timeout);
        let is_empty = |state: &mut State| (!state.operations.has_detached()).then_some(());
        self.port().block(true, deadline, is_empty).is_some()
    }

    /// Begins a receive that ends in a report.
    ///
    /// # Safety
    /// Until it has ended, the memory must stay valid for writes, and nobody else may access it.
    #[inline]
    pub unsafe fn post_receive(
        &self,
        wanted: &Wanted,
        pieces: &[Piece],
        context: u64,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.port().post_receive(wanted, pieces, context, None) }
    }

    /// Begins a receive that takes message after message, one behind the other, until fewer than
    /// `least` bytes are left. Each ends in a report; that of the last says so.
    ///
    /// # Safety
    /// As for [`Endpoint::post_receive`], until the report of the last.
    pub unsafe fn post_receive_several(
        &self,
        wanted: &Wanted,
        memory: Piece,
        context: u64,
        least: u64,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.port().post_receive(wanted, &[memory], context, Some(least)) }
    }

    /// Moves messages on and looks for one that a receive would take. With a claim it is set aside:
    /// only [`Endpoint::post_claimed`] finds it.
    pub fn peek(&self, wanted: &Wanted, claim: Option<u64>) -> Result<Option<Report>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().enter();
        state.look_around();
        state.peek(wanted, claim)
    }

    /// Begins to receive a message that was set aside. It ends in a report.
    ///
    /// # Safety
    /// As for [`Endpoint::post_receive`].
    pub unsafe fn post_claimed(
        &self,
        claim: u64,
        pieces: &[Piece],
        context: u64,
    ) -> Result<(), Error> {
        self.port().check_fork()?;
        // SAFETY: passed on.
        unsafe { self.port().enter().receive_claimed(claim, pieces, context) }
    }

    /// Moves messages on and drops the first that a receive would take. Its sender does not notice.
    pub fn discard(&self, wanted: &Wanted) -> Result<Option<Report>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().enter();
        state.look_around();
        state.discard(wanted)
    }

    /// Drops a message that was set aside.
    pub fn discard_claimed(&self, claim: u64) -> Result<(), Error> {
        self.port().check_fork()?;
        self.port().enter().discard_claimed(claim)
    }

    /// Asks for an early end of the operation that was posted with this context. It ends in a report
    /// one way or the other. Returns whether there is such an operation.
    pub fn cancel_posted(&self, context: u64) -> bool {
        self.port().check_fork().is_ok() && self.port().enter().cancel_posted(context)
    }

    /// Moves messages on and hands over what has ended. Returns whether anything has.
    ///
    /// It never waits, but for one case: where processes share cores, a thread that has asked in vain
    /// again and again, and has done nothing else, sleeps for at most a millisecond.
    #[inline]
    pub fn collect(&self, reports: &mut Vec<Report>) -> bool {
        self.port().collect(reports)
    }

    /// Waits until something has ended, at most so long, and hands it over. Ends early when
    /// [`Endpoint::interrupt`] is called or the endpoint closed.
    pub fn collect_timeout(&self, reports: &mut Vec<Report>, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.port().collect_until(reports, deadline)
    }

    /// Whether a sleep on the descriptor of [`Endpoint::watch`] misses nothing. While it is `false`,
    /// something is under way that does not ring: look again soon.
    pub fn rings(&self) -> bool {
        if self.port().check_fork().is_err() {
            return true;
        }
        let mut state = self.port().enter();
        !state.is_hearing_soon() && !state.is_offloading()
    }

    /// Ends a wait of another thread in [`Endpoint::collect_timeout`]; the next one if none waits.
    pub fn interrupt(&self) {
        if self.port().check_fork().is_ok() {
            self.port().interrupt();
        }
    }
}
