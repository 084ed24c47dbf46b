//! Copies between the memory of this process and that of another, by one system call.
//!
//! The kernel checks that this process may access the other (same user; no namespace, filter or
//! ptrace setting that forbids it); [`CrossMemoryDenied`] names the usual reasons for a refusal. A
//! process with `CAP_SYS_PTRACE` passes all these checks, so callers compare the privileges
//! themselves: [`crate::peer_process::compare_privilege`].

use std::io;

use crate::fault;

/// A range of memory in the address space of some process, with the layout of `struct iovec`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct IoVec {
    /// First address, in the address space of the owning process.
    pub address: usize,
    /// Length in bytes.
    pub length: usize,
}

const _: () = assert!(size_of::<IoVec>() == size_of::<libc::iovec>());

/// Maximum number of segments of one call, on each side.
pub const MAX_IOVECS: usize = 1024;

/// The common signature of `process_vm_readv` and `process_vm_writev`.
type ProcessVmCall = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// Reads from `remote` in process `pid` into `local`, in order. Returns the number of bytes read,
/// which is smaller than requested if memory on either side is not mapped.
///
/// # Safety
/// Every local segment must be valid for writes, and no other code may access it during the call.
pub unsafe fn read(pid: u32, remote: &[IoVec], local: &[IoVec]) -> io::Result<usize> {
    // SAFETY: the caller meets the same conditions.
    unsafe { copy(fault::Call::ProcessVmReadv, libc::process_vm_readv, pid, remote, local) }
}

/// Writes from `local` to `remote` in process `pid`, in order. Returns the number of bytes written.
///
/// # Safety
/// Every local segment must be valid for reads. The other process must have exposed the remote
/// memory for this write.
pub unsafe fn write(pid: u32, remote: &[IoVec], local: &[IoVec]) -> io::Result<usize> {
    // SAFETY: the caller meets the same conditions.
    unsafe { copy(fault::Call::ProcessVmWritev, libc::process_vm_writev, pid, remote, local) }
}

unsafe fn copy(
    kind: fault::Call,
    call: ProcessVmCall,
    pid: u32,
    remote: &[IoVec],
    local: &[IoVec],
) -> io::Result<usize> {
    let count = |list: &[IoVec]| list.len().min(MAX_IOVECS) as libc::c_ulong;
    let (local_ptr, remote_ptr) = (local.as_ptr().cast(), remote.as_ptr().cast());
    // SAFETY: both slices have the layout of iovecs and live until the call returns; the caller
    // guarantees that the local memory is valid, and the kernel checks the remote memory.
    let copy = || unsafe {
        call(pid as libc::pid_t, local_ptr, count(local), remote_ptr, count(remote), 0)
    };
    fault::call(kind, || usize::try_from(copy()).map_err(|_| io::Error::last_os_error()))
}

/// The most likely reason why cross-memory access is denied, with its fix in the displayed text.
///
/// ```
/// use memferry::message::{CrossMemoryDenied, Endpoint};
///
/// let endpoint = Endpoint::open("denied-doc")?;
/// let own = endpoint.self_peer()?;
/// if let Some(denied) = endpoint.peer_access(own)?.denied {
///     println!("messages are copied twice: {denied}"); // with its fix
///     assert_ne!(denied, CrossMemoryDenied::Exited);
/// }
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CrossMemoryDenied {
    /// Disabled by `MEMFERRY_CMA=off`.
    Disabled,
    /// The system call does not exist, or a seccomp filter refuses it.
    Filtered,
    /// `kernel.yama.ptrace_scope` restricts access to ancestors, or forbids it.
    PtraceScope(u8),
    /// The other process belongs to another user or group.
    OtherUser,
    /// This process has `CAP_SYS_PTRACE` and the other does not. The other could make this process
    /// access memory that it may not access itself.
    LessPrivileged,
    /// The other process is in another user namespace.
    UserNamespace,
    /// The other process is not dumpable, so only privileged processes may access it.
    NotDumpable,
    /// The other process is in another pid namespace and not visible here.
    PidNamespace,
    /// The other process has exited, or is exiting: its memory is released before its descriptors.
    /// Or its main thread has exited, through which the kernel accesses the memory.
    Exited,
    /// The kernel refused, for a reason that cannot be determined from here.
    Unknown,
}

impl std::fmt::Display for CrossMemoryDenied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Disabled => write!(f, "disabled by MEMFERRY_CMA=off: unset it"),
            Self::Filtered => write!(
                f,
                "a seccomp filter refuses the system call: allow process_vm_readv and \
                 process_vm_writev, for example by `--cap-add=SYS_PTRACE` in a container"
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
                "this process has CAP_SYS_PTRACE and the other does not: give it to both, or to \
                 none"
            ),
            Self::UserNamespace => write!(
                f,
                "the other process is in another user namespace: run both in one container, or \
                 in containers that share it"
            ),
            Self::NotDumpable => write!(
                f,
                "the other process is not dumpable (it changed its user, has file \
                 capabilities, is an unreadable executable, or called prctl(PR_SET_DUMPABLE, 0)): \
                 call prctl(PR_SET_DUMPABLE, 1) in it"
            ),
            Self::PidNamespace => write!(
                f,
                "the other process is in another pid namespace: share it between the containers, \
                 for example by `--pid=container:NAME`"
            ),
            Self::Exited => write!(
                f,
                "the other process or its main thread has exited: keep the main thread alive until the others end"
            ),
            Self::Unknown => write!(
                f,
                "the kernel refused access: check the security modules (AppArmor, SELinux)"
            ),
        }
    }
}

