//! Calls of an endpoint for callers with a table of operations of their own: operations are posted with a
//! context and end in completion entries, which one call collects for all of them. The libfabric provider
//! uses these calls. They are hidden from the documentation.

use std::time::{Duration, Instant};

use crate::completion::{CompletionEntry, CompletionOptions};
use crate::endpoint::Endpoint;
use crate::envelope::{Envelope, MatchSpec};
use crate::error::Error;
use crate::port::{BufferReceived, Peer, PendingOps, PortState, ServiceMessage};
use crate::remote_transport::{RemoteRma, RemoteTransport};
use crate::segments::Segment;
use crate::window::{RawMemory, RemoteWindow, Rights, Window};

#[doc(hidden)]
impl Endpoint {
    /// Adds a peer by name. The peer is connected when the first message to it needs that, without blocking:
    /// messages are queued in order until then.
    pub fn add_peer(&self, name: &str) -> Result<Peer, Error> {
        self.port().check_fork()?;
        self.port().lock().add_peer(name)
    }

    /// Whether a peer is connected. If it is not, this call starts a connect, and the caller polls again
    /// later.
    pub fn is_connected(&self, peer: Peer) -> Result<bool, Error> {
        self.port().check_fork()?;
        self.port().lock().ensure_connected(peer)
    }

