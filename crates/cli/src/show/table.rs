//! One outcome as text: a table per figure, the summary, and at most two sentences of notes. The
//! report has all notes. The caller prints the complete text, so that tests can read it.

use memferry_bench::results::figure::Figure;
use memferry_bench::results::outcome::{Outcome, Row};
use memferry_bench::results::summary_keys::TargetStatus;
use memferry_bench::results::{number, size};

use crate::show::Paint;
use crate::show::columns::align;

/// The options for displaying an outcome.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableView {
    pub(crate) paint: Paint,
    /// Whether the summary shows the targets and whether they are reached.
    pub(crate) bars: bool,
    /// Whether the text mentions the option that writes a report.
    pub(crate) names_report: bool,
}

/// Formats an outcome as text.
pub(crate) fn render(outcome: &Outcome, view: TableView) -> String {
    let paint = view.paint;
    let mut text = format!("{}\n", paint.bold(&outcome.bench));
    for figure in Figure::of(&outcome.rows) {
        text.push('\n');
        text.push_str(&render_figure(&figure, paint));
    }
    text.push_str(&render_summary(outcome, view));
    let (failed, absent) = outcome.failed_and_missing();
    for (index, failure) in failed.iter().enumerate() {
        let gap = if index == 0 { "\n" } else { "" };
        text.push_str(&format!("{gap}  {} {failure}\n", paint.bad("failed:")));
    }
    if !absent.is_empty() {
        let missing = absent.join(", ");
        text.push_str(&format!("\n  {} {missing}\n", paint.bad("did not take part:")));
    }
    if let Some(note) = short_note(outcome) {
        text.push_str(&format!("\n  {}\n", paint.dim(note)));
        if view.names_report {
            let line = "All notes are in the report (--report FILE.html).";
            text.push_str(&format!("  {}\n", paint.dim(line)));
        }
    }
    text
}

/// The note about a disturbance, which is the last note, if there is one; otherwise the first
/// sentence of the notes.
fn short_note(outcome: &Outcome) -> Option<&str> {
    if outcome.disturbance().is_some() {
        return outcome.notes.last().map(String::as_str);
    }
    outcome.notes.first().map(|note| first_sentence(note))
}

fn first_sentence(text: &str) -> &str {
    let is_start = |rest: &str| rest.starts_with(|c: char| c.is_uppercase() || c == '`');
    let ends = text.match_indices(". ").map(|(at, _)| at + 1);
    ends.into_iter().find(|&end| is_start(&text[end + 1..])).map_or(text, |end| &text[..end])
}

/// Formats a figure with one row per size and one column per series. A figure of one size becomes a
/// list of series.
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

