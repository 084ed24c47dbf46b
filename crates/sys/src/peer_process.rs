//! Identity, privilege and liveness of another process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::fault::{Call, call, call_c};

/// Credentials of the process at the other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Process id in this pid namespace; 0 if the process is not visible here.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// Reads the credentials of the peer process from the kernel; a process cannot forge them.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    // SAFETY: all zeroes is a valid ucred.
    let mut found: libc::ucred = unsafe { std::mem::zeroed() };
    socket_option(socket, libc::SO_PEERCRED, &mut found)?;
    Ok(Credentials { pid: found.pid.max(0) as u32, uid: found.uid, gid: found.gid })
}

/// Privilege of another process compared with this one, as far as access to the memory of processes
/// is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerPrivilege {
    /// Same user and group, and `CAP_SYS_PTRACE` if this process has it.
    Equal,
    /// Different user or group.
    Other,
    /// Same user and group, but only this process has `CAP_SYS_PTRACE`.
    LessPrivileged,
    /// The privilege cannot be read.
    Unknown,
}

/// Compares the current privilege of a process with that of this process, by the kernel's ptrace
/// rule: the peer's real, effective and saved ids must all equal the real ids of this process.
pub fn compare_privilege(found: Credentials) -> PeerPrivilege {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    if (found.uid, found.gid) != (uid, gid) {
        return PeerPrivilege::Other;
    }
    let has_ptrace = |pid| {
        let sets = call(Call::Capget, || rustix::thread::capabilities(pid)).ok()?;
        Some(sets.effective.contains(rustix::thread::CapabilitySet::SYS_PTRACE))
    };
    // The ids may have changed since the connection was made: a program can be set-uid.
    match read_ids(found.pid) {
        Some((uids, gids)) if uids != [uid; 3] || gids != [gid; 3] => return PeerPrivilege::Other,
        Some(_) => {}
        // With `CAP_SYS_PTRACE`, the kernel's own comparison does not apply to this process.
        None if has_ptrace(None) != Some(false) => return PeerPrivilege::Unknown,
        None => return PeerPrivilege::Equal,
    }
    match (has_ptrace(None), has_ptrace(Pid::from_raw(found.pid as i32))) {
        (Some(false), _) | (_, Some(true)) => PeerPrivilege::Equal,
        _ => PeerPrivilege::LessPrivileged,
    }
}

/// Reads the real, effective and saved user and group ids of a process.
fn read_ids(pid: u32) -> Option<([u32; 3], [u32; 3])> {
    let path = format!("/proc/{pid}/status");
    let text = call(Call::Open, || std::fs::read_to_string(path)).ok()?;
    let ids = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut ids = line.split_whitespace().map_while(|id| id.parse().ok());
        Some([ids.next()?, ids.next()?, ids.next()?])
    };
    Some((ids("Uid:")?, ids("Gid:")?))
}

/// Opens a pidfd of the peer, which becomes readable when the peer exits. `None` if the kernel
/// supports neither method.
pub fn peer_pidfd(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    pidfd_from_socket(socket).or_else(|_| pidfd_from_pid(socket)).ok()
}

/// Opens a pidfd by the socket, which cannot refer to another process. Linux 6.5 or later.
pub fn pidfd_from_socket(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut descriptor: libc::c_int = -1;
    socket_option(socket, SO_PEERPIDFD, &mut descriptor)?;
    if descriptor < 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: the kernel has created this descriptor for this call, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Opens a pidfd by the peer's process id, which must be visible in this pid namespace.
pub fn pidfd_from_pid(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let pid = i32::try_from(credentials(socket)?.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::NotFound)?;
    Ok(call(Call::PidfdOpen, || pidfd_open(pid, PidfdFlags::empty()))?)
}

fn socket_option<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: value and length are valid for writes, and length is the size of the value.
    let getsockopt = || unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (value as *mut T).cast(),
            &mut length,
        )
    };
    call_c(Call::Getsockopt, getsockopt)
}

/// Whether the process is alive and its end of the socket is open.
pub fn is_alive(process: Option<BorrowedFd<'_>>, socket: BorrowedFd<'_>) -> bool {
    let mut descriptors = vec![PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    descriptors.extend(process.map(|process| PollFd::from_borrowed_fd(process, PollFlags::IN)));
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // After `EINTR` or `ENOMEM` the caller checks again later.
    call(Call::Poll, || poll(&mut descriptors, Some(&now))).map_or(true, |ended| ended == 0)
}

/// Whether the process has exited.
pub fn has_exited(process: BorrowedFd<'_>) -> bool {
    let mut descriptors = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    call(Call::Poll, || poll(&mut descriptors, Some(&now))).is_ok_and(|ended| ended > 0)
}

/// Waits until the process exits, for at most `timeout`. Returns whether it has exited.
pub fn wait_for_exit(process: BorrowedFd<'_>, timeout: std::time::Duration) -> bool {
    let mut descriptors = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    call(Call::Poll, || poll(&mut descriptors, Some(&timeout))).is_ok_and(|ready| ready > 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_socket_pair_is_from_this_process_and_alive_until_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let found = credentials(ours.as_fd()).unwrap();
        assert_eq!(found.pid, std::process::id());
        assert_eq!(compare_privilege(found), PeerPrivilege::Equal);
        assert_eq!(
            compare_privilege(Credentials { uid: found.uid + 1, ..found }),
            PeerPrivilege::Other
        );
        assert_eq!(
            compare_privilege(Credentials { gid: found.gid + 1, ..found }),
            PeerPrivilege::Other
        );
        let process = peer_pidfd(ours.as_fd()).unwrap();
        assert!(is_alive(Some(process.as_fd()), ours.as_fd()));
        drop(theirs);
        assert!(!is_alive(Some(process.as_fd()), ours.as_fd()));
        assert!(!is_alive(None, ours.as_fd()));
    }
}
