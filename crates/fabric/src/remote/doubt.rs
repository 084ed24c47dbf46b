//! Whether a silent peer still exists.
//!
//! The inner endpoint tries to connect for ever, and says nothing of a peer that died while bytes were
//! awaited from it. A busy peer is as silent, so its socket is asked: the kernel of a host answers for
//! processes that compute, and refuses for those that are gone. The connection is kept, so that the
//! kernel goes on asking: a host that vanishes answers nothing, and one whose process ends says so.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use memferry_message::Gone;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::RemoteCarrier;
use super::peers::Remote;
use super::socket_of;
use crate::address::SOCKET_BYTES;

/// How long a peer may be silent while something is expected of it.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Looks between two looks at the clock.
const LOOKS: u32 = 64;
/// How long a host may take to answer a question: until the kernel has asked four times.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// The longest pause between two questions.
const LONGEST: Duration = Duration::from_secs(60);
/// Connections that are kept, so that the kernel notices at once when a peer or its host goes. Others
/// are asked again and again.
const MOST_WATCHED: usize = 32;
/// How the kernel asks a host of which there is a connection, and how often in vain.
const KEEPALIVE_PAUSE: Duration = Duration::from_secs(2);
const KEEPALIVE_TRIES: u32 = 5;

/// What is doubted about a peer.
#[derive(Debug)]
pub(super) struct Doubt {
    /// The packets that had come from it.
    heard: u64,
    /// When its socket is asked.
    ask_at: Instant,
    pause: Duration,
    question: Option<Question>,
}

/// A connection to a peer's socket, over which nothing is ever said.
#[derive(Debug)]
struct Question {
    socket: OwnedFd,
    asked_at: Instant,
    is_answered: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    None,
    Exists,
    Gone,
}

impl Doubt {
    fn new(heard: u64, now: Instant, patience: Duration) -> Self {
        Self { heard, ask_at: now + patience, pause: patience, question: None }
    }

    /// Whether a connection to the peer is kept.
    fn is_watching(&self) -> bool {
        self.question.as_ref().is_some_and(|question| question.is_answered)
    }

    /// What is known of the peer now. Keeps the connection if it may.
    fn ask(&mut self, socket: &[u8; SOCKET_BYTES], now: Instant, may_watch: bool) -> Answer {
        if let Some(question) = &mut self.question {
            let is_kept = question.is_answered;
            match question.look(now) {
                Answer::Exists if may_watch || is_kept => question.watch(),
                // The connection was closed: by the peer, or because it has ended. Asking again tells.
                Answer::None if is_kept => self.ask_later(now),
                Answer::Exists => self.ask_later(now),
                answer => return answer,
            }
            return Answer::Exists;
        }
        if now < self.ask_at {
            return Answer::None;
        }
        match connect(socket) {
            Ok(socket) => {
                self.question = Some(Question { socket, asked_at: now, is_answered: false });
                Answer::None
            }
            Err(Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => Answer::Gone,
            // Nothing is known if this side cannot ask.
            Err(_) => {
                self.ask_later(now);
                Answer::Exists
            }
        }
    }

    fn ask_later(&mut self, now: Instant) {
        self.question = None;
        self.pause = (2 * self.pause).min(LONGEST);
        self.ask_at = now + self.pause;
    }
}

impl Question {
    /// How it stands. Of an answered one: nothing if the connection was closed.
    fn look(&self, now: Instant) -> Answer {
        let wanted = if self.is_answered { PollFlags::RDHUP } else { PollFlags::OUT };
        let mut asked = [PollFd::new(&self.socket, wanted)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut asked, Some(&at_once)), Ok(1..)) {
            return match self.is_answered {
                true => Answer::Exists,
                false if now >= self.asked_at + ANSWER_TIMEOUT => Answer::Gone,
                false => Answer::None,
            };
        }
        match sockopt::socket_error(&self.socket) {
            Ok(Ok(())) if !self.is_answered => Answer::Exists,
            Ok(Ok(()) | Err(Errno::CONNRESET | Errno::PIPE)) if self.is_answered => Answer::None,
            _ => Answer::Gone,
        }
    }

    /// Lets the kernel ask the host from now on.
    fn watch(&mut self) {
        if !std::mem::replace(&mut self.is_answered, true) {
            let _ = sockopt::set_tcp_keepidle(&self.socket, KEEPALIVE_PAUSE);
            let _ = sockopt::set_tcp_keepintvl(&self.socket, KEEPALIVE_PAUSE);
            let _ = sockopt::set_tcp_keepcnt(&self.socket, KEEPALIVE_TRIES);
            let _ = sockopt::set_socket_keepalive(&self.socket, true);
        }
    }
}

