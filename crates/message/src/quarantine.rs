//! The quarantine: memory that a peer may still write, and the check whether it still may.
//!
//! A peer writes to memory of this process in two cases: it has claimed chunks of a cooperative
//! message, or it accesses a window. A [`Claim`] names one of these. The claim ends when the peer
//! releases it, or when the peer's process exits. A thread of this process that copies between the
//! two memories also has a claim, which ends with the copy. A stopped process can hold a claim for
//! any time, and the memory must not be returned to its owner until then. Memory that this library
//! owns waits here.

mod watch;

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};

use memferry_sys::fork::PerProcess;
use memferry_sys::peer_process;
use memferry_sys::seqpacket::SeqPacketSocket;
use memferry_sys::sync::lock;

use crate::path::ActiveCopy;
use crate::ring::layout::ConnectionMemory;
pub(crate) use watch::watch;

/// The number of connections of one living process that may have ended during a write before its
/// further connections are refused: each of them holds descriptors of this process.
const MAX_ENDED: usize = 8;

/// The same limit for all processes together that have no pid in this namespace.
const MAX_ENDED_UNKNOWN: usize = 64;

/// Interval between two sweeps of the quarantine.
const SWEEP_INTERVAL_NS: u64 = 10_000_000;

/// A process that can write to memory of this one, with the shared words in which it publishes its
/// claims.
#[derive(Debug)]
pub(crate) struct Writer {
    memory: ConnectionMemory,
    pid: u32,
    process: Option<OwnedFd>,
    socket: Option<SeqPacketSocket>,
}

impl Writer {
    /// Creates a writer, and records it so that the connections of one process can be counted.
    pub(crate) fn new(
        memory: ConnectionMemory,
        pid: u32,
        process: Option<OwnedFd>,
        socket: Option<SeqPacketSocket>,
    ) -> Arc<Self> {
        let writer = Arc::new(Self { memory, pid, process, socket });
        let mut writers = WRITERS.lock();
        writers.retain(|known| known.strong_count() > 0);
        writers.push(Arc::downgrade(&writer));
        writer
    }

    /// Returns whether the process is alive. A socket that was shut down is no proof of exit: a
    /// copy may be in flight. Without a pidfd, the process counts as exited when its socket is
    /// closed.
    pub(crate) fn is_alive(&self) -> bool {
        match (&self.process, &self.socket) {
            (Some(process), _) => !peer_process::has_exited(process.as_fd()),
            (None, Some(socket)) => peer_process::is_alive(None, socket.as_fd()),
            (None, None) => true,
        }
    }

    /// Returns whether the peer accesses a window.
    pub(crate) fn is_accessing(&self, window: u32) -> bool {
        self.memory.peer_access().is_accessing(window)
    }

    /// Returns whether the process is alive and accesses any window.
    pub(crate) fn is_accessing_any(&self) -> bool {
        self.memory.peer_access().is_active() && self.is_alive()
    }
}

/// The memory that a peer has claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimKind {
    /// `claimed` chunks of a message, in a slot that is closed.
    Chunks { claim_slot: u16, generation: u16, chunks: u64, claimed: u64 },
    /// A window that is closed.
    Window(u32),
}

/// A claim on memory of this process.
#[derive(Debug, Clone)]
pub(crate) enum Claim {
    /// A claim of a peer.
    Peer { writer: Arc<Writer>, kind: ClaimKind },
    /// A claim of a thread of this process that may be blocked on a peer's memory. It counts as one
    /// of the peer, so that the number that one process can cause is bounded.
    Copy { active_copy: Arc<ActiveCopy>, _writer: Arc<Writer> },
}

impl Claim {
    /// Creates the claim of a peer.
    pub(crate) fn new(writer: Arc<Writer>, claimed: ClaimKind) -> Self {
        Self::Peer { writer, kind: claimed }
    }

