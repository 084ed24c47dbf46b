//! The access probe: whether the two processes can read and write each other's memory. It is tried,
//! not assumed, and only between processes of the same user with the same privileges.
//!
//! A peer decides which of its addresses this process reads and writes, and may execute another
//! program at any time, with the same pid. The kernel compares users on every access, so a set-uid
//! program is out of reach; but it compares nothing for a process that holds `CAP_SYS_PTRACE`. So
//! this process never accesses a process of another user or group, and a process that holds that
//! capability never accesses one without it: a peer can direct this process only to memory that the
//! peer may access itself.
//!
//! One case remains: a peer that executes another program of its own user thereby closes its
//! socket, which the next liveness check detects within about 10 ms. An access before that reaches
//! the other program, at addresses that most likely are not mapped there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::cross_memory::{self, CrossMemoryDenied, IoVec};
use memferry_sys::fork::PerProcess;
use memferry_sys::peer_process::{self, Credentials, PeerPrivilege};
use memferry_sys::sync::lock;

/// Two words for the peer's access probe: one to read, one to write. A peer may probe them at any time,
/// so they exist until the process exits.
#[derive(Debug)]
#[repr(C)]
struct ProbeWords {
    readable: AtomicU64,
    /// Written by the peer through the kernel.
    writable: AtomicU64,
}

/// The probe words of one connection, with a random value. Later connections reuse them.
#[derive(Debug)]
pub(crate) struct OwnProbe {
    words: &'static ProbeWords,
}

/// The words of connections that have ended.
static FREE_WORDS: PerProcess<Mutex<Vec<&'static ProbeWords>>> = PerProcess::new();

impl OwnProbe {
    pub(crate) fn new() -> Self {
        let free = FREE_WORDS.lock().pop();
        let words = free.unwrap_or_else(|| {
            Box::leak(Box::new(ProbeWords { readable: 0.into(), writable: 0.into() }))
        });
        let nonce = super::EndpointUuid::random().0 as u64;
        words.readable.store(nonce, Ordering::Relaxed);
        words.writable.store(nonce, Ordering::Relaxed);
        Self { words }
    }

    /// The address of the words, and the value to be read there.
    pub(crate) fn addresses(&self) -> (u64, u64) {
        (&raw const *self.words as u64, self.words.readable.load(Ordering::Relaxed))
    }

    /// Whether the peer has proved that it can write the memory of this process: it was sent the value, and
    /// only the kernel writes here. A late probe of a peer that had the words before can only hide that.
    pub(crate) fn is_written(&self) -> bool {
        let nonce = self.words.readable.load(Ordering::Relaxed);
        self.words.writable.load(Ordering::Relaxed) == proof_of(nonce)
    }
}

impl Drop for OwnProbe {
    fn drop(&mut self) {
        FREE_WORDS.lock().push(self.words);
    }
}

/// What a peer that has read a value writes beside it.
fn proof_of(nonce: u64) -> u64 {
    !nonce
}

/// What this process can do with the memory of another.
///
/// ```
/// use memferry::message::Endpoint;
///
/// let endpoint = Endpoint::open("doc-access")?;
/// println!("{:?}", endpoint.peer_access(endpoint.self_peer()?)?);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAccess {
    /// The memory can be read.
    pub read: bool,
    /// The memory can be written.
    pub write: bool,
    /// The reason of denied access, if any is denied.
    pub denied: Option<CrossMemoryDenied>,
}

impl PeerAccess {
    /// No access.
    pub(crate) fn none(denied: CrossMemoryDenied) -> Self {
        Self { read: false, write: false, denied: Some(denied) }
    }

    /// Probes read and write access to a process, unless it belongs to another user. The probe may
    /// block for any time: see [`AccessProbe`].
    fn probe(peer: Credentials, probe: (u64, u64)) -> Self {
        let Credentials { pid, uid, .. } = peer;
        match peer_process::compare_privilege(peer) {
            _ if pid == 0 => return Self::none(CrossMemoryDenied::PidNamespace),
            PeerPrivilege::Equal => {}
            PeerPrivilege::Other => return Self::none(CrossMemoryDenied::OtherUser),
            PeerPrivilege::LessPrivileged => return Self::none(CrossMemoryDenied::LessPrivileged),
            PeerPrivilege::Unknown => return Self::none(CrossMemoryDenied::Unknown),
        }
        let (address, expected) = probe;
        let (mut found, value) = (0u64, proof_of(expected));
        let local = |word: *const u64| [IoVec { address: word as usize, length: 8 }];
        let remote =
            |offset| [IoVec { address: (address as usize).wrapping_add(offset), length: 8 }];
        // SAFETY: the target is a local word.
        let read = unsafe { cross_memory::read(pid, &remote(0), &local(&raw mut found)) };
        match read {
            // A word with another value belongs to some other process.
            Ok(8) if found == expected => {}
            Ok(_) => return Self::none(CrossMemoryDenied::PidNamespace),
            Err(error) => return Self::none(cross_memory::denial_reason(pid, uid, &error)),
        }
        // SAFETY: the source is a local word; the peer has sent the target address for this.
        let written = unsafe { cross_memory::write(pid, &remote(8), &local(&raw const value)) };
        match written {
            Ok(8) => Self { read: true, write: true, denied: None },
            Ok(_) => Self { read: true, write: false, denied: Some(CrossMemoryDenied::Unknown) },
            Err(error) => {
                let denied = cross_memory::denial_reason(pid, uid, &error);
                Self { read: true, write: false, denied: Some(denied) }
            }
        }
    }
}

