//! Intel's copy engine over the model of its registers: the number of descriptors that the device
//! gets, counted by the device.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;
use memferry::engine::ChannelOptions;
use memferry::engine::ioat::IoatEngine;
use memferry::engine::testing::conformance::EngineUnderTest;
use memferry::engine::testing::ioat_model::{
    FaultSchedule, IoatFaults, IoatModel, IoatModelCounters,
};

use super::super::Effort;
use super::memory::{ALIGNED, Alignment, EngineFixture, HALF_APART, LINE_APART};
use super::suite::{self, SuiteResult};
use crate::results::outcome::{Outcome, Row};

/// Size of the summary keys.
const REFERENCE_BYTES: usize = 4 << 20;
/// Descriptors for a copy of 4 MB in the literature: one for each page of 4 KB, and twice as many
/// if source and target have different offsets in their pages.
const LITERATURE: [(&str, f64); 2] = [("paper, aligned", 1000.0), ("paper, misaligned", 2000.0)];

const FIGURE: &str = "I/OAT model: descriptors for a copy";

/// A variant of the model that the suite runs over.
pub(super) struct ModelVariant {
    pub(super) name: &'static str,
    faults: IoatFaults,
    is_contiguous: bool,
    options: ChannelOptions,
}

/// Variants of the model, including those with injected faults.
pub(super) fn model_variants(effort: Effort) -> Vec<ModelVariant> {
    let plain = |name| ModelVariant {
        name,
        faults: IoatFaults::default(),
        is_contiguous: false,
        options: ChannelOptions::default(),
    };
    let halts = IoatFaults { halts: FaultSchedule::Every(7), ..IoatFaults::default() };
    let loses = IoatFaults { loses_write_backs: FaultSchedule::Every(3), ..IoatFaults::default() };
    let tiny = ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() };
    let mut trials = vec![
        plain("ioat over its model"),
        ModelVariant { faults: halts, ..plain("ioat over a model that halts") },
        ModelVariant { faults: loses, ..plain("ioat over a model that loses write-backs") },
    ];
    if effort == Effort::Full {
        trials
            .push(ModelVariant { options: tiny, ..plain("ioat over its model, with a tiny ring") });
        let name = "ioat over a model with contiguous pages";
        trials.push(ModelVariant { is_contiguous: true, ..plain(name) });
    }
    trials
}

impl ModelVariant {
    /// Runs the suite, and checks that the models did the work and that the driver made no error.
    pub(super) fn run(&self, on_case: impl FnMut(&str)) -> SuiteResult {
        let models = Arc::new(Mutex::new(Vec::new()));
        let (faults, is_contiguous, kept) = (self.faults, self.is_contiguous, models.clone());
        let mut subject = EngineUnderTest::new(move || {
            let (model, engine) = engine(faults, is_contiguous);
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(model);
            engine
        });
        subject = subject.options(self.options.clone());
        if faults != IoatFaults::default() {
            subject = subject.injects_faults();
        }
        let mut tally = suite::run(self.name, &subject, on_case);
        let models = models.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |count: fn(&IoatModelCounters) -> u64| -> u64 {
            models.iter().map(|model| count(&model.all_counters())).sum()
        };
        tally.require_skips(&suite::COPIER_SKIPS);
        tally.require(sum(|counters| counters.bytes) > 0, || "the models moved nothing".into());
        let halts = sum(|counters| counters.halts);
        let is_halting = faults.halts != FaultSchedule::Never;
        tally.require((halts > 0) == is_halting, || format!("the models halted {halts} times"));
        let mistakes: Vec<_> =
            models.iter().flat_map(|model| model.protocol_violations()).collect();
        tally.require(mistakes.is_empty(), || {
            format!("the driver made mistakes: {}", mistakes.join("; "))
        });
        tally
    }
}

/// Returns an engine over a model with four channels that injects faults once it is in use.
fn engine(faults: IoatFaults, is_contiguous: bool) -> (Arc<IoatModel>, Arc<IoatEngine>) {
    let model = IoatModel::builder().channels(4).contiguous(is_contiguous).build();
    let engine = open_engine(model.clone()).expect("a model of a copy engine");
    model.set_faults(faults);
    (model, engine)
}

