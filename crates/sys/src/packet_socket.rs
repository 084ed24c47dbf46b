//! Unix sockets that keep the borders of packets and can carry descriptors along.

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

use crate::fault::{Call, call};
use crate::folder_lock::lock_folder_of;

/// The name of a listening socket.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SocketName {
    /// A name outside the file system, which vanishes with the process.
    Abstract(String),
    /// A file.
    Path(PathBuf),
}

impl SocketName {
    /// The name that an address stands for, if it is one of these.
    fn of_address(address: &SocketAddrUnix) -> Option<Self> {
        if let Some(name) = address.abstract_name() {
            let name = name.strip_prefix(PREFIX.as_bytes())?;
            return Some(Self::Abstract(std::str::from_utf8(name).ok()?.to_owned()));
        }
        Some(Self::Path(address.path()?.to_str().ok()?.into()))
    }

    /// A name with a slash in it is a path; any other is abstract.
    pub fn parse(name: &str) -> Self {
        if name.contains('/') { Self::Path(name.into()) } else { Self::Abstract(name.to_owned()) }
    }

    /// Whether it is the path of something that is no socket.
    pub fn is_other_file(&self) -> bool {
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

/// Abstract names are all programs' together.
const PREFIX: &str = "memferry/";

/// A connected socket. Never blocks: what cannot be done at once is `WouldBlock`.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let family = AddressFamily::UNIX;
    Ok(call(Call::Socket, || socket_with(family, SocketType::SEQPACKET, flags, None))?)
}

impl PacketSocket {
    /// Connects to a listening socket.
    pub fn connect(name: &SocketName) -> io::Result<Self> {
        let socket = new_socket()?;
        let address = name.address()?;
        call(Call::Connect, || connect(&socket, &address))?;
        Ok(Self(socket))
    }

    /// The name that the other end listens on, as it was bound there, whatever name led to it.
    pub fn peer_name(&self) -> Option<SocketName> {
        let address = call(Call::Getpeername, || rustix::net::getpeername(&self.0)).ok()??;
        SocketName::of_address(&SocketAddrUnix::try_from(address).ok()?)
    }

    /// Two sockets connected to each other.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = call(Call::Socketpair, || {
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        })?;
        Ok((Self(one), Self(other)))
    }

    /// Sends one packet with descriptors.
    pub fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let packet = [io::IoSlice::new(packet)];
        call(Call::Sendmsg, || sendmsg(&self.0, &packet, &mut control, flags))?;
        Ok(())
    }

    /// Receives one packet; returns its length (0 when the other side has closed) and the
    /// descriptors that came with it. A packet that does not fit is an error. Descriptors that this
    /// process has no room for are missing: see [`PacketSocket::receive_whole`].
    pub fn receive(&self, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.take(packet).map(|(length, descriptors, _)| (length, descriptors))
    }

    /// The same, but a packet whose descriptors are missing is lost, and the error says why: this
    /// process has as many as it may have.
    pub fn receive_whole(&self, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        match self.take(packet)? {
            (_, _, true) => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            (length, descriptors, false) => Ok((length, descriptors)),
        }
    }

    /// A packet, its descriptors, and whether some of those are missing.
    fn take(&self, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>, bool)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
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
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet that is too long"));
        }
        Ok((result.bytes, descriptors, result.flags.contains(ReturnFlags::CTRUNC)))
    }
}

/// The most descriptors that one packet carries.
const MOST_DESCRIPTORS: usize = 4;

impl PacketSocket {
    /// Lets the other end know that nothing comes any more, whoever else has descriptors of it.
    pub fn hang_up(&self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write);
    }

    /// Another descriptor of the same socket.
    pub fn try_clone(&self) -> io::Result<Self> {
        call(Call::Dup, || self.0.try_clone()).map(Self)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A listening socket. Its file, if it has one, is removed on drop.
#[derive(Debug)]
pub struct PacketListener {
    socket: OwnedFd,
    name: SocketName,
    /// Whose the file is: not a forked child's.
    pid: u32,
    file: Option<FileId>,
}

/// Which file a name stands for, whatever becomes of the name.
type FileId = (u64, u64);

impl PacketListener {
    /// Takes a name. A file that a dead process left behind is taken over; a name that somebody
    /// listens on is `AddrInUse`.
    pub fn bind(name: &SocketName) -> io::Result<Self> {
        const WAITING: i32 = 64;
        const PATIENCE: Duration = Duration::from_secs(2);
        let socket = new_socket()?;
        let address = name.address()?;
        // A file that nobody listens on yet looks stale.
        let _turn = name.path().and_then(|path| lock_folder_of(path, PATIENCE));
        let take_name = || call(Call::Bind, || bind(&socket, &address));
        if let Err(error) = take_name() {
            let SocketName::Path(path) = name else { return Err(error.into()) };
            if error != rustix::io::Errno::ADDRINUSE || !is_stale(name) {
                return Err(error.into());
            }
            call(Call::Unlink, || std::fs::remove_file(path))?;
            take_name()?;
        }
        let file = name.path().and_then(socket_file).map(|(id, _)| id);
        call(Call::Listen, || listen(&socket, WAITING))?;
        Ok(Self { socket, name: name.clone(), pid: std::process::id(), file })
    }

    /// The next process that has connected, or `WouldBlock`.
    pub fn accept(&self) -> io::Result<PacketSocket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(PacketSocket(call(Call::Accept, || accept_with(&self.socket, flags))?))
    }

    /// The name it was bound to.
    pub fn name(&self) -> &SocketName {
        &self.name
    }
}

