//! Unix sockets of type `SOCK_SEQPACKET`: they preserve packet boundaries and can pass file
//! descriptors.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};

use crate::dir_lock::lock_parent_dir;
use crate::fault::{Call, call};
use crate::fork::OwnerProcess;

/// The name of a listening socket.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SocketName {
    /// A name in the abstract namespace, which disappears when the socket is closed.
    Abstract(String),
    /// The path of a socket file.
    Path(PathBuf),
}

impl SocketName {
    /// Converts a socket address. `None` for an address that was not made by this module.
    fn of_address(address: &SocketAddrUnix) -> Option<Self> {
        if let Some(name) = address.abstract_name() {
            let name = name.strip_prefix(PREFIX.as_bytes())?;
            return Some(Self::Abstract(std::str::from_utf8(name).ok()?.to_owned()));
        }
        Some(Self::Path(address.path()?.to_str().ok()?.into()))
    }

    /// Parses a name: one with a slash is a path, any other is abstract.
    pub fn parse(name: &str) -> Self {
        if name.contains('/') { Self::Path(name.into()) } else { Self::Abstract(name.to_owned()) }
    }

    /// Whether the path exists and is not a socket.
    pub fn is_non_socket_file(&self) -> bool {
        self.path().is_some_and(|path| path.exists() && socket_file(path).is_none())
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::Abstract(_) => None,
            Self::Path(path) => Some(path),
        }
    }

    fn address(&self) -> io::Result<SocketAddrUnix> {
        Ok(match self {
            Self::Abstract(name) => {
                SocketAddrUnix::new_abstract_name(format!("{PREFIX}{name}").as_bytes())?
            }
            Self::Path(path) => SocketAddrUnix::new(path.as_path())?,
        })
    }
}

impl std::fmt::Display for SocketName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Abstract(name) => f.write_str(name),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// Prefix of abstract names, which all programs of a network namespace share.
const PREFIX: &str = "memferry/";

/// A connected, non-blocking socket. An operation that cannot complete at once returns
/// `WouldBlock`.
#[derive(Debug)]
pub struct SeqPacketSocket(OwnedFd);

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let family = AddressFamily::UNIX;
    Ok(call(Call::Socket, || socket_with(family, SocketType::SEQPACKET, flags, None))?)
}

impl SeqPacketSocket {
    /// Connects to a listening socket.
    pub fn connect(name: &SocketName) -> io::Result<Self> {
        let socket = new_socket()?;
        let address = name.address()?;
        call(Call::Connect, || connect(&socket, &address))?;
        Ok(Self(socket))
    }

    /// The name that the listener was bound to, even if the caller connected through an alias.
    /// `None` on the accepting side.
    pub fn peer_name(&self) -> Option<SocketName> {
        let address = call(Call::Getpeername, || rustix::net::getpeername(&self.0)).ok()??;
        SocketName::of_address(&SocketAddrUnix::try_from(address).ok()?)
    }

    /// Creates two sockets that are connected to each other.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = call(Call::Socketpair, || {
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        })?;
        Ok((Self(one), Self(other)))
    }

    /// Sends one packet with up to four descriptors.
    pub fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let packet = [io::IoSlice::new(packet)];
        call(Call::Sendmsg, || sendmsg(&self.0, &packet, &mut control, flags))?;
        Ok(())
    }

    /// Receives one packet. Returns its length (0 after the peer has closed) and its descriptors. A
    /// packet longer than the buffer is an error. Descriptors beyond this process's descriptor
    /// limit are dropped; [`SeqPacketSocket::receive_whole`] reports that as an error.
    pub fn receive(&self, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.recv(packet).map(|(length, descriptors, _)| (length, descriptors))
    }

    /// As [`SeqPacketSocket::receive`], but the call fails with `EMFILE` and drops the packet if
    /// descriptors are missing because this process has reached its limit.
    pub fn receive_whole(&self, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        match self.recv(packet)? {
            (_, _, true) => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            (length, descriptors, false) => Ok((length, descriptors)),
        }
    }

    /// Receives the length, the descriptors, and whether descriptors are missing.
    fn recv(&self, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>, bool)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let packet = &mut [io::IoSliceMut::new(packet)];
        let result = call(Call::Recvmsg, || recvmsg(&self.0, packet, &mut control, flags))?;
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if result.flags.contains(ReturnFlags::TRUNC) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "packet longer than the buffer",
            ));
        }
        Ok((result.bytes, descriptors, result.flags.contains(ReturnFlags::CTRUNC)))
    }
}

