//! The copies of one reader thread out of its buffers.

use std::sync::atomic::Ordering;

use memferry_copy::{Ferry, Request, Transfer};
use memferry_engine::MemoryKind;
use memferry_engine::contract::DeviceStream;

use crate::blocks::Block;
use crate::error::LoadError;
use crate::loading::{LoadState, SLOTS_PER_THREAD};
use crate::staging_ring::StagingRing;

/// A queue of the device that this thread drives itself, or else transfers of the ferry: a
/// transfer goes through the thread of a channel, which has 17 µs of work for each.
pub(crate) struct StagedCopies {
    stream: Option<Box<dyn DeviceStream>>,
    slots: [SlotCopies; SLOTS_PER_THREAD],
}

/// The copies out of one buffer.
#[derive(Default)]
struct SlotCopies {
    /// In flight in the stream.
    bytes: u64,
    /// In flight in channels.
    transfers: Vec<Transfer>,
}

impl StagedCopies {
    /// A stream copies pinned memory alone: without it the channels stage.
    pub(crate) fn open(ferry: &Ferry, ring: &StagingRing) -> Self {
        let stream = if ring.is_pinned() { ferry.open_stream() } else { None };
        Self { stream, slots: Default::default() }
    }

    /// Starts the copies of a block that was read into the buffer of a slot.
    ///
    /// # Safety
    /// The buffer has the parts of the block, is pinned, and stays unchanged until the slot was
    /// [finished](StagedCopies::finish). The targets are memory of the ferry's device, valid until
    /// then.
    pub(crate) unsafe fn start(
        &mut self,
        slot: usize,
        ferry: &Ferry,
        block: &Block,
        buffer: *const u8,
    ) -> Result<(), LoadError> {
        let copies = &mut self.slots[slot];
        for part in &block.parts {
            let source = buffer.wrapping_add(part.start);
            let target = part.target.0;
            if let Some(stream) = &mut self.stream {
                // SAFETY: the caller upholds the contract.
                unsafe { stream.copy_to_device(source, target as u64, part.length) }
                    .map_err(|error| LoadError::Copy(error.into()))?;
            } else {
                let request = Request::copy(source, target, part.length)
                    .memory(MemoryKind::Host, MemoryKind::Device);
                // SAFETY: the caller upholds the contract.
                let transfer = unsafe { ferry.start_raw(request) }.map_err(LoadError::Copy)?;
                copies.transfers.push(transfer);
            }
        }
        if let Some(stream) = &mut self.stream {
            stream.mark(slot).map_err(|error| LoadError::Copy(error.into()))?;
            copies.bytes = block.bytes();
        }
        Ok(())
    }

    /// Waits for all copies out of a buffer, also behind one that failed.
    pub(crate) fn finish(&mut self, slot: usize, state: &LoadState) -> Result<(), LoadError> {
        let copies = &mut self.slots[slot];
        let mut outcome = Ok(());
        let bytes = std::mem::take(&mut copies.bytes);
        if let Some(stream) = &mut self.stream
            && bytes > 0
        {
            outcome = stream.wait(slot).map_err(|error| LoadError::Copy(error.into()));
            if outcome.is_ok() {
                state.delivered.fetch_add(bytes, Ordering::Relaxed);
            }
        }
        for transfer in copies.transfers.drain(..) {
            let bytes = transfer.len();
            match transfer.wait() {
                Ok(_) => _ = state.delivered.fetch_add(bytes, Ordering::Relaxed),
                Err(error) => outcome = outcome.and(Err(LoadError::Copy(error))),
            }
        }
        outcome
    }
}

impl Drop for StagedCopies {
    /// Buffers and targets are in use until their copies are complete, also when a thread panics.
    /// The stream waits by itself.
    fn drop(&mut self) {
        for transfer in self.slots.iter_mut().flat_map(|slot| slot.transfers.drain(..)) {
            let _ = transfer.wait();
        }
    }
}
