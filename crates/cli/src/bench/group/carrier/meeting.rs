//! Two members that meet: the first waits under the name of their group, the second comes. They hand
//! each other words and descriptors until they are connected in their own way; afterwards each can
//! ask whether the other is still there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::ensure;
use memferry_sys::packet_socket::{PacketListener, PacketSocket, SocketName};
use memferry_sys::peer_process::{Credentials, credentials, is_alive};

/// How long the other may take to come, and to speak.
const PATIENCE: Duration = Duration::from_secs(20);
const NAP: Duration = Duration::from_millis(1);

/// A connection to the other member.
#[derive(Debug)]
pub(in crate::bench::group) struct Meeting {
    name: String,
    is_first: bool,
    socket: PacketSocket,
}

impl Meeting {
    /// Waits for the other, or goes to it.
    pub(super) fn attend(name: &str, is_first: bool) -> anyhow::Result<Self> {
        let point = SocketName::Abstract(format!("meeting:{name}"));
        let socket = if is_first {
            let listener = PacketListener::bind(&point)?;
            patiently(|| listener.accept())?
        } else {
            patiently(|| PacketSocket::connect(&point))?
        };
        Ok(Self { name: name.to_owned(), is_first, socket })
    }

    /// A name that no other group has.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is the member that waited.
    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Hands words and descriptors to the other.
    pub(super) fn give(&self, words: &[u8], descriptors: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        Ok(patiently(|| self.socket.send(words, descriptors))?)
    }

    /// Waits for `COUNT` descriptors of the other, and for as many words as fill `words`.
    pub(super) fn take<const COUNT: usize>(
        &self,
        words: &mut [u8],
    ) -> anyhow::Result<[OwnedFd; COUNT]> {
        let (length, descriptors) = patiently(|| self.socket.receive(words))?;
        let count = descriptors.len();
        let descriptors = descriptors.try_into().ok().filter(|_| length == words.len());
        descriptors.ok_or_else(|| anyhow::anyhow!("got {length} bytes and {count} descriptors"))
    }

    /// Who the other is.
    pub(super) fn other(&self) -> io::Result<Credentials> {
        credentials(self.socket.as_fd())
    }

    /// An error if the other has gone.
    pub(super) fn look_for_other(&self) -> anyhow::Result<()> {
        ensure!(is_alive(None, self.socket.as_fd()), "the other member has gone");
        Ok(())
    }
}

/// Tries until it works, fails for good, or takes too long.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(error) if is_early(error.kind()) && Instant::now() < deadline => {
                std::thread::sleep(NAP);
            }
            result => return result,
        }
    }
}

/// Whether the other has only not come or not spoken yet.
fn is_early(kind: io::ErrorKind) -> bool {
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
            let first = scope.spawn(|| Meeting::attend(&name, true).unwrap());
            let second = Meeting::attend(&name, false).unwrap();
            let first = first.join().unwrap();
            assert!(first.is_first() && !second.is_first());
            first.give(&[1, 2], &[std::io::stdin().as_fd()]).unwrap();
            let mut words = [0; 2];
            let [_descriptor] = second.take(&mut words).unwrap();
            assert_eq!(words, [1, 2]);
            assert_eq!(second.other().unwrap().pid, std::process::id());
            second.give(&[3], &[]).unwrap();
            assert!(first.take::<1>(&mut words).is_err(), "neither the words nor a descriptor");
            first.look_for_other().unwrap();
            drop(second);
            assert!(first.look_for_other().is_err());
        });
    }
}
