//! Summary for the reader: a dozen lines of text and three figures over size. Both are made only
//! from outcomes, so the screen, the report and recorded runs show the same.

pub mod figures;

use serde::Serialize;

use crate::results::figure::is_memferry;
use crate::results::outcome::{Outcome, Row};
use crate::results::series::{LOWER_BOUND, MEMFERRY, SHAREABLE, SINGLE_LINE, is_reference};
use crate::results::{number, size};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// One line: what was measured, its value, and the comparison with a peer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Text of the line, such as `4 MiB copy: 34.1 GB/s, 2.44× memcpy`.
    pub text: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Median.
    pub value: f64,
    /// `GB/s`, `ns`, or `share` (0 to 1).
    pub unit: String,
    /// Speedup over the peer; `None` without a peer.
    pub ratio: Option<f64>,
    /// Name of the peer.
    pub peer: Option<String>,
}

impl Line {
    /// Length of the bar, where 1 is the speed of the peer, or a share of 100 %.
    pub fn bar(&self) -> Option<f64> {
        if self.unit == "share" { Some(self.value) } else { self.ratio }
    }
}

/// Returns the lines that these outcomes contain.
pub fn lines(outcomes: &[Outcome]) -> Vec<Line> {
    let find = |bench: &str| outcomes.iter().find(|outcome| outcome.bench == bench);
    let mut lines = Vec::new();
    if let Some(outcome) = find("copy-latency") {
        lines.extend(copy_lines(outcome));
    }
    if let Some(outcome) = find("overlap") {
        lines.extend([64 * KIB, 4 * MIB].into_iter().filter_map(|bytes| overlap(outcome, bytes)));
    }
    if let Some(outcome) = find("pingpong") {
        lines.extend(message_lines(outcome));
    }
    if let Some(outcome) = find("lookup") {
        lines.extend(put_lines(outcome));
    }
    if let Some(outcome) = find("gpu") {
        lines.extend(gpu_lines(outcome));
    }
    lines
}

/// Location of the value and the comparison of a line in an outcome.
struct Comparison<'a> {
    subject: &'a str,
    figure: &'a str,
    bytes: u64,
    ours: &'a str,
    /// The peer, if it was measured, and its name in the line.
    peer: Option<&'a str>,
    peer_name: &'a str,
    /// Key of the median of the ratios within rounds.
    key: &'a str,
}

impl Comparison<'_> {
    fn line(&self, outcome: &Outcome) -> Option<Line> {
        let ours = row(outcome, self.figure, self.ours, self.bytes)?;
        let peer = self.peer.and_then(|peer| row(outcome, self.figure, peer, self.bytes));
        let ratio = peer.and_then(|peer| {
            let key = outcome.summary.get(self.key).filter(|ratio| ratio.is_finite());
            // Older recordings lack some keys; the ratio of the medians replaces them.
            key.or_else(|| Some(speedup(ours, peer)).filter(|ratio| ratio.is_finite()))
        });
        let comparison = match ratio {
            Some(ratio) => format!("{ratio:.2}× {}", self.peer_name),
            None => "no peer found".to_owned(),
        };
        Some(Line {
            text: format!(
                "{} {}: {}, {comparison}",
                size::format(self.bytes),
                self.subject,
                number::with_unit(ours.value, &ours.unit)
            ),
            bytes: self.bytes,
            value: ours.value,
            unit: ours.unit.clone(),
            ratio,
            peer: ratio.map(|_| self.peer_name.to_owned()),
        })
    }
}

fn row<'a>(outcome: &'a Outcome, figure: &str, series: &str, bytes: u64) -> Option<&'a Row> {
    let is_it = |row: &&Row| row.figure == figure && row.series == series && row.bytes == bytes;
    outcome.rows.iter().find(is_it).filter(|row| row.value.is_finite())
}

fn speedup(ours: &Row, peer: &Row) -> f64 {
    if ours.unit == "ns" { peer.value / ours.value } else { ours.value / peer.value }
}

/// Series of copies with the default number of channels: the last one of Memferry.
pub(super) fn default_series<'a>(outcome: &'a Outcome, figure: &str) -> Option<&'a str> {
    let mut rows = outcome.rows.iter().filter(|row| row.figure == figure);
    rows.rfind(|row| is_memferry(&row.series)).map(|row| row.series.as_str())
}

