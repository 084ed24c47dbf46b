//! Liveness checks of silent peers.
//!
//! The inner endpoint retries connecting for ever, and does not report a peer that exits while
//! bytes are expected from it. A busy peer is silent too, so this module connects to its socket:
//! the kernel of a host accepts for processes that compute, and refuses for those that have exited.
//! The connection is kept, so that the kernel sends keepalives: a host that vanishes does not
//! reply, and the exit of the process closes the connection.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use memferry_message::DisconnectReason;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::FabricTransport;
use super::peers::RemotePeer;
use super::socket_of;
use crate::address::SOCKET_BYTES;

/// How long a peer may be silent while something is expected from it.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_secs(2);
/// Polls between two reads of the clock.
const POLLS_PER_CLOCK: u32 = 64;
/// How long a connect may take: four tries of the kernel.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// The maximum interval between two probes.
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(60);
/// The maximum number of kept connections, over which the kernel detects at once that a peer or its
/// host vanishes. Other peers are probed repeatedly.
const MAX_MONITORED: usize = 32;
/// The kernel's keepalive interval, and the number of unanswered keepalives before it closes the
/// connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_PROBES: u32 = 5;

/// The liveness probe of a peer.
#[derive(Debug)]
pub(super) struct LivenessProbe {
    /// The number of packets received from the peer when the probe was created.
    packets_received: u64,
    /// The time of the next probe.
    probe_at: Instant,
    interval: Duration,
    connection: Option<ProbeConnection>,
}

/// A connection to a peer's socket, over which nothing is sent.
#[derive(Debug)]
struct ProbeConnection {
    socket: OwnedFd,
    started_at: Instant,
    is_connected: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum ProbeStatus {
    Pending,
    Alive,
    Unreachable,
}

impl LivenessProbe {
    fn new(packets_received: u64, now: Instant, timeout: Duration) -> Self {
        Self { packets_received, probe_at: now + timeout, interval: timeout, connection: None }
    }

    /// Returns whether a connection to the peer is kept.
    fn is_monitoring(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.is_connected)
    }

    /// Returns the status of the peer. Keeps the connection if `may_monitor`.
    fn check(
        &mut self,
        socket: &[u8; SOCKET_BYTES],
        now: Instant,
        may_monitor: bool,
    ) -> ProbeStatus {
        if let Some(connection) = &mut self.connection {
            let is_connected = connection.is_connected;
            match connection.poll(now) {
                ProbeStatus::Alive if may_monitor || is_connected => connection.enable_keepalive(),
                // The connection was closed: by the peer, or by its exit. The next probe decides.
                ProbeStatus::Pending if is_connected => self.schedule_next(now),
                ProbeStatus::Alive => self.schedule_next(now),
                status => return status,
            }
            return ProbeStatus::Alive;
        }
        if now < self.probe_at {
            return ProbeStatus::Pending;
        }
        match connect(socket) {
            Ok(socket) => {
                self.connection =
                    Some(ProbeConnection { socket, started_at: now, is_connected: false });
                ProbeStatus::Pending
            }
            Err(Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
                ProbeStatus::Unreachable
            }
            // Without a socket of this side, nothing is known.
            Err(_) => {
                self.schedule_next(now);
                ProbeStatus::Alive
            }
        }
    }

    fn schedule_next(&mut self, now: Instant) {
        self.connection = None;
        self.interval = (2 * self.interval).min(MAX_PROBE_INTERVAL);
        self.probe_at = now + self.interval;
    }
}

impl ProbeConnection {
    /// The status. For a kept connection, `Pending` means that it was closed.
    fn poll(&self, now: Instant) -> ProbeStatus {
        let wanted = if self.is_connected { PollFlags::RDHUP } else { PollFlags::OUT };
        let mut polled = [PollFd::new(&self.socket, wanted)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut polled, Some(&zero)), Ok(1..)) {
            return match self.is_connected {
                true => ProbeStatus::Alive,
                false if now >= self.started_at + CONNECT_TIMEOUT => ProbeStatus::Unreachable,
                false => ProbeStatus::Pending,
            };
        }
        match sockopt::socket_error(&self.socket) {
            Ok(Ok(())) if !self.is_connected => ProbeStatus::Alive,
            Ok(Ok(()) | Err(Errno::CONNRESET | Errno::PIPE)) if self.is_connected => {
                ProbeStatus::Pending
            }
            _ => ProbeStatus::Unreachable,
        }
    }

    /// Enables the kernel's keepalives.
    fn enable_keepalive(&mut self) {
        if !std::mem::replace(&mut self.is_connected, true) {
            let _ = sockopt::set_tcp_keepidle(&self.socket, KEEPALIVE_INTERVAL);
            let _ = sockopt::set_tcp_keepintvl(&self.socket, KEEPALIVE_INTERVAL);
            let _ = sockopt::set_tcp_keepcnt(&self.socket, KEEPALIVE_PROBES);
            let _ = sockopt::set_socket_keepalive(&self.socket, true);
        }
    }
}

/// Starts a non-blocking connect.
fn connect(socket: &[u8; SOCKET_BYTES]) -> Result<OwnedFd, Errno> {
    let address = address_of(socket).ok_or(Errno::AFNOSUPPORT)?;
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket_fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket_fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket_fd),
        Err(error) => Err(error),
    }
}

/// Converts a socket address to the standard library's type.
pub(super) fn address_of(socket: &[u8; SOCKET_BYTES]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes([socket[0], socket[1]]);
    let port = u16::from_be_bytes([socket[2], socket[3]]);
    if family == libc::AF_INET as u16 {
        let [a, b, c, d] = [socket[4], socket[5], socket[6], socket[7]];
        return Some((Ipv4Addr::new(a, b, c, d), port).into());
    }
    let address: [u8; 16] = socket[8..24].try_into().ok()?;
    let scope = u32::from_ne_bytes(socket[24..28].try_into().ok()?);
    let six = SocketAddrV6::new(Ipv6Addr::from(address), port, 0, scope);
    (family == libc::AF_INET6 as u16).then_some(SocketAddr::V6(six))
}

