//! Direct access to the memory of other ranks. It is tried when the team is created, and used only if every rank can
//! access every other one.
//!
//! A rank decides which of its addresses the others read; nobody writes there. The kernel compares users on every access, but
//! nothing for a process that holds `CAP_SYS_PTRACE`. So privileges are compared first: a rank can direct others only
//! to memory that it may access itself.

use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::cross_memory::{self, IoVec};
use memferry_sys::fork::ForkSafe;
use memferry_sys::peer_process::{Credentials, PeerPrivilege, compare_privilege};
use memferry_sys::settings;

use crate::error::Error;
use crate::shared::Shared;

/// The word that other processes read to try their access. It exists until the process exits.
pub(crate) fn probe_word() -> (u64, u64) {
    static WORD: ForkSafe<AtomicU64> = ForkSafe::new();
    let word = WORD.get_or_init(|| {
        let random = crate::bootstrap::random_words().unwrap_or([1, 2]);
        AtomicU64::new(random[0])
    });
    (&raw const *word as u64, word.load(Ordering::Relaxed))
}

/// The processes of all ranks, whose memory this process can access.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    pids: Box<[u32]>,
}

impl PeerMemory {
    /// Tries to access all ranks. `None` if one cannot be accessed.
    pub(crate) fn probe(shared: &Shared) -> Option<Self> {
        if settings::is_switched_off("MEMFERRY_CMA") {
            return None;
        }
        let own = std::process::id();
        let mut pids = Vec::new();
        for rank in 0..shared.layout.size {
            let line = shared.line(rank);
            let pid = line.pid.load(Ordering::Relaxed);
            let address = line.probe_address.load(Ordering::Relaxed);
            let value = line.probe_value.load(Ordering::Relaxed);
            if !(pid == own && rank == shared.rank || can_access(pid, address, value)) {
                return None;
            }
            pids.push(pid);
        }
        Some(Self { pids: pids.into() })
    }

    /// Reads memory of a rank.
    ///
    /// # Safety
    /// `target` must be valid for writes of `bytes`, and no other code may access it during the call.
    pub(crate) unsafe fn read(
        &self,
        rank: usize,
        address: u64,
        target: *mut u8,
        bytes: usize,
    ) -> Result<(), Error> {
        let mut done = 0;
        while done < bytes {
            let remote = (address as usize).wrapping_add(done);
            let remote = [IoVec { address: remote, length: bytes - done }];
            let local = [IoVec { address: target as usize + done, length: bytes - done }];
            // SAFETY: `done` is below `bytes`, and the caller guarantees the target.
            match unsafe { cross_memory::read(self.pids[rank], &remote, &local) } {
                Ok(moved) if moved > 0 => done += moved.min(bytes - done),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                    return Err(Error::RankDied(rank));
                }
                _ => return Err(Error::BadMemory(rank)),
            }
        }
        Ok(())
    }
}

fn can_access(pid: u32, address: u64, expected: u64) -> bool {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    if pid == 0 || compare_privilege(Credentials { pid, uid, gid }) != PeerPrivilege::Equal {
        return false;
    }
    let mut found = 0u64;
    let remote = [IoVec { address: address as usize, length: 8 }];
    let local = [IoVec { address: &raw mut found as usize, length: 8 }];
    // SAFETY: the target is a local word.
    let read = unsafe { cross_memory::read(pid, &remote, &local) };
    // A word with another value belongs to some other process.
    read.is_ok_and(|bytes| bytes == 8) && found == expected
}

/// Whether the kernel can access memory of this process for others: that of devices it cannot.
pub(crate) fn is_reachable(address: *const u8, bytes: usize) -> bool {
    let mut found = [0u8; 2];
    let byte = |address| IoVec { address, length: 1 };
    let remote = [byte(address as usize), byte((address as usize).wrapping_add(bytes - 1))];
    let local = [IoVec { address: found.as_mut_ptr() as usize, length: 2 }];
    // SAFETY: the target is a local array of two bytes.
    unsafe { cross_memory::read(std::process::id(), &remote, &local) }.is_ok_and(|read| read == 2)
}
