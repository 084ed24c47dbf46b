//! Gather, all-gather and all-to-all: blocks that move without being changed.

use crate::broadcast::Exposed;
use crate::error::Error;
use crate::line::PAYLOAD_BYTES;
use crate::team::{Operation, Team, mark};
use crate::waiting::Progress;

/// Staged blocks begin at multiples of this.
const BLOCK_ALIGNMENT: usize = 64;

/// The memory of an exchange.
#[derive(Clone, Copy)]
struct Exchange {
    operation: Operation,
    send: *const u8,
    recv: *mut u8,
    /// The length of a block.
    block: usize,
    /// The rank that receives; all ranks if there is none.
    root: Option<usize>,
}

impl Exchange {
    fn mark(&self, step: u8) -> u64 {
        mark(self.operation, step, self.root.unwrap_or(0), self.block)
    }

    fn is_receiver(&self, rank: usize) -> bool {
        self.root.is_none_or(|root| root == rank)
    }

    /// The number of blocks that a rank sends.
    fn blocks(&self, size: usize) -> usize {
        if self.operation == Operation::Alltoall { size } else { 1 }
    }

    /// The block for rank `to` among those that a rank sends.
    fn index(&self, to: usize) -> usize {
        if self.operation == Operation::Alltoall { to } else { 0 }
    }
}

impl Team {
    /// Copies a block of `bytes` of each rank to rank `root`, in the order of the ranks.
    ///
    /// # Safety
    /// `send` must be valid for reads of `bytes`; at the root, `recv` for writes of `bytes` for each rank. The root's
    /// own block may be in its place in `recv`; otherwise the two must not overlap. No other code of this process may
    /// write `send` or access `recv` during the call.
    pub unsafe fn gather_raw(
        &mut self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.check_root(root)?;
        let operation = Operation::Gather;
        let exchange = Exchange { operation, send, recv, block: bytes, root: Some(root) };
        // SAFETY: the caller guarantees the same.
        unsafe { self.exchange(exchange, progress) }
    }

    /// Copies a block of `bytes` of each rank to all ranks, in the order of the ranks.
    ///
    /// # Safety
    /// As [`Team::gather_raw`], where every rank is a root.
    pub unsafe fn allgather_raw(
        &mut self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let operation = Operation::Allgather;
        let exchange = Exchange { operation, send, recv, block: bytes, root: None };
        // SAFETY: the caller guarantees the same.
        unsafe { self.exchange(exchange, progress) }
    }

    /// Copies the `n`-th block of each rank to rank `n`, which gets them in the order of the ranks.
    ///
    /// # Safety
    /// `send` must be valid for reads and `recv` for writes of `bytes` for each rank. The two must be equal, or not
    /// overlap. No other code of this process may write `send` or access `recv` during the call.
    pub unsafe fn alltoall_raw(
        &mut self,
        send: *const u8,
        recv: *mut u8,
        bytes: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let operation = Operation::Alltoall;
        let exchange = Exchange { operation, send, recv, block: bytes, root: None };
        // SAFETY: the caller guarantees the same.
        unsafe { self.exchange(exchange, progress) }
    }

    /// # Safety
    /// As the call of the operation.
    unsafe fn exchange(
        &mut self,
        exchange: Exchange,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.enter()?;
        let total = exchange.block.checked_mul(self.size());
        if total.and_then(|total| isize::try_from(total).ok()).is_none() {
            return Err(Error::Argument("the data is longer than any memory"));
        }
        if exchange.block == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees what these need.
        unsafe {
            if self.size() == 1 {
                self.copy_own(&exchange, 0, exchange.block);
                return Ok(());
            }
            if exchange.blocks(self.size()) * exchange.block <= PAYLOAD_BYTES {
                return self.exchange_lines(&exchange, progress);
            }
            if exchange.block >= self.tuning.exchange_cross_bytes && self.peers.is_some() {
                let is_done = match exchange.operation {
                    Operation::Gather => self.gather_cross(&exchange, progress)?,
                    _ => self.exchange_cross(&exchange, progress)?,
                };
                if is_done {
                    return Ok(());
                }
            }
            self.exchange_staged(&exchange, progress)
        }
    }

