//! The team of a communicator: its collectives over Memferry.

use std::ffi::c_int;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use memferry_collective::{ElementType, ReduceOp};
use memferry_collective::{Error, Invitation, Reduction, Team};

use crate::communicator::Context;
use crate::handles::{Class, Operation};
use crate::progress::MpiProgress;
use crate::report;

/// The error of a collective.
pub(crate) type TeamError = Error;

/// Length of an invitation to a team.
pub(crate) const INVITATION_BYTES: usize = Invitation::BYTES;
/// How long ranks wait for each other while a team is formed. All of them are in the same call.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Team of the ranks of a communicator.
#[derive(Debug)]
pub(crate) struct HostTeam {
    team: Team,
    progress: MpiProgress,
}

impl HostTeam {
    /// Waits for the ranks that join.
    pub(crate) fn accept(invitation: Invitation, mut progress: MpiProgress) -> Result<Self, Error> {
        let team = invitation.accept(&mut progress, JOIN_TIMEOUT)?;
        progress.set_crowded(team.is_crowded());
        Ok(Self { team, progress })
    }

    /// Joins the team of an invitation.
    pub(crate) fn join(
        invitation: &[u8],
        rank: usize,
        mut progress: MpiProgress,
    ) -> Result<Self, Error> {
        let team = Team::join(invitation, rank, &mut progress, JOIN_TIMEOUT)?;
        progress.set_crowded(team.is_crowded());
        Ok(Self { team, progress })
    }

    /// Ends the team, since this rank cannot take part in a collective that the others call.
    fn give_up(&mut self) {
        self.team.stop();
    }

    /// Waits for all ranks.
    pub(crate) fn barrier(&mut self) -> Result<(), Error> {
        self.team.barrier(&mut self.progress)
    }

    /// # Safety
    ///
    /// As [`Team::broadcast_raw`].
    #[inline]
    pub(crate) unsafe fn broadcast(
        &mut self,
        root: usize,
        buffer: *mut u8,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.team.broadcast_raw(buffer, bytes, root, &mut self.progress) }
    }

    /// # Safety
    ///
    /// As [`Team::gather_raw`].
    pub(crate) unsafe fn gather(
        &mut self,
        root: usize,
        from: *const u8,
        bytes: usize,
        to: *mut u8,
    ) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.team.gather_raw(from, to, bytes, root, &mut self.progress) }
    }

    /// # Safety
    ///
    /// As [`Team::allgather_raw`].
    pub(crate) unsafe fn allgather(
        &mut self,
        from: *const u8,
        bytes: usize,
        to: *mut u8,
    ) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.team.allgather_raw(from, to, bytes, &mut self.progress) }
    }

    /// # Safety
    ///
    /// As [`Team::alltoall_raw`].
    pub(crate) unsafe fn alltoall(
        &mut self,
        from: *const u8,
        bytes: usize,
        to: *mut u8,
    ) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.team.alltoall_raw(from, to, bytes, &mut self.progress) }
    }

    /// # Safety
    ///
    /// As [`Team::reduce_raw`].
    pub(crate) unsafe fn reduce(
        &mut self,
        root: usize,
        from: *const u8,
        to: *mut u8,
        count: usize,
        (element, operation): (ElementType, ReduceOp),
    ) -> Result<(), Error> {
        let how = &mut Reduction::Numbers(element, operation);
        // SAFETY: as the caller promises.
        unsafe { self.team.reduce_raw(how, from, to, count, root, &mut self.progress) }
    }

    /// # Safety
    ///
    /// As [`Team::allreduce_raw`].
    #[inline]
    pub(crate) unsafe fn allreduce(
        &mut self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        (element, operation): (ElementType, ReduceOp),
    ) -> Result<(), Error> {
        let how = &mut Reduction::Numbers(element, operation);
        // SAFETY: as the caller promises.
        unsafe { self.team.allreduce_raw(how, from, to, count, &mut self.progress) }
    }
}

/// Number of collectives that were executed here. Two threads may count as one.
static EXECUTED: AtomicU64 = AtomicU64::new(0);

/// The number of collectives that this library has executed in this process.
pub(crate) fn executed() -> u64 {
    EXECUTED.load(Ordering::Relaxed)
}

/// Runs a collective. The error is a code of MPI, which has been reported.
#[inline]
pub(crate) fn run(
    context: &Context,
    collective: impl FnOnce(&mut HostTeam) -> Result<(), Error>,
) -> Result<(), c_int> {
    let mut team = context.team.lock().unwrap_or_else(PoisonError::into_inner);
    team.progress.restart();
    let result = collective(&mut team);
    // The error handler of the program may call MPI.
    drop(team);
    // Without a locked instruction, which would take longer than the rest of this function.
    EXECUTED.store(EXECUTED.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    result.map_err(|error| report::fail(context, &error.to_string()))
}

/// What a rank has prepared for a collective. If it could not, which has been reported, the others get an
/// error: they would wait for it.
#[inline]
pub(crate) fn prepared<T>(context: &Context, prepared: Result<T, c_int>) -> Result<T, c_int> {
    if prepared.is_err() {
        context.team.lock().unwrap_or_else(PoisonError::into_inner).give_up();
    }
    prepared
}

/// The type of elements of a class and a size.
pub(crate) fn element_type(class: Class, size: usize) -> Option<ElementType> {
    Some(match (class, size) {
        (Class::Signed, 1) => ElementType::I8,
        (Class::Signed, 2) => ElementType::I16,
        (Class::Signed, 4) => ElementType::I32,
        (Class::Signed, 8) => ElementType::I64,
        (Class::Unsigned, 1) => ElementType::U8,
        (Class::Unsigned, 2) => ElementType::U16,
        (Class::Unsigned, 4) => ElementType::U32,
        (Class::Unsigned, 8) => ElementType::U64,
        (Class::Real, 4) => ElementType::F32,
        (Class::Real, 8) => ElementType::F64,
        _ => return None,
    })
}

/// The operation of a team for one of MPI.
pub(crate) fn reduce_op(operation: Operation) -> ReduceOp {
    match operation {
        Operation::Max => ReduceOp::Max,
        Operation::Min => ReduceOp::Min,
        Operation::Sum => ReduceOp::Sum,
        Operation::Product => ReduceOp::Product,
        Operation::LogicalAnd => ReduceOp::LogicalAnd,
        Operation::BitAnd => ReduceOp::BitAnd,
        Operation::LogicalOr => ReduceOp::LogicalOr,
        Operation::BitOr => ReduceOp::BitOr,
        Operation::LogicalXor => ReduceOp::LogicalXor,
        Operation::BitXor => ReduceOp::BitXor,
    }
}
