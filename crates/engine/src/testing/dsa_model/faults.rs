//! Fault injection for the model.

use std::time::Duration;

use crate::dsa::record::status;
use crate::testing::ioat_model::{ENOMEM, FaultSchedule, PATIENCE, SHORT_PATIENCE};

/// The faults of the model. Events are counted over all queues, from the time at which the faults
/// were set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DsaFaults {
    /// Descriptors at which the whole device halts, until it is reset.
    pub halts: FaultSchedule,
    /// Descriptors at which their queue stops without a report, until it is reset.
    pub stalls: FaultSchedule,
    /// Descriptors that fail.
    pub errors: FaultSchedule,
    /// The status of these failures.
    pub error_status: u8,
    /// Descriptors that stop half-way, as at a page fault.
    pub page_faults: FaultSchedule,
    /// Batches whose list cannot be read.
    pub list_faults: FaultSchedule,
    /// Completion records that are not written.
    pub loses_records: FaultSchedule,
    /// Submissions to a shared queue, or by `write`, that find no space.
    pub refuses_submissions: FaultSchedule,
    /// The kernel error with which every `write` fails, or 0.
    pub write_error: i32,
    /// The error with which queues cannot be enabled, or 0.
    pub enable_error: u32,
    /// The additional time of every descriptor.
    pub delay: Duration,
    /// The additional time of descriptors whose targets are not aligned to 64 bytes.
    pub unaligned_delay: Duration,
    /// The number of resets, of queues or of the device, that do not end.
    pub refused_resets: u32,
    /// The device is removed: its registers read as ones, and it executes nothing. A device that
    /// returns is in the power-on state.
    pub is_removed: bool,
    /// Mappings that fail.
    pub refuses_maps: FaultSchedule,
    /// The kernel error of these failures.
    pub map_error: i32,
    /// The maximum number of bytes that can be mapped at a time.
    pub max_mapped_bytes: Option<usize>,
    /// How long the driver waits for the device, in place of a time that suits the other faults.
    pub patience: Option<Duration>,
}

impl Default for DsaFaults {
    /// No faults.
    fn default() -> Self {
        Self {
            halts: FaultSchedule::Never,
            stalls: FaultSchedule::Never,
            errors: FaultSchedule::Never,
            error_status: status::HARDWARE,
            page_faults: FaultSchedule::Never,
            list_faults: FaultSchedule::Never,
            loses_records: FaultSchedule::Never,
            refuses_submissions: FaultSchedule::Never,
            write_error: 0,
            enable_error: 0,
            delay: Duration::ZERO,
            unaligned_delay: Duration::ZERO,
            refused_resets: 0,
            is_removed: false,
            refuses_maps: FaultSchedule::Never,
            map_error: ENOMEM,
            max_mapped_bytes: None,
            patience: None,
        }
    }
}

impl DsaFaults {
    fn patience(&self) -> Duration {
        let never = FaultSchedule::Never;
        let is_silent = self.stalls != never || self.loses_records != never;
        let is_full = self.refuses_submissions == FaultSchedule::Always;
        let fails = is_silent || is_full || self.refused_resets > 0 || self.is_removed;
        self.patience.unwrap_or(if fails { SHORT_PATIENCE } else { PATIENCE })
    }
}

/// The faults and the events since they were set.
#[derive(Debug, Default)]
pub(super) struct DsaFaultScript {
    pub(super) faults: DsaFaults,
    /// By the faults as they were set: refused resets are counted down.
    pub(super) patience: Duration,
    descriptors: u64,
    batches: u64,
    records: u64,
    submissions: u64,
    maps: u64,
}

/// The fault that the script injects at a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InjectedFault {
    Runs {
        delay: Duration,
    },
    Halts,
    Stalls,
    Fails {
        status: u8,
    },
    /// It ends after half of its bytes.
    StopsHalfWay,
}

/// Counts an event, and returns whether it is selected.
fn next(schedule: FaultSchedule, count: &mut u64) -> bool {
    *count += 1;
    schedule.matches(*count)
}

impl DsaFaultScript {
    pub(super) fn new(faults: DsaFaults) -> Self {
        Self { patience: faults.patience(), faults, ..Self::default() }
    }

    /// The fault at the next descriptor, whose target is aligned or not.
    pub(super) fn next_descriptor(&mut self, is_aligned: bool) -> InjectedFault {
        self.descriptors += 1;
        let (faults, number) = (self.faults, self.descriptors);
        let unaligned_delay = if is_aligned { Duration::ZERO } else { faults.unaligned_delay };
        if faults.stalls.matches(number) {
            InjectedFault::Stalls
        } else if faults.halts.matches(number) {
            InjectedFault::Halts
        } else if faults.errors.matches(number) {
            InjectedFault::Fails { status: faults.error_status }
        } else if faults.page_faults.matches(number) {
            InjectedFault::StopsHalfWay
        } else {
            InjectedFault::Runs { delay: faults.delay + unaligned_delay }
        }
    }

    pub(super) fn loses_list(&mut self) -> bool {
        next(self.faults.list_faults, &mut self.batches)
    }

    pub(super) fn loses_record(&mut self) -> bool {
        next(self.faults.loses_records, &mut self.records)
    }

    pub(super) fn refuses_submission(&mut self) -> bool {
        next(self.faults.refuses_submissions, &mut self.submissions)
    }

    /// The error of a mapping that the script fails.
    pub(super) fn refuses_map(&mut self) -> Option<i32> {
        next(self.faults.refuses_maps, &mut self.maps).then_some(self.faults.map_error)
    }

    pub(super) fn refuses_reset(&mut self) -> bool {
        let refuses = self.faults.refused_resets > 0;
        self.faults.refused_resets = self.faults.refused_resets.saturating_sub(1);
        refuses
    }
}
