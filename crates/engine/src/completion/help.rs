//! Execution of chunks on processors: by channels, by waiting callers, and after an engine failed.

use super::{Chunk, ChunkedWork, Completion, PartOutput};
use crate::contract::ExecutionError;

impl Completion {
    /// The chunks, if a processor can execute them.
    fn host_work(&self) -> Option<&ChunkedWork> {
        self.work().filter(|work| work.is_host_only())
    }

    /// Claims one chunk from the back and executes it on the calling processor. Returns `false` if
    /// no chunk is left or the memory is not host memory.
    pub fn help_from_back(&self) -> bool {
        let work = self.host_work();
        let Some((work, chunk)) = work.and_then(|w| Some((w, w.claim_back()?))) else {
            return false;
        };
        self.run_chunk(work, chunk);
        true
    }

    /// Claims one chunk from the front and executes it on the calling processor. Returns `false` if
    /// no chunk is left or the memory is not host memory.
    pub fn help_from_front(&self) -> bool {
        let work = self.host_work();
        let Some((work, chunk)) = work.and_then(|w| Some((w, w.claim_front()?))) else {
            return false;
        };
        self.run_chunk(work, chunk);
        true
    }

    /// Claims chunks from the front and executes them until none is left; returns the number of
    /// bytes.
    pub fn run_from_front(&self) -> u64 {
        let Some(work) = self.host_work() else { return 0 };
        let mut bytes = 0;
        while let Some(chunk) = work.claim_front() {
            bytes += chunk.length;
            self.run_chunk(work, chunk);
        }
        bytes
    }

    fn run_chunk(&self, work: &ChunkedWork, chunk: Chunk) {
        // SAFETY: the creator of the work guarantees its memory until the completion is done, and
        // the claim makes this thread the only one to access the chunk.
        let value = unsafe { work.execute(chunk) };
        let output = PartOutput::new(work.operation, value);
        self.finish_part(chunk.offset, chunk.length, Ok(output));
    }

    /// Executes a run of chunks that an engine claimed and could not copy.
    pub(crate) fn run_claimed(&self, run: Chunk) {
        let Some(work) = self.host_work() else { return };
        work.chunks_of(run).for_each(|chunk| self.run_chunk(work, chunk));
    }

    /// Reports the end of a run of chunks that an engine claimed.
    pub(crate) fn finish_claimed(&self, run: Chunk, result: &Result<Option<u64>, ExecutionError>) {
        let Some(work) = self.work() else { return };
        let has_crc = work.operation.has_crc();
        if let (true, Ok(Some(crc))) = (has_crc, result) {
            // The CRC of a run is that of all its chunks together.
            let bytes_behind = work.length() - (run.offset + run.length);
            self.output.add(PartOutput::Crc(*crc as u32), run.offset, bytes_behind);
        }
        for chunk in work.chunks_of(run) {
            // The difference is reported with the chunk that contains it.
            let inside = |at: u64| {
                (run.offset + at).checked_sub(chunk.offset).filter(|&at| at < chunk.length)
            };
            let result = result.clone().map(|value| match value.and_then(inside) {
                Some(at) if !has_crc => PartOutput::Difference(at),
                _ => PartOutput::None,
            });
            self.finish_part(chunk.offset, chunk.length, result);
        }
    }
}
