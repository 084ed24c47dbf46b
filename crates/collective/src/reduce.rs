//! Reductions of little data: every rank, or the root, reads the data of all ranks.

use crate::element::{Combine, Reduction};
use crate::error::Error;
use crate::line::PAYLOAD_BYTES;
use crate::reduce_large::Reducing;
use crate::team::{Operation, Team, mark_of};
use crate::waiting::Progress;

impl Team {
    /// Reduces `count` elements of all ranks, element by element, to all ranks.
    ///
    /// # Safety
    /// `send` must be valid for reads and `recv` for writes of `count` elements. The two must be equal, or not overlap.
    /// No other code of this process may write `send` or access `recv` during the call.
    pub unsafe fn allreduce_raw(
        &mut self,
        reduction: &mut Reduction<'_>,
        send: *const u8,
        recv: *mut u8,
        count: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees the same.
        unsafe { self.reduce_any(reduction, send, recv, count, None, progress) }
    }

    /// Reduces `count` elements of all ranks, element by element, to rank `root`.
    ///
    /// # Safety
    /// As [`Team::allreduce_raw`]; ranks other than the root do not use `recv`.
    pub unsafe fn reduce_raw(
        &mut self,
        reduction: &mut Reduction<'_>,
        send: *const u8,
        recv: *mut u8,
        count: usize,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.check_root(root)?;
        // SAFETY: the caller guarantees the same.
        unsafe { self.reduce_any(reduction, send, recv, count, Some(root), progress) }
    }

    /// # Safety
    /// As [`Team::allreduce_raw`], and as [`Team::reduce_raw`] if there is a root.
    unsafe fn reduce_any(
        &mut self,
        reduction: &mut Reduction<'_>,
        send: *const u8,
        recv: *mut u8,
        count: usize,
        root: Option<usize>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.enter()?;
        let kind = reduction.kind();
        let mut combine = reduction.prepare()?;
        let element = combine.element_bytes;
        let bytes = count.checked_mul(element).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or(Error::Argument("the data is longer than any memory"))?;
        if element > self.tuning.staging_bytes {
            return Err(Error::Argument("an element is longer than the staging of the team"));
        }
        if bytes == 0 {
            return Ok(());
        }
        if self.size() == 1 {
            // SAFETY: the caller guarantees both ranges, which are equal or do not overlap.
            unsafe { std::ptr::copy(send, recv, bytes) };
            return Ok(());
        }
        let reducing = Reducing { send, recv, bytes, root, kind };
        let is_tree = self.size() > self.tree_from();
        // SAFETY: the caller guarantees what these need.
        unsafe {
            match bytes {
                _ if bytes > self.tuning.direct_reduce_bytes.max(PAYLOAD_BYTES) => {
                    self.reduce_large(reducing, &mut combine, progress)
                }
                _ if root.is_none() && is_tree && bytes <= PAYLOAD_BYTES => {
                    self.allreduce_tree(reducing, &mut combine, progress)
                }
                ..=PAYLOAD_BYTES => self.reduce_lines(reducing, &mut combine, progress),
                _ if is_tree => self.reduce_large(reducing, &mut combine, progress),
                _ => self.reduce_staged(reducing, &mut combine, progress),
            }
        }
    }

    /// # Safety
    /// As [`Team::allreduce_raw`].
    unsafe fn allreduce_tree(
        &mut self,
        reducing: Reducing,
        combine: &mut Combine<'_>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let Reducing { send, recv, bytes, .. } = reducing;
        let mark = reducing.mark(0);
        let mut words = [0u64; PAYLOAD_BYTES / 8];
        let data = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the words are at least as long as `bytes`; the caller guarantees `send` and `recv`.
        unsafe {
            std::ptr::copy_nonoverlapping(send, data, bytes);
            let data = std::slice::from_raw_parts_mut(data, bytes);
            self.meet_in_tree(mark, data, Some(combine), progress)?;
            std::ptr::copy_nonoverlapping(data.as_ptr(), recv, bytes);
        }
        Ok(())
    }

    /// Through the lines.
    ///
    /// # Safety
    /// As [`Team::allreduce_raw`].
    unsafe fn reduce_lines(
        &mut self,
        reducing: Reducing,
        combine: &mut Combine<'_>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let Reducing { send, recv, bytes, root, .. } = reducing;
        let mark = reducing.mark(0);
        // SAFETY: the caller guarantees `send`.
        let payload = unsafe { std::slice::from_raw_parts(send, bytes) };
        let phase = self.publish(mark, payload, progress)?;
        if root.is_some_and(|root| root != self.rank()) {
            return Ok(());
        }
        self.meet_all(phase, mark, progress)?;
        // Not in `recv`: it may be `send`, and have any alignment.
        let mut words = [0u64; PAYLOAD_BYTES / 8];
        let data = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the words are at least as long as `bytes`, and the caller guarantees `recv`.
        unsafe {
            let data = std::slice::from_raw_parts_mut(data, bytes);
            self.slot(0, phase).read(0, data);
            for rank in 1..self.size() {
                self.combine_line(rank, phase, data, Some(combine))?;
            }
            std::ptr::copy_nonoverlapping(data.as_ptr(), recv, bytes);
        }
        Ok(())
    }

    /// Through the staging.
    ///
    /// # Safety
    /// As [`Team::allreduce_raw`].
    unsafe fn reduce_staged(
        &mut self,
        reducing: Reducing,
        combine: &mut Combine<'_>,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let Reducing { send, recv, bytes, root, .. } = reducing;
        let mark = reducing.mark(1);
        let half = self.take_half(progress)?;
        // SAFETY: the caller guarantees `send`, and the staging is as long as the longest direct reduction.
        unsafe {
            std::ptr::copy_nonoverlapping(send, self.shared.staging(self.rank(), half), bytes);
        };
        let phase = self.publish(mark, &[], progress)?;
        if root.is_none_or(|root| root == self.rank()) {
            self.meet_all(phase, mark, progress)?;
            let sources = |team: &Self, rank: usize| team.shared.staging(rank, half).cast_const();
            // SAFETY: all stagings have `bytes` bytes that their ranks have published, and the caller guarantees `recv`.
            unsafe { self.combine_blocks(recv, bytes, combine, sources)? };
        }
        self.release_half(half);
        Ok(())
    }
}

impl Reducing {
    /// What ranks compare.
    pub(crate) fn mark(&self, step: u8) -> u64 {
        let (operation, root) = match self.root {
            Some(root) => (Operation::Reduce, root),
            None => (Operation::Allreduce, 0),
        };
        mark_of(operation, step, root, self.bytes, self.kind)
    }
}
