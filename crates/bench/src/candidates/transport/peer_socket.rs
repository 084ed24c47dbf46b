//! Socket between two members: the first listens under the name of their group, the second
//! connects. They exchange bytes and descriptors until their transport is connected; later each
//! member uses the socket to check that the other is alive.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::ensure;
use memferry_sys::peer_process::{Credentials, credentials, is_alive};
use memferry_sys::seqpacket::{SeqPacketListener, SeqPacketSocket, SocketName};

/// Timeout of the connection and of each receive.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
const RETRY_SLEEP: Duration = Duration::from_millis(1);

/// Connection to the other member.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    name: String,
    is_first: bool,
    socket: SeqPacketSocket,
}

impl PeerSocket {
    /// Listens for the other member, or connects to it.
    pub(super) fn connect(name: &str, is_first: bool) -> anyhow::Result<Self> {
        let point = SocketName::Abstract(format!("meeting:{name}"));
        let socket = if is_first {
            let listener = SeqPacketListener::bind(&point)?;
            retry_until_timeout(|| listener.accept())?
        } else {
            retry_until_timeout(|| SeqPacketSocket::connect(&point))?
        };
        Ok(Self { name: name.to_owned(), is_first, socket })
    }

    /// Name of the group, which is unique.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether this is the member that listened.
    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Sends bytes and descriptors to the other member.
    pub(super) fn send(&self, words: &[u8], descriptors: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        Ok(retry_until_timeout(|| self.socket.send(words, descriptors))?)
    }

    /// Waits for `COUNT` descriptors from the other member, and for bytes that fill `words`.
    pub(super) fn receive<const COUNT: usize>(
        &self,
        words: &mut [u8],
    ) -> anyhow::Result<[OwnedFd; COUNT]> {
        let (length, descriptors) = retry_until_timeout(|| self.socket.receive(words))?;
        let count = descriptors.len();
        let descriptors = descriptors.try_into().ok().filter(|_| length == words.len());
        descriptors.ok_or_else(|| anyhow::anyhow!("got {length} bytes and {count} descriptors"))
    }

    /// Credentials of the other member.
    pub(super) fn peer_credentials(&self) -> io::Result<Credentials> {
        credentials(self.socket.as_fd())
    }

    /// Returns an error if the other member has exited.
    pub(super) fn check_peer(&self) -> anyhow::Result<()> {
        ensure!(is_alive(None, self.socket.as_fd()), "the other member has gone");
        Ok(())
    }
}

/// Retries until the attempt succeeds, fails permanently, or the timeout expires.
fn retry_until_timeout<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match attempt() {
            Err(error) if is_not_ready(error.kind()) && Instant::now() < deadline => {
                std::thread::sleep(RETRY_SLEEP);
            }
            result => return result,
        }
    }
}

/// Returns whether an error means that the other member is not ready yet.
fn is_not_ready(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, WouldBlock};
    matches!(kind, ConnectionRefused | Interrupted | WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_gives_the_other_takes_until_it_has_gone() {
        let name = format!("meeting-test-{}", std::process::id());
        std::thread::scope(|scope| {
            let first = scope.spawn(|| PeerSocket::connect(&name, true).unwrap());
            let second = PeerSocket::connect(&name, false).unwrap();
            let first = first.join().unwrap();
            assert!(first.is_first() && !second.is_first());
            first.send(&[1, 2], &[std::io::stdin().as_fd()]).unwrap();
            let mut words = [0; 2];
            let [_descriptor] = second.receive(&mut words).unwrap();
            assert_eq!(words, [1, 2]);
            assert_eq!(second.peer_credentials().unwrap().pid, std::process::id());
            second.send(&[3], &[]).unwrap();
            assert!(first.receive::<1>(&mut words).is_err(), "neither the words nor a descriptor");
            first.check_peer().unwrap();
            drop(second);
            assert!(first.check_peer().is_err());
        });
    }
}
