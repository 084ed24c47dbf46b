//! Model of a card that loses or damages frames, in this process: the driver retransmits them, and
//! the bench measures the cost.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;
use memferry::engine::nic::{NicConfig, NicEngine};
use memferry::engine::testing::conformance::EngineUnderTest;
use memferry::engine::testing::nic_model::{NicFaults, NicModel};

use super::card;
use super::memory::{ALIGNED, EngineFixture};
use super::suite::{self, SuiteResult};
use crate::results::outcome::Row;

const BYTES: usize = 1 << 20;

/// Models that the suite runs over in a full run.
pub(super) const SUITES: [&str; 2] =
    ["nic over a model that loses frames", "nic over a model that damages frames"];

/// Runs the suite over both models, and checks that the models did the work, that frames were lost,
/// and that the driver made no error.
pub(super) fn run_suites(mut on_case: impl FnMut(&str, &str)) -> Vec<SuiteResult> {
    let loses = NicFaults { lose_every: Some(11), ..NicFaults::default() };
    let damages = NicFaults { damage_every: Some(5), ..NicFaults::default() };
    [(SUITES[0], loses, false), (SUITES[1], damages, true)]
        .map(|(name, faults, checks)| {
            run_suite(name, faults, NicConfig { verify_checksums: checks }, |case| {
                on_case(name, case);
            })
        })
        .into()
}

fn run_suite(
    name: &str,
    faults: NicFaults,
    settings: NicConfig,
    on_case: impl FnMut(&str),
) -> SuiteResult {
    let made = Arc::new(Mutex::new(Vec::new()));
    let kept = made.clone();
    let subject = EngineUnderTest::new(move || {
        let (model, engine) = engine(faults, settings);
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push((model, engine.clone()));
        engine
    });
    let mut tally = suite::run(name, &subject.injects_faults(), on_case);
    let made = made.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut bytes, mut again, mut mistakes) = (0, 0, Vec::new());
    for (model, engine) in made.iter() {
        let counters = engine.counters();
        bytes += counters.bytes_by_card;
        again += counters.retransmits;
        mistakes.extend(model.stats().protocol_violations);
    }
    tally.require_skips(&card::skips());
    tally.require(bytes > 0, || "the models moved nothing".into());
    tally.require(again > 0, || "nothing was sent again".into());
    tally.require(mistakes.is_empty(), || {
        format!("the driver made mistakes: {}", mistakes.join("; "))
    });
    tally
}

/// Returns an engine over a model that injects faults once it is in use.
fn engine(faults: NicFaults, settings: NicConfig) -> (Arc<NicModel>, Arc<NicEngine>) {
    let model = NicModel::new();
    let engine = NicEngine::over_model(model.clone(), settings).expect("a model of a card");
    model.set_faults(faults);
    (model, Arc::new(engine))
}

/// Measures copies of 1 MiB with increasing loss rates.
pub(super) fn measure() -> anyhow::Result<Vec<Row>> {
    let (mut frames, mut repeats) = (Vec::new(), Vec::new());
    for (series, lose_every) in [
        ("memferry, nothing lost", None),
        ("memferry, 1 of 100 lost", Some(100)),
        ("memferry, 1 of 20 lost", Some(20)),
        ("memferry, 1 of 5 lost", Some(5)),
    ] {
        let faults = NicFaults { lose_every, ..NicFaults::default() };
        let (model, engine) = engine(faults, NicConfig::default());
        let mut shore = EngineFixture::new(engine.clone(), BYTES)?;
        // The engine tests the card when it opens it, so the frames are counted from here.
        let before = model.stats().frames;
        shore.copy(BYTES, ALIGNED)?;
        let sightings = model.stats();
        let mistakes = sightings.protocol_violations;
        ensure!(mistakes.is_empty(), "the driver made mistakes: {}", mistakes.join("; "));
        let row = |figure: &str, unit: &str, count: u64| {
            let figure = format!("model of a card that loses frames: {figure}");
            Row::of_rounds(&figure, series, BYTES as u64, unit, &[count as f64])
        };
        frames.push(row("all that is sent for a copy", "frames", sightings.frames - before));
        repeats.push(row(
            "times that some were sent again",
            "count",
            engine.counters().retransmits,
        ));
    }
    Ok([frames, repeats].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_sent_again() {
        let rows = measure().unwrap();
        let sent: Vec<_> = rows.iter().filter(|row| row.unit == "frames").collect();
        // Memory is pinned in chunks, and frames end at the ends of chunks.
        assert!((128.0..140.0).contains(&sent[0].value), "{sent:?}");
        // How much more depends on the load of the machine too: a late answer counts as a lost frame.
        assert!(sent[1..].iter().all(|lossy| sent[0].value < lossy.value), "{sent:?}");
    }
}
