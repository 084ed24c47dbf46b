//! Copies between the memory of this process and that of another, by one system call.
//!
//! The kernel checks that this process may look into the other (same user, no namespace, filter or
//! ptrace setting in between); [`Denied`] names what usually stands in the way. Who holds
//! `CAP_SYS_PTRACE` passes all these checks, so that callers make the comparison of users
//! themselves: [`crate::peer_process::standing`].

use std::io;

use crate::fault;

/// A stretch of memory: an address in some process, and a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Stretch {
    /// Where it begins, in the address space of the process it belongs to.
    pub address: usize,
    /// How many bytes it has.
    pub length: usize,
}

// The kernel reads stretches as `struct iovec`.
const _: () = assert!(size_of::<Stretch>() == size_of::<libc::iovec>());

/// The most stretches that one call takes on each side.
pub const MOST_STRETCHES: usize = 1024;

/// The two system calls look the same from here.
type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// Reads from `remote` in process `pid` into `local`, in order; returns how many bytes were read,
/// which is less than asked for where memory on either side is missing.
///
/// # Safety
/// Every local stretch must be valid for writes, and nobody else may access it meanwhile.
pub unsafe fn read(pid: u32, remote: &[Stretch], local: &[Stretch]) -> io::Result<usize> {
    // SAFETY: passed on.
    unsafe { copy(fault::Call::ProcessVmReadv, libc::process_vm_readv, pid, remote, local) }
}

/// Writes from `local` to `remote` in process `pid`, in order; returns how many bytes were written.
///
/// # Safety
/// Every local stretch must be valid for reads. What it does to the other process is between that
/// process and the caller: it must have named the memory for this.
pub unsafe fn write(pid: u32, remote: &[Stretch], local: &[Stretch]) -> io::Result<usize> {
    // SAFETY: passed on.
    unsafe { copy(fault::Call::ProcessVmWritev, libc::process_vm_writev, pid, remote, local) }
}

unsafe fn copy(
    kind: fault::Call,
    call: Call,
    pid: u32,
    remote: &[Stretch],
    local: &[Stretch],
) -> io::Result<usize> {
    let count = |list: &[Stretch]| list.len().min(MOST_STRETCHES) as libc::c_ulong;
    let (at, there) = (local.as_ptr().cast(), remote.as_ptr().cast());
    // SAFETY: both slices have the layout of iovecs and live until the call returns; the caller
    // vouches for the local memory, the kernel checks the remote.
    let copy = || unsafe { call(pid as libc::pid_t, at, count(local), there, count(remote), 0) };
    fault::call(kind, || usize::try_from(copy()).map_err(|_| io::Error::last_os_error()))
}

/// What most likely forbids cross-memory access, for people who have to change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Denied {
    /// Switched off by `MEMFERRY_CMA=off`.
    SwitchedOff,
    /// The system call does not exist, or a filter (seccomp) hides it.
    Filtered,
    /// `kernel.yama.ptrace_scope` lets only parents, or nobody, look into processes.
    PtraceScope(u8),
    /// The other process belongs to another user or group.
    OtherUser,
    /// This process holds `CAP_SYS_PTRACE` and the other does not, which could lead it where it may
    /// not look itself.
    LessPrivileged,
    /// The other process is in another user namespace.
    UserNamespace,
    /// The other process is not dumpable, so that only the privileged may look into it.
    NotDumpable,
    /// The other process is not visible here: it is in another pid namespace.
    PidNamespace,
    /// The other process has ended, or is about to: its memory goes before its descriptors do. Or its first
    /// thread has ended, through which the kernel looks.
    Ended,
    /// The kernel said no, for none of the reasons that can be seen from here.
    Unknown,
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SwitchedOff => write!(f, "switched off by MEMFERRY_CMA=off: unset it"),
            Self::Filtered => write!(
                f,
                "the system call is filtered (seccomp): allow process_vm_readv and \
                 process_vm_writev, as by `--cap-add=SYS_PTRACE` in a container"
            ),
            Self::PtraceScope(scope) => write!(
                f,
                "kernel.yama.ptrace_scope is {scope}: `sysctl kernel.yama.ptrace_scope=0`, or give \
                 the processes CAP_SYS_PTRACE"
            ),
            Self::OtherUser => write!(
                f,
                "the other process belongs to another user or group: run both as one user and \
                 group; capabilities do not help"
            ),
            Self::LessPrivileged => write!(
                f,
                "this process holds CAP_SYS_PTRACE and the other does not: give it to both, or to \
                 none"
            ),
            Self::UserNamespace => write!(
                f,
                "the other process is in another user namespace: run both in one container, or \
                 in containers that share it"
            ),
            Self::NotDumpable => write!(
                f,
                "the other process is not dumpable (it has changed its user, was given \
                 capabilities, cannot be read by its user, or called prctl(PR_SET_DUMPABLE, 0)): \
                 let it call prctl(PR_SET_DUMPABLE, 1)"
            ),
            Self::PidNamespace => write!(
                f,
                "the other process is in another pid namespace: share it between the containers, \
                 as by `--pid=container:NAME`"
            ),
            Self::Ended => write!(
                f,
                "the other process has ended, or its first thread has: let that one wait for the others"
            ),
            Self::Unknown => write!(f, "the kernel refused it: look for a security module"),
        }
    }
}

