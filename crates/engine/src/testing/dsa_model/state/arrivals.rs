//! How descriptors arrive from the portals, and how the engines wait for them.

use std::sync::atomic::{Ordering, fence};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use memferry_sys::portal::PortalWords;

use super::{DeviceState, DsaModelState};
use crate::dsa::record::status;
use crate::dsa::registers::{self as r, DsaState};

/// The maximum number of violations that are kept until they are taken.
const MAX_VIOLATIONS: usize = 256;

impl DsaModelState {
    /// Locks the device after everything that was stored to its portals has arrived.
    pub(in super::super) fn lock_after_stores(&self) -> MutexGuard<'_, DeviceState> {
        let mut device = self.lock();
        self.take_stores(&mut device);
        device
    }

    /// Takes the descriptors out of the portals, as far as their lines were used in turn.
    pub(super) fn take_next_stores(&self, device: &mut DeviceState) {
        for queue in 0..device.queues.len() {
            while let Some(words) = self.portals.take_next(queue) {
                self.accept(device, queue, words, true);
            }
        }
    }

    /// Takes all descriptors out of the portals.
    pub(super) fn take_stores(&self, device: &mut DeviceState) {
        for queue in 0..device.queues.len() {
            loop {
                while let Some(words) = self.portals.take_next(queue) {
                    self.accept(device, queue, words, true);
                }
                let Some(line) = self.portals.skip_gap(queue) else { break };
                if !self.is_removed.load(Ordering::SeqCst) {
                    device.record_violation(format!(
                        "line {line} of the portal of queue {queue} was left out, or its descriptor \
                         was overwritten before the device took it"
                    ));
                }
            }
        }
    }

    /// Adds a descriptor to a queue. A queue without space refuses it, or drops it if it was a store.
    pub(in super::super) fn accept(
        &self,
        device: &mut DeviceState,
        queue: usize,
        words: PortalWords,
        is_store: bool,
    ) -> bool {
        if self.is_removed.load(Ordering::SeqCst) || device.state == DsaState::Halted {
            // The submitter cannot know.
            return true;
        }
        let found = &mut device.queues[queue];
        let is_full = found.pending.len() >= usize::from(found.config().size);
        let why = if !found.is_enabled {
            "is not enabled"
        } else if is_store && !found.config().is_dedicated {
            "is shared"
        } else if is_store && is_full {
            "is full"
        } else if is_full {
            found.counters.refused += 1;
            return false;
        } else {
            found.counters.doorbells += 1;
            found.pending.push_back(words);
            self.changes.fetch_add(1, Ordering::Release);
            if self.sleepers.load(Ordering::Relaxed) > 0 {
                self.doorbell.notify_all();
            }
            return true;
        };
        device.software_error = r::SWERR_VALID
            | r::SWERR_QUEUE_VALID
            | u64::from(status::DESCRIPTOR_COUNT) << r::SWERR_CODE_SHIFT
            | (queue as u64) << r::SWERR_QUEUE_SHIFT;
        device.record_violation(format!("a descriptor was stored to queue {queue}, which {why}"));
        true
    }

    /// What was wrong with stores to portals since the last call.
    pub(in super::super) fn take_violations(&self) -> Vec<String> {
        let mut device = self.lock_after_stores();
        while let Some(at) = self.portals.take_stray() {
            device.record_violation(format!("a descriptor was stored at {at:#x}, to no queue"));
        }
        std::mem::take(&mut device.violations)
    }

    /// Wakes the threads that sleep, after a store to a portal.
    pub(in super::super) fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // A thread that has found nothing keeps the lock until it sleeps.
            drop(self.lock());
            self.doorbell.notify_all();
        }
    }

    /// Tells the threads of a change.
    pub(super) fn notify(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        if !*self.is_polling {
            self.doorbell.notify_all();
        }
    }

    /// Waits for a descriptor, or for a change after `seen`. A thread that sleeps is woken by every store. One
    /// that polls watches the next line of each queue, and looks for a store behind a line that was left out
    /// only when nothing has come for long.
    pub(super) fn wait<'a>(
        &'a self,
        device: MutexGuard<'a, DeviceState>,
        seen: u64,
    ) -> MutexGuard<'a, DeviceState> {
        const POLLS: u32 = 1 << 20;
        const SLEEP: Duration = Duration::from_micros(100);
        if !*self.is_polling {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            // Who stores what this does not find sees the sleeper; see `Portal::store`.
            fence(Ordering::SeqCst);
            let device = match self.portals.has_next() {
                true => device,
                false => self.doorbell.wait(device).unwrap_or_else(PoisonError::into_inner),
            };
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            return device;
        }
        drop(device);
        let mut polls = 0;
        while self.changes.load(Ordering::Acquire) == seen && !self.portals.has_next() {
            polls += 1;
            if polls < POLLS {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(SLEEP);
                // What arrives is a change.
                self.take_stores(&mut self.lock());
            }
        }
        self.lock()
    }
}

impl DeviceState {
    fn record_violation(&mut self, text: String) {
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(text);
        }
    }
}