/// Determines why access to `pid` (0 if it is not visible) was refused with `error`.
pub fn denial_reason(pid: u32, uid: u32, error: &io::Error) -> CrossMemoryDenied {
    let namespace = |pid: &str| {
        let path = format!("/proc/{pid}/ns/user");
        fault::call(fault::Call::Readlink, || std::fs::read_link(path)).ok()
    };
    let own_uid = rustix::process::geteuid().as_raw();
    match error.raw_os_error() {
        _ if pid == 0 => CrossMemoryDenied::PidNamespace,
        Some(libc::ENOSYS) => CrossMemoryDenied::Filtered,
        Some(libc::ESRCH) => CrossMemoryDenied::Exited,
        _ if is_seccomp_filtered() => CrossMemoryDenied::Filtered,
        _ if uid != own_uid => CrossMemoryDenied::OtherUser,
        _ => match (namespace(&pid.to_string()), namespace("self")) {
            (Some(theirs), Some(ours)) if theirs != ours => CrossMemoryDenied::UserNamespace,
            _ if is_not_dumpable(pid, uid) => CrossMemoryDenied::NotDumpable,
            _ if ptrace_scope() > 0 => CrossMemoryDenied::PtraceScope(ptrace_scope()),
            // A process that this one may not access hides even its namespace.
            (None, _) => CrossMemoryDenied::UserNamespace,
            _ => CrossMemoryDenied::Unknown,
        },
    }
}

/// Whether any thread of process `pid` has memory. An exiting process loses its memory before it is
/// reported as exited, because releasing much memory takes long. The kernel accesses the memory
/// through one thread, which may have exited alone; so the function tries all threads.
pub fn has_memory(pid: u32) -> bool {
    let tasks = fault::call(fault::Call::Open, || std::fs::read_dir(format!("/proc/{pid}/task")));
    let ids = tasks.into_iter().flatten().flatten();
    ids.filter_map(|task| task.file_name().to_str()?.parse().ok()).any(|id| {
        let mut byte = 0u8;
        let local = [IoVec { address: &raw mut byte as usize, length: 1 }];
        let unmapped = [IoVec { address: 8, length: 1 }];
        // SAFETY: the target is a local variable of one byte.
        let error = unsafe { read(id, &unmapped, &local) }.err();
        error.is_none_or(|error| error.raw_os_error() != Some(libc::ESRCH))
    })
}

/// Whether process `pid` of user `uid` is not dumpable: then root owns its files in `/proc`.
fn is_not_dumpable(pid: u32, uid: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let path = format!("/proc/{pid}/mem");
    fault::call(fault::Call::Stat, || std::fs::metadata(path))
        .is_ok_and(|metadata| metadata.uid() != uid)
}

/// The ptrace scope of the Yama security module; 0 without Yama.
pub fn ptrace_scope() -> u8 {
    let path = "/proc/sys/kernel/yama/ptrace_scope";
    let text = fault::call(fault::Call::Open, || std::fs::read_to_string(path));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Whether access fails even for this process itself, as it does under a seccomp filter.
pub fn is_seccomp_filtered() -> bool {
    let (from, mut to) = (7u64, 0u64);
    let source = [IoVec { address: &raw const from as usize, length: 8 }];
    let target = [IoVec { address: &raw mut to as usize, length: 8 }];
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
        let local_ptr = target.as_mut_ptr() as usize;
        let segments = [
            IoVec { address: local_ptr + 50, length: 50 },
            IoVec { address: local_ptr, length: 50 },
        ];
        let whole = [IoVec { address: source.as_ptr() as usize, length: 100 }];
        let own = std::process::id();
        // SAFETY: the target is a vector of this test.
        assert_eq!(unsafe { read(own, &whole, &segments) }.unwrap(), 100);
        assert_eq!(target[..50], source[50..]);
        assert_eq!(target[50..], source[..50]);
        // SAFETY: as above, and the source is only read.
        assert_eq!(unsafe { write(own, &segments[..1], &whole) }.unwrap(), 50);
        assert_eq!(target[50..], source[..50]);
    }

    #[test]
    fn a_process_that_has_ended_is_told_as_such() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let mut target = 0u64;
        let local = [IoVec { address: &raw mut target as usize, length: 8 }];
        // SAFETY: the target is a local variable of eight bytes.
        let error = unsafe { read(pid, &local, &local) }.unwrap_err();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(denial_reason(pid, uid, &error), CrossMemoryDenied::Exited);
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
        let unmapped = [IoVec { address: 8, length: 8 }];
        let local = [IoVec { address: &raw mut target as usize, length: 8 }];
        // SAFETY: the target is a local variable.
        let error = unsafe { read(std::process::id(), &unmapped, &local) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