impl Drop for PacketListener {
    fn drop(&mut self) {
        if let SocketName::Path(path) = &self.name
            && self.pid == std::process::id()
        {
            // Somebody else may have the name by now.
            let _turn = lock_folder_of(path, Duration::ZERO);
            if socket_file(path).map(|(id, _)| id) == self.file {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl AsFd for PacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Whether a name is a socket's file that nobody listens on any more.
fn is_stale(name: &SocketName) -> bool {
    let is_socket = name.path().and_then(socket_file).is_some();
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && PacketSocket::connect(name).err().is_some_and(refused)
}

/// Which file a path stands for, and whose it is, if it is a socket's.
fn socket_file(path: &Path) -> Option<(FileId, u32)> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let facts = call(Call::Stat, || std::fs::symlink_metadata(path)).ok()?;
    facts.file_type().is_socket().then(|| ((facts.dev(), facts.ino()), facts.uid()))
}

/// Removes the file of a listening socket whose process is gone, if it was made by this user: a
/// process may say that it listens anywhere.
pub fn remove_stale(path: &Path, owner: u32) {
    if socket_file(path).is_none_or(|(_, uid)| uid != owner) {
        return;
    }
    let name = SocketName::Path(path.to_owned());
    // Whoever has the turn may be about to listen there; others wait for this, so not for long.
    let Some(_turn) = lock_folder_of(path, Duration::from_millis(5)) else { return };
    if socket_file(path).is_some_and(|(_, uid)| uid == owner) && is_stale(&name) {
        let _ = std::fs::remove_file(path);
    }
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
        let listener = PacketListener::bind(&unique("packet")).unwrap();
        let client = PacketSocket::connect(listener.name()).unwrap();
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
        let listener = PacketListener::bind(&unique("bound")).unwrap();
        let client = PacketSocket::connect(listener.name()).unwrap();
        assert_eq!(client.peer_name().as_ref(), Some(listener.name()));
        assert_eq!(listener.accept().unwrap().peer_name(), None);
        let folder = std::env::temp_dir();
        let file = format!("memferry-bound-{}", std::process::id());
        let listener = PacketListener::bind(&SocketName::Path(folder.join(&file))).unwrap();
        let alias = SocketName::Path(folder.join(".").join(&file));
        let client = PacketSocket::connect(&alias).unwrap();
        assert_eq!(client.peer_name().as_ref(), Some(listener.name()));
    }

    #[test]
    fn a_name_that_somebody_else_has_taken_over_is_left_alone() {
        let path = std::env::temp_dir().join(format!("memferry-taken-{}", std::process::id()));
        let name = SocketName::Path(path.clone());
        let first = PacketListener::bind(&name).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = PacketListener::bind(&name).unwrap();
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
        let listener = PacketListener::bind(&name).unwrap();
        remove_stale(&path, own);
        assert!(path.exists(), "somebody listens");
        let PacketListener { socket, .. } = &*std::mem::ManuallyDrop::new(listener);
        rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
        remove_stale(&path, own + 1);
        assert!(path.exists(), "it is another's");
        remove_stale(&path, own);
        assert!(!path.exists());
    }

    #[test]
    fn a_name_in_use_is_refused_and_a_stale_file_is_taken_over() {
        let path = std::env::temp_dir().join(format!("memferry-stale-{}", std::process::id()));
        let name = SocketName::Path(path.clone());
        let listener = PacketListener::bind(&name).unwrap();
        let error = PacketListener::bind(&name).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        // As a crash leaves it: the file is there, the socket is not.
        let file = std::mem::ManuallyDrop::new(listener);
        // A child that another test has just forked may hold on to it.
        rustix::net::shutdown(&file.socket, rustix::net::Shutdown::Both).unwrap();
        // SAFETY: the listener is never dropped, so its socket is closed once, here.
        drop(unsafe { std::ptr::read(&file.socket) });
        assert!(path.exists());
        drop(PacketListener::bind(&name).unwrap());
        assert!(!path.exists());
    }
}
