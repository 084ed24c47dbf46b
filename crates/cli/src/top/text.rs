//! `memferry top --once`: one table as text.

use super::columns::{fitting, heading, line, sort};
use super::details;
use super::no_process;
use super::sample::{Row, Sample};
use crate::args::TopArgs;

const WIDTH: usize = 120;

/// The table, and with a process its parts.
pub(super) fn render(before: &Sample, now: &Sample, args: &TopArgs) -> String {
    let mut rows = Row::all(Some(before), now);
    if rows.is_empty() {
        return format!("{}\n", no_process(args.pid));
    }
    sort(&mut rows, args.sort);
    let columns = fitting(WIDTH);
    let mut text = format!("{}\n", heading(&columns));
    rows.iter().for_each(|row| text.push_str(&format!("{}\n", line(&columns, row))));
    if let Some(process) = args.pid.and_then(|pid| now.process(pid)) {
        let seconds = now.seconds_since(before);
        for section in details::sections(before.process(process.pid), process, seconds) {
            text.push_str(&format!("\n{}\n", section.title));
            section.lines().iter().for_each(|line| text.push_str(&format!("{line}\n")));
        }
    }
    text
}
