//! Intel's copy engine over the model of its registers: how many descriptors the device is given,
//! counted by the device.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;
use memferry::engine::ChannelOptions;
use memferry::engine::conformance::Subject;
use memferry::engine::ioat::IoatEngine;
use memferry::engine::ioat::model::{Counters, Faults, IoatModel, When};

use super::super::Effort;
use super::memory::{ALIGNED, HALF_APART, LINE_APART, Placing, Shore};
use super::suite::{self, Tally};
use crate::outcome::{Outcome, Row};

/// The size that the keys are of.
const TELLING: usize = 4 << 20;
/// What a copy of 4 MB takes in the literature: one descriptor for each page of 4 KB, and twice as
/// many if the pages of source and target do not begin at the same place.
const LITERATURE: [(&str, f64); 2] = [("paper, aligned", 1000.0), ("paper, misaligned", 2000.0)];

const FIGURE: &str = "I/OAT model: descriptors for a copy";

/// Cases about what this engine does not claim to do.
const SKIPS: [&str; 4] = [
    "comparisons_find_the_first_difference",
    "overlapping_moves_have_the_result_of_memmove",
    "whoever_waits_for_a_number_is_told",
    "nobody_can_help_a_transfer_before_its_turn",
];

/// A kind of model that the suite is run over.
pub(super) struct Trial {
    pub(super) name: &'static str,
    faults: Faults,
    is_contiguous: bool,
    options: ChannelOptions,
}

/// The kinds of models, those with faults among them.
pub(super) fn trials(effort: Effort) -> Vec<Trial> {
    let plain = |name| Trial {
        name,
        faults: Faults::default(),
        is_contiguous: false,
        options: ChannelOptions::default(),
    };
    let halts = Faults { halts: When::Every(7), ..Faults::default() };
    let loses = Faults { loses_write_backs: When::Every(3), ..Faults::default() };
    let tiny = ChannelOptions { capacity: Some(2), spin_ns: Some(0), ..ChannelOptions::default() };
    let mut trials = vec![
        plain("ioat over its model"),
        Trial { faults: halts, ..plain("ioat over a model that halts") },
        Trial { faults: loses, ..plain("ioat over a model that loses write-backs") },
    ];
    if effort == Effort::Full {
        trials.push(Trial { options: tiny, ..plain("ioat over its model, with a tiny ring") });
        let name = "ioat over a model with contiguous pages";
        trials.push(Trial { is_contiguous: true, ..plain(name) });
    }
    trials
}

impl Trial {
    /// Runs the suite, and looks whether it was the models that did the work, and without a mistake
    /// of the driver.
    pub(super) fn run(&self, on_case: impl FnMut(&str)) -> Tally {
        let models = Arc::new(Mutex::new(Vec::new()));
        let (faults, is_contiguous, kept) = (self.faults, self.is_contiguous, models.clone());
        let mut subject = Subject::new(move || {
            let (model, engine) = engine(faults, is_contiguous);
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(model);
            engine
        });
        subject = subject.options(self.options.clone());
        if faults != Faults::default() {
            subject = subject.injects_faults();
        }
        let mut tally = suite::run(self.name, &subject, on_case);
        let models = models.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |count: fn(&Counters) -> u64| -> u64 {
            models.iter().map(|model| count(&model.all_counters())).sum()
        };
        tally.require_skips(&SKIPS);
        tally.require(sum(|counters| counters.bytes) > 0, || "the models moved nothing".into());
        let halts = sum(|counters| counters.halts);
        let is_halting = faults.halts != When::Never;
        tally.require((halts > 0) == is_halting, || format!("the models halted {halts} times"));
        let mistakes: Vec<_> = models.iter().flat_map(|model| model.mistakes()).collect();
        tally.require(mistakes.is_empty(), || {
            format!("the driver made mistakes: {}", mistakes.join("; "))
        });
        tally
    }
}

/// An engine over a model with four channels that goes wrong once it is in use.
fn engine(faults: Faults, is_contiguous: bool) -> (Arc<IoatModel>, Arc<IoatEngine>) {
    let model = IoatModel::builder().channels(4).contiguous(is_contiguous).build();
    let engine = over(model.clone()).expect("a model of a copy engine");
    model.set_faults(faults);
    (model, engine)
}

fn over(model: Arc<IoatModel>) -> io::Result<Arc<IoatEngine>> {
    IoatEngine::over_model(model).map(Arc::new)
}

/// Descriptors for copies of all sizes and placings, and the keys.
pub(super) fn measure(outcome: &mut Outcome, effort: Effort) -> anyhow::Result<()> {
    let sizes = sizes(effort);
    let most = sizes.iter().copied().max().unwrap_or(TELLING);
    let mut device = Counted::new(most, false)?;
    let mut telling = Vec::new();
    for placing in [ALIGNED, HALF_APART, LINE_APART] {
        for &bytes in &sizes {
            let count = device.descriptors(bytes, placing)?;
            outcome.rows.push(row(FIGURE, placing.series, bytes, count));
            if bytes == TELLING {
                telling.push((placing, count));
            }
        }
    }
    // An IOMMU may make neighbours of pages: then only the largest transfer counts.
    let mut device = Counted::new(most, true)?;
    for &bytes in &sizes {
        let count = device.descriptors(bytes, ALIGNED)?;
        outcome.rows.push(row(FIGURE, "memferry, contiguous pages", bytes, count));
    }
    for (placing, count) in &telling {
        outcome.rows.push(row(
            "I/OAT, against a paper: descriptors",
            placing.series,
            TELLING,
            *count,
        ));
    }
    for (series, count) in LITERATURE {
        outcome.rows.push(row("I/OAT, against a paper: descriptors", series, TELLING, count));
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

/// A model, and what it counts.
struct Counted {
    shore: Shore,
    model: Arc<IoatModel>,
}

impl Counted {
    fn new(most_bytes: usize, is_contiguous: bool) -> anyhow::Result<Self> {
        let model = IoatModel::builder().contiguous(is_contiguous).build();
        Ok(Self { shore: Shore::new(over(model.clone())?, most_bytes)?, model })
    }

    /// How many descriptors the device carries out for a copy, every byte of which it moves.
    fn descriptors(&mut self, bytes: usize, placing: Placing) -> anyhow::Result<f64> {
        let before = self.model.all_counters();
        self.shore.copy(bytes, placing)?;
        let after = self.model.all_counters();
        let moved = after.bytes - before.bytes;
        ensure!(moved == bytes as u64, "the device moved {moved} of {bytes} bytes");
        let mistakes = self.model.mistakes();
        ensure!(mistakes.is_empty(), "the driver made mistakes: {}", mistakes.join("; "));
        Ok((after.descriptors - before.descriptors) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

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
            assert!(sizes(effort).contains(&TELLING), "{effort:?}");
        }
    }
}
