//! The calls with slices of numbers.

use crate::element::{Element, ReduceOp, Reduction};
use crate::error::Error;
use crate::team::Team;
use crate::waiting::{Progress, Stop};

const LENGTHS: Error = Error::Argument("the buffers have not the lengths that the operation needs");

/// Checks that a buffer has as many elements as it must have.
fn check(length: usize, needed: Option<usize>) -> Result<(), Error> {
    if Some(length) == needed { Ok(()) } else { Err(LENGTHS) }
}

impl Team {
    /// Copies the elements of rank `root` to all ranks.
    pub fn broadcast<T: Element>(
        &mut self,
        buffer: &mut [T],
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let bytes = size_of_val(buffer);
        // SAFETY: the slice is borrowed for the call, and takes any bytes.
        unsafe { self.broadcast_raw(buffer.as_mut_ptr().cast(), bytes, root, progress) }
    }

    /// Reduces the elements of all ranks to all ranks, element by element.
    pub fn allreduce<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        operation: ReduceOp,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        check(recv.len(), Some(send.len()))?;
        let reduction = &mut Reduction::Numbers(T::TYPE, operation);
        let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        // SAFETY: both slices are borrowed for the call, have the same length, and take any bytes.
        unsafe { self.allreduce_raw(reduction, from, into, send.len(), progress) }
    }

    /// As [`Team::allreduce`], in place.
    pub fn allreduce_in_place<T: Element>(
        &mut self,
        buffer: &mut [T],
        operation: ReduceOp,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let reduction = &mut Reduction::Numbers(T::TYPE, operation);
        let (memory, count) = (buffer.as_mut_ptr().cast::<u8>(), buffer.len());
        // SAFETY: the slice is borrowed for the call, and takes any bytes.
        unsafe { self.allreduce_raw(reduction, memory, memory, count, progress) }
    }

    /// As [`Team::allreduce_in_place`], with a function that combines the elements of some ranks with those of the next
    /// rank. It is applied in the order of the ranks, and may be called several times, each time for other elements.
    pub fn allreduce_with<T: Element>(
        &mut self,
        buffer: &mut [T],
        mut combine: impl FnMut(&mut [T], &[T]),
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let combine = &mut slices(&mut combine);
        let reduction = &mut Reduction::Function { element_bytes: size_of::<T>(), combine };
        let (memory, count) = (buffer.as_mut_ptr().cast::<u8>(), buffer.len());
        // SAFETY: the slice is borrowed for the call, and takes any bytes.
        unsafe { self.allreduce_raw(reduction, memory, memory, count, progress) }
    }

    /// Reduces the elements of all ranks to rank `root`. Other ranks may pass an empty `recv`.
    pub fn reduce<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        operation: ReduceOp,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if self.rank() == root {
            check(recv.len(), Some(send.len()))?;
        }
        let reduction = &mut Reduction::Numbers(T::TYPE, operation);
        let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        // SAFETY: both slices are borrowed for the call, have the same length at the root, and take any bytes.
        unsafe { self.reduce_raw(reduction, from, into, send.len(), root, progress) }
    }

    /// As [`Team::reduce`], with a function as in [`Team::allreduce_with`].
    pub fn reduce_with<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        mut combine: impl FnMut(&mut [T], &[T]),
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if self.rank() == root {
            check(recv.len(), Some(send.len()))?;
        }
        let combine = &mut slices(&mut combine);
        let reduction = &mut Reduction::Function { element_bytes: size_of::<T>(), combine };
        let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        // SAFETY: as in `reduce`.
        unsafe { self.reduce_raw(reduction, from, into, send.len(), root, progress) }
    }

    /// Copies the elements of all ranks to rank `root`, in the order of the ranks. Other ranks may pass an empty `recv`.
    pub fn gather<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        if self.rank() == root {
            check(recv.len(), send.len().checked_mul(self.size()))?;
        }
        let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        // SAFETY: both slices are borrowed for the call, have the lengths that the call needs, and take any bytes.
        unsafe { self.gather_raw(from, into, size_of_val(send), root, progress) }
    }

    /// Copies the elements of all ranks to all ranks, in the order of the ranks.
    pub fn allgather<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        check(recv.len(), send.len().checked_mul(self.size()))?;
        let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        // SAFETY: as in `gather`.
        unsafe { self.allgather_raw(from, into, size_of_val(send), progress) }
    }

    /// Copies the `n`-th of as many blocks as there are ranks to rank `n`, which gets them in the order of the ranks.
    pub fn alltoall<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let block = send.len() / self.size();
        check(send.len(), block.checked_mul(self.size()))?;
        check(recv.len(), Some(send.len()))?;
        let (from, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
        // SAFETY: as in `gather`; both have a block for each rank.
        unsafe { self.alltoall_raw(from, into, block * size_of::<T>(), progress) }
    }
}

/// A function on slices as one on memory.
fn slices<T: Element>(
    combine: &mut impl FnMut(&mut [T], &[T]),
) -> impl FnMut(*mut u8, *const u8, usize) -> Result<(), Stop> {
    move |into, from, count| {
        // SAFETY: `Reduction::Function` guarantees both, aligned and private to this process, and any bytes are elements.
        unsafe {
            let into = std::slice::from_raw_parts_mut(into.cast::<T>(), count);
            combine(into, std::slice::from_raw_parts(from.cast::<T>(), count));
        }
        Ok(())
    }
}