    /// Returns whether a thread of this process holds the claim.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Copy { .. })
    }

    /// Returns whether the holder may still write. Invalid words claim nothing: a correct peer
    /// writes none, and another peer could write without claiming.
    pub(crate) fn is_active(&self) -> bool {
        let (writer, claimed) = match self {
            Self::Peer { writer, kind: claimed } => (writer, *claimed),
            Self::Copy { active_copy, .. } => return active_copy.is_in_flight(),
        };
        let is_claimed = match claimed {
            ClaimKind::Chunks { claim_slot, generation, chunks, claimed } => {
                let slot = writer.memory.claims(true, claim_slot.into());
                slot.load(generation, chunks).is_ok_and(|progress| progress.released() < claimed)
            }
            ClaimKind::Window(window) => writer.is_accessing(window),
        };
        is_claimed && writer.is_alive()
    }
}

/// Memory in quarantine.
struct QuarantinedBuffer {
    claims: Vec<Claim>,
    _memory: Box<dyn Any + Send>,
}

/// The memory that a process has in quarantine. A forked child has none, and frees none of its parent's.
#[derive(Default)]
struct Quarantine {
    buffers: Mutex<Vec<QuarantinedBuffer>>,
    count: AtomicUsize,
    swept_ns: AtomicU64,
}

static QUARANTINE: PerProcess<Quarantine> = PerProcess::new();
static WRITERS: PerProcess<Mutex<Vec<Weak<Writer>>>> = PerProcess::new();

/// Keeps memory until no writer has a claim on it.
pub(crate) fn hold(claims: Vec<Claim>, memory: Box<dyn Any + Send>) {
    if claims.iter().all(Claim::is_local) {
        tracing::debug!("memory in quarantine until a copy of this process completes");
    } else {
        tracing::warn!(
            "peer stopped during a write: its target stays in quarantine until the peer continues or exits"
        );
    }
    let quarantine = QUARANTINE.get_or_make(|_| Quarantine::default());
    quarantine.count.fetch_add(1, Ordering::Relaxed);
    lock(&quarantine.buffers).push(QuarantinedBuffer { claims, _memory: memory });
}

/// Frees the memory whose claims have ended, at most once per [`SWEEP_INTERVAL_NS`]. Must be called
/// without a lock, because destructors of the application may run.
#[inline]
pub(crate) fn sweep() {
    if let Some(quarantine) = QUARANTINE.get()
        && quarantine.count.load(Ordering::Relaxed) > 0
    {
        quarantine.sweep(false);
    }
}

/// The number of buffers in quarantine: a stopped peer may still write to them. Each is freed when
/// its peer continues or exits.
pub fn quarantined_buffers() -> usize {
    let Some(quarantine) = QUARANTINE.get() else { return 0 };
    quarantine.sweep(true);
    quarantine.count.load(Ordering::Relaxed)
}

impl Quarantine {
    #[cold]
    fn sweep(&self, force: bool) {
        let now = memferry_sys::clock::coarse_ns();
        if !force && now.saturating_sub(self.swept_ns.load(Ordering::Relaxed)) < SWEEP_INTERVAL_NS {
            return;
        }
        let mut all = match self.buffers.try_lock() {
            Ok(all) => all,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        self.swept_ns.store(now, Ordering::Relaxed);
        let mut freed = Vec::new();
        for index in (0..all.len()).rev() {
            if !all[index].claims.iter().any(Claim::is_active) {
                freed.push(all.swap_remove(index));
            }
        }
        drop(all);
        for buffer in freed {
            self.count.fetch_sub(1, Ordering::Relaxed);
            if catch_unwind(AssertUnwindSafe(|| drop(buffer))).is_err() {
                tracing::error!("the destructor of a quarantined buffer panicked");
            }
        }
    }
}

/// Returns whether too many connections of a living process have ended during a write, so that
/// further ones are refused.
pub(crate) fn has_many_ended(pid: u32) -> bool {
    let writers = WRITERS.lock();
    let of_process = writers.iter().filter_map(Weak::upgrade).filter(|writer| writer.pid == pid);
    let limit = if pid == 0 { MAX_ENDED_UNKNOWN } else { MAX_ENDED };
    of_process.filter(|writer| writer.is_alive()).count() >= limit
}