impl FabricTransport {
    /// Makes the next poll read the clock.
    pub(super) fn force_clock_check(&mut self) {
        self.polls = POLLS_PER_CLOCK - 1;
    }

    /// Probes peers from which something is expected, at intervals.
    pub(super) fn check_liveness(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        if !self.polls.is_multiple_of(POLLS_PER_CLOCK) {
            return;
        }
        let now = Instant::now();
        if now < self.next_liveness_check {
            return;
        }
        self.next_liveness_check = now + self.silence_timeout / 8;
        self.wants_awaited = true;
        self.abort_stalled(now);
        let is_monitoring = |remote: &RemotePeer| {
            remote.liveness.as_ref().is_some_and(LivenessProbe::is_monitoring)
        };
        let mut monitored = self.peers.iter().filter(|remote| is_monitoring(remote)).count();
        for peer in 0..self.peers.len() {
            let timeout = self.silence_timeout;
            let remote = &mut self.peers[peer];
            if !remote.is_expected() {
                remote.liveness = None;
                continue;
            }
            let probe = remote
                .liveness
                .get_or_insert_with(|| LivenessProbe::new(remote.packets_received, now, timeout));
            if probe.packets_received != remote.packets_received {
                remote.liveness = None;
                continue;
            }
            let was_monitoring = probe.is_monitoring();
            if probe.check(socket_of(&remote.address), now, monitored < MAX_MONITORED)
                == ProbeStatus::Unreachable
            {
                tracing::debug!(peer, "no process listens at the address of a peer");
                self.disconnect(peer, DisconnectReason::Exited);
            } else if probe.is_monitoring() && !was_monitoring {
                monitored += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(port: u16) -> [u8; SOCKET_BYTES] {
        let mut socket = [0; SOCKET_BYTES];
        socket[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        socket[2..4].copy_from_slice(&port.to_be_bytes());
        socket[4..8].copy_from_slice(&[127, 0, 0, 1]);
        socket
    }

    fn probe(now: Instant) -> LivenessProbe {
        LivenessProbe::new(0, now, Duration::ZERO)
    }

    fn status(
        probe: &mut LivenessProbe,
        port: u16,
        now: Instant,
        may_monitor: bool,
    ) -> ProbeStatus {
        for _ in 0..30_000 {
            match probe.check(&socket(port), now, may_monitor) {
                ProbeStatus::Pending => std::thread::sleep(Duration::from_millis(1)),
                status => return status,
            }
        }
        ProbeStatus::Pending
    }

    #[test]
    fn a_socket_that_somebody_listens_at_exists_and_another_does_not() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(address_of(&socket(port)), Some(listener.local_addr().unwrap()));
        let now = Instant::now();
        for may_monitor in [false, true] {
            let mut probe = probe(now);
            assert_eq!(status(&mut probe, port, now, may_monitor), ProbeStatus::Alive);
            assert_eq!(probe.is_monitoring(), may_monitor);
        }
        drop(listener);
        assert_eq!(status(&mut probe(now), port, now, true), ProbeStatus::Unreachable);
    }

    #[test]
    fn a_kept_connection_tells_of_the_end_and_not_of_silence() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let now = Instant::now();
        let mut probe = probe(now);
        assert_eq!(status(&mut probe, port, now, true), ProbeStatus::Alive);
        // The peer does not poll for an hour.
        let later = now + Duration::from_secs(3600);
        assert_eq!(probe.check(&socket(port), later, true), ProbeStatus::Alive);
        assert!(probe.is_monitoring());
        // A peer that closes the connection is probed again, and is alive.
        drop(listener.accept().unwrap());
        for _ in 0..30_000 {
            probe.check(&socket(port), later, true);
            if !probe.is_monitoring() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let later = later + MAX_PROBE_INTERVAL;
        assert_eq!(status(&mut probe, port, later, true), ProbeStatus::Alive);
        drop(listener);
        let is_unreachable = (0..30_000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            probe.check(&socket(port), later + 2 * MAX_PROBE_INTERVAL, true)
                == ProbeStatus::Unreachable
        });
        assert!(is_unreachable, "the exit of the process is detected");
    }

    #[test]
    fn a_host_that_answers_nothing_is_gone_after_a_while() {
        // The listener does not accept and its queue is full: the kernel does not reply.
        let address = rustix::net::SocketAddrAny::from(SocketAddr::from(([127, 0, 0, 1], 0)));
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let listener = rustix::net::socket(family, kind, None).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let bound = SocketAddr::try_from(rustix::net::getsockname(&listener).unwrap()).unwrap();
        let fill = std::net::TcpStream::connect(bound).unwrap();
        let now = Instant::now();
        let mut probe = probe(now);
        for _ in 0..50 {
            assert_eq!(probe.check(&socket(bound.port()), now, true), ProbeStatus::Pending);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(
            probe.check(&socket(bound.port()), now + CONNECT_TIMEOUT, true),
            ProbeStatus::Unreachable
        );
        drop(fill);
    }

    #[test]
    fn addresses_of_both_families_are_read() {
        let mut six = [0; SOCKET_BYTES];
        six[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        six[2..4].copy_from_slice(&77u16.to_be_bytes());
        six[23] = 1;
        assert_eq!(address_of(&six), Some("[::1]:77".parse().unwrap()));
        assert_eq!(address_of(&[9; SOCKET_BYTES]), None);
    }
}