/// Maximum number of descriptors in one packet.
const MAX_DESCRIPTORS: usize = 4;

impl SeqPacketSocket {
    /// Shuts down the sending direction. The peer sees the end even if other processes hold
    /// descriptors of this socket.
    pub fn shutdown(&self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write);
    }

    /// Duplicates the descriptor of this socket.
    pub fn try_clone(&self) -> io::Result<Self> {
        call(Call::Dup, || self.0.try_clone()).map(Self)
    }
}

impl AsFd for SeqPacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A listening socket. Its file, if it has one, is removed on drop.
#[derive(Debug)]
pub struct SeqPacketListener {
    socket: OwnedFd,
    name: SocketName,
    /// The process that owns the file. A forked child does not remove it.
    owner: OwnerProcess,
    file: Option<FileId>,
}

/// Device and inode of a socket file; they identify the file after a rename or a replacement.
type FileId = (u64, u64);

impl SeqPacketListener {
    /// Binds a name and listens on it. A socket file without a listener is replaced; a name with a
    /// listener is `AddrInUse`.
    pub fn bind(name: &SocketName) -> io::Result<Self> {
        const BACKLOG: i32 = 64;
        const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
        let socket = new_socket()?;
        let address = name.address()?;
        // Without the lock, a file that another process has bound and does not listen on yet looks
        // stale.
        let _lock = name.path().and_then(|path| lock_parent_dir(path, LOCK_TIMEOUT));
        let bind_name = || call(Call::Bind, || bind(&socket, &address));
        if let Err(error) = bind_name() {
            let SocketName::Path(path) = name else { return Err(error.into()) };
            if error != rustix::io::Errno::ADDRINUSE || !is_stale(name) {
                return Err(error.into());
            }
            call(Call::Unlink, || std::fs::remove_file(path))?;
            bind_name()?;
        }
        let file = name.path().and_then(socket_file).map(|(id, _)| id);
        call(Call::Listen, || listen(&socket, BACKLOG))?;
        Ok(Self { socket, name: name.clone(), owner: OwnerProcess::current(), file })
    }

    /// Accepts the next connection, or returns `WouldBlock`.
    pub fn accept(&self) -> io::Result<SeqPacketSocket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(SeqPacketSocket(call(Call::Accept, || accept_with(&self.socket, flags))?))
    }

    /// The name that the listener is bound to.
    pub fn name(&self) -> &SocketName {
        &self.name
    }
}

