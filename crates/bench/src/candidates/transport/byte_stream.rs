//! Byte streams of the kernel: loopback TCP, a Unix socket, pipes. Calls block, as in most programs
//! that use them.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use anyhow::Context;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

use super::{Connect, Link, PeerSocket};

/// Requested size of the kernel's socket buffers: large, but small enough for the caches.
const SOCKET_BYTES: usize = 1 << 20;
/// Maximum size of a pipe for unprivileged users, if the kernel does not report it.
const PIPE_BYTES: i32 = 1 << 20;

/// A byte stream in each direction.
pub(crate) struct ByteStream<R, W> {
    from: R,
    to: W,
}

impl<R: Read, W: Write> Link for ByteStream<R, W> {
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        Ok(self.to.write_all(message)?)
    }

    fn receive(&mut self, message: &mut [u8]) -> anyhow::Result<()> {
        Ok(self.from.read_exact(message)?)
    }
}

/// TCP over the loopback interface.
pub(crate) type LoopbackTcp = ByteStream<TcpStream, TcpStream>;
/// A Unix stream socket.
pub(crate) type UnixSocket = ByteStream<UnixStream, UnixStream>;
/// A pipe for each direction.
pub(crate) type Pipe = ByteStream<PipeReader, PipeWriter>;

impl Connect for LoopbackTcp {
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self> {
        let socket = if meeting.is_first() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            meeting.send(&listener.local_addr()?.port().to_le_bytes(), &[])?;
            listener.accept()?.0
        } else {
            let mut port = [0; 2];
            let [] = meeting.receive(&mut port)?;
            TcpStream::connect((Ipv4Addr::LOCALHOST, u16::from_le_bytes(port)))?
        };
        // The kernel's automatic buffer sizes exceed the maximum that can be set by hand.
        socket.set_nodelay(true)?;
        Ok(Self { from: socket.try_clone()?, to: socket })
    }
}

impl Connect for UnixSocket {
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self> {
        let socket = if meeting.is_first() {
            let (own, other) = UnixStream::pair()?;
            meeting.send(&[0], &[other.as_fd()])?;
            own
        } else {
            let [own] = meeting.receive(&mut [0])?;
            own.into()
        };
        enlarge_socket(socket.as_fd())?;
        Ok(Self { from: socket.try_clone()?, to: socket })
    }
}

impl Connect for Pipe {
    fn connect(meeting: PeerSocket) -> anyhow::Result<Self> {
        let (from, to): (PipeReader, PipeWriter) = if meeting.is_first() {
            let ((from, other_to), (other_from, to)) = (std::io::pipe()?, std::io::pipe()?);
            meeting.send(&[0], &[other_from.as_fd(), other_to.as_fd()])?;
            (from, to)
        } else {
            let [from, to] = meeting.receive(&mut [0])?;
            (from.into(), to.into())
        };
        enlarge_pipe(&to)?;
        Ok(Self { from, to })
    }
}

fn enlarge_socket(socket: BorrowedFd<'_>) -> anyhow::Result<()> {
    set_socket_send_buffer_size(socket, SOCKET_BYTES)?;
    set_socket_recv_buffer_size(socket, SOCKET_BYTES)?;
    Ok(())
}

/// Enlarges a pipe to the maximum size for unprivileged users.
fn enlarge_pipe(pipe: &PipeWriter) -> anyhow::Result<()> {
    let limit = std::fs::read_to_string("/proc/sys/fs/pipe-max-size").ok();
    let bytes = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(PIPE_BYTES);
    // SAFETY: changes the size of a pipe whose descriptor is open; no memory is involved.
    let size = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETPIPE_SZ, bytes) };
    if size < 0 {
        return Err(std::io::Error::last_os_error()).context("a pipe cannot be made larger");
    }
    Ok(())
}