    /// Copies a part of the block of this rank for itself.
    ///
    /// # Safety
    /// As the call of the operation; the part must be in a block.
    unsafe fn copy_own(&self, exchange: &Exchange, offset: usize, length: usize) {
        let rank = self.rank();
        // SAFETY: the caller guarantees both; in place they are equal.
        unsafe {
            let from = exchange.send.add(exchange.index(rank) * exchange.block + offset);
            let into = exchange.recv.add(rank * exchange.block + offset);
            if from != into.cast_const() {
                std::ptr::copy(from, into, length);
            }
        }
    }

    /// Through the lines.
    ///
    /// # Safety
    /// As the call of the operation.
    unsafe fn exchange_lines(
        &mut self,
        exchange: &Exchange,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let (rank, size, block) = (self.rank(), self.size(), exchange.block);
        let (mark, sent) = (exchange.mark(0), exchange.blocks(size) * block);
        // SAFETY: the caller guarantees `send`.
        let payload = unsafe { std::slice::from_raw_parts(exchange.send, sent) };
        let phase = self.publish(mark, payload, progress)?;
        if !exchange.is_receiver(rank) {
            return Ok(());
        }
        self.meet_all(phase, mark, progress)?;
        let start = exchange.index(rank) * block;
        let mut words = [0u8; PAYLOAD_BYTES];
        for other in 0..size {
            self.slot(other, phase).read(0, &mut words[..start + block]);
            // SAFETY: the caller guarantees that `recv` has a block for each rank.
            unsafe {
                let into = exchange.recv.add(other * block);
                std::ptr::copy_nonoverlapping(words[start..].as_ptr(), into, block);
            }
        }
        Ok(())
    }

    /// Through the staging.
    ///
    /// # Safety
    /// As the call of the operation.
    unsafe fn exchange_staged(
        &mut self,
        exchange: &Exchange,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let (rank, size, block) = (self.rank(), self.size(), exchange.block);
        let blocks = exchange.blocks(size);
        let room = self.tuning.staging_bytes / blocks;
        // A team of very many ranks has less than the alignment for each block.
        let longest =
            if room < BLOCK_ALIGNMENT { room } else { room / BLOCK_ALIGNMENT * BLOCK_ALIGNMENT };
        if longest == 0 {
            return Err(Error::Argument("the staging of the team is too short for its size"));
        }
        let mark = exchange.mark(1);
        for offset in (0..block).step_by(longest) {
            let length = longest.min(block - offset);
            let half = self.take_half(progress)?;
            let own = self.shared.staging(rank, half);
            let is_sent = |index: &usize| match exchange.operation {
                Operation::Alltoall => *index != rank,
                _ => exchange.root != Some(rank),
            };
            for index in (0..blocks).filter(is_sent) {
                // SAFETY: the caller guarantees `send`; the staging has room for `blocks` parts of this length; nobody
                // reads it before it is published.
                unsafe {
                    let from = exchange.send.add(index * block + offset);
                    std::ptr::copy_nonoverlapping(from, own.add(index * longest), length);
                }
            }
            let phase = self.publish(mark, &[], progress)?;
            if exchange.is_receiver(rank) {
                // SAFETY: the caller guarantees it; the part is in a block.
                unsafe { self.copy_own(exchange, offset, length) };
                self.meet_all(phase, mark, progress)?;
                for other in (1..size).map(|step| (rank + step) % size) {
                    let staging = self.shared.staging(other, half);
                    // SAFETY: the staging of the other rank has the part for this rank, and the caller guarantees
                    // `recv`.
                    unsafe {
                        let from = staging.add(exchange.index(rank) * longest);
                        let into = exchange.recv.add(other * block + offset);
                        std::ptr::copy_nonoverlapping(from, into, length);
                    }
                }
            }
            self.release_half(half);
        }
        Ok(())
    }

