//! An engine of a ferry with its channels.

use std::sync::Arc;

use memferry_engine::completion::ChannelBatch;
use memferry_engine::contract::RegistrationCache;
use memferry_engine::{Channel, Descriptor, Engine, Sequence};

use crate::registration::EngineRegistrations;
use crate::transfer::{ChannelWaiter, Transfer};
use memferry_sys::probes;
use memferry_sys::stats::{
    self,
    kinds::{CopyPath, Fallback},
};

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
    /// Whether the channels are processors, which execute a list of segments as one work.
    pub(crate) runs_lists: bool,
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
    /// The function is always inlined, so that the transfer is moved once: each further move takes
    /// some nanoseconds.
    #[inline(always)]
    pub(super) fn submit_sequence(
        &self,
        index: usize,
        descriptor: Descriptor,
        assists: bool,
    ) -> Transfer {
        let length = descriptor.length();

        // Every atomic read-modify-write comes before the submit: after it, such an instruction
        // would wait for the transfer of the channel's cache line.
        let lane = self.waiters[index].clone();
        stats::thread(|counters| counters.count_copy(CopyPath::Single, length));
        probes::submit(length, CopyPath::Single as u64);
        // Built before the submit, too: its words would be stored behind those of the descriptor, and
        // wait with them. The black box makes the compiler store them here.
        let mut transfer = Transfer::sequenced(lane, 0, length, assists);
        match std::hint::black_box(&mut transfer).submit_into(descriptor) {
            Ok(()) => transfer,
            Err(descriptor) => {
                stats::thread(|counters| counters.fall_back(Fallback::Full));
                descriptor.run();
                Transfer::done(length)
            }
        }
    }

    /// Submits descriptors that complete by sequence; those that the channel does not accept are
    /// left.
    pub(super) fn submit_sequences(
        &self,
        index: usize,
        descriptors: &mut [Option<Descriptor>],
    ) -> SubmittedSequences {
        let waiter = self.waiters[index].clone();
        let next = waiter.channel.submit(descriptors).map_or(0, |submitted| submitted.first);
        SubmittedSequences { waiter: Some(waiter), next }
    }

    /// Returns a batch of one descriptor for a channel.
    pub(crate) fn batch(&self, channel: &Arc<dyn Channel>, descriptor: Descriptor) -> ChannelBatch {
        ChannelBatch::one(channel.clone(), self.has_auto_progress(), descriptor)
    }
}

/// The sequences of descriptors that were submitted together.
#[derive(Default)]
pub(crate) struct SubmittedSequences {
    waiter: Option<Arc<ChannelWaiter>>,
    next: Sequence,
}

impl SubmittedSequences {
    /// Returns the transfer of the next accepted descriptor. Called once for each.
    pub(crate) fn next_transfer(&mut self, length: u64) -> Transfer {
        let waiter = self.waiter.clone().expect("a descriptor was accepted by a channel");
        stats::thread(|counters| counters.count_copy(CopyPath::Single, length));
        probes::submit(length, CopyPath::Single as u64);
        let sequence = self.next;
        self.next += 1;
        Transfer::sequenced(waiter, sequence, length, true)
    }
}

/// Executes a small descriptor that a full channel did not accept.
pub(crate) fn run_refused(descriptor: Descriptor) -> Transfer {
    let length = descriptor.length();
    stats::thread(|counters| {
        counters.count_copy(CopyPath::Inline, length);
        counters.fall_back(Fallback::Full);
    });
    descriptor.run();
    Transfer::done(length)
}