/// How long a call waits for a probe, which nearly always takes microseconds. A slower probe is
/// polled, and so are all further ones of that process: a process with a bad address costs this
/// time once.
const PROBE_WAIT: Duration = Duration::from_millis(10);
/// Timeout of a probe. The words of a correct process are resident.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// No probe of a process is started while this many of its probes have taken longer than
/// [`SLOW_PROBE`], or any longer than [`PROBE_TIMEOUT`]. The time counts from when the thread of the
/// probe runs: on a busy machine, the threads of many correct probes wait for a core.
const MAX_SLOW_PROBES: usize = 8;
const SLOW_PROBE: Duration = Duration::from_millis(200);

/// A probe of the access to a peer, on a thread of its own: the peer chooses the address, and its
/// page may never become resident. Only that thread blocks on it.
#[derive(Debug)]
pub(crate) struct AccessProbe {
    shared: Arc<ProbeShared>,
    started: Instant,
}

/// The state that a probe shares with its thread.
#[derive(Debug, Default)]
struct ProbeShared {
    outcome: Mutex<ProbeOutcome>,
    done: Condvar,
}

#[derive(Debug, Default)]
struct ProbeOutcome {
    access: Option<PeerAccess>,
    /// When the thread of the probe began to run.
    running_since: Option<Instant>,
    /// Signalled when the probe is complete.
    event: Option<Arc<EventFd>>,
}

/// The probe does not complete: the peer has sent the address of memory that does not become
/// resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProbeStuck;

/// A probe that is not complete.
#[derive(Debug)]
struct PendingProbe {
    /// The probed process.
    pid: u32,
    shared: Arc<ProbeShared>,
}

/// All probes of this process that did not complete within [`PROBE_WAIT`].
static PENDING_PROBES: PerProcess<Mutex<Vec<PendingProbe>>> = PerProcess::new();

