//! Fetches of peers' announced messages: the receive buffer is posted to the inner endpoint first,
//! then the peer is requested to send directly into it.

use memferry_message::{DisconnectReason, Error, RemoteEvent, Segment};

use super::in_flight::InFlightOp;
use super::inner::{InnerCompletion, PostError};
use super::packet::PacketBody;
use super::peers::QueuedOutput;
use super::{FabricTransport, iov};

/// A fetch that is posted to the inner endpoint, or will be.
#[derive(Debug)]
pub(super) struct RemoteFetch {
    pub(super) number: u64,
    ticket: u64,
    length: u64,
    acknowledged: bool,
    segments: Vec<Segment>,
    /// Receives the bytes first, if the inner endpoint cannot take that many segments.
    bounce: Option<Vec<u8>>,
}

impl FabricTransport {
    /// Fetches the first `length` bytes of an announced message.
    pub(super) fn start_fetch(
        &mut self,
        peer: usize,
        ticket: u64,
        number: u64,
        segments: &[Segment],
        length: u64,
    ) {
        let offer = self.peers[peer].pending_rts.remove(&ticket);
        let reason = self.peers[peer].disconnect_reason();
        let (Some(offer), None) = (offer, &reason) else {
            let reason = reason.unwrap_or(DisconnectReason::Exited);
            return self.report_fetched(number, Err(Error::PeerDisconnected(reason.into())));
        };
        let length = length.min(offer.length).min(iov::total(segments));
        if length == 0 {
            // A request for 0 bytes completes the message on the sender.
            self.push_control(peer, &PacketBody::Cts { ticket, label: 0, length: 0 });
            return self.report_fetched(number, Ok(()));
        }
        let (acknowledged, segments, gathered) = (offer.acknowledged, segments.to_vec(), None);
        let fetch =
            RemoteFetch { number, ticket, length, acknowledged, segments, bounce: gathered };
        self.enqueue(peer, QueuedOutput::Fetch(fetch));
    }

    /// Posts the buffer of a fetch to the inner endpoint, then sends the request.
    pub(super) fn post_receive(
        &mut self,
        peer: usize,
        mut fetch: RemoteFetch,
    ) -> Result<(), (RemoteFetch, PostError)> {
        let from = match self.inner_number(peer) {
            Ok(from) => from,
            Err(error) => return Err((fetch, error)),
        };
        let context = self.in_flight.next_context();
        let vectors = iov::vectors(&fetch.segments, fetch.length, self.inner.max_iov());
        let vectors = vectors.unwrap_or_else(|| {
            let bytes = fetch.bounce.get_or_insert_with(|| vec![0; fetch.length as usize]);
            iov::bounce_vector(bytes)
        });
        let label = self.labels + 1;
        // SAFETY: the segments stay valid until the `Fetched` event, and the gathered bytes are
        // kept.
        let posted = unsafe { self.inner.receive_labelled(&vectors, from, label, context) };
        if let Err(error) = posted {
            return Err((fetch, error));
        }
        self.labels = label;
        let body = PacketBody::Cts { ticket: fetch.ticket, label, length: fetch.length };
        self.peers[peer].data_in_flight += 1;
        self.in_flight.insert(InFlightOp::DataReceive { peer, fetch });
        let packet = self.packet(peer, &body, 0);
        // At its position in the order.
        self.peers[peer].output.push_front(QueuedOutput::Packet(packet));
        Ok(())
    }

    /// Completes a fetch, with its bytes or an error.
    pub(super) fn on_received(
        &mut self,
        peer: usize,
        fetch: RemoteFetch,
        finished: InnerCompletion,
    ) {
        self.peers[peer].data_in_flight -= 1;
        let is_whole = finished.length as u64 == fetch.length;
        let outcome = match (finished.outcome, self.peers[peer].disconnect_reason()) {
            (Ok(()), _) if is_whole => Ok(()),
            (_, Some(reason)) => Err(reason),
            (Ok(()), None) => {
                Err(DisconnectReason::ProtocolViolation("fewer bytes sent than requested"))
            }
            (Err(code), None) => {
                tracing::debug!(code, "receive from another host failed");
                Err(DisconnectReason::Exited)
            }
        };
        if let Err(reason) = &outcome {
            self.disconnect(peer, reason.clone());
        } else {
            if let Some(bytes) = &fetch.bounce {
                // SAFETY: the receive is in flight until the `Fetched` event.
                unsafe { iov::scatter(&fetch.segments, bytes) };
            }
            if fetch.acknowledged && self.peers[peer].disconnect_reason().is_none() {
                self.push_control(peer, &PacketBody::Fin { ticket: fetch.ticket });
            }
        }
        self.report_fetched(
            fetch.number,
            outcome.map_err(|reason| Error::PeerDisconnected(reason.into())),
        );
        self.finish_disconnect(peer);
    }

    pub(super) fn report_fetched(&mut self, number: u64, outcome: Result<(), Error>) {
        self.events.push(RemoteEvent::Fetched { number, outcome });
    }
}
