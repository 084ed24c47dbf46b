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
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::cross_memory::{self, Denied, Stretch};
use memferry_sys::fork;
use memferry_sys::peer_process::{self, Credentials, Standing};
use memferry_sys::sync::lock;

use crate::quarantine;

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

    /// Tries to read and to write the probe words of a process, unless it is another user's. The words may
    /// never come: see [`Trial`].
    fn try_out(peer: Credentials, probe: (u64, u64)) -> Self {
        let Credentials { pid, uid, .. } = peer;
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

/// How long a call waits for a trial, which is nearly always over in microseconds. One that takes longer is
/// polled, and so are all others of that process meanwhile: a process that lies costs this time once.
const SHORT: Duration = Duration::from_millis(10);
/// How long a trial may take. The words of an honest process are in memory.
const LONGEST: Duration = Duration::from_secs(5);
/// A process gets no further trial while this many of it have taken longer than [`SLOW`], or any longer
/// than [`LONGEST`].
const MOST_SLOW: usize = 8;
const SLOW: Duration = Duration::from_millis(200);

/// A trial of the access to another process, on a thread of its own: the process names the address, and a
/// page there may never come. No thread but that one waits for it.
#[derive(Debug)]
pub(crate) struct Trial {
    shared: Arc<Shared>,
    began: Instant,
}

/// What a trial and its thread share.
#[derive(Debug, Default)]
struct Shared {
    outcome: Mutex<Outcome>,
    is_over: Condvar,
}

#[derive(Debug, Default)]
struct Outcome {
    reach: Option<Reach>,
    /// To be signalled at the end.
    event: Option<Arc<EventFd>>,
}

/// A trial that does not come to an end: the other process has named memory that does not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stuck;

/// A trial that is not over.
#[derive(Debug)]
struct Pending {
    /// Whose memory is tried, and since when.
    pid: u32,
    began: Instant,
    shared: Arc<Shared>,
    /// Which process tries it: in a forked child there is no such thread.
    fork_generation: u64,
}

/// All trials of this process that were not over at once.
static PENDING: Mutex<Vec<Pending>> = Mutex::new(Vec::new());

impl Trial {
    /// Begins to try the access to a process, unless it is switched off. Waits for it only briefly.
    pub(crate) fn start(
        peer: Credentials,
        probe: (u64, u64),
        cross_memory: bool,
    ) -> Result<Self, Stuck> {
        let (shared, began) = (Arc::new(Shared::default()), Instant::now());
        let this = Self { shared: shared.clone(), began };
        if !cross_memory || is_switched_off() {
            shared.end(Reach::none(Denied::SwitchedOff));
            return Ok(this);
        }
        let patience = patience_with(peer.pid)?;
        let of_thread = shared.clone();
        let run = move || of_thread.end(Reach::try_out(peer, probe));
        match memferry_sys::thread::spawn("memferry-trial", run) {
            Ok(_) => {
                let outcome = lock(&shared.outcome);
                let is_pending = |outcome: &mut Outcome| outcome.reach.is_none();
                let waited = shared.is_over.wait_timeout_while(outcome, patience, is_pending);
                let (outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
                if outcome.reach.is_none() {
                    drop(outcome);
                    let fork_generation = fork::generation();
                    let pending = Pending { pid: peer.pid, began, shared, fork_generation };
                    if let Some(mut all) = quarantine::lock(&PENDING) {
                        all.push(pending);
                    }
                }
            }
            // Where no thread can be started, access is more use than protection from a process of the same
            // user.
            Err(error) => {
                tracing::debug!(%error, "no thread to try the access to a peer");
                shared.end(Reach::try_out(peer, probe));
            }
        }
        Ok(this)
    }

    /// What came of it, if it is over.
    pub(crate) fn poll(&self) -> Option<Result<Reach, Stuck>> {
        match lock(&self.shared.outcome).reach {
            Some(reach) => Some(Ok(reach)),
            None => (self.began.elapsed() > LONGEST).then_some(Err(Stuck)),
        }
    }

    /// How long it has taken.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Signals a descriptor at the end, or now if it is over.
    pub(crate) fn signal_at_end(&self, event: &Arc<EventFd>) {
        let mut outcome = lock(&self.shared.outcome);
        if outcome.reach.is_some() {
            event.signal();
        } else {
            outcome.event = Some(event.clone());
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // The thread may wait for ever: it keeps no descriptor.
        lock(&self.shared.outcome).event = None;
    }
}

impl Shared {
    fn end(&self, reach: Reach) {
        let mut outcome = lock(&self.outcome);
        outcome.reach = Some(reach);
        let event = outcome.event.take();
        drop(outcome);
        self.is_over.notify_all();
        if let Some(event) = event {
            event.signal();
        }
    }
}

/// How long a call waits for the trial of a process. An error if the process has named memory that does not
/// come.
fn patience_with(pid: u32) -> Result<Duration, Stuck> {
    let Some(mut all) = quarantine::lock(&PENDING) else { return Ok(SHORT) };
    let generation = fork::generation();
    all.retain(|pending| {
        pending.fork_generation == generation && lock(&pending.shared.outcome).reach.is_none()
    });
    let of_process = all.iter().filter(|pending| pending.pid == pid);
    let ages: Vec<Duration> = of_process.map(|pending| pending.began.elapsed()).collect();
    let slow = ages.iter().filter(|age| **age > SLOW).count();
    if slow >= MOST_SLOW || ages.iter().any(|age| *age > LONGEST) {
        return Err(Stuck);
    }
    Ok(if ages.is_empty() { SHORT } else { Duration::ZERO })
}

/// Whether `MEMFERRY_CMA` says that cross-memory access must not be used.
fn is_switched_off() -> bool {
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
        let reach = Reach::try_out(own, (address, nonce));
        assert!(reach.read && reach.write && reach.denied.is_none());
        assert!(!Reach::try_out(own, (address, nonce ^ 1)).read);
        assert!(!Reach::try_out(own, (8, nonce)).read);
        // Whatever the kernel would permit.
        let other = Credentials { uid: own.uid + 1, ..own };
        let denied = Reach::try_out(other, (address, nonce)).denied;
        assert_eq!(denied, Some(Denied::OtherUser));
        let off = Trial::start(own, (address, nonce), false).unwrap().poll().unwrap().unwrap();
        assert_eq!(off.denied, Some(Denied::SwitchedOff));
    }
}
