//! The model of a card that loses frames or damages them, in this process: what is lost is sent
//! again, and what that takes.

use std::sync::Arc;

use anyhow::ensure;
use memferry::engine::conformance::Subject;
use memferry::engine::nic::model::{Faults, NicModel};
use memferry::engine::nic::{NicEngine, Settings};

use super::super::Effort;
use super::memory::{ALIGNED, Shore};
use crate::outcome::Row;

const BYTES: usize = 1 << 20;

/// The engines that the suite is run over.
pub(super) fn subjects(effort: Effort) -> Vec<(&'static str, Subject)> {
    let loses = Faults { lose_every: Some(11), ..Faults::default() };
    let damages = Faults { damage_every: Some(5), ..Faults::default() };
    let faulty = |faults, checks| {
        Subject::new(move || engine(faults, Settings { checks }).1).injects_faults()
    };
    match effort {
        Effort::Brief | Effort::Quick => Vec::new(),
        Effort::Full => vec![
            ("nic over a model that loses frames", faulty(loses, false)),
            ("nic over a model that damages frames", faulty(damages, true)),
        ],
    }
}

/// An engine over a model that goes wrong once it is in use.
fn engine(faults: Faults, settings: Settings) -> (Arc<NicModel>, Arc<NicEngine>) {
    let model = NicModel::new();
    let engine = NicEngine::over(model.clone(), settings).expect("a model of a card");
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