/// Finds out why access to `pid` (0 where it is not visible) was refused with `error`.
pub fn why_denied(pid: u32, uid: u32, error: &io::Error) -> Denied {
    let namespace = |pid: &str| {
        let path = format!("/proc/{pid}/ns/user");
        fault::call(fault::Call::Readlink, || std::fs::read_link(path)).ok()
    };
    let own_uid = rustix::process::geteuid().as_raw();
    match error.raw_os_error() {
        _ if pid == 0 => Denied::PidNamespace,
        Some(libc::ENOSYS) => Denied::Filtered,
        Some(libc::ESRCH) => Denied::Ended,
        _ if is_filtered() => Denied::Filtered,
        _ if uid != own_uid => Denied::OtherUser,
        _ => match (namespace(&pid.to_string()), namespace("self")) {
            (Some(theirs), Some(ours)) if theirs != ours => Denied::UserNamespace,
            _ if is_not_dumpable(pid, uid) => Denied::NotDumpable,
            _ if ptrace_scope() > 0 => Denied::PtraceScope(ptrace_scope()),
            // A process that this one may not look into hides even its namespace.
            (None, _) => Denied::UserNamespace,
            _ => Denied::Unknown,
        },
    }
}

/// Whether a thread of process `pid` has memory. A process that ends has none long before it is seen to have
/// ended: much memory takes long to be given back. The kernel looks through one thread, which may have ended
/// alone; so all are asked.
pub fn has_memory(pid: u32) -> bool {
    let tasks = fault::call(fault::Call::Open, || std::fs::read_dir(format!("/proc/{pid}/task")));
    let ids = tasks.into_iter().flatten().flatten();
    ids.filter_map(|task| task.file_name().to_str()?.parse().ok()).any(|id| {
        let mut byte = 0u8;
        let local = [Stretch { address: &raw mut byte as usize, length: 1 }];
        let nowhere = [Stretch { address: 8, length: 1 }];
        // SAFETY: the target is a byte of this function.
        let error = unsafe { read(id, &nowhere, &local) }.err();
        error.is_none_or(|error| error.raw_os_error() != Some(libc::ESRCH))
    })
}

/// Whether process `pid` of user `uid` is not dumpable: then its files in `/proc` are root's.
fn is_not_dumpable(pid: u32, uid: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let path = format!("/proc/{pid}/mem");
    fault::call(fault::Call::Stat, || std::fs::metadata(path)).is_ok_and(|facts| facts.uid() != uid)
}

/// The ptrace scope of the Yama security module, 0 where there is none.
pub fn ptrace_scope() -> u8 {
    let path = "/proc/sys/kernel/yama/ptrace_scope";
    let text = fault::call(fault::Call::Open, || std::fs::read_to_string(path));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Whether even a look at this very process is refused.
pub fn is_filtered() -> bool {
    let (from, mut to) = (7u64, 0u64);
    let source = [Stretch { address: &raw const from as usize, length: 8 }];
    let target = [Stretch { address: &raw mut to as usize, length: 8 }];
    // SAFETY: the target is a local variable of eight bytes.
    let read = unsafe { read(std::process::id(), &source, &target) };
    read.is_err()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_can_be_read_and_written_in_pieces() {
        let source: Vec<u8> = (0..100).collect();
        let mut target = vec![0u8; 100];
        let at = target.as_mut_ptr() as usize;
        let pieces =
            [Stretch { address: at + 50, length: 50 }, Stretch { address: at, length: 50 }];
        let whole = [Stretch { address: source.as_ptr() as usize, length: 100 }];
        let own = std::process::id();
        // SAFETY: the target is a vector of this test.
        assert_eq!(unsafe { read(own, &whole, &pieces) }.unwrap(), 100);
        assert_eq!(target[..50], source[50..]);
        assert_eq!(target[50..], source[..50]);
        // SAFETY: as above, and the source is only read.
        assert_eq!(unsafe { write(own, &pieces[..1], &whole) }.unwrap(), 50);
        assert_eq!(target[50..], source[..50]);
    }

    #[test]
    fn a_process_that_has_ended_is_told_as_such() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let mut target = 0u64;
        let local = [Stretch { address: &raw mut target as usize, length: 8 }];
        // SAFETY: the target is a word of this test.
        let error = unsafe { read(pid, &local, &local) }.unwrap_err();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(why_denied(pid, uid, &error), Denied::Ended);
        assert!(!has_memory(pid));
    }

    #[test]
    fn a_process_that_has_ended_and_was_not_waited_for_has_no_memory() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let options =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), options).unwrap();
        assert!(!has_memory(child.id()));
        child.wait().unwrap();
        assert!(has_memory(std::process::id()));
    }

    #[test]
    fn missing_memory_is_an_error_and_not_a_crash() {
        let mut target = 0u64;
        let nowhere = [Stretch { address: 8, length: 8 }];
        let local = [Stretch { address: &raw mut target as usize, length: 8 }];
        // SAFETY: the target is a local variable.
        let error = unsafe { read(std::process::id(), &nowhere, &local) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
