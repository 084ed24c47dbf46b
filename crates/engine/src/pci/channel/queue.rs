//! The queue inside the gate of a channel: the accepted descriptors in order, and the driver.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memferry_sys::sync::atomic::AtomicU64;

use super::add;
use super::effort::PollEffort;
use super::in_flight::{FinalStatus, InFlightDescriptor};
use crate::completion::catch_user_panic;
use crate::contract::{Descriptor, NotificationWrite};
use crate::pci::hardware::{HardwareQueue, HwStatus, PostResult};

/// The queue.
#[derive(Debug)]
pub(super) struct PciQueue {
    /// `None` after a panic in the driver.
    hardware: Option<Box<dyn HardwareQueue>>,
    /// Accepted descriptors that are not finished, in order: first those that the hardware has or
    /// had, then the pending ones.
    entries: VecDeque<InFlightDescriptor>,
    /// The number of entries that the hardware has or has ended.
    posted: usize,
    /// The number of entries that have failed, which the processor finishes.
    failed: usize,
    /// The bytes that were posted since an interrupt was requested.
    quiet_bytes: u64,
    /// What the driver reports, between two calls empty.
    ended: Vec<HwStatus>,
}

/// What the processor reports for descriptors of a device whose driver panicked.
const PANICKED: FinalStatus =
    FinalStatus::Hardware(HwStatus::Failed("the driver of the device panicked"));

impl PciQueue {
    pub(super) fn new(hardware: Box<dyn HardwareQueue>) -> Self {
        Self {
            hardware: Some(hardware),
            entries: VecDeque::new(),
            posted: 0,
            failed: 0,
            quiet_bytes: 0,
            ended: Vec::new(),
        }
    }

    /// Whether no interrupt will come: the device has to be recovered, or nothing is posted before the
    /// processor has executed what failed.
    pub(super) fn is_stopped(&mut self) -> bool {
        let mut is_stopped = self.hardware.is_none();
        let is_well = self.call_driver(|hardware| is_stopped |= hardware.needs_recovery());
        is_stopped || !is_well || self.failed > 0
    }

    /// Whether every accepted descriptor is finished.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds accepted descriptors behind all others; [`PciQueue::post`] posts them.
    pub(super) fn extend(&mut self, descriptors: impl Iterator<Item = Descriptor>) {
        let wrap = |descriptor| InFlightDescriptor { descriptor, end: None };
        self.entries.extend(descriptors.map(wrap));
    }

    /// Adds the first `count` accepted descriptors of a batch, and returns their bytes.
    #[inline]
    pub(super) fn take_from(&mut self, batch: &mut [Option<Descriptor>], mut count: u64) -> u64 {
        self.entries.reserve(count as usize);
        let mut bytes = 0;
        for slot in batch {
            if count == 0 {
                break;
            }
            if let Some(descriptor) = slot.take() {
                bytes += descriptor.length();
                self.entries.push_back(InFlightDescriptor { descriptor, end: None });
                count -= 1;
            }
        }
        bytes
    }

    /// Reads completions from the hardware; `false` if its driver panicked.
    pub(super) fn poll(&mut self, effort: PollEffort) -> bool {
        let Some(hardware) = self.hardware.as_mut() else { return true };
        let ended = &mut self.ended;
        let poll = || {
            if effort == PollEffort::Arming {
                hardware.arm_interrupt();
            }
            hardware.poll_completions(ended);
            if effort == PollEffort::Whole {
                hardware.recover(ended);
            }
        };
        let is_well = catch_unwind(AssertUnwindSafe(poll)).is_ok();
        // What a driver has reported before it panicked has ended: its owner may use the memory again.
        let mut in_flight = self.entries.iter_mut().take(self.posted).filter(|e| e.end.is_none());
        for end in self.ended.drain(..) {
            let Some(entry) = in_flight.next() else {
                assert!(!is_well, "no more completions than were posted");
                break;
            };
            entry.end = Some(FinalStatus::Hardware(end));
            self.failed += usize::from(entry.has_failed());
        }
        if !is_well {
            self.fail_hardware();
        }
        is_well
    }

