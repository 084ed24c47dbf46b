//! Queues that stop: how that is noticed, and how they are restarted or given up.

use std::sync::atomic::Ordering;
use std::time::Duration;

use memferry_sys::clock::CoarseInstant;

use super::{BROKEN, DsaQueue};
use crate::dsa::record::RecordOutcome;
use crate::dsa::slot::SlotState;
use crate::dsa::work_queue::{QueueCheck, QueueStop};
use crate::pci::HwStatus;

/// The number of stalls in a row after which the queue is not used any more.
const MAX_STALLS: u32 = 2;
/// The number of restarts in a row, after which the queue accepted nothing, that end its use.
const MAX_VAIN_RESTARTS: u32 = 3;
/// The time without progress after which the driver checks the device.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

const STALLED: &str = "the work queue stalled";
const CROWDED: &str = "the work queue has no space";

impl DsaQueue {
    /// Finds out whether the queue has stopped, at intervals while it makes no progress.
    pub(super) fn look_for_stop(&mut self) {
        let idle = self.last_progress.elapsed();
        if self.stop.is_some()
            || idle < CHECK_INTERVAL
            || self.last_check.elapsed() < CHECK_INTERVAL
        {
            return;
        }
        self.last_check = CoarseInstant::now();
        // Ends behind a descriptor that waits for space are progress.
        if self.reclaim() > 0 {
            self.last_progress = self.last_check;
            return;
        }
        let timeout = self.port.patience();
        self.stop = match self.port.check() {
            Err(stop) => Some(stop),
            // The time of a command for another queue is none of this one's.
            Ok(QueueCheck::Unknown) => {
                self.last_progress = self.last_check;
                None
            }
            // Others fill the shared queue: nothing of this one is in flight.
            Ok(_) if self.entries() == 0 && (self.is_crowded || idle > timeout) => {
                Some(QueueStop::Failed(CROWDED))
            }
            // Also if the record of a batch does not come.
            Ok(_) if idle > timeout => Some(QueueStop::Failed(STALLED)),
            Ok(_) => None,
        };
    }

    /// Forgets a timeout after progress: a device may go on before anybody recovers it.
    pub(super) fn forget_timeout(&mut self) {
        self.stop.take_if(|stop| matches!(stop.reason(), STALLED | CROWDED));
    }

    /// Recovers a queue that stopped: aborts what is in flight, which fails unless its record says
    /// otherwise, and continues with what was not submitted.
    pub(super) fn restart(&mut self, ended: &mut Vec<HwStatus>, stop: QueueStop) {
        let reason = stop.reason();
        tracing::debug!(reason, "a work queue stopped");
        self.counters.recoveries.fetch_add(1, Ordering::Relaxed);
        self.stalls += u32::from(reason == STALLED);
        self.is_crowded = reason == CROWDED;
        if self.is_crowded {
            // The queue itself is well. What it has no space for is left to the processor.
            self.published = self.head;
        } else {
            // A queue that refuses what it is given has nothing in flight, and no restart would
            // ever end anything.
            let is_vain = self.reported == self.published && stop != QueueStop::WasReset;
            self.vain_restarts += u32::from(is_vain);
            let is_hopeless = self.stalls >= MAX_STALLS || self.vain_restarts >= MAX_VAIN_RESTARTS;
            self.is_broken = !self.port.restart() || is_hopeless;
        }
        if self.is_broken {
            tracing::warn!(reason, "disabling a work queue that cannot be restarted");
            self.published = self.head;
        }
        while self.reported < self.published {
            let status = self.status_after_stop(self.reported, reason);
            self.report(ended, status);
        }
        self.batches.clear();
        self.singles.clear();
        (self.first_batch, self.running_batches) = (0, 0);
        (self.freed, self.last_progress) = (self.reported, CoarseInstant::now());
    }

    /// The final status of a slot of a queue that has stopped.
    fn status_after_stop(&self, number: u64, reason: &'static str) -> HwStatus {
        let slot = self.slots[self.index(number)];
        match self.record(number).decode(slot.kind(), slot.length) {
            RecordOutcome::Done(None) if slot.state != SlotState::Ready => HwStatus::Ok,
            RecordOutcome::Done(Some(value)) if slot.state != SlotState::Ready => {
                HwStatus::OkValue(slot.done_bytes + value)
            }
            _ => self.left_to_processor(number, if self.is_broken { BROKEN } else { reason }),
        }
    }
}
