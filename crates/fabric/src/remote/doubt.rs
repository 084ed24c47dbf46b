//! Whether a silent peer still exists.
//!
//! The inner endpoint tries to connect for ever, and says nothing of a peer that died while bytes were
//! awaited from it. A busy peer is as silent, so its socket is asked: the kernel of a host answers for
//! processes that compute, and refuses for those that are gone.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use memferry_message::Gone;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::RemoteCarrier;
use super::socket_of;
use crate::address::SOCKET_BYTES;

/// How long a peer may be silent while something is expected of it.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Looks between two looks at the clock.
const LOOKS: u32 = 64;
/// The longest pause between two questions.
const LONGEST: Duration = Duration::from_secs(60);

/// What is doubted about a peer.
#[derive(Debug)]
pub(super) struct Doubt {
    /// The packets that had come from it.
    heard: u64,
    /// When its socket is asked.
    ask_at: Instant,
    pause: Duration,
    question: Option<OwnedFd>,
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

    fn ask(&mut self, socket: &[u8; SOCKET_BYTES], now: Instant) -> Answer {
        if now < self.ask_at {
            return Answer::None;
        }
        let answer = match &self.question {
            Some(question) => answer_to(question),
            None => match connect(socket) {
                Ok(question) => {
                    self.question = Some(question);
                    Answer::None
                }
                Err(Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => Answer::Gone,
                // Nothing is known if this side cannot ask.
                Err(_) => Answer::Exists,
            },
        };
        if answer == Answer::Exists {
            self.question = None;
            self.pause = (2 * self.pause).min(LONGEST);
            self.ask_at = now + self.pause;
        }
        answer
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

fn answer_to(question: &OwnedFd) -> Answer {
    let mut asked = [PollFd::new(question, PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut asked, Some(&at_once)) {
        Ok(1..) => match rustix::net::sockopt::socket_error(question) {
            Ok(Ok(())) => Answer::Exists,
            _ => Answer::Gone,
        },
        _ => Answer::None,
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
        self.cut(now);
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
            } else if doubt.ask(socket_of(&remote.name), now) == Answer::Gone {
                tracing::debug!(peer, "nobody listens where a peer was");
                self.end(peer, Gone::Ended);
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

    fn answer(port: u16) -> Answer {
        let now = Instant::now();
        let mut doubt = Doubt::new(0, now, Duration::ZERO);
        for _ in 0..1000 {
            match doubt.ask(&socket(port), now) {
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
        assert_eq!(answer(port), Answer::Exists);
        drop(listener);
        assert_eq!(answer(port), Answer::Gone);
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
