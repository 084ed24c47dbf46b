//! The three figures over size at the start of a report: copies, messages, and overlap.

use super::{KIB, default_series, is_peer};
use crate::results::figure::is_memferry;
use crate::results::outcome::{Outcome, Row};
use crate::results::series::SHAREABLE;

/// A figure over size, extracted from an outcome.
#[derive(Debug)]
pub struct HeadlineFigure {
    /// Title of the figure.
    pub title: &'static str,
    /// Meaning of the values.
    pub detail: &'static str,
    /// Outcome that contains only the rows of this figure.
    pub outcome: Outcome,
}

/// Returns the figures that these outcomes contain.
pub fn figures(outcomes: &[Outcome]) -> Vec<HeadlineFigure> {
    [copies(outcomes), messages(outcomes), overlap(outcomes)].into_iter().flatten().collect()
}

/// Blocking copies against memcpy. Sizes below 64 KiB are omitted: both are equal there, and so
/// fast that the rest of the curve would be flat.
pub fn copies(outcomes: &[Outcome]) -> Option<HeadlineFigure> {
    let outcome = outcomes.iter().find(|outcome| outcome.bench == "copy-latency")?;
    let ours = default_series(outcome, "hot")?;
    let is_shown = |row: &Row| {
        row.figure == "hot"
            && row.bytes >= 64 * KIB
            && (row.series == ours || !is_memferry(&row.series))
    };
    cut(outcome, "Copies by size", "GB/s, buffers used just before", is_shown)
}

/// Messages between two processes against all peers.
pub fn messages(outcomes: &[Outcome]) -> Option<HeadlineFigure> {
    let outcome = outcomes.iter().find(|outcome| outcome.bench == "pingpong")?;
    let is_shown = |row: &Row| {
        let is_ours = is_memferry(&row.series);
        row.figure == "bandwidth" && row.bytes >= 4 * KIB && (is_ours || is_peer(&row.series))
    };
    let mut figure = cut(
        outcome,
        "Messages by size",
        "GB/s between two processes, half a round trip",
        is_shown,
    )?;
    for row in &mut figure.outcome.rows {
        if row.series == SHAREABLE {
            "memferry, mapped memory".clone_into(&mut row.series);
        }
    }
    Some(figure)
}

fn overlap(outcomes: &[Outcome]) -> Option<HeadlineFigure> {
    let outcome = outcomes.iter().find(|outcome| outcome.bench == "overlap")?;
    let detail = "share of a copy that is hidden behind computing";
    cut(outcome, "Overlap by size", detail, |row| row.figure == "hot")
}

/// Extracts the rows of one figure; `None` if there are not enough points for a curve.
fn cut(
    outcome: &Outcome,
    title: &'static str,
    detail: &'static str,
    is_shown: impl Fn(&Row) -> bool,
) -> Option<HeadlineFigure> {
    let mut outcome = outcome.clone();
    outcome.rows.retain(is_shown);
    let first = outcome.rows.first()?.bytes;
    let is_curve = outcome.rows.iter().any(|row| row.bytes != first);
    is_curve.then_some(HeadlineFigure { title, detail, outcome })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;

    #[test]
    fn copies_are_drawn_for_the_default_channels_and_memcpy_alone() {
        let figure = copies(&[sample::latency()]).unwrap();
        let rows = &figure.outcome.rows;
        assert!(rows.iter().all(|row| row.figure == "hot" && row.bytes >= 64 * KIB));
        assert!(rows.iter().all(|row| row.series != "memferry, 1 channel"));
        assert!(rows.iter().any(|row| row.series == "memferry, 2 channels"));
        assert!(rows.iter().any(|row| row.series == "memcpy"));
    }

    #[test]
    fn a_single_size_is_no_figure() {
        let mut outcome = sample::latency();
        outcome.rows.retain(|row| row.bytes == 64 * KIB);
        assert!(figures(&[outcome]).is_empty());
    }
}
