//! Memferry's collectives: the members of a group as a team.

use std::time::Duration;

use memferry_collective::{Invitation, NoProgress, ReduceOp, Reduction, Team};

use crate::group::exchange::{Exchange, gather_all};
use crate::message::collective_task::Collectives;

/// How long members wait for each other while they form the team.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Membership of one process in the team of its group.
#[derive(Debug)]
pub(crate) struct TeamMember {
    team: Team,
}

impl TeamMember {
    /// Forms the team of a group: the first member invites the others by a message.
    pub(crate) fn join(members: &mut impl Exchange) -> anyhow::Result<Self> {
        let (rank, size) = (members.rank(), members.size());
        let invitation = if rank == 0 { Some(Invitation::new(size)?) } else { None };
        let mut own = [0; Invitation::BYTES];
        if let Some(invitation) = &invitation {
            own = *invitation.bytes();
        }
        let mut all = vec![0; own.len() * size];
        gather_all(members, &own, &mut all)?;
        let team = match invitation {
            Some(invitation) => invitation.accept(&mut NoProgress, JOIN_TIMEOUT)?,
            None => Team::join(&all[..own.len()], rank, &mut NoProgress, JOIN_TIMEOUT)?,
        };
        Ok(Self { team })
    }
}

impl Collectives for TeamMember {
    fn rank(&self) -> usize {
        self.team.rank()
    }

    fn size(&self) -> usize {
        self.team.size()
    }

    fn barrier(&mut self) -> anyhow::Result<()> {
        Ok(self.team.barrier(&mut NoProgress)?)
    }

    fn broadcast(&mut self, root: usize, words: &mut [u64]) -> anyhow::Result<()> {
        Ok(self.team.broadcast(words, root, &mut NoProgress)?)
    }

    fn sum(&mut self, own: &[u64], sums: &mut [u64]) -> anyhow::Result<()> {
        anyhow::ensure!(own.len() == sums.len(), "as many sums as summands");
        let how = &mut Reduction::Numbers(memferry_collective::ElementType::F64, ReduceOp::Sum);
        let (from, to) = (own.as_ptr().cast(), sums.as_mut_ptr().cast());
        // SAFETY: both slices are borrowed for the call, do not overlap, and have as many words; a
        // double is a word, and every word is a double.
        unsafe { self.team.allreduce_raw(how, from, to, own.len(), &mut NoProgress)? };
        Ok(())
    }

    fn alltoall(&mut self, sent: &[u64], received: &mut [u64]) -> anyhow::Result<()> {
        Ok(self.team.alltoall(sent, received, &mut NoProgress)?)
    }

    fn maximum(&mut self, value: f64) -> anyhow::Result<f64> {
        let mut largest = [value];
        self.team.allreduce_in_place(&mut largest, ReduceOp::Max, &mut NoProgress)?;
        Ok(largest[0])
    }
}