    /// By reads of the memory of all other ranks. Returns false if one is not reachable: then no rank has read any.
    ///
    /// # Safety
    /// As the call of the operation.
    unsafe fn exchange_cross(
        &mut self,
        exchange: &Exchange,
        progress: &mut dyn Progress,
    ) -> Result<bool, Error> {
        let (size, block) = (self.size(), exchange.block);
        let (first, last) = (exchange.mark(2), exchange.mark(3));
        let mut exposed = Exposed::new(exchange.send, exchange.blocks(size) * block);
        // Others would read what this rank has overwritten. They may pass two buffers, and must hear of it.
        let is_in_place = exchange.send == exchange.recv.cast_const();
        exposed.is_reachable &= !(exchange.operation == Operation::Alltoall && is_in_place);
        let phase = self.publish(first, &exposed.encode(), progress)?;
        // SAFETY: the caller guarantees it. In place, the block for this rank is the one that it has.
        unsafe { self.copy_own(exchange, 0, block) };
        self.meet_all(phase, first, progress)?;
        if !(0..size).all(|rank| self.exposed(rank, phase).is_reachable) {
            return Ok(false);
        }
        // SAFETY: the caller guarantees that `recv` has a block for each rank.
        unsafe { self.read_blocks(exchange, phase)? };
        let phase = self.publish(last, &[], progress)?;
        // The others read `send` until then.
        self.meet_all(phase, last, progress)?;
        Ok(true)
    }

    /// By reads of the root. Returns false if a rank is not reachable: then nothing was copied. (Writes of all ranks
    /// at a time would use more cores, but a rank that scribbles over the shared memory could direct them anywhere.)
    ///
    /// # Safety
    /// As the call of the operation.
    unsafe fn gather_cross(
        &mut self,
        exchange: &Exchange,
        progress: &mut dyn Progress,
    ) -> Result<bool, Error> {
        let (rank, size, block) = (self.rank(), self.size(), exchange.block);
        let (first, last) = (exchange.mark(2), exchange.mark(3));
        let root = exchange.root.ok_or(Error::Corrupt)?;
        let exposed = match rank == root {
            true => Exposed { address: 0, is_reachable: true },
            false => Exposed::new(exchange.send, block),
        };
        let phase = self.publish(first, &exposed.encode(), progress)?;
        if rank != root {
            // Its memory is read until the root says whether it has.
            let phase = self.publish(last, &[], progress)?;
            self.meet(root, phase, last, progress)?;
            return Ok(self.exposed(root, phase).is_reachable);
        }
        self.meet_all(phase, first, progress)?;
        let is_reachable = (0..size).all(|rank| self.exposed(rank, phase).is_reachable);
        if is_reachable {
            // SAFETY: the caller guarantees it.
            unsafe { self.copy_own(exchange, 0, block) };
            // SAFETY: the caller guarantees that `recv` has a block for each rank.
            unsafe { self.read_blocks(exchange, phase)? };
        }
        let answer = Exposed { address: 0, is_reachable };
        self.publish(last, &answer.encode(), progress)?;
        Ok(is_reachable)
    }

    /// Reads the blocks for this rank from the memory of all others.
    ///
    /// # Safety
    /// `recv` must be valid for writes of a block for each rank.
    unsafe fn read_blocks(&self, exchange: &Exchange, phase: u64) -> Result<(), Error> {
        let (rank, size, block) = (self.rank(), self.size(), exchange.block);
        let peers = self.peers.as_ref().ok_or(Error::Corrupt)?;
        for other in (1..size).map(|step| (rank + step) % size) {
            let offset = (exchange.index(rank) * block) as u64;
            let address = self.exposed(other, phase).address.wrapping_add(offset);
            // SAFETY: the caller guarantees `recv`.
            let read =
                unsafe { peers.read(other, address, exchange.recv.add(other * block), block) };
            read.map_err(|error| self.fail(error))?;
        }
        self.check_read()
    }
}
