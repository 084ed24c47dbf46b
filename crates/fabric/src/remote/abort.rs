//! Disconnected peers with whose messages the inner endpoint is still busy.
//!
//! A host that vanishes during a message sends nothing, and the inner endpoint waits for it until
//! the kernel gives up, which takes a quarter of an hour for bytes in flight and for ever for
//! expected bytes. The memory of the message stays in use for that time. So the connection to the
//! peer is shut down after [`ABORT_TIMEOUT`], and the inner endpoint completes its operations. Only
//! the inner endpoint's own sockets are touched: those in the epoll set of its completion queue.
//! libfabric has no call for this (`docs/design/fabric.md`). Connections from the peer's host may belong to other processes there: on these, keepalives are
//! enabled. If none of that helps (the layers of libfabric 1.17 lose messages that a peer was to
//! fetch), the inner endpoint is closed, and all other hosts are disconnected.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use memferry_message::DisconnectReason;
use rustix::net::sockopt;

use super::in_flight::InFlightOp;
use super::inner::InnerCompletion;
use super::liveness::address_of;
use super::peers::RemotePeerState;
use super::{FabricTransport, socket_of};
use crate::abi::FI_ADDR_NOTAVAIL;

/// How long the inner endpoint may take to complete its operations by itself.
pub(super) const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

impl FabricTransport {
    /// Shuts down the connections to disconnected peers whose messages do not complete.
    pub(super) fn abort_stalled(&mut self, now: Instant) {
        for peer in 0..self.peers.len() {
            let remote = &mut self.peers[peer];
            if !matches!(remote.state, RemotePeerState::Closing(_)) {
                continue;
            }
            let at = *remote.abort_at.get_or_insert(now + ABORT_TIMEOUT);
            if now < at {
                continue;
            }
            if std::mem::replace(&mut remote.is_aborted, true) {
                return self.close_inner();
            }
            remote.abort_at = Some(now + ABORT_TIMEOUT);
            let name = remote.address;
            // A peer with the same socket uses the same connection.
            let is_shared = self.peers.iter().any(|other| {
                other.state == RemotePeerState::Open
                    && socket_of(&other.address) == socket_of(&name)
            });
            let (Some(peer_address), Some(own_address)) =
                (address_of(socket_of(&name)), address_of(&self.inner.address().0))
            else {
                continue;
            };
            if let Some(set) = self.inner.descriptor().filter(|_| !is_shared) {
                tracing::debug!(peer, %peer_address, "shutting down the connection to a lost peer");
                let mut abort =
                    |socket: BorrowedFd<'_>| abort_socket(socket, peer_address, own_address);
                each_member(set.as_raw_fd(), MAX_NESTED_SETS, &mut abort);
            }
        }
    }

    /// Closes the inner endpoint and disconnects all other hosts: after that no thread accesses the
    /// memory of messages, which complete.
    fn close_inner(&mut self) {
        tracing::warn!("messages with a lost host do not complete: disconnecting all other hosts");
        self.inner.close();
        for op in self.in_flight.take_all() {
            match op {
                InFlightOp::PacketBuffer { .. } => {}
                InFlightOp::Packet { peer, is_reply, .. } => {
                    self.on_packet_sent(peer, is_reply);
                }
                InFlightOp::DataSend { peer, ticket, .. } => {
                    self.on_data_sent(peer, ticket, Err(DisconnectReason::Exited));
                }
                InFlightOp::DataReceive { peer, fetch } => {
                    let outcome = Err(libc::ECONNABORTED);
                    let source = FI_ADDR_NOTAVAIL;
                    let finished = InnerCompletion { context: 0, length: 0, source, outcome };
                    self.on_received(peer, fetch, finished);
                }
            }
        }
        for peer in 0..self.peers.len() {
            self.disconnect(peer, DisconnectReason::Exited);
        }
        self.free_packet_buffers.clear();
    }
}

/// How deeply the kernel lets epoll sets be nested.
const MAX_NESTED_SETS: u32 = 5;

/// Calls `visit` for every descriptor in an epoll set of this process, and in the sets within it.
fn each_member(set: RawFd, depth: u32, visit: &mut impl FnMut(BorrowedFd<'_>)) {
    let Ok(info) = std::fs::read_to_string(format!("/proc/self/fdinfo/{set}")) else { return };
    for member in info.lines().filter_map(epoll_member) {
        // SAFETY: the set forgets descriptors that are closed, and the one thread that uses the
        // inner endpoint, which could close it, is this one.
        visit(unsafe { BorrowedFd::borrow_raw(member) });
        if depth > 0 {
            each_member(member, depth - 1, visit);
        }
    }
}

/// The descriptor in a line `tfd: 7 events: 19 ...` of the kernel's description of an epoll set.
fn epoll_member(line: &str) -> Option<RawFd> {
    line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok()
}

/// Shuts down a connection to the peer, or enables keepalives on one from its host.
fn abort_socket(socket: BorrowedFd<'_>, peer_address: SocketAddr, own_address: SocketAddr) {
    let (Ok(Some(remote_end)), Ok(local_end)) =
        (rustix::net::getpeername(socket), rustix::net::getsockname(socket))
    else {
        return;
    };
    let (Ok(remote_end), Ok(local_end)) =
        (SocketAddr::try_from(remote_end), SocketAddr::try_from(local_end))
    else {
        return;
    };
    if remote_end == peer_address {
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    } else if remote_end.ip() == peer_address.ip() && local_end.port() == own_address.port() {
        let _ = sockopt::set_tcp_keepidle(socket, ABORT_TIMEOUT);
        let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1));
        let _ = sockopt::set_tcp_keepcnt(socket, 5);
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_user_timeout(socket, 2 * ABORT_TIMEOUT.as_millis() as u32);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use memferry_sys::EventFd;
    use memferry_sys::epoll::EpollSet;

    use super::*;

    #[test]
    fn only_the_members_of_a_set_and_of_the_sets_within_it_are_visited() {
        let (outer, inner) = (EpollSet::new().unwrap(), EpollSet::new().unwrap());
        let [near, deep, removed, foreign] = [(); 4].map(|()| EventFd::new().unwrap());
        outer.add(near.as_fd(), false).unwrap();
        outer.add(inner.as_fd(), false).unwrap();
        inner.add(deep.as_fd(), false).unwrap();
        inner.add(removed.as_fd(), false).unwrap();
        inner.remove(removed.as_fd());
        let mut found = Vec::new();
        each_member(outer.as_fd().as_raw_fd(), MAX_NESTED_SETS, &mut |fd| {
            found.push(fd.as_raw_fd());
        });
        found.sort_unstable();
        let mut expected = [near.as_raw_fd(), deep.as_raw_fd(), inner.as_fd().as_raw_fd()];
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert!(!found.contains(&foreign.as_raw_fd()));
    }
}
