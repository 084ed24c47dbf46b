//! An engine of a ferry with its channels.

use std::sync::Arc;

use memferry_engine::completion::ChannelBatch;
use memferry_engine::contract::RegistrationCache;
use memferry_engine::{Channel, Descriptor, Engine};

use crate::registration::EngineRegistrations;
use crate::transfer::{ChannelWaiter, Transfer};

/// An engine with its channels.
#[derive(Debug)]
pub(crate) struct ActiveEngine {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) channels: Vec<Arc<dyn Channel>>,
    /// The same channels, for transfers that complete by sequence.
    pub(crate) waiters: Vec<Arc<ChannelWaiter>>,
    /// The pinned memory of the engine, if it needs any.
    pub(crate) registrations: Option<EngineRegistrations>,
    /// Whether the sequence of a small descriptor suffices as its completion: no descriptor fails,
    /// and none has pins.
    pub(crate) sequence_completion: bool,
}

impl ActiveEngine {
    pub(super) fn has_auto_progress(&self) -> bool {
        self.engine.capabilities().auto_progress
    }

    /// Returns the registered memory of the engine, if it registers any: that of its submitter, or
    /// its own.
    pub(crate) fn registration_cache(&self) -> Option<&RegistrationCache> {
        match &self.registrations {
            Some(registrations) => Some(registrations.cache()),
            None => self.engine.registrations(),
        }
    }

    /// Submits a descriptor that completes by sequence. If the channel is full or closed, the
    /// calling thread executes it.
    ///
    /// The function is always inlined, so that the transfer is built where it is returned: copying
    /// it after the submit takes about 10 ns more.
    #[inline(always)]
    pub(super) fn submit_sequence(&self, index: usize, descriptor: Descriptor) -> Transfer {
        let length = descriptor.length();
        // Every atomic read-modify-write comes before the submit: after it, such an instruction
        // would wait for the transfer of the channel's cache line.
        let lane = self.waiters[index].clone();
        match lane.channel.submit_one(descriptor) {
            Ok(sequence) => Transfer::sequenced(lane, sequence, length),
            Err(descriptor) => {
                descriptor.run();
                Transfer::done(length)
            }
        }
    }

    /// Returns a batch of one descriptor for a channel.
    pub(super) fn batch(&self, channel: &Arc<dyn Channel>, descriptor: Descriptor) -> ChannelBatch {
        ChannelBatch::one(channel.clone(), self.has_auto_progress(), descriptor)
    }
}
