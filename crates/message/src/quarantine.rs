//! Memory that a peer may still write, and how it is found out that it does not any more.
//!
//! A peer writes to memory of this process in two cases: it has claimed chunks of a message that both
//! sides copy, or it visits a window. A [`Claim`] names one of these. It is over when the peer says so,
//! or when the peer's process has ended. A thread of this process that copies between the two has a claim
//! too, which is over when its copy is. A stopped process may hold one for ever, and nobody may hand
//! the memory back meanwhile: memory of which this library is the owner waits here.

mod watch;

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};

use memferry_sys::packet_socket::PacketSocket;
use memferry_sys::{fork, peer_process};

use crate::path::Copying;
use crate::ring::layout::Memory;
pub(crate) use watch::watch;

/// Connections of one process that may have ended in the middle of a write before no more of its
/// connections are accepted: each of them holds descriptors here.
const MOST_ENDED: usize = 8;

/// The same for all processes together that have no number here.
const MOST_ENDED_UNKNOWN: usize = 64;

/// How often the kept memory is looked at while nothing else asks for it.
const SWEEP_NS: u64 = 10_000_000;

/// A process that can write to memory of this one, with the words in which it says that it does.
#[derive(Debug)]
pub(crate) struct Writer {
    memory: Memory,
    pid: u32,
    process: Option<OwnedFd>,
    socket: Option<PacketSocket>,
}

impl Writer {
    /// Remembered, so that the connections of one process can be counted.
    pub(crate) fn new(
        memory: Memory,
        pid: u32,
        process: Option<OwnedFd>,
        socket: Option<PacketSocket>,
    ) -> Arc<Self> {
        let writer = Arc::new(Self { memory, pid, process, socket });
        if let Some(mut writers) = lock(&WRITERS) {
            writers.retain(|known| known.strong_count() > 0);
            writers.push(Arc::downgrade(&writer));
        }
        writer
    }

    /// Whether its process has not ended. A hung-up socket is no end: a copy may be under way. One
    /// without a descriptor is taken to have ended with its socket.
    pub(crate) fn is_alive(&self) -> bool {
        match (&self.process, &self.socket) {
            (Some(process), _) => !peer_process::has_ended(process.as_fd()),
            (None, Some(socket)) => peer_process::is_alive(None, socket.as_fd()),
            (None, None) => true,
        }
    }

    /// Whether it says that it visits a window.
    pub(crate) fn is_at(&self, window: u32) -> bool {
        self.memory.other_visits().is_at(window)
    }

    /// Whether it lives and visits any window.
    pub(crate) fn is_visiting(&self) -> bool {
        self.memory.other_visits().is_anywhere() && self.is_alive()
    }
}

/// What a writer has claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    /// So many chunks of a message, in a record that is closed.
    Chunks { record: u16, generation: u16, chunks: u64, claimed: u64 },
    /// A window, which is closed.
    Window(u32),
}

/// Memory that somebody may still write.
#[derive(Debug, Clone)]
pub(crate) enum Claim {
    /// A peer.
    Peer { writer: Arc<Writer>, claimed: Claimed },
    /// A thread of this process that may wait for a peer's memory. The peer counts as its writer: what
    /// one process can make us hold is bounded.
    Copy { copying: Arc<Copying>, _writer: Arc<Writer> },
}

impl Claim {
    /// What a peer has claimed.
    pub(crate) fn new(writer: Arc<Writer>, claimed: Claimed) -> Self {
        Self::Peer { writer, claimed }
    }

    /// Whether it is a thread of this process.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Copy { .. })
    }

    /// Whether somebody may still write. Words that make no sense claim nothing: an honest peer
    /// writes none, and another one could write without claiming.
    pub(crate) fn is_held(&self) -> bool {
        let (writer, claimed) = match self {
            Self::Peer { writer, claimed } => (writer, *claimed),
            Self::Copy { copying, .. } => return copying.is_under_way(),
        };
        let says_so = match claimed {
            Claimed::Chunks { record, generation, chunks, claimed } => {
                let record = writer.memory.record(true, record.into());
                record.told(generation, chunks).is_ok_and(|told| told.given_up() < claimed)
            }
            Claimed::Window(window) => writer.is_at(window),
        };
        says_so && writer.is_alive()
    }
}

/// Memory that waits for its writers.
struct Kept {
    claims: Vec<Claim>,
    _memory: Box<dyn Any + Send>,
    /// Which process keeps it: a forked child has a copy, and no business with it.
    fork_generation: u64,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);
static SWEPT_NS: AtomicU64 = AtomicU64::new(0);
static WRITERS: Mutex<Vec<Weak<Writer>>> = Mutex::new(Vec::new());

/// A lock that a forked child may find locked for ever: then nothing.
pub(crate) fn lock<T>(mutex: &'static Mutex<T>) -> Option<MutexGuard<'static, T>> {
    const TRIES: u32 = 10_000;
    for _ in 0..TRIES {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// Keeps memory until nobody writes there any more.
pub(crate) fn keep(claims: Vec<Claim>, memory: Box<dyn Any + Send>) {
    if claims.iter().all(Claim::is_local) {
        tracing::debug!("memory is kept until a thread that copies is out of it");
    } else {
        tracing::warn!(
            "a peer is stopped in the middle of a write: the memory is kept until it goes on or ends"
        );
    }
    let kept = Kept { claims, _memory: memory, fork_generation: fork::generation() };
    COUNT.fetch_add(1, Ordering::Relaxed);
    match lock(&KEPT) {
        Some(mut all) => all.push(kept),
        None => std::mem::forget(kept),
    }
}

/// Frees what nobody writes any more, if it is time to look. Called without any lock: foreign code
/// may run.
#[inline]
pub(crate) fn sweep() {
    if COUNT.load(Ordering::Relaxed) > 0 {
        sweep_now(false);
    }
}

#[cold]
fn sweep_now(at_once: bool) {
    let now = memferry_sys::clock::coarse_ns();
    if !at_once && now.saturating_sub(SWEPT_NS.load(Ordering::Relaxed)) < SWEEP_NS {
        return;
    }
    let Ok(mut all) = KEPT.try_lock() else { return };
    SWEPT_NS.store(now, Ordering::Relaxed);
    let (generation, mut freed) = (fork::generation(), Vec::new());
    for index in (0..all.len()).rev() {
        let kept = &all[index];
        if kept.fork_generation == generation && !kept.claims.iter().any(Claim::is_held) {
            freed.push(all.swap_remove(index));
        }
    }
    drop(all);
    for kept in freed {
        COUNT.fetch_sub(1, Ordering::Relaxed);
        if catch_unwind(AssertUnwindSafe(|| drop(kept))).is_err() {
            tracing::error!("a buffer panicked when it was dropped");
        }
    }
}

/// How many buffers this process keeps because a peer that is stopped may still write to them. They
/// are freed when it goes on or ends.
pub fn kept_buffers() -> usize {
    if COUNT.load(Ordering::Relaxed) > 0 {
        sweep_now(true);
    }
    COUNT.load(Ordering::Relaxed)
}

/// Whether so many connections of a process have ended in the middle of a write, and it lives on,
/// that it gets no more.
pub(crate) fn has_many_ended(pid: u32) -> bool {
    let Some(writers) = lock(&WRITERS) else { return false };
    let its = writers.iter().filter_map(Weak::upgrade).filter(|writer| writer.pid == pid);
    let most = if pid == 0 { MOST_ENDED_UNKNOWN } else { MOST_ENDED };
    its.filter(|writer| writer.is_alive()).count() >= most
}
