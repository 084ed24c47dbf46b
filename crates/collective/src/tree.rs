//! Meetings of large teams: with two levels of ranks, so that no rank reads the lines of all others.

use crate::element::Combine;
use crate::error::Error;
use crate::line::PAYLOAD_BYTES;
use crate::team::Team;
use crate::waiting::Progress;

/// From this size on a tree takes less time than lines that everybody reads.
const TREE_FROM: usize = 16;

impl Team {
    /// Teams of more ranks meet in a tree.
    pub(crate) fn tree_from(&self) -> usize {
        TREE_FROM
    }

    /// Meets all ranks, and reduces a payload in the order of the ranks.
    ///
    /// The ranks are in groups of neighbours. In the first phase the first rank of each group publishes the result of
    /// its group; in the second one rank 0 publishes the result of all groups, and the first ranks repeat it.
    pub(crate) fn meet_in_tree(
        &mut self,
        mark: u64,
        data: &mut [u8],
        mut combine: Option<&mut Combine<'_>>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let group = self.size().isqrt().max(2);
        let (rank, size) = (self.rank(), self.size());
        let leader = rank - rank % group;
        let next = self.next_phase();
        if rank == leader {
            for member in leader + 1..size.min(leader + group) {
                self.meet(member, next, mark, progress)?;
                self.combine_line(member, next, data, combine.as_deref_mut())?;
            }
        }
        let up = self.publish(mark, data, progress)?;
        if rank == 0 {
            for other in (group..size).step_by(group) {
                self.meet(other, up, mark, progress)?;
                self.combine_line(other, up, data, combine.as_deref_mut())?;
            }
        }
        let source = if rank == leader { 0 } else { leader };
        if rank == leader && rank != 0 {
            self.meet(source, up + 1, mark, progress)?;
            self.slot(source, up + 1).read(0, data);
        }
        let down = self.publish(mark, data, progress)?;
        if rank != leader {
            self.meet(source, down, mark, progress)?;
            self.slot(source, down).read(0, data);
        }
        Ok(())
    }

    /// Combines the payload of a rank into `data`.
    pub(crate) fn combine_line(
        &self,
        rank: usize,
        phase: u64,
        data: &mut [u8],
        combine: Option<&mut Combine<'_>>,
    ) -> Result<(), Error> {
        let Some(combine) = combine else { return Ok(()) };
        let mut words = [0u64; PAYLOAD_BYTES / 8];
        let from = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the words are valid for writes of as many bytes, and `data` is not longer than a payload.
        let bytes = unsafe { std::slice::from_raw_parts_mut(from, data.len().min(PAYLOAD_BYTES)) };
        self.slot(rank, phase).read(0, bytes);
        let count = bytes.len() / combine.element_bytes;
        // SAFETY: both have `count` elements, and only this thread accesses them.
        unsafe { self.shared.combine(combine, data.as_mut_ptr(), from, count) }
    }
}
