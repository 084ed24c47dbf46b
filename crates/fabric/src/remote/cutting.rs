//! Peers that are gone while the inner endpoint still works on memory of messages with them.
//!
//! A host that vanishes in the middle of a message says nothing, and the inner endpoint waits for it
//! until the kernel gives up, which takes a quarter of an hour for bytes on their way and for ever for
//! bytes that are awaited. The memory cannot be given back meanwhile. So the connection that leads to
//! the peer is cut after a while, and the inner endpoint lets go. Connections that came from its host
//! may be those of others there: the kernel is told to ask that host whether it still exists. Where
//! none of that helps (the layers of libfabric 1.17 forget about messages that a peer was to fetch),
//! the inner endpoint is closed, and with it every other host is given up.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use memferry_message::Gone;
use rustix::net::sockopt;

use super::doubt::address_of;
use super::flights::Flight;
use super::inner::Finished;
use super::peers::Standing;
use super::{RemoteCarrier, socket_of};
use crate::abi::FI_ADDR_NOTAVAIL;

/// How long the inner endpoint may take to let go by itself.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

impl RemoteCarrier {
    /// Cuts the connections to peers that are gone and whose messages do not end.
    pub(super) fn cut(&mut self, now: Instant) {
        for peer in 0..self.peers.len() {
            let remote = &mut self.peers[peer];
            if !matches!(remote.standing, Standing::Ending(_)) {
                continue;
            }
            let at = *remote.cut_at.get_or_insert(now + PATIENCE);
            if now < at {
                continue;
            }
            if std::mem::replace(&mut remote.is_cut, true) {
                return self.close_inner();
            }
            remote.cut_at = Some(now + PATIENCE);
            let name = remote.name;
            // Whoever has the same socket uses the same connection.
            let is_shared = self.peers.iter().any(|other| {
                other.standing == Standing::Open && socket_of(&other.name) == socket_of(&name)
            });
            let (Some(theirs), Some(ours)) =
                (address_of(socket_of(&name)), address_of(&self.inner.address().0))
            else {
                continue;
            };
            if !is_shared {
                tracing::debug!(peer, %theirs, "the connection to a lost peer is cut");
                each_socket(|socket| cut_one(socket, theirs, ours));
            }
        }
    }

    /// Gives up all other hosts: after that nobody touches the memory of messages, which end.
    fn close_inner(&mut self) {
        tracing::warn!("messages with a lost host do not end: all other hosts are given up");
        self.inner.close();
        for flight in self.flights.take_all() {
            match flight {
                Flight::Room { .. } => {}
                Flight::Packet { peer, is_answer, .. } => {
                    self.packet_left(peer, is_answer);
                }
                Flight::Departure { peer, ticket, .. } => {
                    self.departed(peer, ticket, Err(Gone::Ended));
                }
                Flight::Landing { peer, fetch } => {
                    let outcome = Err(libc::ECONNABORTED);
                    let source = FI_ADDR_NOTAVAIL;
                    let finished = Finished { context: 0, length: 0, source, outcome };
                    self.landed(peer, fetch, finished);
                }
            }
        }
        for peer in 0..self.peers.len() {
            self.end(peer, Gone::Ended);
        }
        self.rooms.clear();
    }
}

/// Calls for every descriptor of this process that may be a socket's.
fn each_socket(mut visit: impl FnMut(BorrowedFd<'_>)) {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return };
    for entry in all.flatten() {
        let is_socket = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        let number = entry.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok());
        if let Some(number) = number.filter(|_| is_socket) {
            // SAFETY: it was open just now. If it is closed meanwhile, or another's, its addresses say
            // so: nothing is done but to a connection between these two.
            visit(unsafe { BorrowedFd::borrow_raw(number) });
        }
    }
}

/// Cuts a connection to the peer, or has one from its host watched.
fn cut_one(socket: BorrowedFd<'_>, theirs: SocketAddr, ours: SocketAddr) {
    let (Ok(Some(other_end)), Ok(this_end)) =
        (rustix::net::getpeername(socket), rustix::net::getsockname(socket))
    else {
        return;
    };
    let (Ok(other_end), Ok(this_end)) =
        (SocketAddr::try_from(other_end), SocketAddr::try_from(this_end))
    else {
        return;
    };
    if other_end == theirs {
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    } else if other_end.ip() == theirs.ip() && this_end.port() == ours.port() {
        let _ = sockopt::set_tcp_keepidle(socket, PATIENCE);
        let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1));
        let _ = sockopt::set_tcp_keepcnt(socket, 5);
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_user_timeout(socket, 2 * PATIENCE.as_millis() as u32);
    }
}
