//! One outcome as text: a table per figure, the summary with its bars, and what the reader should
//! know. The text is built whole and printed by the caller, so that tests can read it.

use crate::figure::Figure;
use crate::outcome::{Outcome, Row};
use crate::show::Paint;
use crate::summary_keys::Mark;
use crate::{number, size};

/// Renders an outcome.
pub(crate) fn render(outcome: &Outcome, paint: Paint) -> String {
    let mut text = format!("{}\n", paint.bold(&outcome.bench));
    for figure in Figure::of(&outcome.rows) {
        text.push('\n');
        text.push_str(&render_figure(&figure, paint));
    }
    text.push_str(&render_summary(outcome, paint));
    let (failed, absent) = outcome.failed_and_absent();
    for (index, failure) in failed.iter().enumerate() {
        let gap = if index == 0 { "\n" } else { "" };
        text.push_str(&format!("{gap}  {} {failure}\n", paint.bad("failed:")));
    }
    if !absent.is_empty() {
        let missing = absent.join(", ");
        text.push_str(&format!("\n  {} {missing}\n", paint.bad("did not take part:")));
    }
    for (index, note) in outcome.notes.iter().enumerate() {
        let gap = if index == 0 { "\n" } else { "" };
        text.push_str(&format!("{gap}  {}\n", paint.dim(note)));
    }
    text
}

/// Sizes down and series across; a figure of one size turns into a plain list of series.
fn render_figure(figure: &Figure<'_>, paint: Paint) -> String {
    let cell =
        |row: Option<&Row>| row.map_or(String::new(), |row| number::in_unit(row.value, &row.unit));
    let mut lines: Vec<Vec<String>> = Vec::new();
    if let [bytes] = figure.sizes[..] {
        for series in &figure.series {
            lines.push(vec![(*series).to_owned(), cell(figure.row(series, bytes))]);
        }
    } else {
        let names = figure.series.iter().map(|series| (*series).to_owned());
        lines.push(std::iter::once("size".to_owned()).chain(names).collect());
        for &bytes in &figure.sizes {
            let label = if bytes == 0 { "any".to_owned() } else { size::format(bytes) };
            let cells = figure.series.iter().map(|series| cell(figure.row(series, bytes)));
            lines.push(std::iter::once(label).chain(cells).collect());
        }
    }
    let is_list = figure.sizes.len() == 1;
    let title = match figure.sizes[..] {
        [bytes] if bytes > 0 => {
            format!("{}, {}, {}", figure.name, size::format(bytes), figure.unit)
        }
        _ => format!("{}, {}", figure.name, figure.unit),
    };
    let mut text = format!("  {}\n", paint.bold(&title));
    for (index, line) in align(&lines, is_list).iter().enumerate() {
        let is_header = index == 0 && !is_list;
        let line = if is_header { paint.dim(line) } else { line.clone() };
        text.push_str(&format!("  {line}\n"));
    }
    text
}

fn render_summary(outcome: &Outcome, paint: Paint) -> String {
    if outcome.summary.is_empty() {
        return String::new();
    }
    let judged: Vec<_> =
        outcome.summary.iter().map(|(key, value)| (key, outcome.judge(key, value))).collect();
    let lines: Vec<_> = judged
        .iter()
        .map(|(key, judged)| vec![(*key).to_owned(), judged.value.clone(), judged.bar.clone()])
        .collect();
    let mut text = format!("\n  {}\n", paint.bold("summary"));
    for (line, (_, judged)) in align(&lines, true).iter().zip(&judged) {
        let mark = match judged.mark {
            Mark::Reached => paint.good(judged.mark.text()),
            Mark::Missed => paint.bad(judged.mark.text()),
            Mark::NotJudged(_) => paint.dim(judged.mark.text()),
            Mark::NoBar => String::new(),
        };
        text.push_str(format!("  {line}  {mark}").trim_end());
        text.push('\n');
    }
    text
}