fn open_engine(model: Arc<IoatModel>) -> io::Result<Arc<IoatEngine>> {
    IoatEngine::over_model(model).map(Arc::new)
}

/// Measures the descriptors for copies of all sizes and alignments, and sets the keys.
pub(super) fn measure(outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
    let sizes = sizes(effort);
    let most = sizes.iter().copied().max().unwrap_or(REFERENCE_BYTES);
    let mut device = CountingFixture::new(most, false)?;
    let mut telling = Vec::new();
    for placing in [ALIGNED, HALF_APART, LINE_APART] {
        for &bytes in &sizes {
            let count = device.descriptors(bytes, placing)?;
            outcome.rows.push(row(FIGURE, placing.series, bytes, count));
            if bytes == REFERENCE_BYTES {
                telling.push((placing, count));
            }
        }
    }
    // An IOMMU may map pages contiguously; then only the maximum transfer size limits a descriptor.
    let mut device = CountingFixture::new(most, true)?;
    for &bytes in &sizes {
        let count = device.descriptors(bytes, ALIGNED)?;
        outcome.rows.push(row(FIGURE, "memferry, contiguous pages", bytes, count));
    }
    for (placing, count) in &telling {
        outcome.rows.push(row(
            "I/OAT, against a paper: descriptors",
            placing.series,
            REFERENCE_BYTES,
            *count,
        ));
    }
    for (series, count) in LITERATURE {
        outcome.rows.push(row(
            "I/OAT, against a paper: descriptors",
            series,
            REFERENCE_BYTES,
            count,
        ));
    }
    for (key, placing) in
        [("ioat_descriptors_aligned_4m", ALIGNED), ("ioat_descriptors_misaligned_4m", HALF_APART)]
    {
        if let Some((_, count)) = telling.iter().find(|(known, _)| *known == placing) {
            outcome.summary.set(key, *count);
        }
    }
    Ok(())
}

fn sizes(effort: Effort) -> Vec<usize> {
    let shifts: &[u32] = match effort {
        Effort::Brief => &[22],
        Effort::Quick => &[12, 14, 16, 18, 20, 22],
        Effort::Full => &[10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24],
    };
    shifts.iter().map(|shift| 1 << shift).collect()
}

fn row(figure: &str, series: &str, bytes: usize, count: f64) -> Row {
    Row::of_rounds(figure, series, bytes as u64, "descriptors", &[count])
}

/// A model, and a fixture over its engine.
struct CountingFixture {
    fixture: EngineFixture,
    model: Arc<IoatModel>,
}

impl CountingFixture {
    fn new(most_bytes: usize, is_contiguous: bool) -> anyhow::Result<Self> {
        let model = IoatModel::builder().contiguous(is_contiguous).build();
        Ok(Self { fixture: EngineFixture::new(open_engine(model.clone())?, most_bytes)?, model })
    }

    /// Returns how many descriptors the device executes for a copy. The device must move every
    /// byte.
    fn descriptors(&mut self, bytes: usize, placing: Alignment) -> anyhow::Result<f64> {
        let before = self.model.all_counters();
        self.fixture.copy(bytes, placing)?;
        let after = self.model.all_counters();
        let moved = after.bytes - before.bytes;
        ensure!(moved == bytes as u64, "the device moved {moved} of {bytes} bytes");
        let mistakes = self.model.protocol_violations();
        ensure!(mistakes.is_empty(), "the driver made mistakes: {}", mistakes.join("; "));
        Ok((after.descriptors - before.descriptors) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    #[test]
    fn the_keys_are_what_the_device_has_counted() {
        let mut outcome = sample::empty("devices");
        measure(&mut outcome, Effort::Brief).unwrap();
        assert_eq!(outcome.summary.get("ioat_descriptors_aligned_4m"), Some(1024.0));
        assert_eq!(outcome.summary.get("ioat_descriptors_misaligned_4m"), Some(2048.0));
    }

    #[test]
    fn every_effort_has_the_size_of_the_keys() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            assert!(sizes(effort).contains(&REFERENCE_BYTES), "{effort:?}");
        }
    }
}
