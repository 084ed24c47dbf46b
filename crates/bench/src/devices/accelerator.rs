//! The rows of Intel's data streaming accelerator, over its model.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::ensure;
use memferry::engine::completion::Completion;
use memferry::engine::dsa::DsaEngine;
use memferry::engine::testing::conformance::EngineUnderTest;
use memferry::engine::testing::dsa_model::{
    DsaFaults, DsaModel, DsaModelCounters, IdxdModel, IdxdModelOptions,
};
use memferry::engine::testing::ioat_model::FaultSchedule;
use memferry::engine::{ChannelOptions, Descriptor, Engine, Opcode};
use memferry_sys::Pages;

use super::memory::{ALIGNED, Alignment, EngineFixture, HALF_APART};
use super::suite::{self, SuiteResult};
use crate::Effort;
use crate::results::outcome::{Outcome, Row};

const REFERENCE_BYTES: usize = 4 << 20;
const FIGURE: &str = "DSA model: descriptors for a copy";
/// The number of descriptors of a batch.
const BATCH: usize = 64;

/// Cases of the suite that this engine does not support.
const SKIPS: [&str; 3] = [
    "overlapping_moves_have_the_result_of_memmove",
    "whoever_waits_for_a_number_is_told",
    "nobody_can_help_a_transfer_before_its_turn",
];

/// Cases about pinned memory, which a queue of the kernel does not need.
const PIN_SKIPS: [&str; 2] = [
    "memory_that_is_not_pinned_is_not_touched_by_the_engine",
    "memory_pinned_for_another_place_is_not_touched_by_the_engine",
];

/// A variant of the model that the suite runs over.
pub(super) struct AcceleratorVariant {
    pub(super) name: &'static str,
    faults: DsaFaults,
    /// Behind the kernel's driver, not VFIO.
    is_of_kernel: bool,
}

/// Variants of the model, including those with injected faults.
pub(super) fn variants(effort: Effort) -> Vec<AcceleratorVariant> {
    let plain = |name, is_of_kernel| AcceleratorVariant {
        name,
        faults: DsaFaults::default(),
        is_of_kernel,
    };
    let fails = DsaFaults {
        errors: FaultSchedule::Every(31),
        page_faults: FaultSchedule::Every(3),
        ..DsaFaults::default()
    };
    let mut variants = vec![
        plain("dsa over its model, by VFIO", false),
        plain("dsa over its model, by a queue of the kernel", true),
    ];
    if effort == Effort::Full {
        let name = "dsa over a model that fails and faults";
        variants.push(AcceleratorVariant { faults: fails, ..plain(name, true) });
    }
    variants
}

/// The device behind an engine.
enum ModelHandle {
    Vfio(Arc<DsaModel>),
    Kernel(Arc<IdxdModel>),
}

impl ModelHandle {
    fn device(&self) -> &DsaModel {
        match self {
            Self::Vfio(model) => model,
            Self::Kernel(model) => model.device(),
        }
    }
}

impl AcceleratorVariant {
    fn open(
        faults: DsaFaults,
        is_of_kernel: bool,
    ) -> anyhow::Result<(ModelHandle, Arc<DsaEngine>)> {
        let (model, engine) = if is_of_kernel {
            let model = IdxdModel::new(IdxdModelOptions::default())?;
            (ModelHandle::Kernel(model.clone()), DsaEngine::over_idxd_model(model)?)
        } else {
            let model = DsaModel::new();
            (ModelHandle::Vfio(model.clone()), DsaEngine::over_model(model)?)
        };
        model.device().set_faults(faults);
        Ok((model, Arc::new(engine)))
    }

    /// Runs the suite, and checks that the models did the work and that the driver made no error.
    pub(super) fn run(&self, on_case: impl FnMut(&str)) -> SuiteResult {
        let models = Arc::new(Mutex::new(Vec::new()));
        let (faults, is_of_kernel, kept) = (self.faults, self.is_of_kernel, models.clone());
        let mut subject = EngineUnderTest::new(move || {
            let (model, engine) = Self::open(faults, is_of_kernel).expect("a model of the device");
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(model);
            engine
        });
        if faults != DsaFaults::default() {
            subject = subject.injects_faults();
        }
        let mut tally = suite::run(self.name, &subject, on_case);
        let models = models.lock().unwrap_or_else(PoisonError::into_inner);
        let skips =
            if self.is_of_kernel { [&SKIPS[..], &PIN_SKIPS].concat() } else { SKIPS.into() };
        tally.require_skips(&skips);
        let bytes: u64 = models.iter().map(|model| model.device().counters().bytes).sum();
        tally.require(bytes > 0, || "the models moved nothing".into());
        let mistakes = models.iter().flat_map(|model| model.device().protocol_violations());
        let mistakes: Vec<_> = mistakes.collect();
        tally.require(mistakes.is_empty(), || {
            format!("the driver made mistakes: {}", mistakes.join("; "))
        });
        tally
    }
}