    /// Exposes raw memory under a key that the caller chooses, so that peers find it without a handle. Two
    /// windows may have the same key: peers then find either of them.
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
        // SAFETY: the caller guarantees it.
        let memory = unsafe { RawMemory::new(address, length) };
        self.port().expose(memory, rights, Some(key)).map_err(|failed| failed.error)
    }

    /// Attaches the window of a connected peer that has a key.
    pub fn attach_key(&self, peer: Peer, key: u64) -> Result<RemoteWindow, Error> {
        self.port().attach_key(peer, key)
    }

    /// Drops the reference of [`Endpoint::add_peer`]. After the last one, messages that wait for the
    /// connection fail.
    pub fn remove_peer(&self, peer: Peer) {
        if self.port().check_fork().is_ok() {
            self.port().lock().remove_peer(peer);
        }
    }

    /// Sets the transport for messages to and from other hosts.
    pub fn set_remote_transport(&self, carrier: Box<dyn RemoteTransport>) -> Result<(), Error> {
        self.port().check_fork()?;
        self.port().lock().set_remote_transport(carrier)
    }

    /// Sets whether peers on other hosts are expected, which they are by default. If not, a thread that sleeps
    /// for less than a second may do so without a look at the remote transport, until that has a peer.
    pub fn expect_remote(&self, is_expected: bool) {
        self.port().lock().expect_remote(is_expected);
    }

    /// The peer with a number of the remote transport.
    pub fn remote_peer(&self, number: u64) -> Result<Peer, Error> {
        self.port().check_fork()?;
        self.port().lock().protocol.remote_peer(number)
    }

    /// The remote transport's number for a peer, if the peer is on another host.
    pub fn remote_id(&self, peer: Peer) -> Option<u64> {
        self.port().lock().protocol.peers.remote_id(peer)
    }

    /// Starts a put to or a get from memory of a peer on another host. It ends in a completion entry.
    ///
    /// # Safety
    /// Until it completes, the memory of this side must stay valid: unchanged for a put, and without any
    /// other access for a get.
    pub unsafe fn post_remote_rma(
        &self,
        peer: Peer,
        access: &RemoteRma,
        ending: CompletionOptions,
    ) -> Result<(), Error> {
        self.port().check_fork()?;
        // SAFETY: the caller guarantees it.
        unsafe { self.port().lock().protocol.start_remote_rma(peer, access, ending) }
    }

    /// Starts a send that ends in a completion entry. If it completes at once, the entry is returned (`None`
    /// for a silent send that succeeded).
    ///
    /// # Safety
    /// Until it completes, the memory must stay valid and unchanged.
    #[inline]
    pub unsafe fn post_send(
        &self,
        to: Peer,
        envelope: Envelope,
        pieces: &[Segment],
        ending: CompletionOptions,
    ) -> Result<Option<CompletionEntry>, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.port().post_send(to, envelope, pieces, ending) }
    }

    /// Sends bytes, or a copy of them if they cannot be sent at once. There is no completion entry.
    #[inline]
    pub fn inject(&self, to: Peer, envelope: Envelope, bytes: &[u8]) -> Result<(), Error> {
        self.port().inject(to, envelope, bytes)
    }

    /// Accepts requests of peers ([`crate::MatchSpace::Service`]) from now on. Requests are sent by
    /// [`Endpoint::inject`], to connected peers only.
    pub fn enable_service(&self) {
        self.port().lock().enable_service();
    }

    /// Takes the first requests of peers, `limit` at most. A completion entry of
    /// [`crate::CompletionKind::Service`] reports that there are any, and another one that there are more than
    /// were taken. The caller ends each by [`Endpoint::end_service`].
    pub fn take_services(&self, limit: usize) -> Vec<ServiceMessage> {
        self.port().lock().take_services(limit)
    }

    /// Ends a request that a peer has sent in a connection, after the reply has left.
    pub fn end_service(&self, peer: Peer, connection: u64) {
        self.port().lock().end_service(peer, connection);
    }

    /// A number of the connection to a peer. It changes when the peer disconnects: a peer that connects again
    /// may have the same handle, but knows nothing of what was in flight before.
    pub fn connection_number(&self, peer: Peer) -> Result<u64, Error> {
        self.port().lock().connection_number(peer)
    }

    /// Whether a peer is connected, or may still be. Starts nothing.
    pub fn is_reachable(&self, peer: Peer) -> bool {
        let state = self.port().lock();
        state
            .protocol
            .peers
            .index_of(peer)
            .is_ok_and(|index| state.protocol.peers.is_reachable(index))
    }

    /// The operations in flight with a peer.
    pub fn pending_ops(&self, peer: Peer) -> Result<PendingOps, Error> {
        self.port().lock().protocol.pending_ops(peer)
    }

    /// Makes progress until everything that was injected has left this process, or until the timeout. Returns
    /// whether it has left. For callers that are about to close the endpoint.
    pub fn flush(&self, timeout: Duration) -> bool {
        if self.port().check_fork().is_err() {
            return true;
        }
        let deadline = Instant::now().checked_add(timeout);
        let is_empty =
            |state: &mut PortState| (!state.protocol.operations.has_detached()).then_some(());
        self.port().block(true, deadline, is_empty).is_some()
    }

    /// Starts a receive that ends in a completion entry.
    ///
    /// # Safety
    /// Until it completes, the memory must stay valid for writes, and no other code may access it.
    #[inline]
    pub unsafe fn post_receive(
        &self,
        wanted: &MatchSpec,
        pieces: &[Segment],
        context: u64,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.port().post_receive(wanted, pieces, context, None) }
    }

    /// As [`Endpoint::post_receive`]. A small message may end in [`Endpoint::poll_received`] instead of a
    /// completion entry, which takes less time.
    ///
    /// # Safety
    /// As for [`Endpoint::post_receive`].
    #[inline]
    pub unsafe fn post_buffer(
        &self,
        wanted: &MatchSpec,
        pieces: &[Segment],
        context: u64,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.port().post_buffer(wanted, pieces, context) }
    }

    /// Starts a receive that takes several messages into contiguous memory, until fewer than `least` bytes
    /// are left. Each message has a completion entry; that of the last one is marked.
    ///
    /// # Safety
    /// As for [`Endpoint::post_receive`], until the last completion entry.
    pub unsafe fn post_multi_receive(
        &self,
        wanted: &MatchSpec,
        memory: Segment,
        context: u64,
        least: u64,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees it.
        unsafe { self.port().post_receive(wanted, &[memory], context, Some(least)) }
    }

    /// Makes progress, and returns the first message that a receive would match. With a claim, the message is
    /// reserved: only [`Endpoint::post_claimed`] finds it.
    pub fn peek(
        &self,
        wanted: &MatchSpec,
        claim: Option<u64>,
    ) -> Result<Option<CompletionEntry>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().lock();
        state.progress_and_check_peers();
        state.peek(wanted, claim)
    }

    /// Starts a receive of a claimed message. It ends in a completion entry.
    ///
    /// # Safety
    /// As for [`Endpoint::post_receive`].
    pub unsafe fn post_claimed(
        &self,
        claim: u64,
        pieces: &[Segment],
        context: u64,
    ) -> Result<(), Error> {
        self.port().check_fork()?;
        // SAFETY: the caller guarantees it.
        unsafe { self.port().lock().receive_claimed(claim, pieces, context) }
    }

    /// Makes progress, and drops the first message that a receive would match. Its sender is notified as if
    /// it had been received.
    pub fn discard(&self, wanted: &MatchSpec) -> Result<Option<CompletionEntry>, Error> {
        self.port().check_fork()?;
        let mut state = self.port().lock();
        state.progress_and_check_peers();
        state.discard(wanted)
    }

    /// Drops a claimed message.
    pub fn discard_claimed(&self, claim: u64) -> Result<(), Error> {
        self.port().check_fork()?;
        self.port().lock().discard_claimed(claim)
    }

    /// Cancels the operation that was posted with this context. The operation ends in a completion entry in
    /// any case. Returns whether there is such an operation.
    pub fn cancel_posted(&self, context: u64) -> bool {
        self.port().check_fork().is_ok() && self.port().lock().cancel_posted(context)
    }

    /// Makes progress and returns completion entries. Returns whether there were any.
    ///
    /// The call blocks in one case only: if processes share cores, a thread that has only polled, repeatedly
    /// and without result, sleeps for at most 1 ms.
    #[inline]
    pub fn poll_completions(&self, reports: &mut Vec<CompletionEntry>) -> bool {
        self.port().poll_completions(reports)
    }

    /// As [`Endpoint::poll_completions`]. Passes up to `limit` messages for buffers of [`Endpoint::post_buffer`] to
    /// `take`; the others make completion entries. `take` is called inside the endpoint, and must not call it.
    #[inline]
    pub fn poll_received(
        &self,
        reports: &mut Vec<CompletionEntry>,
        limit: usize,
        take: impl FnMut(BufferReceived),
    ) -> bool {
        self.port().poll_received(reports, limit, take)
    }

    /// Waits for completion entries, at most `timeout`, and returns them. Returns early when
    /// [`Endpoint::wake_waiter`] is called or the endpoint is closed.
    pub fn wait_completions(
        &self,
        reports: &mut Vec<CompletionEntry>,
        timeout: Option<Duration>,
    ) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.port().wait_completions(reports, deadline)
    }

    /// Whether a sleep on the descriptor of [`Endpoint::ready_fd`] misses no event. While this is `false`,
    /// something is in flight that does not signal the descriptor, and the caller must poll again soon.
    pub fn can_block(&self) -> bool {
        if self.port().check_fork().is_err() {
            return true;
        }
        let mut state = self.port().lock();
        !state.needs_timed_poll()
            && !state.protocol.is_offloading()
            && state.protocol.peers.can_block_on_transport()
    }

    /// Ends a wait of another thread in [`Endpoint::wait_completions`], or the next one if no thread waits.
    pub fn wake_waiter(&self) {
        if self.port().check_fork().is_ok() {
            self.port().wake_waiter();
        }
    }
}