impl Drop for SeqPacketListener {
    fn drop(&mut self) {
        if let SocketName::Path(path) = &self.name
            && self.owner.is_current()
        {
            // Another process may have bound the name in the meantime.
            let _lock = lock_parent_dir(path, Duration::ZERO);
            if socket_file(path).map(|(id, _)| id) == self.file {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl AsFd for SeqPacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether the name is a socket file without a listener.
fn is_stale(name: &SocketName) -> bool {
    let is_socket = name.path().and_then(socket_file).is_some();
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && SeqPacketSocket::connect(name).err().is_some_and(refused)
}

/// Identity and owner (user id) of the file at `path`, if it is a socket.
fn socket_file(path: &Path) -> Option<(FileId, u32)> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let metadata = call(Call::Stat, || std::fs::symlink_metadata(path)).ok()?;
    metadata.file_type().is_socket().then(|| ((metadata.dev(), metadata.ino()), metadata.uid()))
}

/// Removes a socket file without a listener if user `owner` created it. The check of the owner
/// matters because the path comes from the peer, which may send any path. Returns `false` if the
/// file has to be checked again later, because another process holds the lock of the directory for
/// longer than `timeout`.
pub fn remove_stale(path: &Path, owner: u32, timeout: Duration) -> bool {
    let is_owners = || socket_file(path).is_some_and(|(_, uid)| uid == owner);
    if !is_owners() {
        return true;
    }
    let name = SocketName::Path(path.to_owned());
    // The process that holds the lock may be about to listen.
    let Some(_lock) = lock_parent_dir(path, timeout) else { return false };
    if is_owners() && is_stale(&name) {
        let _ = std::fs::remove_file(path);
    }
    true
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::EventFd;

    fn unique(name: &str) -> SocketName {
        SocketName::Abstract(format!("{name}-{}", std::process::id()))
    }

    #[test]
    fn a_packet_arrives_with_its_descriptors() {
        let listener = SeqPacketListener::bind(&unique("packet")).unwrap();
        let client = SeqPacketSocket::connect(listener.name()).unwrap();
        let server = listener.accept().unwrap();
        let event = EventFd::new().unwrap();
        client.send(b"hello", &[event.as_fd()]).unwrap();
        let mut packet = [0; 16];
        let (length, descriptors) = server.receive(&mut packet).unwrap();
        assert_eq!((&packet[..length], descriptors.len()), (&b"hello"[..], 1));
        assert!(server.receive(&mut packet).unwrap_err().kind() == io::ErrorKind::WouldBlock);
        client.send(&[1; 17], &[]).unwrap();
        assert!(server.receive(&mut packet).unwrap_err().kind() == io::ErrorKind::InvalidData);
        drop(client);
        assert_eq!(server.receive(&mut packet).unwrap().0, 0);
    }

    #[test]
    fn a_socket_knows_the_name_that_the_other_end_was_bound_to() {
        let listener = SeqPacketListener::bind(&unique("bound")).unwrap();
        let client = SeqPacketSocket::connect(listener.name()).unwrap();
        assert_eq!(client.peer_name().as_ref(), Some(listener.name()));
        assert_eq!(listener.accept().unwrap().peer_name(), None);
        let folder = std::env::temp_dir();
        let file = format!("memferry-bound-{}", std::process::id());
        let listener = SeqPacketListener::bind(&SocketName::Path(folder.join(&file))).unwrap();
        let alias = SocketName::Path(folder.join(".").join(&file));
        let client = SeqPacketSocket::connect(&alias).unwrap();
        assert_eq!(client.peer_name().as_ref(), Some(listener.name()));
    }

    #[test]
    fn a_name_that_somebody_else_has_taken_over_is_left_alone() {
        let path = std::env::temp_dir().join(format!("memferry-taken-{}", std::process::id()));
        let name = SocketName::Path(path.clone());
        let first = SeqPacketListener::bind(&name).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = SeqPacketListener::bind(&name).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn only_the_owners_stale_file_is_removed() {
        let path = std::env::temp_dir().join(format!("memferry-owner-{}", std::process::id()));
        let name = SocketName::Path(path.clone());
        let own = rustix::process::geteuid().as_raw();
        let listener = SeqPacketListener::bind(&name).unwrap();
        let patience = Duration::from_secs(60);
        assert!(remove_stale(&path, own, patience));
        assert!(path.exists(), "the file has a listener");
        let SeqPacketListener { socket, .. } = &*std::mem::ManuallyDrop::new(listener);
        rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
        assert!(remove_stale(&path, own + 1, patience));
        assert!(path.exists(), "the file belongs to another user");
        let lock = lock_parent_dir(&path, patience).unwrap();
        assert!(!remove_stale(&path, own, Duration::ZERO), "another has the lock");
        assert!(path.exists());
        drop(lock);
        assert!(remove_stale(&path, own, patience));
        assert!(!path.exists());
    }

    #[test]
    fn a_name_in_use_is_refused_and_a_stale_file_is_taken_over() {
        let path = std::env::temp_dir().join(format!("memferry-stale-{}", std::process::id()));
        let name = SocketName::Path(path.clone());
        let listener = SeqPacketListener::bind(&name).unwrap();
        let error = SeqPacketListener::bind(&name).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        // The state after a crash: the file exists, the socket does not.
        let file = std::mem::ManuallyDrop::new(listener);
        // A child that another test has forked may have inherited the socket, so it is shut down
        // explicitly.
        rustix::net::shutdown(&file.socket, rustix::net::Shutdown::Both).unwrap();
        // SAFETY: the listener is never dropped, so its socket is closed once, here.
        drop(unsafe { std::ptr::read(&file.socket) });
        assert!(path.exists());
        drop(SeqPacketListener::bind(&name).unwrap());
        assert!(!path.exists());
    }
}
