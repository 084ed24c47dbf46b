//! The collective operations of a job.

use memferry_collective::{Element, ReduceOp, Reduction};

use crate::error::Error;
use crate::job::Job;

impl Job {
    /// Waits until all ranks have called it. Messages make progress meanwhile, as in all collective operations.
    ///
    /// ```
    /// use memferry::message::Job;
    ///
    /// let job = Job::join("doc-barrier", 0, 1)?;
    /// job.barrier()?;
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As all collective operations: [`Error::Collective`] if a rank has died, has left, or has called something
    /// else. Then all ranks get an error, and so do all later collective operations of the job.
    pub fn barrier(&self) -> Result<(), Error> {
        self.with_team(|team, progress| team.barrier(progress))
    }

    /// Copies the elements of rank `root` to all ranks.
    ///
    /// ```
    /// use memferry::message::Job;
    ///
    /// let job = Job::join("doc-broadcast", 0, 1)?;
    /// let mut numbers = [1.5f32, 2.5];
    /// job.broadcast(&mut numbers, 0)?; // from rank 0
    /// assert_eq!(numbers, [1.5, 2.5]);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<(), Error> {
        self.with_team(|team, progress| team.broadcast(buffer, root, progress))
    }

    /// Reduces the elements of all ranks to all ranks, element by element. All ranks get the same result, bit by bit.
    ///
    /// ```
    /// use memferry::message::{Job, ReduceOp};
    ///
    /// let job = Job::join("doc-allreduce", 0, 1)?;
    /// let mut sums = [0.0; 2];
    /// job.allreduce(&[1.5, 2.5], &mut sums, ReduceOp::Sum)?;
    /// assert_eq!(sums, [1.5, 2.5]); // the only rank
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn allreduce<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        operation: ReduceOp,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| team.allreduce(send, recv, operation, progress))
    }

    /// As [`Job::allreduce`], in place.
    pub fn allreduce_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        operation: ReduceOp,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| team.allreduce_in_place(buffer, operation, progress))
    }

    /// As [`Job::allreduce_in_place`], with a function that combines the elements of some ranks with those of the
    /// next rank. It is applied in the order of the ranks, and may be called several times, each time for other
    /// elements. It must not call collective operations of the job.
    ///
    /// ```
    /// use memferry::message::Job;
    ///
    /// let job = Job::join("doc-function", 0, 1)?;
    /// let mut numbers = [3u32, 4];
    /// let gcd = |a: u32, b: u32| {
    ///     let (mut a, mut b) = (a, b);
    ///     while b != 0 {
    ///         (a, b) = (b, a % b);
    ///     }
    ///     a
    /// };
    /// let combine = |into: &mut [u32], from: &[u32]| {
    ///     into.iter_mut().zip(from).for_each(|(into, from)| *into = gcd(*into, *from));
    /// };
    /// job.allreduce_with(&mut numbers, combine)?;
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn allreduce_with<T: Element>(
        &self,
        buffer: &mut [T],
        combine: impl FnMut(&mut [T], &[T]),
    ) -> Result<(), Error> {
        self.with_team(|team, progress| team.allreduce_with(buffer, combine, progress))
    }

    /// Reduces the elements of all ranks to rank `root`. Other ranks may pass an empty `recv`.
    pub fn reduce<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        operation: ReduceOp,
        root: usize,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| team.reduce(send, recv, operation, root, progress))
    }

    /// As [`Job::reduce`], with a function as in [`Job::allreduce_with`].
    pub fn reduce_with<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        combine: impl FnMut(&mut [T], &[T]),
        root: usize,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| team.reduce_with(send, recv, combine, root, progress))
    }

    /// Copies the elements of all ranks to rank `root`, in the order of the ranks. Other ranks may pass an empty `recv`.
    pub fn gather<T: Element>(&self, send: &[T], recv: &mut [T], root: usize) -> Result<(), Error> {
        self.with_team(|team, progress| team.gather(send, recv, root, progress))
    }

    /// Copies the elements of all ranks to all ranks, in the order of the ranks.
    pub fn allgather<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<(), Error> {
        self.with_team(|team, progress| team.allgather(send, recv, progress))
    }

    /// Copies the `n`-th of as many blocks as there are ranks to rank `n`, which gets them in the order of the ranks.
    ///
    /// ```
    /// use memferry::message::Job;
    ///
    /// let job = Job::join("doc-alltoall", 0, 1)?;
    /// let mut received = [0; 3];
    /// job.alltoall(&[1, 2, 3], &mut received)?; // one rank: one block
    /// assert_eq!(received, [1, 2, 3]);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn alltoall<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<(), Error> {
        self.with_team(|team, progress| team.alltoall(send, recv, progress))
    }

    /// Copies `bytes` of raw memory from rank `root` to all others.
    ///
    /// # Safety
    /// `buffer` must be valid for reads at the root, and for writes at all other ranks, of `bytes`; no other code of
    /// this process may write it, or access it on other ranks, during the call.
    pub unsafe fn broadcast_raw(
        &self,
        buffer: *mut u8,
        bytes: usize,
        root: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees it.
        self.with_team(|team, progress| unsafe {
            team.broadcast_raw(buffer, bytes, root, progress)
        })
    }

    /// Reduces `count` elements of raw memory of all ranks to all ranks.
    ///
    /// # Safety
    /// `send` must be valid for reads and `recv` for writes of `count` elements. The two must be equal, or not overlap.
    /// No other code of this process may write `send` or access `recv` during the call.
    pub unsafe fn allreduce_raw(
        &self,
        reduction: &mut Reduction<'_>,
        send: *const u8,
        recv: *mut u8,
        count: usize,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| {
            // SAFETY: the caller guarantees it.
            unsafe { team.allreduce_raw(reduction, send, recv, count, progress) }
        })
    }

    /// Reduces `count` elements of raw memory of all ranks to rank `root`.
    ///
    /// # Safety
    /// As [`Job::allreduce_raw`]; ranks other than the root do not use `recv`.
    pub unsafe fn reduce_raw(
        &self,
        reduction: &mut Reduction<'_>,
        send: *const u8,
        recv: *mut u8,
        count: usize,
        root: usize,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| {
            // SAFETY: the caller guarantees it.
            unsafe { team.reduce_raw(reduction, send, recv, count, root, progress) }
        })
    }

    /// Copies a block of `bytes` of raw memory of each rank to rank `root`, in the order of the ranks.
    ///
    /// # Safety
    /// `send` must be valid for reads of `bytes`; at the root, `recv` for writes of `bytes` for each rank. The root's
    /// own block may be in its place in `recv`; otherwise the two must not overlap. No other code of this process may
    /// write `send` or access `recv` during the call.
    pub unsafe fn gather_raw(
        &self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
        root: usize,
    ) -> Result<(), Error> {
        self.with_team(|team, progress| {
            // SAFETY: the caller guarantees it.
            unsafe { team.gather_raw(send, recv, bytes, root, progress) }
        })
    }

    /// Copies a block of `bytes` of raw memory of each rank to all ranks, in the order of the ranks.
    ///
    /// # Safety
    /// As [`Job::gather_raw`], where every rank is a root.
    pub unsafe fn allgather_raw(
        &self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees it.
        self.with_team(|team, progress| unsafe { team.allgather_raw(send, recv, bytes, progress) })
    }

    /// Copies the `n`-th block of `bytes` of raw memory of each rank to rank `n`.
    ///
    /// # Safety
    /// `send` must be valid for reads and `recv` for writes of `bytes` for each rank. The two must be equal, or not
    /// overlap. No other code of this process may write `send` or access `recv` during the call.
    pub unsafe fn alltoall_raw(
        &self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees it.
        self.with_team(|team, progress| unsafe { team.alltoall_raw(send, recv, bytes, progress) })
    }
}