    /// Posts pending descriptors while there is space, and rings the doorbell once; `false` if the
    /// driver panicked. After an entry that failed nothing is posted until it is finished: what is
    /// ordered after it, such as a notification write, must not overtake it. An interrupt is requested at
    /// the end of a transfer if `interrupt_bytes` were posted since the last one.
    pub(super) fn post(&mut self, interrupt_bytes: u64) -> bool {
        let Self { hardware, entries, posted, failed, quiet_bytes, .. } = self;
        if *posted == entries.len() {
            return true;
        }
        let Some(hardware) = hardware.as_mut() else {
            self.fail_entries();
            return true;
        };
        // What is posted is counted at once: a panic finds it so.
        let post_all = || {
            let (before, mut has_accepted) = (*posted, false);
            while *posted < entries.len() && *failed == 0 {
                match post_one(&mut **hardware, entries, *posted) {
                    PostOutcome::Accepted => {
                        has_accepted = true;
                        *quiet_bytes =
                            quiet_bytes.saturating_add(entries[*posted].descriptor.length());
                        if *quiet_bytes >= interrupt_bytes && is_end_of_transfer(entries, *posted) {
                            hardware.request_interrupt();
                            *quiet_bytes = 0;
                        }
                    }
                    PostOutcome::Full => {
                        // Nobody posts the rest before a poll.
                        if interrupt_bytes < u64::MAX && has_accepted {
                            hardware.request_interrupt();
                        }
                        break;
                    }
                    PostOutcome::Ended(end) => {
                        let entry = &mut entries[*posted];
                        entry.end = Some(end);
                        *failed += usize::from(entry.has_failed());
                    }
                }
                *posted += 1;
            }
            // The last part of a transfer may have ended at once.
            if has_accepted && *quiet_bytes >= interrupt_bytes {
                hardware.request_interrupt();
                *quiet_bytes = 0;
            }
            if *posted > before {
                hardware.ring_doorbell();
            }
        };
        let is_well = catch_unwind(AssertUnwindSafe(post_all)).is_ok();
        if !is_well {
            self.fail_hardware();
        }
        is_well
    }

    /// Calls the driver; `false` if the driver panics. Does nothing if it has panicked before.
    pub(super) fn call_driver(&mut self, call: impl FnOnce(&mut dyn HardwareQueue)) -> bool {
        let Some(hardware) = self.hardware.as_mut() else { return true };
        let is_well = catch_unwind(AssertUnwindSafe(|| call(&mut **hardware))).is_ok();
        if !is_well {
            self.fail_hardware();
        }
        is_well
    }

    /// After a panic in the driver: stops the device, and leaves its descriptors to the processor.
    /// The channel is closed by the caller.
    fn fail_hardware(&mut self) {
        let hardware = self.hardware.take();
        if catch_unwind(AssertUnwindSafe(|| drop(hardware))).is_err() {
            catch_user_panic(|| {
                tracing::error!(
                    "the driver of a device panicked, and panicked again while stopping the device"
                );
            });
            // The device may still write to memory that would be freed now.
            std::process::abort();
        }
        self.fail_entries();
        catch_user_panic(|| {
            tracing::error!(
                "the driver of a device panicked: the processor finishes its descriptors"
            );
        });
    }

    /// Fails all entries that have not ended.
    fn fail_entries(&mut self) {
        for entry in self.entries.iter_mut().filter(|entry| entry.end.is_none()) {
            entry.end = Some(PANICKED);
            self.failed += 1;
        }
        self.posted = self.entries.len();
    }

    /// Removes the oldest entry if it has ended, and if the processor may execute it should it have
    /// to.
    pub(super) fn take_finished(
        &mut self,
        taken: &AtomicU64,
        max_executed: &mut u32,
    ) -> Option<InFlightDescriptor> {
        let oldest =
            self.entries.front().filter(|oldest| self.posted > 0 && oldest.end.is_some())?;
        if matches!(oldest.end, Some(FinalStatus::Hardware(HwStatus::Failed(_)))) {
            *max_executed = max_executed.checked_sub(1)?;
        }
        let entry = self.entries.pop_front()?;
        self.posted -= 1;
        self.failed -= usize::from(entry.has_failed());
        if self.entries.is_empty() {
            // From its start again: that memory is in the caches.
            self.entries.clear();
        }
        add(taken, 1);
        Some(entry)
    }
}

/// What became of an entry that was posted.
enum PostOutcome {
    Accepted,
    Full,
    Ended(FinalStatus),
}

/// Posts one entry.
#[inline]
fn post_one(
    hardware: &mut dyn HardwareQueue,
    entries: &VecDeque<InFlightDescriptor>,
    index: usize,
) -> PostOutcome {
    let descriptor = &entries[index].descriptor;
    if descriptor.is_cancelled() {
        return PostOutcome::Ended(FinalStatus::Cancelled);
    }
    if descriptor.length() == 0 {
        return PostOutcome::Ended(FinalStatus::Hardware(HwStatus::Ok));
    }
    match hardware.post(descriptor, notification_write_of(entries, index)) {
        PostResult::Accepted => PostOutcome::Accepted,
        PostResult::Full => PostOutcome::Full,
        PostResult::Completed(end) => PostOutcome::Ended(FinalStatus::Hardware(end)),
    }
}

/// Whether the entry behind this one, if there is any, belongs to another transfer.
fn is_end_of_transfer(entries: &VecDeque<InFlightDescriptor>, index: usize) -> bool {
    let descriptor = &entries[index].descriptor;
    let follows = |next: &InFlightDescriptor| next.descriptor.is_of_same_transfer(descriptor);
    !entries.get(index + 1).is_some_and(follows)
}

/// The notification write after an entry, if this channel may perform it.
fn notification_write_of(
    entries: &VecDeque<InFlightDescriptor>,
    index: usize,
) -> Option<NotificationWrite<'_>> {
    let last = &entries[index].descriptor;
    last.notification_write(|| {
        let before = entries.iter().take(index).map(|entry| &entry.descriptor);
        before.filter(|other| other.is_of_same_transfer(last)).map(Descriptor::length).sum()
    })
}
