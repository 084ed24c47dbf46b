//! Work offers that channels pass on.
//!
//! The caller of a large copy offers it to one channel, and pays for one submission and at most one
//! wakeup. A channel that executes a work offer first offers the rest to the next two channels of the
//! list, so the number of channels doubles with each step. No channel is woken once all chunks are
//! claimed. The list keeps no channel open: its owner waits for its work when it drops it.

use std::sync::{Arc, Weak};

use memferry_sys::sync::lock;

use super::{ChunkedWork, Completion};
use crate::contract::{Channel, Descriptor};

impl Completion {
    /// Sets the channels that the first one passes the work on to. Called before the completion is
    /// shared.
    pub fn spread_over(self, channels: Vec<Weak<dyn Channel>>) -> Self {
        *lock(&self.spread) = channels;
        self
    }

    /// Offers the work to the next channels, if chunks are unclaimed. A channel that is full or
    /// closed is skipped.
    pub(crate) fn pass_on(self: &Arc<Self>) {
        const CHANNELS: usize = 2;
        if self.work().is_none_or(|work| ChunkedWork::unclaimed_bytes(work) == 0) {
            return;
        }
        for _ in 0..CHANNELS {
            // A statement of its own, so that the lock is released before the submit.
            let next = lock(&self.spread).pop();
            let Some(channel) = next else { return };
            let Some(channel) = channel.upgrade() else { continue };
            // A work offer that was not accepted is only declined.
            drop(channel.submit_one(Descriptor::work_offer(self.clone())));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::contract::{
        ChannelStatistics, ExecutionError, Kernel, Opcode, Sequence, SubmitError, Submitted,
    };

    /// A channel that holds what it gets.
    #[derive(Debug, Default)]
    struct HoldingChannel(Mutex<Vec<Descriptor>>);

    // SAFETY: it executes nothing, and completes nothing.
    unsafe impl Channel for HoldingChannel {
        fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
            let mut held = lock(&self.0);
            let first = held.len() as Sequence + 1;
            held.extend(batch.iter_mut().filter_map(Option::take));
            Ok(Submitted { first, count: batch.len() })
        }

        fn completed(&self) -> Sequence {
            0
        }

        fn error_of(&self, _sequence: Sequence) -> Option<ExecutionError> {
            None
        }

        fn close(&self) {}

        fn outstanding_bytes(&self) -> u64 {
            0
        }

        fn statistics(&self) -> ChannelStatistics {
            ChannelStatistics::default()
        }
    }

    fn fill(target: &mut [u8], channels: &[Arc<HoldingChannel>]) -> Arc<Completion> {
        let (at, length) = (target.as_mut_ptr() as u64, target.len() as u64);
        // SAFETY: the tests keep the target until the completion is done.
        let work = unsafe { ChunkedWork::new(Opcode::Fill, Kernel::Cached, at, at, length, 7, 1) };
        let channels = channels.iter().map(|channel| {
            let channel: Arc<dyn Channel> = channel.clone();
            Arc::downgrade(&channel)
        });
        Arc::new(Completion::chunked(work).spread_over(channels.collect()))
    }

    fn held(channel: &HoldingChannel) -> usize {
        lock(&channel.0).len()
    }

    #[test]
    fn a_channel_offers_the_work_to_two_others_and_they_to_the_rest() {
        let channels: [Arc<HoldingChannel>; 5] = Default::default();
        let mut target = [0u8; 8];
        let completion = fill(&mut target, &channels);
        completion.pass_on();
        assert_eq!(channels.each_ref().map(|channel| held(channel)), [0, 0, 0, 1, 1]);
        completion.pass_on();
        completion.pass_on();
        assert_eq!(channels.each_ref().map(|channel| held(channel)), [1; 5]);
        let offer = lock(&channels[0].0).pop().unwrap();
        assert_eq!((offer.run(), completion.is_done()), (8, true));
        assert_eq!(target, [7; 8]);
    }

    #[test]
    fn no_channel_is_woken_for_work_that_is_claimed_and_none_is_kept_open() {
        let channels: [Arc<HoldingChannel>; 2] = Default::default();
        let mut target = [0u8; 8];
        let completion = fill(&mut target, &channels);
        assert_eq!(completion.run_from_front(), 8);
        completion.pass_on();
        assert_eq!(channels.each_ref().map(|channel| held(channel)), [0; 2]);
        assert!(channels.iter().all(|channel| Arc::strong_count(channel) == 1));
    }
}
