//! Measurements of a network card that copies, delivers and notifies: the emulated card in the
//! virtual machine, or the model of a card in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use memferry::engine::nic::{NicCounters, NicEngine};
use memferry_sys::device::DmaDevice;

use super::super::Effort;
use super::memory::{ALIGNED, Alignment, EngineFixture, LINE_APART, ODD, Packets};
use super::nic_counters::{self, FrameCounts};
use super::suite;
use crate::results::outcome::Row;

/// Size of the summary key.
const REFERENCE_BYTES: usize = 1 << 20;
/// Maximum number of attempts at the reference copy.
const REPEATS: usize = 3;
/// Suffix of figures that contain a time.
const EMULATED_NOTE: &str = "(emulated, says nothing about hardware)";

/// Returns the cases of the suite that the card does not support.
pub(super) fn skips() -> Vec<&'static str> {
    [&["fills_of_every_size_touch_nothing_else"], &suite::COPIER_SKIPS[..]].concat()
}

/// Results of a card.
pub(super) struct CardResults {
    /// Share of an aligned 1 MiB copy that the card moved. If the driver and the card both count,
    /// the lower count is used.
    pub(super) share: f64,
    pub(super) rows: Vec<Row>,
}

/// Figures of a card, in the order of their measurement.
pub(super) const FIGURES: [&str; 5] =
    ["bytes moved", "notices", "delivered packets", "frames a second", "mappings looked up"];

/// Measures all figures, and reports the name of each before it starts. If the card has counters of
/// its own, they are read too.
pub(super) fn measure(
    engine: Arc<NicEngine>,
    counting: Option<&dyn DmaDevice>,
    place: &str,
    effort: Effort,
    mut on_figure: impl FnMut(&str),
) -> anyhow::Result<CardResults> {
    let sizes = sizes(effort);
    let most = sizes.iter().copied().max().unwrap_or(REFERENCE_BYTES);
    let mut card =
        Card { fixture: EngineFixture::new(engine.clone(), most)?, engine, card_name: place };
    let [bytes, notices, packets, pace, lookups] = FIGURES;
    on_figure(bytes);
    let mut rows = card.shares(&sizes)?;
    let (share, both) = card.reference_copy(counting)?;
    rows.extend(both);
    on_figure(notices);
    rows.extend(card.notifications(&sizes)?);
    on_figure(packets);
    rows.extend(card.deliveries(most)?);
    on_figure(pace);
    rows.extend(card.throughput(effort)?);
    on_figure(lookups);
    rows.extend(card.lookups());
    Ok(CardResults { share, rows })
}

fn sizes(effort: Effort) -> Vec<usize> {
    let shifts: &[u32] = match effort {
        Effort::Brief => &[12, 20],
        Effort::Quick => &[6, 7, 8, 10, 12, 14, 16, 18, 20],
        Effort::Full => &[6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    };
    shifts.iter().map(|shift| 1 << shift).collect()
}

/// Difference of two readings of the counters.
pub(super) fn counters_between(before: &NicCounters, after: &NicCounters) -> NicCounters {
    NicCounters {
        frames: after.frames - before.frames,
        bytes_by_card: after.bytes_by_card - before.bytes_by_card,
        bytes_by_processor: after.bytes_by_processor - before.bytes_by_processor,
        retransmits: after.retransmits - before.retransmits,
        cpu_fallbacks: after.cpu_fallbacks - before.cpu_fallbacks,
        notification_writes: after.notification_writes - before.notification_writes,
        segments_found: after.segments_found - before.segments_found,
        segments_missing: after.segments_missing - before.segments_missing,
    }
}

/// Returns why the counters of the reference copy are unusable, if they are.
fn count_mismatch(done: &NicCounters) -> Option<String> {
    let NicCounters {
        bytes_by_card,
        bytes_by_processor,
        retransmits: sent_again,
        cpu_fallbacks: given_up,
        ..
    } = *done;
    let is_whole = bytes_by_card + bytes_by_processor == REFERENCE_BYTES as u64;
    (given_up > 0 || sent_again > 0 || !is_whole).then(|| {
        format!(
            "{bytes_by_card} bytes by the card, {bytes_by_processor} by the processor, sent again \
             {sent_again} times, given up {given_up} times"
        )
    })
}

struct Card<'a> {
    fixture: EngineFixture,
    engine: Arc<NicEngine>,
    card_name: &'a str,
}

