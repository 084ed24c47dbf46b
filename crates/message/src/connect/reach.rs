//! Whether the two processes can read and write each other's memory: tried out, not assumed, and only
//! between processes of the same user with the same rights.
//!
//! A peer decides which addresses of its own this process reads and writes, and may execute another
//! program at any time, under the same process number. Where the kernel compares users for every
//! access that leads nowhere: a set-uid program is out of reach. It compares nothing for a process
//! that holds `CAP_SYS_PTRACE`. So there is no access to another user or group at all, and none to a
//! process without that capability for one that holds it: a peer can lead this process only where it
//! may go itself.
//!
//! What remains: a peer that executes another program of its own user closes its socket by that, which
//! is noticed by the next liveness check, some 10 ms later at most. An access in between meets the
//! other program, at addresses that most likely do not exist there.

use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::cross_memory::{self, Denied, Stretch};
use memferry_sys::peer_process::{self, Credentials, Standing};

/// Two words that the other side tries its access on: one to read, one to write.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ProbeWords {
    readable: AtomicU64,
    /// Written by the other process through the kernel, read by nobody.
    writable: UnsafeCell<u64>,
}

// SAFETY: one word is atomic, the other is never read or written by this process.
unsafe impl Send for ProbeWords {}
// SAFETY: as above.
unsafe impl Sync for ProbeWords {}

impl ProbeWords {
    /// Those of this process, with a value that is unlikely to be found by chance. They stay for
    /// ever: a peer may try them at any time.
    pub(crate) fn of_process() -> &'static Self {
        static WORDS: OnceLock<ProbeWords> = OnceLock::new();
        WORDS.get_or_init(|| {
            let nonce = super::Identity::random().0 as u64;
            Self { readable: AtomicU64::new(nonce), writable: UnsafeCell::new(0) }
        })
    }

    /// Where they are, and what is to be read there.
    pub(crate) fn describe(&self) -> (u64, u64) {
        (&raw const *self as u64, self.readable.load(Ordering::Relaxed))
    }
}

/// What this process can do with the memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// It can be read.
    pub read: bool,
    /// It can be written.
    pub write: bool,
    /// What stands in the way, if something does.
    pub denied: Option<Denied>,
}

impl Reach {
    /// No access.
    pub(crate) fn none(denied: Denied) -> Self {
        Self { read: false, write: false, denied: Some(denied) }
    }

    /// Tries to read and to write the probe words of a process, unless it is switched off or the
    /// process is another user's.
    pub(crate) fn try_out(peer: Credentials, probe: (u64, u64), switched_off: bool) -> Self {
        let Credentials { pid, uid, .. } = peer;
        if switched_off {
            return Self::none(Denied::SwitchedOff);
        }
        match peer_process::standing(peer) {
            _ if pid == 0 => return Self::none(Denied::PidNamespace),
            Standing::Equal => {}
            Standing::Other => return Self::none(Denied::OtherUser),
            Standing::LessPrivileged => return Self::none(Denied::LessPrivileged),
            Standing::Unknown => return Self::none(Denied::Unknown),
        }
        let (address, expected) = probe;
        let (mut found, value) = (0u64, 1u64);
        let local = |word: *const u64| [Stretch { address: word as usize, length: 8 }];
        let remote =
            |offset| [Stretch { address: (address as usize).wrapping_add(offset), length: 8 }];
        // SAFETY: the target is a local word.
        let read = unsafe { cross_memory::read(pid, &remote(0), &local(&raw mut found)) };
        match read {
            // A word that does not hold what was said belongs to some other process.
            Ok(8) if found == expected => {}
            Ok(_) => return Self::none(Denied::PidNamespace),
            Err(error) => return Self::none(cross_memory::why_denied(pid, uid, &error)),
        }
        // SAFETY: the source is a local word; the target was named by the other process for this.
        let written = unsafe { cross_memory::write(pid, &remote(8), &local(&raw const value)) };
        match written {
            Ok(8) => Self { read: true, write: true, denied: None },
            Ok(_) => Self { read: true, write: false, denied: Some(Denied::Unknown) },
            Err(error) => {
                let denied = cross_memory::why_denied(pid, uid, &error);
                Self { read: true, write: false, denied: Some(denied) }
            }
        }
    }
}

/// Whether `MEMFERRY_CMA` says that cross-memory access must not be used.
pub(crate) fn is_switched_off() -> bool {
    std::env::var_os("MEMFERRY_CMA").is_some_and(|word| word == "off")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_process_reaches_itself_if_the_value_is_right() {
        let (address, nonce) = ProbeWords::of_process().describe();
        let (socket, _other) = memferry_sys::packet_socket::PacketSocket::pair().unwrap();
        let own = peer_process::credentials(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        let reach = Reach::try_out(own, (address, nonce), false);
        assert!(reach.read && reach.write && reach.denied.is_none());
        assert!(!Reach::try_out(own, (address, nonce ^ 1), false).read);
        assert!(!Reach::try_out(own, (8, nonce), false).read);
        // Whatever the kernel would permit.
        let other = Credentials { uid: own.uid + 1, ..own };
        let denied = Reach::try_out(other, (address, nonce), false).denied;
        assert_eq!(denied, Some(Denied::OtherUser));
        let off = Reach::try_out(own, (address, nonce), true);
        assert_eq!(off.denied, Some(Denied::SwitchedOff));
    }
}
