//! The model of a card that loses frames or damages them, in this process: what is lost is sent
//! again, and what that takes.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;
use memferry::engine::conformance::Subject;
use memferry::engine::nic::model::{Faults, NicModel};
use memferry::engine::nic::{NicEngine, Settings};

use super::card::SKIPS;
use super::memory::{ALIGNED, Shore};
use super::suite::{self, Tally};
use crate::outcome::Row;

const BYTES: usize = 1 << 20;

/// The models that the suite is run over, if there is time for it.
pub(super) const SUITES: [&str; 2] =
    ["nic over a model that loses frames", "nic over a model that damages frames"];

/// Runs the suite over both kinds of models, and looks whether it was they who did the work, that
/// something was lost, and that the driver made no mistake.
pub(super) fn run_suites(mut on_case: impl FnMut(&str, &str)) -> Vec<Tally> {
    let loses = Faults { lose_every: Some(11), ..Faults::default() };
    let damages = Faults { damage_every: Some(5), ..Faults::default() };
    [(SUITES[0], loses, false), (SUITES[1], damages, true)]
        .map(|(name, faults, checks)| {
            run_suite(name, faults, Settings { checks }, |case| on_case(name, case))
        })
        .into()
}

fn run_suite(name: &str, faults: Faults, settings: Settings, on_case: impl FnMut(&str)) -> Tally {
    let made = Arc::new(Mutex::new(Vec::new()));
    let kept = made.clone();
    let subject = Subject::new(move || {
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
        again += counters.sent_again;
        mistakes.extend(model.sightings().mistakes);
    }
    tally.require_skips(&SKIPS);
    tally.require(bytes > 0, || "the models moved nothing".into());
    tally.require(again > 0, || "nothing was sent again".into());
    tally.require(mistakes.is_empty(), || {
        format!("the driver made mistakes: {}", mistakes.join("; "))
    });
    tally
}

/// An engine over a model that goes wrong once it is in use.
fn engine(faults: Faults, settings: Settings) -> (Arc<NicModel>, Arc<NicEngine>) {
    let model = NicModel::new();
    let engine = NicEngine::over_model(model.clone(), settings).expect("a model of a card");
    model.set_faults(faults);
    (model, Arc::new(engine))
}

/// Copies of a mebibyte with ever more losses.
pub(super) fn measure() -> anyhow::Result<Vec<Row>> {
    let (mut frames, mut repeats) = (Vec::new(), Vec::new());
    for (series, lose_every) in [
        ("memferry, nothing lost", None),
        ("memferry, 1 of 100 lost", Some(100)),
        ("memferry, 1 of 20 lost", Some(20)),
        ("memferry, 1 of 5 lost", Some(5)),
    ] {
        let faults = Faults { lose_every, ..Faults::default() };
        let (model, engine) = engine(faults, Settings::default());
        let mut shore = Shore::new(engine.clone(), BYTES)?;
        // A card is tried out when it is opened.
        let before = model.sightings().frames;
        shore.copy(BYTES, ALIGNED)?;
        let sightings = model.sightings();
        let mistakes = sightings.mistakes;
        ensure!(mistakes.is_empty(), "the driver made mistakes: {}", mistakes.join("; "));
        let row = |figure: &str, unit: &str, count: u64| {
            let figure = format!("model of a card that loses frames: {figure}");
            Row::of_rounds(&figure, series, BYTES as u64, unit, &[count as f64])
        };
        frames.push(row("all that is sent for a copy", "frames", sightings.frames - before));
        repeats.push(row("times that some were sent again", "count", engine.counters().sent_again));
    }
    Ok([frames, repeats].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_is_lost_the_more_is_sent() {
        let rows = measure().unwrap();
        let sent: Vec<_> = rows.iter().filter(|row| row.unit == "frames").collect();
        // Memory is pinned in chunks, and frames are cut where those end.
        assert!((128.0..140.0).contains(&sent[0].value), "{sent:?}");
        assert!(sent.windows(2).all(|pair| pair[0].value < pair[1].value), "{sent:?}");
    }
}