/// Measures descriptors, doorbells and resumed faults, and sets the keys.
pub(super) fn measure(outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
    let shifts: &[u32] = if effort == Effort::Brief { &[22] } else { &[12, 16, 20, 22] };
    let mut device = CountingFixture::new()?;
    for placing in [ALIGNED, HALF_APART] {
        for shift in shifts {
            let bytes = 1 << shift;
            let count = device.descriptors(bytes, placing)?;
            outcome.rows.push(row(FIGURE, placing.series, bytes, "descriptors", count));
            if bytes == REFERENCE_BYTES && placing == ALIGNED {
                outcome.summary.set("dsa_descriptors_aligned_4m", count);
            }
        }
    }
    let (doorbells, resumed) = batch_and_faults()?;
    let figure = "DSA model: doorbells of a batch of 64";
    outcome.rows.push(row(figure, "memferry", BATCH * PART, "doorbells", doorbells));
    outcome.summary.set("dsa_batch_of_64_doorbells", doorbells);
    outcome.summary.set("dsa_fault_resumed", if resumed { 1.0 } else { 0.0 });
    Ok(())
}

fn row(figure: &str, series: &str, bytes: usize, unit: &str, count: f64) -> Row {
    Row::of_rounds(figure, series, bytes as u64, unit, &[count])
}

/// The length in bytes of a descriptor of a batch.
const PART: usize = 4096;

/// Submits one batch whose target was never touched. Returns the number of doorbells for it, without
/// those of resumed descriptors, and whether the device finished all of it after page faults.
fn batch_and_faults() -> anyhow::Result<(f64, bool)> {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let (model, engine) = AcceleratorVariant::open(DsaFaults::default(), true)?;
    let mut source = Pages::new(BATCH * PART)?;
    source.as_mut_slice().fill(7);
    let run = |target: &Pages| {
        // Dropped before the memory: the drop waits for everything in flight.
        let channel = engine.open_channel(&ChannelOptions::default())?;
        let batch = (0..BATCH).map(|number| {
            let at = (number * PART) as u64;
            let (from, to) = (source.as_ptr() as u64 + at, target.as_ptr() as u64 + at);
            // SAFETY: both sides outlive the channel; each completion has only this descriptor.
            let descriptor = unsafe {
                let copy = Descriptor::new(Opcode::Copy, from, to, PART as u64);
                copy.completes(Arc::new(Completion::whole()))
            };
            Some(descriptor)
        });
        let before = model.device().counters();
        let accepted = channel.submit(&mut batch.collect::<Vec<_>>())?;
        let is_done = channel.park(accepted.last(), TIMEOUT);
        ensure!(is_done && accepted.count == BATCH, "a batch of {BATCH} was not finished");
        ensure!(channel.statistics().failed == 0, "the processor finished a part of the batch");
        ensure!(target.as_slice() == source.as_slice(), "a batch was not copied well");
        let after = model.device().counters();
        anyhow::Ok((after.doorbells - before.doorbells, after.page_faults - before.page_faults))
    };
    let target = Pages::new(BATCH * PART)?;
    let (_, faults) = run(&target)?;
    let is_resumed = faults > 0 && engine.counters().resumed_faults > 0;
    let (doorbells, later_faults) = run(&target)?;
    ensure!(later_faults == 0, "pages that are there met {later_faults} faults");
    Ok((doorbells as f64, is_resumed))
}

/// A queue of the kernel, and a fixture over its engine.
struct CountingFixture {
    fixture: EngineFixture,
    model: ModelHandle,
}

impl CountingFixture {
    fn new() -> anyhow::Result<Self> {
        let (model, engine) = AcceleratorVariant::open(DsaFaults::default(), true)?;
        Ok(Self { fixture: EngineFixture::new(engine, REFERENCE_BYTES)?, model })
    }

    /// Returns how many descriptors the device executes for a copy. The device must move every
    /// byte.
    fn descriptors(&mut self, bytes: usize, placing: Alignment) -> anyhow::Result<f64> {
        let before: DsaModelCounters = self.model.device().counters();
        self.fixture.copy(bytes, placing)?;
        let after = self.model.device().counters();
        let moved = after.bytes - before.bytes;
        ensure!(moved == bytes as u64, "the device moved {moved} of {bytes} bytes");
        let mistakes = self.model.device().protocol_violations();
        ensure!(mistakes.is_empty(), "the driver made mistakes: {}", mistakes.join("; "));
        Ok((after.descriptors - before.descriptors) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    #[test]
    fn the_keys_of_the_accelerator_are_what_its_model_has_counted() {
        let mut outcome = sample::empty("devices");
        measure(&mut outcome, Effort::Brief).unwrap();
        assert_eq!(outcome.summary.get("dsa_descriptors_aligned_4m"), Some(4.0));
        assert_eq!(outcome.summary.get("dsa_batch_of_64_doorbells"), Some(1.0));
        assert_eq!(outcome.summary.get("dsa_fault_resumed"), Some(1.0));
    }
}
