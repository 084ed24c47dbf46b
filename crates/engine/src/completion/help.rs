//! Execution of chunks on processors: by channels, by waiting callers, and after an engine failed.

use memferry_sys::affinity;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::{Chunk, ChunkedWork, Completion, PartOutput};
use crate::contract::ExecutionError;

/// The core on which a caller waits. A channel whose thread has no other core, because other programs use
/// them, takes that core's time from the caller.
#[derive(Debug, Default)]
pub(super) struct CallerCore {
    core: Option<usize>,
    /// The chunks that channels have executed there.
    chunks: AtomicU64,
}

impl CallerCore {
    fn is_here(&self) -> bool {
        self.core.is_some_and(|core| core == affinity::current_core())
    }
}

impl Completion {
    /// Sets the core on which the caller waits. Called before the completion is shared.
    pub fn awaited_on(mut self, core: usize) -> Self {
        self.caller_core.core = Some(core);
        self
    }

    /// The number of chunks that channels have executed on the core on which the caller waits.
    pub fn chunks_on_caller_core(&self) -> u64 {
        self.caller_core.chunks.load(Ordering::Relaxed)
    }

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
            // Counted before the end of the chunk, which may be that of the copy.
            if self.caller_core.is_here() {
                self.caller_core.chunks.fetch_add(1, Ordering::Relaxed);
            }
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

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::contract::{Kernel, Opcode};

    use super::*;

    #[test]
    fn chunks_that_a_channel_executes_on_the_core_of_the_caller_are_counted() {
        let core = affinity::allowed_cores()[0];
        affinity::bind_to_core(core).unwrap();
        for (caller, expected) in [(Some(core), 4), (Some(core + 1), 0), (None, 0)] {
            let mut target = [0u8; 4];
            let at = target.as_mut_ptr() as u64;
            // SAFETY: the target lives until the completion is done, below.
            let work = unsafe { ChunkedWork::new(Opcode::Fill, Kernel::Cached, at, at, 4, 7, 1) };
            let completion = Completion::chunked(work);
            let completion = match caller {
                Some(core) => completion.awaited_on(core),
                None => completion,
            };
            assert_eq!(completion.run_from_front(), 4);
            assert_eq!((completion.chunks_on_caller_core(), target), (expected, [7; 4]));
        }
    }
}
