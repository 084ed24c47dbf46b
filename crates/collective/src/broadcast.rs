//! Barrier and broadcast.

use crate::access::is_reachable;
use crate::error::Error;
use crate::line::PAYLOAD_BYTES;
use crate::team::{Operation, Team, mark};
use crate::waiting::Progress;

/// What a rank publishes about its memory before others access it.
pub(crate) struct Exposed {
    pub(crate) address: u64,
    /// Whether the kernel can access it for others. Otherwise all ranks use the staging.
    pub(crate) is_reachable: bool,
}

impl Exposed {
    pub(crate) fn new(address: *const u8, bytes: usize) -> Self {
        Self { address: address as u64, is_reachable: is_reachable(address, bytes) }
    }

    pub(crate) fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_ne_bytes());
        bytes[8] = u8::from(self.is_reachable);
        bytes
    }
}

impl Team {
    /// What a rank has published about its memory.
    pub(crate) fn exposed(&self, rank: usize, phase: u64) -> Exposed {
        let mut bytes = [0; 16];
        self.slot(rank, phase).read(0, &mut bytes);
        let address = u64::from_ne_bytes(std::array::from_fn(|at| bytes[at]));
        Exposed { address, is_reachable: bytes[8] == 1 }
    }

    /// Waits until all ranks have called it.
    pub fn barrier(&mut self, progress: &mut dyn Progress) -> Result<(), Error> {
        self.enter()?;
        let mark = mark(Operation::Barrier, 0, 0, 0);
        if self.size() > self.tree_from() {
            return self.meet_in_tree(mark, &mut [], None, progress);
        }
        let phase = self.publish(mark, &[], progress)?;
        self.meet_all(phase, mark, progress)
    }

    /// Copies `bytes` from the buffer of rank `root` to those of all others.
    ///
    /// # Safety
    /// `buffer` must be valid for reads at the root, and for writes at all other ranks, of `bytes`; no other code of
    /// this process may write it, or access it on other ranks, during the call.
    pub unsafe fn broadcast_raw(
        &mut self,
        buffer: *mut u8,
        bytes: usize,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        self.enter()?;
        self.check_root(root)?;
        if bytes == 0 || self.size() == 1 {
            return Ok(());
        }
        // SAFETY: the caller guarantees what these need.
        unsafe {
            if bytes <= PAYLOAD_BYTES {
                return self.broadcast_line(buffer, bytes, root, progress);
            }
            if bytes >= self.tuning.broadcast_cross_bytes
                && self.peers.is_some()
                && self.broadcast_cross(buffer, bytes, root, progress)?
            {
                return Ok(());
            }
            self.broadcast_staged(buffer, bytes, root, progress)
        }
    }

    pub(crate) fn check_root(&self, root: usize) -> Result<(), Error> {
        match root < self.size() {
            true => Ok(()),
            false => Err(Error::Argument("the root is not a rank of the team")),
        }
    }

    /// Through the line of the root.
    ///
    /// # Safety
    /// As [`Team::broadcast_raw`].
    unsafe fn broadcast_line(
        &mut self,
        buffer: *mut u8,
        bytes: usize,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let mark = mark(Operation::Broadcast, 0, root, bytes);
        if self.rank() == root {
            // SAFETY: the caller guarantees that the root may read it.
            let payload = unsafe { std::slice::from_raw_parts(buffer, bytes) };
            return self.publish(mark, payload, progress).map(drop);
        }
        let phase = self.publish(mark, &[], progress)?;
        self.meet(root, phase, mark, progress)?;
        // SAFETY: the caller guarantees that the other ranks may write it.
        self.slot(root, phase).read(0, unsafe { std::slice::from_raw_parts_mut(buffer, bytes) });
        Ok(())
    }

    /// By reads of the root's memory. Returns false if that is not reachable: then nothing was copied.
    ///
    /// # Safety
    /// As [`Team::broadcast_raw`].
    unsafe fn broadcast_cross(
        &mut self,
        buffer: *mut u8,
        bytes: usize,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<bool, Error> {
        let (first, last) = (
            mark(Operation::Broadcast, 1, root, bytes),
            mark(Operation::Broadcast, 2, root, bytes),
        );
        if self.rank() == root {
            let exposed = Exposed::new(buffer, bytes);
            self.publish(first, &exposed.encode(), progress)?;
            if exposed.is_reachable {
                let phase = self.publish(last, &[], progress)?;
                self.meet_all(phase, last, progress)?;
            }
            return Ok(exposed.is_reachable);
        }
        let phase = self.publish(first, &[], progress)?;
        self.meet(root, phase, first, progress)?;
        let exposed = self.exposed(root, phase);
        if exposed.is_reachable {
            let peers = self.peers.as_ref().ok_or(Error::Corrupt)?;
            // SAFETY: the caller guarantees that the buffer may be written.
            let read = unsafe { peers.read(root, exposed.address, buffer, bytes) };
            read.map_err(|error| self.fail(error))?;
            self.check_read()?;
            self.publish(last, &[], progress)?;
        }
        Ok(exposed.is_reachable)
    }

    /// Through the staging of the root, chunk by chunk: the others copy one while the root copies the next.
    ///
    /// # Safety
    /// As [`Team::broadcast_raw`].
    unsafe fn broadcast_staged(
        &mut self,
        buffer: *mut u8,
        bytes: usize,
        root: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), Error> {
        let mark = mark(Operation::Broadcast, 3, root, bytes);
        let (staging, chunk) = (self.tuning.staging_bytes, self.tuning.chunk_bytes);
        let mut done = 0;
        while done < bytes {
            let half = self.take_half(progress)?;
            let start = self.shared.staging(root, half);
            let piece = staging.min(bytes - done);
            let mut within = 0;
            while within < piece {
                let length = chunk.min(piece - within);
                // SAFETY: done + within + length <= bytes, and within + length <= the length of the staging.
                let (private, shared) = unsafe { (buffer.add(done + within), start.add(within)) };
                if self.rank() == root {
                    // SAFETY: the root may read its buffer, and no rank reads the staging before it is published.
                    unsafe { std::ptr::copy_nonoverlapping(private, shared, length) };
                    self.publish(mark, &[], progress)?;
                } else {
                    let phase = self.publish(mark, &[], progress)?;
                    self.meet(root, phase, mark, progress)?;
                    // SAFETY: this rank may write its buffer; the root does not write the staging until this rank
                    // has published the next phase. A root that does it anyway changes bytes of its own broadcast.
                    unsafe { std::ptr::copy_nonoverlapping(shared, private, length) };
                }
                within += length;
            }
            self.release_half(half);
            done += piece;
        }
        Ok(())
    }
}
