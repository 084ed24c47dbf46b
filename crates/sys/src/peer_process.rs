//! Another process as seen from here: who it is, and whether it still lives.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::fault::{Call, call, call_c};

/// Who is at the other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Its process number as seen from here; 0 where it is not visible.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Asks the kernel who connected, or who listens. What the kernel says cannot be forged.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    // SAFETY: all zeroes is a valid ucred.
    let mut found: libc::ucred = unsafe { std::mem::zeroed() };
    socket_option(socket, libc::SO_PEERCRED, &mut found)?;
    Ok(Credentials { pid: found.pid.max(0) as u32, uid: found.uid, gid: found.gid })
}

/// How the rights of another process compare with those of this one, as far as looking into memory
/// goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The same user and group, and it may look wherever this process may.
    Equal,
    /// Another user or group.
    Other,
    /// The same user, but this process may look into all processes (`CAP_SYS_PTRACE`) and it may
    /// not.
    LessPrivileged,
    /// It cannot be seen.
    Unknown,
}

/// Compares the rights of a process, as it has them now, with those of this one. By the rule of the
/// kernel (ptrace): its real, effective and saved users and groups must be this process's real ones.
pub fn standing(found: Credentials) -> Standing {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    if (found.uid, found.gid) != (uid, gid) {
        return Standing::Other;
    }
    let may_look = |pid| {
        let sets = call(Call::Capget, || rustix::thread::capabilities(pid)).ok()?;
        Some(sets.effective.contains(rustix::thread::CapabilitySet::SYS_PTRACE))
    };
    // What it was when it connected may have changed since: programs can be set-uid.
    match ids_now(found.pid) {
        Some((uids, gids)) if uids != [uid; 3] || gids != [gid; 3] => return Standing::Other,
        Some(_) => {}
        // Whoever may look everywhere is not stopped by the kernel's own comparison.
        None if may_look(None) != Some(false) => return Standing::Unknown,
        None => return Standing::Equal,
    }
    match (may_look(None), may_look(Pid::from_raw(found.pid as i32))) {
        (Some(false), _) | (_, Some(true)) => Standing::Equal,
        _ => Standing::LessPrivileged,
    }
}

/// The real, effective and saved user and group of a process.
fn ids_now(pid: u32) -> Option<([u32; 3], [u32; 3])> {
    let path = format!("/proc/{pid}/status");
    let text = call(Call::Open, || std::fs::read_to_string(path)).ok()?;
    let ids = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut ids = line.split_whitespace().map_while(|id| id.parse().ok());
        Some([ids.next()?, ids.next()?, ids.next()?])
    };
    Some((ids("Uid:")?, ids("Gid:")?))
}

/// A descriptor of the process at the other end, which becomes readable when that process ends.
/// `None` where the kernel cannot tell.
pub fn process_of(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    process_by_socket(socket).or_else(|_| process_by_number(socket)).ok()
}

/// The same by the socket, which cannot mean another process. Linux 6.5 or later.
pub fn process_by_socket(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut descriptor: libc::c_int = -1;
    socket_option(socket, SO_PEERPIDFD, &mut descriptor)?;
    if descriptor < 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The same by the number of the process, which has to be visible here.
pub fn process_by_number(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let pid = i32::try_from(credentials(socket)?.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::NotFound)?;
    Ok(call(Call::PidfdOpen, || pidfd_open(pid, PidfdFlags::empty()))?)
}

fn socket_option<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: value and length are valid for writes, and length says how large the value is.
    let ask = || unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (value as *mut T).cast(),
            &mut length,
        )
    };
    call_c(Call::Getsockopt, ask)
}

/// Whether the process still lives and holds its end of the socket.
pub fn is_alive(process: Option<BorrowedFd<'_>>, socket: BorrowedFd<'_>) -> bool {
    let mut watched = vec![PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    watched.extend(process.map(|process| PollFd::from_borrowed_fd(process, PollFlags::IN)));
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Interrupted, or out of memory: ask again later.
    call(Call::Poll, || poll(&mut watched, Some(&now))).map_or(true, |ended| ended == 0)
}

/// Whether a process has ended.
pub fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    call(Call::Poll, || poll(&mut watched, Some(&now))).is_ok_and(|ended| ended > 0)
}

/// Waits until a process has ended, at most `timeout`.
pub fn wait_for_end(process: BorrowedFd<'_>, timeout: std::time::Duration) {
    let mut watched = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let _ = call(Call::Poll, || poll(&mut watched, Some(&timeout)));
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
        assert_eq!(standing(found), Standing::Equal);
        assert_eq!(standing(Credentials { uid: found.uid + 1, ..found }), Standing::Other);
        assert_eq!(standing(Credentials { gid: found.gid + 1, ..found }), Standing::Other);
        let process = process_of(ours.as_fd()).unwrap();
        assert!(is_alive(Some(process.as_fd()), ours.as_fd()));
        drop(theirs);
        assert!(!is_alive(Some(process.as_fd()), ours.as_fd()));
        assert!(!is_alive(None, ours.as_fd()));
    }
}