fn copy_lines(outcome: &Outcome) -> Vec<Line> {
    [
        ("hot", "copy", 64 * KIB, "hot_64k_vs_memcpy"),
        ("hot", "copy", 4 * MIB, "hot_4m_vs_memcpy"),
        ("hot", "copy", 64 * MIB, "hot_64m_vs_memcpy"),
        ("cold", "cold copy", 4 * MIB, "cold_4m_vs_memcpy"),
    ]
    .into_iter()
    .filter_map(|(figure, subject, bytes, key)| {
        let (ours, peer) = (default_series(outcome, figure)?, "memcpy");
        let peer = Some(peer);
        Comparison { subject, figure, bytes, ours, peer, peer_name: "memcpy", key }.line(outcome)
    })
    .collect()
}

fn overlap(outcome: &Outcome, bytes: u64) -> Option<Line> {
    let share = row(outcome, "hot", MEMFERRY, bytes)?.value.clamp(0.0, 1.0);
    let percent = (100.0 * share).round();
    Some(Line {
        text: format!("{} copy while computing: {percent} % hidden", size::format(bytes)),
        bytes,
        value: share,
        unit: "share".to_owned(),
        ratio: None,
        peer: None,
    })
}

/// Returns whether a series of `pingpong` is a peer of Memferry.
pub(super) fn is_peer(series: &str) -> bool {
    !is_memferry(series) && !is_reference(series) && ![LOWER_BOUND, SINGLE_LINE].contains(&series)
}

fn message_lines(outcome: &Outcome) -> Vec<Line> {
    const TIME: &str = "half round trip";
    const SPEED: &str = "bandwidth";
    [
        (MEMFERRY, "message", TIME, 8, "8b_vs_best"),
        (MEMFERRY, "message", SPEED, 64 * KIB, "64k_vs_best"),
        (MEMFERRY, "message", SPEED, 4 * MIB, "4m_vs_best"),
        (SHAREABLE, "mapped message", SPEED, 4 * MIB, "4m_shareable_vs_best"),
    ]
    .into_iter()
    .filter_map(|(ours, subject, figure, bytes, key)| {
        let is_measured = |row: &&Row| row.figure == TIME && row.bytes == bytes;
        let peers = outcome.rows.iter().filter(is_measured).filter(|row| is_peer(&row.series));
        let best = peers
            .filter(|row| row.value.is_finite())
            .min_by(|one, other| one.value.total_cmp(&other.value))
            .map(|row| row.series.as_str());
        let peer_name = best.unwrap_or_default();
        Comparison { subject, figure, bytes, ours, peer: best, peer_name, key }.line(outcome)
    })
    .collect()
}

fn put_lines(outcome: &Outcome) -> Vec<Line> {
    [("time of a put", 8, "put_8b_vs_full"), ("bandwidth of puts", 64 * KIB, "put_64k_vs_full")]
        .into_iter()
        .filter_map(|(figure, bytes, key)| {
            let (subject, ours) = ("put into a window", "cache, 0 % misses");
            let (peer, peer_name) = (Some("full table, 0 % other places"), "a full table");
            Comparison { subject, figure, bytes, ours, peer, peer_name, key }.line(outcome)
        })
        .collect()
}

fn gpu_lines(outcome: &Outcome) -> Vec<Line> {
    let bytes = 256 * MIB;
    let to_device = Comparison {
        subject: "to the GPU",
        figure: "host to device, fresh memory of 4 KiB pages",
        bytes,
        ours: MEMFERRY,
        peer: Some("driver, pageable"),
        peer_name: "its driver",
        key: "pageable_to_device_vs_driver",
    };
    let host_to_host = Comparison {
        subject: "copy by the GPU",
        figure: "host to host, registered memory of 4 KiB pages",
        bytes,
        ours: "memferry, caller sleeps",
        peer: Some("memcpy"),
        peer_name: "memcpy",
        key: "host_to_host_vs_memcpy",
    };
    [to_device, host_to_host].iter().filter_map(|comparison| comparison.line(outcome)).collect()
}

#[cfg(test)]
mod tests;
