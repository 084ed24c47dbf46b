//! Streams of bytes that the kernel carries: loopback TCP, a Unix socket, pipes. Calls block, as in
//! most programs that use them.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use anyhow::Context;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

use super::{Connect, Link, Meeting};

/// What is asked of the kernel for the data under way: much, but what the caches hold.
const SOCKET_BYTES: usize = 1 << 20;
/// The largest pipe for users without privileges, where the kernel does not say it.
const PIPE_BYTES: i32 = 1 << 20;

/// Two directions of bytes.
pub(in crate::bench::group) struct ByteStream<R, W> {
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
pub(in crate::bench::group) type LoopbackTcp = ByteStream<TcpStream, TcpStream>;
/// A Unix stream socket.
pub(in crate::bench::group) type UnixSocket = ByteStream<UnixStream, UnixStream>;
/// A pipe for each direction.
pub(in crate::bench::group) type Pipe = ByteStream<PipeReader, PipeWriter>;

impl Connect for LoopbackTcp {
    fn connect(meeting: Meeting) -> anyhow::Result<Self> {
        let socket = if meeting.is_first() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            meeting.give(&listener.local_addr()?.port().to_le_bytes(), &[])?;
            listener.accept()?.0
        } else {
            let mut port = [0; 2];
            let [] = meeting.take(&mut port)?;
            TcpStream::connect((Ipv4Addr::LOCALHOST, u16::from_le_bytes(port)))?
        };
        // Its buffers grow by themselves, further than by hand.
        socket.set_nodelay(true)?;
        Ok(Self { from: socket.try_clone()?, to: socket })
    }
}

impl Connect for UnixSocket {
    fn connect(meeting: Meeting) -> anyhow::Result<Self> {
        let socket = if meeting.is_first() {
            let (own, other) = UnixStream::pair()?;
            meeting.give(&[0], &[other.as_fd()])?;
            own
        } else {
            let [own] = meeting.take(&mut [0])?;
            own.into()
        };
        enlarge(socket.as_fd())?;
        Ok(Self { from: socket.try_clone()?, to: socket })
    }
}

impl Connect for Pipe {
    fn connect(meeting: Meeting) -> anyhow::Result<Self> {
        let (from, to): (PipeReader, PipeWriter) = if meeting.is_first() {
            let ((from, other_to), (other_from, to)) = (std::io::pipe()?, std::io::pipe()?);
            meeting.give(&[0], &[other_from.as_fd(), other_to.as_fd()])?;
            (from, to)
        } else {
            let [from, to] = meeting.take(&mut [0])?;
            (from.into(), to.into())
        };
        widen(&to)?;
        Ok(Self { from, to })
    }
}

fn enlarge(socket: BorrowedFd<'_>) -> anyhow::Result<()> {
    set_socket_send_buffer_size(socket, SOCKET_BYTES)?;
    set_socket_recv_buffer_size(socket, SOCKET_BYTES)?;
    Ok(())
}

/// Makes a pipe as large as a user without privileges may.
fn widen(pipe: &PipeWriter) -> anyhow::Result<()> {
    let limit = std::fs::read_to_string("/proc/sys/fs/pipe-max-size").ok();
    let bytes = limit.and_then(|text| text.trim().parse().ok()).unwrap_or(PIPE_BYTES);
    // SAFETY: changes the size of a pipe whose descriptor is open; no memory is involved.
    let size = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETPIPE_SZ, bytes) };
    if size < 0 {
        return Err(std::io::Error::last_os_error()).context("a pipe cannot be made larger");
    }
    Ok(())
}