impl Card<'_> {
    fn row(&self, figure: &str, series: &str, bytes: usize, unit: &str, rounds: &[f64]) -> Row {
        Row::of_rounds(&format!("{}: {figure}", self.card_name), series, bytes as u64, unit, rounds)
    }

    /// Returns the difference of the counters over a closure.
    fn counters_during(
        &mut self,
        something: impl FnOnce(&mut EngineFixture) -> anyhow::Result<()>,
    ) -> anyhow::Result<NicCounters> {
        let before = self.engine.counters();
        something(&mut self.fixture)?;
        Ok(counters_between(&before, &self.engine.counters()))
    }

    /// Measures how many bytes of a copy the card and the processor move, and in how many frames.
    fn shares(&mut self, sizes: &[usize]) -> anyhow::Result<Vec<Row>> {
        let (mut by_card, mut by_processor, mut frames) = (Vec::new(), Vec::new(), Vec::new());
        for Alignment { series, target_offset: target_at } in [ALIGNED, LINE_APART, ODD] {
            for &bytes in sizes {
                let placing = Alignment { series, target_offset: target_at };
                let done = self.counters_during(|shore| shore.copy(bytes, placing))?;
                let share = done.bytes_by_card as f64 / bytes as f64;
                // The processor moved every byte that the card did not, in the driver or in the
                // ferry.
                let rest = bytes as u64 - done.bytes_by_card;
                let figure = "share of a copy moved by the card";
                by_card.push(self.row(figure, series, bytes, "share", &[share]));
                let figure = "bytes of a copy left to the processor";
                by_processor.push(self.row(figure, series, bytes, "bytes", &[rest as f64]));
                let figure = "frames for a copy";
                frames.push(self.row(figure, series, bytes, "frames", &[done.frames as f64]));
            }
        }
        Ok([by_card, by_processor, frames].concat())
    }

    /// Copies an aligned 1 MiB. Returns the card's share by the lower of the two counts, and rows
    /// with the counts of the driver and of the card. The card counts a retransmitted frame twice,
    /// so a copy with retransmits is repeated.
    fn reference_copy(
        &mut self,
        counting: Option<&dyn DmaDevice>,
    ) -> anyhow::Result<(f64, Vec<Row>)> {
        let mut reason = String::new();
        for _ in 0..REPEATS {
            counting.map(nic_counters::read_and_clear);
            let driver = self.counters_during(|shore| shore.copy(REFERENCE_BYTES, ALIGNED))?;
            let card = counting.map(nic_counters::read_and_clear);
            match count_mismatch(&driver) {
                None => return Ok(self.both_counts(&driver, card)),
                Some(doubt) => reason = doubt,
            }
        }
        bail!("an aligned mebibyte was not copied as it should be, {REPEATS} times: {reason}")
    }

    fn both_counts(&self, driver: &NicCounters, card: Option<FrameCounts>) -> (f64, Vec<Row>) {
        let Some(card) = card else {
            return (driver.bytes_by_card as f64 / REFERENCE_BYTES as f64, Vec::new());
        };
        let mut rows = Vec::new();
        for (unit, by_driver, by_card) in [
            ("frames", driver.frames, card.frames),
            ("bytes", driver.bytes_by_card, card.payload_bytes),
        ] {
            let figure = "an aligned copy, counted twice";
            for (series, count) in
                [("memferry, by the driver", by_driver), ("by the card itself", by_card)]
            {
                rows.push(self.row(figure, series, REFERENCE_BYTES, unit, &[count as f64]));
            }
        }
        (driver.bytes_by_card.min(card.payload_bytes) as f64 / REFERENCE_BYTES as f64, rows)
    }

    /// Measures copies with a notification variable that the card writes after the data.
    fn notifications(&mut self, sizes: &[usize]) -> anyhow::Result<Vec<Row>> {
        let figure = "frames for a copy with a notification";
        let mut rows = Vec::new();
        for &bytes in sizes {
            let done = self.counters_during(|shore| shore.copy_notified(bytes))?;
            for (series, count) in [
                ("memferry, all frames", done.frames),
                ("memferry, notices among them", done.notification_writes),
            ] {
                rows.push(self.row(figure, series, bytes, "frames", &[count as f64]));
            }
        }
        Ok(rows)
    }

    /// Measures the delivery of packets, gathered into one target.
    fn deliveries(&mut self, most_bytes: usize) -> anyhow::Result<Vec<Row>> {
        let counts = [1, 2, 4, 8, 16, 32, 64, 128, 256];
        let counts = counts.into_iter().filter(|count| count * Packets::BYTES <= most_bytes);
        let packets = Packets::new(256)?;
        let (mut frames, mut gathered) = (Vec::new(), Vec::new());
        for count in counts {
            let done = self.counters_during(|shore| shore.deliver(&packets, count))?;
            let bytes = count * Packets::BYTES;
            let figure = "packets of 1460 B delivered into one target";
            for (series, number) in [
                ("packets", count as u64),
                ("memferry, all frames", done.frames),
                ("memferry, notices among them", done.notification_writes),
            ] {
                frames.push(self.row(figure, series, bytes, "frames", &[number as f64]));
            }
            let carriers = done.frames.saturating_sub(done.notification_writes);
            ensure!(carriers > 0, "no frame of the card carried any of {count} packets");
            let pieces = count as f64 / carriers as f64;
            let figure = "packets of 1460 B gathered by one frame";
            gathered.push(self.row(figure, "memferry", bytes, "packets", &[pieces]));
        }
        Ok([frames, gathered].concat())
    }

    /// Measures the throughput, which depends on the emulator of the card.
    fn throughput(&mut self, effort: Effort) -> anyhow::Result<Vec<Row>> {
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
                    let done = self.counters_during(|shore| {
                        while count == 0 || begun.elapsed() < slice {
                            shore.copy_unverified(bytes, notified)?;
                            count += 1;
                        }
                        Ok(())
                    })?;
                    let seconds = begun.elapsed().as_secs_f64();
                    copies_per_s.push(f64::from(count) / seconds);
                    frames_per_s.push(done.frames as f64 / seconds);
                }
                let figure = format!("copies a second {EMULATED_NOTE}");
                copies.push(self.row(&figure, series, bytes, "1/s", &copies_per_s));
                let figure = format!("frames a second {EMULATED_NOTE}");
                frames.push(self.row(&figure, series, bytes, "1/s", &frames_per_s));
            }
        }
        Ok([copies, frames].concat())
    }

    /// Rows about how the card's memory was found, over all previous measurements.
    fn lookups(&self) -> Vec<Row> {
        let counters = self.engine.counters();
        let (pins, pages) = self.engine.pages().mapped_counts();
        let statistics = self.fixture.ferry.statistics();
        let cache = statistics.pinning(memferry::engine::Engine::name(&*self.engine));
        let mut counts = vec![
            ("lookups that hit", counters.segments_found),
            ("lookups that missed", counters.segments_missing),
            ("pins kept at the end", pins as u64),
            ("pages pinned at the end", pages as u64),
        ];
        if let Some(pinning) = cache {
            counts.push(("pins found in the pin cache", pinning.cache.hits));
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
    use memferry::engine::nic::NicConfig;
    use memferry::engine::testing::nic_model::NicModel;

    use super::*;

    #[test]
    fn a_copy_that_was_sent_again_or_is_not_whole_tells_nothing() {
        let bytes = REFERENCE_BYTES as u64;
        let good = NicCounters { bytes_by_card: bytes, ..NicCounters::default() };
        assert_eq!(count_mismatch(&good), None);
        assert!(count_mismatch(&NicCounters { retransmits: 1, ..good }).is_some());
        assert!(count_mismatch(&NicCounters { cpu_fallbacks: 1, ..good }).is_some());
        assert!(count_mismatch(&NicCounters { bytes_by_card: bytes - 1, ..good }).is_some());
        assert!(count_mismatch(&NicCounters { bytes_by_processor: 1, ..good }).is_some());
    }

    #[test]
    fn a_model_of_a_card_moves_nearly_all_of_an_aligned_mebibyte() {
        let engine =
            Arc::new(NicEngine::over_model(NicModel::new(), NicConfig::default()).unwrap());
        let mut figures = Vec::new();
        let found =
            measure(engine, None, "model", Effort::Brief, |name| figures.push(name.to_owned()));
        let found = found.unwrap();
        assert!(found.share >= 0.99, "{}", found.share);
        assert_eq!(figures, FIGURES);
        for row in &found.rows {
            assert!(row.value.is_finite() && row.figure.starts_with("model: "), "{row:?}");
            assert_eq!(row.unit == "1/s", row.figure.ends_with(EMULATED_NOTE), "{row:?}");
        }
    }
}