/// Begins to connect, without waiting.
fn connect(socket: &[u8; SOCKET_BYTES]) -> Result<OwnedFd, Errno> {
    let address = address_of(socket).ok_or(Errno::AFNOSUPPORT)?;
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let question = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&question, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(question),
        Err(error) => Err(error),
    }
}

/// The address of a socket as the standard library has it.
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

impl RemoteCarrier {
    /// Lets the next look ask the clock.
    pub(super) fn look_at_clock(&mut self) {
        self.looks = LOOKS - 1;
    }

    /// Now and then: asks after peers of which something is expected.
    pub(super) fn doubt(&mut self) {
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS) {
            return;
        }
        let now = Instant::now();
        if now < self.doubt_at {
            return;
        }
        self.doubt_at = now + self.patience / 8;
        self.wants_awaited = true;
        self.cut(now);
        let is_watching = |remote: &Remote| remote.doubt.as_ref().is_some_and(Doubt::is_watching);
        let mut watched = self.peers.iter().filter(|remote| is_watching(remote)).count();
        for peer in 0..self.peers.len() {
            let patience = self.patience;
            let remote = &mut self.peers[peer];
            if !remote.is_expected() {
                remote.doubt = None;
                continue;
            }
            let doubt = remote.doubt.get_or_insert_with(|| Doubt::new(remote.heard, now, patience));
            if doubt.heard != remote.heard {
                remote.doubt = None;
                continue;
            }
            let was_watching = doubt.is_watching();
            if doubt.ask(socket_of(&remote.name), now, watched < MOST_WATCHED) == Answer::Gone {
                tracing::debug!(peer, "nobody listens where a peer was");
                self.end(peer, Gone::Ended);
            } else if doubt.is_watching() && !was_watching {
                watched += 1;
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

    fn doubt(now: Instant) -> Doubt {
        Doubt::new(0, now, Duration::ZERO)
    }

    fn answer(doubt: &mut Doubt, port: u16, now: Instant, may_watch: bool) -> Answer {
        for _ in 0..30_000 {
            match doubt.ask(&socket(port), now, may_watch) {
                Answer::None => std::thread::sleep(Duration::from_millis(1)),
                answer => return answer,
            }
        }
        Answer::None
    }

    #[test]
    fn a_socket_that_somebody_listens_at_exists_and_another_does_not() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(address_of(&socket(port)), Some(listener.local_addr().unwrap()));
        let now = Instant::now();
        for may_watch in [false, true] {
            let mut doubt = doubt(now);
            assert_eq!(answer(&mut doubt, port, now, may_watch), Answer::Exists);
            assert_eq!(doubt.is_watching(), may_watch);
        }
        drop(listener);
        assert_eq!(answer(&mut doubt(now), port, now, true), Answer::Gone);
    }

    #[test]
    fn a_kept_connection_tells_of_the_end_and_not_of_silence() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let now = Instant::now();
        let mut doubt = doubt(now);
        assert_eq!(answer(&mut doubt, port, now, true), Answer::Exists);
        // It does not look for an hour.
        let later = now + Duration::from_secs(3600);
        assert_eq!(doubt.ask(&socket(port), later, true), Answer::Exists);
        assert!(doubt.is_watching());
        // A peer that closes the question is asked again, and exists.
        drop(listener.accept().unwrap());
        for _ in 0..30_000 {
            doubt.ask(&socket(port), later, true);
            if !doubt.is_watching() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let later = later + LONGEST;
        assert_eq!(answer(&mut doubt, port, later, true), Answer::Exists);
        drop(listener);
        let gone = (0..30_000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            doubt.ask(&socket(port), later + 2 * LONGEST, true) == Answer::Gone
        });
        assert!(gone, "the end of the process is noticed");
    }

    #[test]
    fn a_host_that_answers_nothing_is_gone_after_a_while() {
        // Nobody takes connections there, and there is no room for more: the kernel is silent.
        let address = rustix::net::SocketAddrAny::from(SocketAddr::from(([127, 0, 0, 1], 0)));
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let listener = rustix::net::socket(family, kind, None).unwrap();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let bound = SocketAddr::try_from(rustix::net::getsockname(&listener).unwrap()).unwrap();
        let fill = std::net::TcpStream::connect(bound).unwrap();
        let now = Instant::now();
        let mut doubt = doubt(now);
        for _ in 0..50 {
            assert_eq!(doubt.ask(&socket(bound.port()), now, true), Answer::None);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(doubt.ask(&socket(bound.port()), now + ANSWER_TIMEOUT, true), Answer::Gone);
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