/// Pads cells to columns. Numbers stand to the right; a first column of names to the left.
pub(crate) fn align(lines: &[Vec<String>], names_first: bool) -> Vec<String> {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let pad = |(column, cell): (usize, &String)| {
        let width = widths[column];
        if names_first && column == 0 {
            format!("{cell:<width$}")
        } else {
            format!("{cell:>width$}")
        }
    };
    lines
        .iter()
        .map(|line| line.iter().enumerate().map(pad).collect::<Vec<_>>().join("  "))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn outcome(rows: Vec<Row>) -> Outcome {
        let mut outcome = sample::empty("copy-latency");
        outcome.rows = rows;
        outcome
    }

    #[test]
    fn columns_are_aligned_and_sizes_readable() {
        let rows = vec![
            Row::of_rounds("hot", "memcpy", 4096, "GB/s", &[21.34]),
            Row::of_rounds("hot", "memferry", 4096, "GB/s", &[22.0]),
            Row::of_rounds("hot", "memcpy", 1 << 20, "GB/s", &[9.5]),
        ];
        let text = render(&outcome(rows), Paint::plain());
        let expected = "copy-latency\n\n  hot, GB/s\n   size  memcpy  memferry\n\
                        \x20 4 KiB    21.3      22.0\n  1 MiB    9.50          \n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_figure_of_one_size_lists_its_series() {
        let rows = vec![
            Row::of_rounds("submit", "memferry", 0, "ns", &[120.0]),
            Row::of_rounds("submit", "a thread per copy", 0, "ns", &[12_000.0]),
        ];
        let text = render(&outcome(rows), Paint::plain());
        assert!(text.contains("  submit, ns\n  memferry              120\n"), "{text}");
        assert!(text.contains("  a thread per copy  12,000\n"), "{text}");
    }

    #[test]
    fn the_summary_says_which_bars_were_reached() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_4k_vs_memcpy", 1.01);
        outcome.summary.set("hot_4m_vs_memcpy", 2.31);
        outcome.summary.set("hot_64m_vs_memcpy", 1.2);
        let text = render(&outcome, Paint::plain());
        assert!(text.contains("  hot_4k_vs_memcpy   1.01×\n"), "{text}");
        assert!(text.contains("  hot_4m_vs_memcpy   2.31×    ≥ 2×  ✓ reached\n"), "{text}");
        assert!(text.contains("  hot_64m_vs_memcpy  1.20×  ≥ 2.5×  ✗ missed\n"), "{text}");
    }

    #[test]
    fn no_bar_is_judged_on_a_busy_machine() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_64m_vs_memcpy", 1.2);
        outcome.busy = Some(0.35);
        let text = render(&outcome, Paint::plain());
        let line = "  hot_64m_vs_memcpy  1.20×  ≥ 2.5×  not judged: the machine was busy\n";
        assert!(text.contains(line), "{text}");
        outcome.busy = Some(0.05);
        assert!(render(&outcome, Paint::plain()).contains("✗ missed"));
    }

    #[test]
    fn no_bar_is_judged_under_a_quota_that_throttles_and_that_is_the_reason_told() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_64m_vs_memcpy", 1.2);
        (outcome.busy, outcome.throttled) = (Some(0.35), Some(0.5));
        let text = render(&outcome, Paint::plain());
        assert!(text.contains("not judged: a CPU quota throttled\n"), "{text}");
        (outcome.busy, outcome.throttled) = (Some(0.0), Some(0.05));
        assert!(render(&outcome, Paint::plain()).contains("✗ missed"));
    }

    #[test]
    fn missing_peers_and_notes_come_last() {
        let mut outcome = outcome(Vec::new());
        outcome.missing.push("rayon".to_owned());
        outcome.notes.push("Two cores only.".to_owned());
        let text = render(&outcome, Paint::plain());
        assert!(text.ends_with("\n  did not take part: rayon\n\n  Two cores only.\n"), "{text}");
    }

    #[test]
    fn failures_of_ours_come_before_missing_peers() {
        let mut outcome = outcome(Vec::new());
        outcome.missing = vec!["rayon".to_owned(), "memferry nic (no card)".to_owned()];
        let text = render(&outcome, Paint::plain());
        let end = "\n  failed: memferry nic (no card)\n\n  did not take part: rayon\n";
        assert!(text.ends_with(end), "{text}");
    }
}