fn render_summary(outcome: &Outcome, view: TableView) -> String {
    let paint = view.paint;
    if outcome.summary.is_empty() {
        return String::new();
    }
    let judged: Vec<_> =
        outcome.summary.iter().map(|(key, value)| (key, outcome.judge(key, value))).collect();
    let lines: Vec<_> = judged
        .iter()
        .map(|(key, judged)| {
            let mut cells = vec![(*key).to_owned(), judged.value.clone()];
            cells.extend(view.bars.then(|| judged.target.clone()));
            cells
        })
        .collect();
    let mut text = format!("\n  {}\n", paint.bold("summary"));
    for (line, (_, judged)) in align(&lines, true).iter().zip(&judged) {
        let mark = match judged.status {
            _ if !view.bars => String::new(),
            TargetStatus::Reached => paint.good(judged.status.text()),
            TargetStatus::Missed => paint.bad(judged.status.text()),
            TargetStatus::NotJudged(_) => paint.dim(judged.status.text()),
            TargetStatus::NoTarget => String::new(),
        };
        text.push_str(format!("  {line}  {mark}").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::sample;

    use super::*;

    const PLAIN: TableView = TableView { paint: Paint::plain(), bars: false, names_report: false };
    const WITH_BARS: TableView = TableView { bars: true, ..PLAIN };

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
        let text = render(&outcome(rows), PLAIN);
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
        let text = render(&outcome(rows), PLAIN);
        assert!(text.contains("  submit, ns\n  memferry              120\n"), "{text}");
        assert!(text.contains("  a thread per copy  12,000\n"), "{text}");
    }

    #[test]
    fn the_summary_says_which_bars_were_reached() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_4k_vs_memcpy", 1.01);
        outcome.summary.set("hot_4m_vs_memcpy", 2.31);
        outcome.summary.set("hot_64m_vs_memcpy", 1.2);
        let text = render(&outcome, WITH_BARS);
        assert!(text.contains("  hot_4k_vs_memcpy   1.01×\n"), "{text}");
        assert!(text.contains("  hot_4m_vs_memcpy   2.31×    ≥ 2×  ✓ reached\n"), "{text}");
        assert!(text.contains("  hot_64m_vs_memcpy  1.20×  ≥ 2.5×  ✗ missed\n"), "{text}");
    }

    #[test]
    fn no_bar_is_judged_on_a_busy_machine() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_64m_vs_memcpy", 1.2);
        outcome.busy = Some(0.35);
        let text = render(&outcome, WITH_BARS);
        let line = "  hot_64m_vs_memcpy  1.20×  ≥ 2.5×  not judged: the machine was busy\n";
        assert!(text.contains(line), "{text}");
        outcome.busy = Some(0.05);
        assert!(render(&outcome, WITH_BARS).contains("✗ missed"));
    }

    #[test]
    fn no_bar_is_judged_under_a_quota_that_throttles_and_that_is_the_reason_told() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_64m_vs_memcpy", 1.2);
        (outcome.busy, outcome.throttled) = (Some(0.35), Some(0.5));
        let text = render(&outcome, WITH_BARS);
        assert!(text.contains("not judged: a CPU quota throttled\n"), "{text}");
        (outcome.busy, outcome.throttled) = (Some(0.0), Some(0.05));
        assert!(render(&outcome, WITH_BARS).contains("✗ missed"));
    }

    #[test]
    fn targets_are_shown_only_where_they_are_wanted() {
        let mut outcome = outcome(Vec::new());
        outcome.summary.set("hot_4m_vs_memcpy", 2.31);
        let text = render(&outcome, PLAIN);
        assert!(text.ends_with("  summary\n  hot_4m_vs_memcpy  2.31×\n"), "{text}");
    }

    #[test]
    fn at_most_two_sentences_stand_below_the_tables() {
        let mut outcome = outcome(Vec::new());
        outcome.notes = vec!["At 1.5 x. `b` is next.".to_owned(), "Another.".to_owned()];
        let view = TableView { names_report: true, ..PLAIN };
        let text = render(&outcome, view);
        let end = "\n\n  At 1.5 x.\n  All notes are in the report (--report FILE.html).\n";
        assert!(text.ends_with(end), "{text}");
        outcome.busy = Some(0.5);
        outcome.notes.push("Others were busy.".to_owned());
        let text = render(&outcome, PLAIN);
        assert!(text.ends_with("\n\n  Others were busy.\n"), "{text}");
    }

    #[test]
    fn missing_peers_and_notes_come_last() {
        let mut outcome = outcome(Vec::new());
        outcome.missing.push("rayon".to_owned());
        outcome.notes.push("Two cores only.".to_owned());
        let text = render(&outcome, WITH_BARS);
        assert!(text.ends_with("\n  did not take part: rayon\n\n  Two cores only.\n"), "{text}");
    }

    #[test]
    fn failures_of_ours_come_before_missing_peers() {
        let mut outcome = outcome(Vec::new());
        outcome.missing = vec!["rayon".to_owned(), "memferry nic (no card)".to_owned()];
        let text = render(&outcome, WITH_BARS);
        let end = "\n  failed: memferry nic (no card)\n\n  did not take part: rayon\n";
        assert!(text.ends_with(end), "{text}");
    }
}
