//! The queue inside the gate of a channel: the accepted descriptors in order, and the driver.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memferry_sys::sync::atomic::AtomicU64;

use super::add;
use super::effort::PollEffort;
use super::finished::{FinalStatus, FinishedDescriptor};
use crate::completion::catch_user_panic;
use crate::contract::{Descriptor, NotificationWrite};
use crate::pci::hardware::{HardwareQueue, HwStatus, PostResult};

/// The queue.
#[derive(Debug)]
pub(super) struct PciQueue {
    /// `None` after a panic in the driver.
    hardware: Option<Box<dyn HardwareQueue>>,
    entries: Entries,
    /// The number of entries that the hardware has or has ended.
    posted: usize,
    /// The number of entries that have failed, which the processor finishes.
    failed: usize,
    /// The bytes that were posted since an interrupt was requested.
    quiet_bytes: u64,
    /// What the driver reports, between two calls empty.
    ended: Vec<HwStatus>,
}

/// The driver panicked, and the channel has to be closed.
#[derive(Debug, Clone, Copy)]
pub(super) struct DriverPanicked;

/// What the processor reports for descriptors of a device whose driver panicked.
const PANICKED: FinalStatus =
    FinalStatus::Hardware(HwStatus::Failed("the driver of the device panicked"));

impl PciQueue {
    pub(super) fn new(hardware: Box<dyn HardwareQueue>) -> Self {
        Self {
            hardware: Some(hardware),
            entries: Entries::default(),
            posted: 0,
            failed: 0,
            quiet_bytes: 0,
            ended: Vec::new(),
        }
    }

    /// Whether no interrupt will come: the device has to be polled or recovered, or nothing is posted
    /// before the processor has executed what failed.
    /// An error if the driver panicked.
    pub(super) fn needs_poll(&mut self) -> Result<bool, DriverPanicked> {
        let mut needs_poll = self.hardware.is_none() || self.failed > 0;
        let is_well = self.call_driver(|hardware| {
            needs_poll |= hardware.needs_recovery() || hardware.needs_poll();
        });
        is_well.then_some(needs_poll).ok_or(DriverPanicked)
    }

    /// Whether every accepted descriptor is finished.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds accepted descriptors behind all others; [`PciQueue::post`] posts them.
    pub(super) fn extend(&mut self, descriptors: impl Iterator<Item = Descriptor>) {
        self.entries.extend(descriptors.map(Some));
    }

    /// Adds the first `count` accepted descriptors of a batch, and returns their bytes.
    #[inline]
    pub(super) fn take_from(&mut self, batch: &mut [Option<Descriptor>], count: u64) -> u64 {
        let count = count as usize;
        match batch.get_mut(..count) {
            Some(front) if front.iter().all(Option::is_some) => {
                let bytes = front.iter().flatten().map(Descriptor::length).sum();
                self.entries.extend(front.iter_mut().map(Option::take));
                bytes
            }
            _ => {
                let mut bytes = 0;
                let descriptors = batch.iter_mut().filter_map(Option::take).take(count);
                self.extend(descriptors.inspect(|descriptor| bytes += descriptor.length()));
                bytes
            }
        }
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
        let ends = self.entries.ends.iter_mut().take(self.posted);
        let mut in_flight = ends.filter(|end| end.is_none());
        for status in self.ended.drain(..) {
            let Some(end) = in_flight.next() else {
                assert!(!is_well, "no more completions than were posted");
                break;
            };
            let status = end.insert(FinalStatus::Hardware(status));
            self.failed += usize::from(status.has_failed());
        }
        if !is_well {
            self.fail_hardware();
        }
        is_well
    }

