//! What a network card does for copies, deliveries and notifications: the emulated one in the virtual
//! machine, or the model of one in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use memferry::engine::nic::{NicCounters, NicEngine};
use memferry_sys::device::Device;

use super::super::Effort;
use super::memory::{ALIGNED, LINE_APART, ODD, Packets, Placing, Shore};
use super::odometer;
use crate::outcome::Row;

/// The size that the key is of.
const TELLING: usize = 1 << 20;
/// What figures with a time in them must say.
const SLOW: &str = "(emulated, says nothing about hardware)";

/// What was found out about a card.
pub(super) struct Found {
    /// The share of an aligned mebibyte that the card has moved, by the lower count if there are two.
    pub(super) share: f64,
    pub(super) rows: Vec<Row>,
}

/// The figures of a card, in the order in which they are made.
pub(super) const FIGURES: [&str; 5] =
    ["bytes moved", "notices", "delivered packets", "frames a second", "mappings looked up"];

/// Makes all figures, and says the name of each before it does. A card that counts by itself what
/// passes is asked too.
pub(super) fn measure(
    engine: Arc<NicEngine>,
    counting: Option<&dyn Device>,
    place: &str,
    effort: Effort,
    mut on_figure: impl FnMut(&str),
) -> anyhow::Result<Found> {
    let sizes = sizes(effort);
    let most = sizes.iter().copied().max().unwrap_or(TELLING);
    let mut card = Card { shore: Shore::new(engine.clone(), most)?, engine, place };
    let [bytes, notices, packets, pace, lookups] = FIGURES;
    on_figure(bytes);
    let (mut share, mut rows) = card.shares(&sizes)?;
    if let Some(device) = counting {
        let (counted, both) = card.both_counts(device)?;
        share = share.min(counted);
        rows.extend(both);
    }
    on_figure(notices);
    rows.extend(card.notices(&sizes)?);
    on_figure(packets);
    rows.extend(card.deliveries(most)?);
    on_figure(pace);
    rows.extend(card.pace(effort)?);
    on_figure(lookups);
    rows.extend(card.lookups());
    Ok(Found { share, rows })
}

fn sizes(effort: Effort) -> Vec<usize> {
    let shifts: &[u32] = match effort {
        Effort::Brief => &[12, 20],
        Effort::Quick => &[6, 7, 8, 10, 12, 14, 16, 18, 20],
        Effort::Full => &[6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    };
    shifts.iter().map(|shift| 1 << shift).collect()
}

struct Card<'a> {
    shore: Shore,
    engine: Arc<NicEngine>,
    place: &'a str,
}

