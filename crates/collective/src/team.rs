//! The team: membership of one rank, and the phases that all calls are made of.

use std::sync::atomic::{Ordering, fence};

use memferry_sys::shared_memory::SealedMemory;

use crate::access::PeerMemory;
use crate::error::Error;
use crate::line::{Awaited, SLOTS, Slot};
use crate::shared::{Layout, Shared};
use crate::tuning::Tuning;
use crate::waiting::Progress;

/// The membership of one rank in a team: processes of one machine that call collective operations together.
///
/// All ranks must call the same operations in the same order, with the same lengths. Each call takes a
/// [`Progress`], which runs while the rank waits for others.
///
/// When a process of the team exits during an operation, all ranks get an error that names it, and so they do when
/// a rank drops its team while others need it. Afterwards every call fails.
///
/// Threads of one process can be ranks too, each with its own value.
#[derive(Debug)]
pub struct Team {
    pub(crate) shared: Shared,
    pub(crate) tuning: Tuning,
    /// The memory of other ranks, if all ranks can read that of all others.
    pub(crate) peers: Option<PeerMemory>,
    /// The last phase that this rank has published.
    phase: u64,
    /// A phase that all ranks have published.
    complete: u64,
    /// The half of the staging that was used last.
    half: usize,
    /// For each half: the phase that all ranks have published when they have read it.
    half_free: [u64; 2],
    /// Private memory for pieces of other ranks' data.
    pub(crate) scratch: Vec<u64>,
}

impl Team {
    pub(crate) fn attach(
        memory: &SealedMemory,
        layout: Layout,
        rank: usize,
        tuning: Tuning,
    ) -> Result<Self, Error> {
        let shared = Shared::attach(memory, layout, rank)?;
        let (half_free, scratch) = ([0; 2], Vec::new());
        Ok(Self { shared, tuning, peers: None, phase: 0, complete: 0, half: 0, half_free, scratch })
    }

    /// The rank of this process.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.shared.layout.size
    }

    /// Whether there are more ranks than cores, so that a waiting rank takes the core of another one.
    pub fn is_crowded(&self) -> bool {
        self.shared.is_crowded
    }

    /// Whether large operations copy directly between the memories of the processes. Otherwise, for example under a
    /// filter of system calls, they go through shared memory.
    pub fn is_direct(&self) -> bool {
        self.peers.is_some()
    }

    /// Checks at the start of each call.
    #[inline]
    pub(crate) fn enter(&self) -> Result<(), Error> {
        if !self.shared.is_owner_process() {
            return Err(Error::Forked);
        }
        self.shared.check_failed()?;
        self.shared.check_broken()
    }

    /// The phase that this rank publishes next.
    pub(crate) fn next_phase(&self) -> u64 {
        self.phase + 1
    }

    /// Publishes the next phase, with a payload of at most [`crate::line::PAYLOAD_BYTES`].
    #[inline]
    pub(crate) fn publish(
        &mut self,
        mark: u64,
        payload: &[u8],
        progress: &mut dyn Progress,
    ) -> Result<u64, Error> {
        let phase = self.phase + 1;
        // The slot was used before, and all ranks must have read it.
        if phase > SLOTS as u64 {
            self.wait_all(phase + 1 - SLOTS as u64, progress)?;
        }
        self.shared.line(self.rank()).slot(phase).fill(mark, payload);
        self.shared.publish(phase);
        self.phase = phase;
        Ok(phase)
    }

    /// Waits until all ranks have published a phase.
    #[inline]
    pub(crate) fn wait_all(
        &mut self,
        phase: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if self.complete < phase {
            self.shared.wait(Awaited::All, phase, progress)?;
            self.complete = phase;
        }
        Ok(())
    }

    /// As [`Team::wait_all`]; fails if a rank has called something else.
    #[inline]
    pub(crate) fn meet_all(
        &mut self,
        phase: u64,
        mark: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.wait_all(phase, progress)?;
        (0..self.size()).try_for_each(|rank| self.check_mark(rank, phase, mark))
    }

    /// Waits until a rank has published a phase; fails if it has called something else.
    #[inline]
    pub(crate) fn meet(
        &self,
        rank: usize,
        phase: u64,
        mark: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.shared.wait(Awaited::Rank(rank), phase, progress)?;
        self.check_mark(rank, phase, mark)
    }

    #[inline]
    fn check_mark(&self, rank: usize, phase: u64, mark: u64) -> Result<(), Error> {
        match self.slot(rank, phase).mark() == mark {
            true => Ok(()),
            false => Err(self.shared.break_with(Error::Mismatch(rank))),
        }
    }

    /// The slot of a rank in a phase, after it was published.
    #[inline]
    pub(crate) fn slot(&self, rank: usize, phase: u64) -> &Slot {
        self.shared.line(rank).slot(phase)
    }

    /// Takes the next half of the staging, the same on all ranks, when all ranks have read what it had before.
    pub(crate) fn take_half(&mut self, progress: &mut dyn Progress) -> Result<usize, Error> {
        self.half ^= 1;
        self.wait_all(self.half_free[self.half], progress)?;
        Ok(self.half)
    }

    /// Ends the use of a half. The ranks have read it when they have published the next phase.
    pub(crate) fn release_half(&mut self, half: usize) {
        self.half_free[half] = self.phase + 1;
    }

    /// Fails if the team is broken. A rank that has read memory of others asks before it trusts what it has read: a
    /// rank that gets an error returns, and may change its memory while others read it. It breaks the team before.
    pub(crate) fn check_read(&self) -> Result<(), Error> {
        // The reads come before the look.
        fence(Ordering::Acquire);
        self.shared.check_broken()
    }

    /// Breaks the team: all ranks get [`Error::Stopped`] with this rank. For a rank that cannot take part in an
    /// operation that others call.
    pub fn stop(&mut self) {
        if self.shared.is_owner_process() {
            self.fail(Error::Stopped(self.rank()));
        }
    }

    /// Breaks the team with an error that all ranks get.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.shared.break_with(error)
    }
}

/// What ranks compare to find out whether they have called the same: operation, step, root and length.
pub(crate) fn mark(operation: Operation, step: u8, root: usize, bytes: usize) -> u64 {
    mark_of(operation, step, root, bytes, 0)
}

/// As [`mark`], with a number for what is done with the elements.
pub(crate) fn mark_of(operation: Operation, step: u8, root: usize, bytes: usize, kind: u64) -> u64 {
    let arguments = (bytes as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        ^ (root as u64) << 17
        ^ kind.wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    (operation as u64) << 56 | u64::from(step) << 48 | arguments >> 16
}

/// The operations of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    Join = 1,
    Barrier,
    Broadcast,
    Reduce,
    Allreduce,
    Gather,
    Allgather,
    Alltoall,
}