    /// Posts pending descriptors while there is space, and rings the doorbell once; `false` if the
    /// driver panicked. After an entry that failed nothing is posted until it is finished: what is
    /// ordered after it, such as a notification write, must not overtake it. An interrupt is requested at
    /// the end of a transfer if `interrupt_bytes` were posted since the last one, and where the hardware
    /// has no more space.
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
                        let bytes = entries.descriptor(*posted).length();
                        *quiet_bytes = quiet_bytes.saturating_add(bytes);
                        let is_long = *quiet_bytes >= interrupt_bytes;
                        // A full device gets more from a poll only, so the last descriptor that it
                        // accepts raises the interrupt that leads to that poll.
                        let is_last = || interrupt_bytes < u64::MAX && hardware.is_full();
                        if is_long && entries.is_end_of_transfer(*posted) || is_last() {
                            hardware.request_interrupt();
                            *quiet_bytes = 0;
                        }
                    }
                    PostOutcome::Full => break,
                    PostOutcome::Ended(end) => {
                        entries.ends[*posted] = Some(end);
                        *failed += usize::from(end.has_failed());
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
        for end in self.entries.ends.iter_mut().filter(|end| end.is_none()) {
            *end = Some(PANICKED);
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
    ) -> Option<FinishedDescriptor> {
        let end = (*self.entries.ends.front()?).filter(|_| self.posted > 0)?;
        if matches!(end, FinalStatus::Hardware(HwStatus::Failed(_))) {
            *max_executed = max_executed.checked_sub(1)?;
        }
        let descriptor = self.entries.pop_front()?;
        self.posted -= 1;
        self.failed -= usize::from(end.has_failed());
        add(taken, 1);
        Some(FinishedDescriptor { descriptor, end })
    }
}

/// Accepted descriptors that are not finished, in order: first those that the hardware has or had,
/// then the pending ones.
#[derive(Debug, Default)]
struct Entries {
    /// All are there. The `Option` of a batch is moved as a whole, by wide loads and stores: unpacked
    /// and packed again, it would be stored in narrow parts, and a wide load of these stalls.
    descriptors: VecDeque<Option<Descriptor>>,
    /// The final status of each, once it is known.
    ends: VecDeque<Option<FinalStatus>>,
}

impl Entries {
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    #[inline]
    fn extend(&mut self, descriptors: impl Iterator<Item = Option<Descriptor>>) {
        self.descriptors.extend(descriptors);
        self.ends.resize(self.descriptors.len(), None);
    }

    fn pop_front(&mut self) -> Option<Descriptor> {
        self.ends.pop_front();
        let descriptor = self.descriptors.pop_front()?;
        if self.is_empty() {
            // From its start again: that memory is in the caches.
            self.descriptors.clear();
            self.ends.clear();
        }
        descriptor
    }

    #[inline]
    fn descriptor(&self, index: usize) -> &Descriptor {
        self.descriptors[index].as_ref().expect("it is not finished")
    }

    /// Whether the entry behind this one, if there is any, belongs to another transfer.
    fn is_end_of_transfer(&self, index: usize) -> bool {
        let descriptor = self.descriptor(index);
        let follows = |next: &Descriptor| next.is_of_same_transfer(descriptor);
        !self.descriptors.get(index + 1).and_then(Option::as_ref).is_some_and(follows)
    }

    /// The notification write after an entry, if this channel may perform it.
    #[inline]
    fn notification_write_of(&self, index: usize) -> Option<NotificationWrite<'_>> {
        let last = self.descriptor(index);
        last.notification_write(|| {
            let before = self.descriptors.iter().take(index).flatten();
            before.filter(|other| other.is_of_same_transfer(last)).map(Descriptor::length).sum()
        })
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
fn post_one(hardware: &mut dyn HardwareQueue, entries: &Entries, index: usize) -> PostOutcome {
    let descriptor = entries.descriptor(index);
    if descriptor.is_cancelled() {
        return PostOutcome::Ended(FinalStatus::Cancelled);
    }
    if descriptor.has_failed_predecessor() {
        return PostOutcome::Ended(FinalStatus::Unstarted);
    }
    if descriptor.length() == 0 {
        return PostOutcome::Ended(FinalStatus::Hardware(HwStatus::Ok));
    }
    match hardware.post(descriptor, entries.notification_write_of(index)) {
        PostResult::Accepted => PostOutcome::Accepted,
        PostResult::Full => PostOutcome::Full,
        PostResult::Completed(end) => PostOutcome::Ended(FinalStatus::Hardware(end)),
    }
}