impl Card<'_> {
    fn row(&self, figure: &str, series: &str, bytes: usize, unit: &str, rounds: &[f64]) -> Row {
        Row::of_rounds(&format!("{}: {figure}", self.place), series, bytes as u64, unit, rounds)
    }

    /// What the card does during something.
    fn during(
        &mut self,
        something: impl FnOnce(&mut Shore) -> anyhow::Result<()>,
    ) -> anyhow::Result<NicCounters> {
        let before = self.engine.counters();
        something(&mut self.shore)?;
        let after = self.engine.counters();
        Ok(NicCounters {
            frames: after.frames - before.frames,
            bytes_by_card: after.bytes_by_card - before.bytes_by_card,
            bytes_by_processor: after.bytes_by_processor - before.bytes_by_processor,
            sent_again: after.sent_again - before.sent_again,
            given_up: after.given_up - before.given_up,
            notices: after.notices - before.notices,
        })
    }

    /// Who moves the bytes of copies, in how many frames.
    fn shares(&mut self, sizes: &[usize]) -> anyhow::Result<(f64, Vec<Row>)> {
        let mut telling = None;
        let (mut by_card, mut by_processor, mut frames) = (Vec::new(), Vec::new(), Vec::new());
        for Placing { series, target_at } in [ALIGNED, LINE_APART, ODD] {
            for &bytes in sizes {
                let placing = Placing { series, target_at };
                let done = self.during(|shore| shore.copy(bytes, placing))?;
                let share = done.bytes_by_card as f64 / bytes as f64;
                // All that the card did not move the processor did, whoever asked it to.
                let rest = bytes as u64 - done.bytes_by_card;
                let figure = "share of a copy moved by the card";
                by_card.push(self.row(figure, series, bytes, "share", &[share]));
                let figure = "bytes of a copy left to the processor";
                by_processor.push(self.row(figure, series, bytes, "bytes", &[rest as f64]));
                let figure = "frames for a copy";
                frames.push(self.row(figure, series, bytes, "frames", &[done.frames as f64]));
                if bytes == TELLING && target_at == ALIGNED.target_at {
                    telling = Some(share);
                }
            }
        }
        let share = telling.context("an aligned mebibyte was not copied")?;
        Ok((share, [by_card, by_processor, frames].concat()))
    }

    /// An aligned mebibyte, as the driver counts it and as the card does; and the card's share by
    /// its own count.
    fn both_counts(&mut self, device: &dyn Device) -> anyhow::Result<(f64, Vec<Row>)> {
        odometer::read(device);
        let driver = self.during(|shore| shore.copy(TELLING, ALIGNED))?;
        let card = odometer::read(device);
        let mut rows = Vec::new();
        for (unit, by_driver, by_card) in [
            ("frames", driver.frames, card.frames),
            ("bytes", driver.bytes_by_card, card.payload_bytes),
        ] {
            let figure = "an aligned copy, counted twice";
            for (series, count) in
                [("memferry, by the driver", by_driver), ("by the card itself", by_card)]
            {
                rows.push(self.row(figure, series, TELLING, unit, &[count as f64]));
            }
        }
        Ok((card.payload_bytes as f64 / TELLING as f64, rows))
    }

    /// Copies with a notification variable that the card sets behind the data.
    fn notices(&mut self, sizes: &[usize]) -> anyhow::Result<Vec<Row>> {
        let figure = "frames for a copy with a notification";
        let mut rows = Vec::new();
        for &bytes in sizes {
            let done = self.during(|shore| shore.copy_with_notice(bytes))?;
            for (series, count) in [
                ("memferry, all frames", done.frames),
                ("memferry, notices among them", done.notices),
            ] {
                rows.push(self.row(figure, series, bytes, "frames", &[count as f64]));
            }
        }
        Ok(rows)
    }

    /// Packets that were received elsewhere, gathered into one target.
    fn deliveries(&mut self, most_bytes: usize) -> anyhow::Result<Vec<Row>> {
        let counts = [1, 2, 4, 8, 16, 32, 64, 128, 256];
        let counts = counts.into_iter().filter(|count| count * Packets::BYTES <= most_bytes);
        let packets = Packets::new(256)?;
        let (mut frames, mut gathered) = (Vec::new(), Vec::new());
        for count in counts {
            let done = self.during(|shore| shore.deliver(&packets, count))?;
            let bytes = count * Packets::BYTES;
            let figure = "packets of 1460 B delivered into one target";
            for (series, number) in [
                ("packets", count as u64),
                ("memferry, all frames", done.frames),
                ("memferry, notices among them", done.notices),
            ] {
                frames.push(self.row(figure, series, bytes, "frames", &[number as f64]));
            }
            let carriers = (done.frames - done.notices).max(1);
            let pieces = count as f64 / carriers as f64;
            let figure = "packets of 1460 B gathered by one frame";
            gathered.push(self.row(figure, "memferry", bytes, "packets", &[pieces]));
        }
        Ok([frames, gathered].concat())
    }

    /// How much goes around in a second, which depends on who emulates the card.
    fn pace(&mut self, effort: Effort) -> anyhow::Result<Vec<Row>> {
        let (rounds, slice) = match effort {
            Effort::Brief => (5, Duration::from_millis(10)),
            Effort::Quick => (5, Duration::from_millis(50)),
            Effort::Full => (11, Duration::from_millis(200)),
        };
        let (mut copies, mut frames) = (Vec::new(), Vec::new());
        for bytes in [4 << 10, 64 << 10, 1 << 20] {
            for (series, notified) in [("memferry", false), ("memferry, with a notification", true)]
            {
                let (mut copies_per_s, mut frames_per_s) = (Vec::new(), Vec::new());
                for _ in 0..rounds {
                    let (begun, mut count) = (Instant::now(), 0);
                    let done = self.during(|shore| {
                        while count == 0 || begun.elapsed() < slice {
                            shore.copy_unseen(bytes, notified)?;
                            count += 1;
                        }
                        Ok(())
                    })?;
                    let seconds = begun.elapsed().as_secs_f64();
                    copies_per_s.push(f64::from(count) / seconds);
                    frames_per_s.push(done.frames as f64 / seconds);
                }
                let figure = format!("copies a second {SLOW}");
                copies.push(self.row(&figure, series, bytes, "1/s", &copies_per_s));
                let figure = format!("frames a second {SLOW}");
                frames.push(self.row(&figure, series, bytes, "1/s", &frames_per_s));
            }
        }
        Ok([copies, frames].concat())
    }

    /// How the addresses of memory for the card were found, over everything before.
    fn lookups(&self) -> Vec<Row> {
        let counters = self.engine.pages().counters();
        let (pins, pages) = self.engine.pages().pinned();
        let statistics = self.shore.ferry.statistics();
        let cache = statistics.pinning(memferry::engine::Engine::name(&*self.engine));
        let misses = counters.misses.send.total() + counters.misses.receive.total();
        let mut counts = vec![
            ("lookups that hit", counters.hits.send + counters.hits.receive),
            ("lookups that missed", misses),
            ("pins kept at the end", pins as u64),
            ("pages pinned at the end", pages as u64),
        ];
        if let Some(pinning) = cache {
            counts.push(("pins found in the pin-down cache", pinning.cache.hits));
            counts.push(("pins made", pinning.cache.misses));
        }
        let figure = "memory mapped for the card, all copies together";
        let row =
            |(series, count): (&str, u64)| self.row(figure, series, 0, "count", &[count as f64]);
        counts.into_iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use memferry::engine::nic::Settings;
    use memferry::engine::nic::model::NicModel;

    use super::*;

    #[test]
    fn a_model_of_a_card_moves_nearly_all_of_an_aligned_mebibyte() {
        let engine = Arc::new(NicEngine::over(NicModel::new(), Settings::default()).unwrap());
        let mut figures = Vec::new();
        let found =
            measure(engine, None, "model", Effort::Brief, |name| figures.push(name.to_owned()));
        let found = found.unwrap();
        assert!(found.share >= 0.99, "{}", found.share);
        assert_eq!(figures, FIGURES);
        for row in &found.rows {
            assert!(row.value.is_finite() && row.figure.starts_with("model: "), "{row:?}");
            assert_eq!(row.unit == "1/s", row.figure.ends_with(SLOW), "{row:?}");
        }
    }
}
