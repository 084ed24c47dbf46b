//! The overview of `memferry bench`: one line with a bar for each measurement, followed by the
//! notes.

use memferry_bench::results::headline::Line;
use memferry_bench::results::outcome::Machine;

use crate::show::Paint;

/// The length in characters of a bar that equals the peer's speed.
const CELLS_PER_PEER: usize = 6;
/// The maximum length of a bar in characters.
const MAX_CELLS: usize = 4 * CELLS_PER_PEER;

/// Renders the lines with their bars.
pub(crate) fn render(machine: &Machine, lines: &[Line], notes: &[String], paint: Paint) -> String {
    let cores = if machine.cores == 1 { "core" } else { "cores" };
    let title = format!("Memferry on {} {cores} of {}", machine.cores, machine.cpu);
    let mut text = format!("\n  {}\n\n", paint.bold(&title));
    let width = lines.iter().map(|line| line.text.chars().count()).max().unwrap_or(0);
    for line in lines {
        let padding = " ".repeat(width - line.text.chars().count());
        let row = format!("  {}{padding}  {}", line.text, bar(line.bar(), paint));
        text.push_str(row.trim_end());
        text.push('\n');
    }
    if lines.iter().any(|line| line.bar().is_some()) {
        let legend = "│ marks the speed of the peer, or the whole copy.";
        text.push_str(&format!("\n  {}\n", paint.dim(legend)));
    }
    for note in notes {
        text.push_str(&format!("  {}\n", paint.dim(note)));
    }
    text.push('\n');
    text
}

/// A bar with a mark at 1, the peer's speed. A bar that exceeds the maximum length ends in an
/// arrow.
fn bar(length: Option<f64>, paint: Paint) -> String {
    let Some(length) = length.filter(|length| length.is_finite()) else {
        return String::new();
    };
    let cells = (length.max(0.0) * CELLS_PER_PEER as f64).round() as usize;
    let fill = |from: usize, to: usize| "━".repeat(cells.min(to).saturating_sub(from));
    let end = if cells > MAX_CELLS { "▶" } else { "" };
    let before = fill(0, CELLS_PER_PEER);
    let gap = " ".repeat(CELLS_PER_PEER - before.chars().count());
    let beyond = format!("{}{end}", fill(CELLS_PER_PEER, MAX_CELLS));
    format!("{}{gap}{}{}", paint.accent(&before), paint.dim("│"), paint.accent(&beyond))
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::sample;

    use super::*;

    fn line(text: &str, ratio: Option<f64>) -> Line {
        let peer = ratio.map(|_| "memcpy".to_owned());
        Line { text: text.to_owned(), bytes: 8, value: 1.0, unit: "GB/s".to_owned(), ratio, peer }
    }

    #[test]
    fn a_bar_has_its_mark_at_the_speed_of_the_peer() {
        let plain = Paint::plain();
        assert_eq!(bar(Some(1.0), plain), "━━━━━━│");
        assert_eq!(bar(Some(0.5), plain), "━━━   │");
        assert_eq!(bar(Some(2.0), plain), "━━━━━━│━━━━━━");
        assert!(bar(Some(40.0), plain).ends_with("━▶"));
        assert_eq!(bar(None, plain), "");
        assert_eq!(bar(Some(f64::NAN), plain), "");
    }

    #[test]
    fn bars_begin_in_one_column_and_notes_come_last() {
        let lines = [line("a", Some(1.0)), line("longer", Some(0.0)), line("none", None)];
        let notes = ["Not found: UCX.".to_owned()];
        let text = render(&sample::empty("x").machine, &lines, &notes, Paint::plain());
        assert!(text.contains("  a       ━━━━━━│\n  longer        │\n  none\n"), "{text}");
        assert!(text.ends_with("\n  Not found: UCX.\n\n"), "{text}");
    }
}
