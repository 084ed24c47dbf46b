//! The colour, dash pattern and marker of each series. Memferry's own series share one strong
//! colour and differ by dash pattern and marker; a peer keeps its colour in the whole report. The
//! style sheet defines the colours, so that dark mode can adjust them.

use memferry_bench::results::figure::is_memferry;
use memferry_bench::results::outcome::Outcome;

/// The number of colours for peers in the style sheet.
const PEER_COLOURS: usize = 5;
const DASHES: [&str; 4] = ["", "8 4", "2.5 3", "10 3 2.5 3"];

/// The shape of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    Circle,
    Square,
    Triangle,
    Diamond,
}

const MARKERS: [Marker; 4] = [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Diamond];

/// The style of one series.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Style {
    /// The class in the style sheet: `ours`, or `peer0` to `peer4`.
    pub(super) class: String,
    /// The dash pattern of the line; empty for a solid line.
    pub(super) dash: &'static str,
    /// The shape of the points.
    pub(super) marker: Marker,
}

/// The styles of all series in one section of a report.
#[derive(Debug)]
pub(super) struct Palette<'a> {
    peers: Vec<&'a str>,
    ours: Vec<&'a str>,
}

impl<'a> Palette<'a> {
    /// Creates the palette of a section. Peers are numbered across all outcomes; Memferry's own
    /// series are numbered within the section, so that the first one is solid.
    pub(super) fn new(all: &'a [Outcome], section: &'a Outcome) -> Self {
        let mut peers = Vec::new();
        let mut ours = Vec::new();
        for series in all.iter().flat_map(series) {
            if !is_memferry(series) && !peers.contains(&series) {
                peers.push(series);
            }
        }
        for series in series(section) {
            if is_memferry(series) && !ours.contains(&series) {
                ours.push(series);
            }
        }
        Self { peers, ours }
    }

    /// The style of a series.
    pub(super) fn style(&self, series: &str) -> Style {
        let place = |list: &[&str]| list.iter().position(|&known| known == series).unwrap_or(0);
        if is_memferry(series) {
            let index = place(&self.ours);
            return Style {
                class: "ours".to_owned(),
                dash: DASHES[index % DASHES.len()],
                marker: MARKERS[index % MARKERS.len()],
            };
        }
        let index = place(&self.peers);
        Style {
            class: format!("peer{}", index % PEER_COLOURS),
            dash: DASHES[index / PEER_COLOURS % DASHES.len()],
            marker: MARKERS[(index + 1) % MARKERS.len()],
        }
    }
}

fn series(outcome: &Outcome) -> impl Iterator<Item = &str> {
    outcome.rows.iter().map(|row| row.series.as_str())
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::outcome::Row;
    use memferry_bench::results::sample;

    use super::*;

    fn outcome(series: &[&str]) -> Outcome {
        let mut outcome = sample::empty("x");
        outcome.rows = series.iter().map(|s| Row::of_rounds("f", s, 1, "ns", &[1.0])).collect();
        outcome
    }

    #[test]
    fn ours_share_a_colour_and_differ_by_dash() {
        let all = [outcome(&["memcpy", "memferry, 1 channel", "memferry, 2 channels"])];
        let palette = Palette::new(&all, &all[0]);
        let (one, two) =
            (palette.style("memferry, 1 channel"), palette.style("memferry, 2 channels"));
        assert_eq!((one.class.as_str(), one.dash), ("ours", ""));
        assert_eq!(two.class, "ours");
        assert_ne!(one.dash, two.dash);
    }

    #[test]
    fn a_peer_keeps_its_colour_in_every_section() {
        let all = [outcome(&["memcpy", "rayon"]), outcome(&["rayon", "memferry", "memcpy"])];
        let (first, second) = (Palette::new(&all, &all[0]), Palette::new(&all, &all[1]));
        assert_eq!(first.style("rayon"), second.style("rayon"));
        assert_ne!(first.style("rayon").class, first.style("memcpy").class);
    }
}