impl AccessProbe {
    /// Starts a probe of a process, unless cross-memory access is disabled, and waits for it for at
    /// most [`PROBE_WAIT`].
    pub(crate) fn start(
        peer: Credentials,
        probe: (u64, u64),
        cross_memory: bool,
    ) -> Result<Self, ProbeStuck> {
        let (shared, started) = (Arc::new(ProbeShared::default()), Instant::now());
        let this = Self { shared: shared.clone(), started };
        if !cross_memory || is_disabled() {
            shared.complete(PeerAccess::none(CrossMemoryDenied::Disabled));
            return Ok(this);
        }
        let timeout = probe_wait(peer.pid)?;
        let thread_shared = shared.clone();
        let run = move || {
            lock(&thread_shared.outcome).running_since = Some(Instant::now());
            thread_shared.complete(PeerAccess::probe(peer, probe));
        };
        match memferry_sys::thread::spawn("memferry-trial", run) {
            Ok(_) => {
                let outcome = lock(&shared.outcome);
                let is_pending = |outcome: &mut ProbeOutcome| outcome.access.is_none();
                let waited = shared.done.wait_timeout_while(outcome, timeout, is_pending);
                let (outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
                if outcome.access.is_none() {
                    drop(outcome);
                    PENDING_PROBES.lock().push(PendingProbe { pid: peer.pid, shared });
                }
            }
            // Without a thread the probe runs inline: access is worth more than protection from a
            // process of the same user.
            Err(error) => {
                tracing::debug!(%error, "no thread for an access probe");
                shared.complete(PeerAccess::probe(peer, probe));
            }
        }
        Ok(this)
    }

    /// The result, if the probe is complete.
    pub(crate) fn poll(&self) -> Option<Result<PeerAccess, ProbeStuck>> {
        let outcome = lock(&self.shared.outcome);
        match outcome.access {
            Some(access) => Some(Ok(access)),
            None => (outcome.running_for() > PROBE_TIMEOUT).then_some(Err(ProbeStuck)),
        }
    }

    /// The time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Signals `event` on completion, or now if the probe is complete.
    pub(crate) fn signal_on_completion(&self, event: &Arc<EventFd>) {
        let mut outcome = lock(&self.shared.outcome);
        if outcome.access.is_some() {
            event.signal();
        } else {
            outcome.event = Some(event.clone());
        }
    }
}

impl Drop for AccessProbe {
    fn drop(&mut self) {
        // The thread may block for ever, so it must not keep the descriptor.
        lock(&self.shared.outcome).event = None;
    }
}

impl ProbeOutcome {
    /// How long the thread of the probe has run.
    fn running_for(&self) -> Duration {
        self.running_since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl ProbeShared {
    fn complete(&self, access: PeerAccess) {
        let mut outcome = lock(&self.outcome);
        outcome.access = Some(access);
        let event = outcome.event.take();
        drop(outcome);
        self.done.notify_all();
        if let Some(event) = event {
            event.signal();
        }
    }
}

/// How long a call waits for the probe of a process. Fails if a probe of that process is stuck.
fn probe_wait(pid: u32) -> Result<Duration, ProbeStuck> {
    let mut all = PENDING_PROBES.lock();
    all.retain(|pending| lock(&pending.shared.outcome).access.is_none());
    let of_process = all.iter().filter(|pending| pending.pid == pid);
    let age = |pending: &PendingProbe| lock(&pending.shared.outcome).running_for();
    let ages: Vec<Duration> = of_process.map(age).collect();
    let slow = ages.iter().filter(|age| **age > SLOW_PROBE).count();
    if slow >= MAX_SLOW_PROBES || ages.iter().any(|age| *age > PROBE_TIMEOUT) {
        return Err(ProbeStuck);
    }
    Ok(if ages.is_empty() { PROBE_WAIT } else { Duration::ZERO })
}

/// Returns whether `MEMFERRY_CMA` disables cross-memory access.
fn is_disabled() -> bool {
    memferry_sys::settings::is_switched_off("MEMFERRY_CMA")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_process_reaches_itself_if_the_value_is_right() {
        let words = OwnProbe::new();
        let (address, nonce) = words.addresses();
        let (socket, _other) = memferry_sys::seqpacket::SeqPacketSocket::pair().unwrap();
        let own = peer_process::credentials(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        assert!(!PeerAccess::probe(own, (address, nonce ^ 1)).read && !words.is_written());
        let access = PeerAccess::probe(own, (address, nonce));
        assert!(access.read && access.write && access.denied.is_none() && words.is_written());
        assert!(!PeerAccess::probe(own, (8, nonce)).read);
        // Independent of what the kernel would permit.
        let other = Credentials { uid: own.uid + 1, ..own };
        let denied = PeerAccess::probe(other, (address, nonce)).denied;
        assert_eq!(denied, Some(CrossMemoryDenied::OtherUser));
        let off =
            AccessProbe::start(own, (address, nonce), false).unwrap().poll().unwrap().unwrap();
        assert_eq!(off.denied, Some(CrossMemoryDenied::Disabled));
    }

    #[test]
    fn words_that_are_used_again_have_not_been_written() {
        let written = |words: &OwnProbe| {
            words.words.writable.store(proof_of(words.addresses().1), Ordering::Relaxed);
            words.is_written()
        };
        // Other tests take words too.
        let first: Vec<_> = (0..20).map(|_| OwnProbe::new()).collect();
        assert!(first.iter().all(written));
        drop(first);
        assert!(!(0..20).map(|_| OwnProbe::new()).any(|words| words.is_written()));
    }

    /// Adds a probe of a process that does not exist, whose thread began to run some time ago.
    fn add_pending(pid: u32, running_for: Option<Duration>) {
        let running_since = running_for.map(|age| Instant::now().checked_sub(age).unwrap());
        let outcome = ProbeOutcome { running_since, ..ProbeOutcome::default() };
        let shared = ProbeShared { outcome: Mutex::new(outcome), done: Condvar::new() };
        PENDING_PROBES.lock().push(PendingProbe { pid, shared: Arc::new(shared) });
    }

    #[test]
    fn probes_whose_threads_have_not_run_yet_are_not_slow() {
        let (crowded, stuck, slow) = (u32::MAX, u32::MAX - 1, u32::MAX - 2);
        (0..100).for_each(|_| add_pending(crowded, None));
        assert_eq!(probe_wait(crowded), Ok(Duration::ZERO));
        add_pending(stuck, Some(2 * PROBE_TIMEOUT));
        assert_eq!(probe_wait(stuck), Err(ProbeStuck));
        (1..MAX_SLOW_PROBES).for_each(|_| add_pending(slow, Some(2 * SLOW_PROBE)));
        assert_eq!(probe_wait(slow), Ok(Duration::ZERO));
        add_pending(slow, Some(2 * SLOW_PROBE));
        assert_eq!(probe_wait(slow), Err(ProbeStuck));
    }
}
