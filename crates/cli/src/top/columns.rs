//! The columns of the table of processes, for the terminal and for text.

use super::quantity::{bytes, count, time};
use super::sample::Row;
use crate::args::SortKey;

/// A column.
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: usize,
    /// The key that sorts by this column.
    pub(super) key: SortKey,
    /// The meaning, for the list of columns.
    meaning: &'static str,
    cell: fn(&Row) -> String,
}

impl Column {
    /// The cell of a row, to the right in its width; names to the left.
    pub(super) fn cell(&self, row: &Row) -> String {
        self.fit(&(self.cell)(row))
    }

    /// A text in the width of the column.
    pub(super) fn fit(&self, text: &str) -> String {
        let text: String = text.chars().take(self.width).collect();
        match self.key {
            SortKey::Name => format!("{text:<width$}", width = self.width),
            _ => format!("{text:>width$}", width = self.width),
        }
    }
}

/// All columns, the most important ones first.
const ALL: [Column; 11] = [
    Column {
        title: "PID",
        width: 7,
        key: SortKey::Pid,
        meaning: "the process",
        cell: |row| row.pid.to_string(),
    },
    Column {
        title: "PROGRAM",
        width: 15,
        key: SortKey::Name,
        meaning: "its name",
        cell: |row| row.name.clone(),
    },
    Column {
        title: "COPY B/s",
        width: 8,
        key: SortKey::CopyBytes,
        meaning: "bytes that it copied, in a second",
        cell: |row| bytes(row.rates.copy_bytes),
    },
    Column {
        title: "MSG B/s",
        width: 7,
        key: SortKey::MessageBytes,
        meaning: "bytes that it sent and received, in a second",
        cell: |row| bytes(row.rates.message_bytes),
    },
    Column {
        title: "COPY/s",
        width: 6,
        key: SortKey::Copies,
        meaning: "copies, in a second",
        cell: |row| count(row.rates.copies),
    },
    Column {
        title: "MSG/s",
        width: 6,
        key: SortKey::Messages,
        meaning: "messages that it sent and received, in a second",
        cell: |row| count(row.rates.messages),
    },
    Column {
        title: "P99",
        width: 6,
        key: SortKey::Latency,
        meaning: "time of blocking copies of 64 KiB or more and of announced messages: 99 % took less",
        cell: |row| time(row.p99_ns),
    },
    Column {
        title: "DEPTH",
        width: 5,
        key: SortKey::Depth,
        meaning: "descriptors in the queues of its channels now",
        cell: |row| count(row.totals.depth as f64),
    },
    Column {
        title: "FALLB",
        width: 5,
        key: SortKey::Fallbacks,
        meaning: "fallbacks since its start: the slower way was taken, because a queue was full, memory was not pinned, or the kernel refused",
        cell: |row| count(row.totals.fallbacks as f64),
    },
    Column {
        title: "WAIT/s",
        width: 6,
        key: SortKey::Waits,
        meaning: "waits for copies that were started, and sleeps of waits for messages, in a second",
        cell: |row| count(row.rates.waits),
    },
    Column {
        title: "P50",
        width: 6,
        key: SortKey::Latency,
        meaning: "the same time: half took less",
        cell: |row| time(row.p50_ns),
    },
];

/// The columns that fit into a width, with a space between two.
pub(super) fn fitting(width: usize) -> Vec<&'static Column> {
    let mut used = 0;
    let fits = |column: &&'static Column| {
        used += column.width + 1;
        used <= width + 1
    };
    ALL.iter().take_while(fits).collect()
}

/// Title and meaning of every column.
pub(super) fn meanings() -> impl Iterator<Item = (&'static str, &'static str)> {
    ALL.iter().map(|column| (column.title, column.meaning))
}

/// The heading of a table with these columns.
pub(super) fn heading(columns: &[&Column]) -> String {
    columns.iter().map(|column| column.fit(column.title)).collect::<Vec<_>>().join(" ")
}

/// A row of a table with these columns.
pub(super) fn line(columns: &[&Column], row: &Row) -> String {
    columns.iter().map(|column| column.cell(row)).collect::<Vec<_>>().join(" ")
}

/// Sorts rows: numbers with the largest first, processes and names in order.
pub(super) fn sort(rows: &mut [Row], key: SortKey) {
    let value = |row: &Row| match key {
        SortKey::Pid | SortKey::Name => 0.0,
        SortKey::Copies => row.rates.copies,
        SortKey::CopyBytes => row.rates.copy_bytes,
        SortKey::Messages => row.rates.messages,
        SortKey::MessageBytes => row.rates.message_bytes,
        SortKey::Latency => row.p99_ns.unwrap_or(0) as f64,
        SortKey::Depth => row.totals.depth as f64,
        SortKey::Waits => row.rates.waits,
        SortKey::Fallbacks => row.totals.fallbacks as f64,
    };
    rows.sort_by(|a, b| {
        let by_name = || if key == SortKey::Name { a.name.cmp(&b.name) } else { a.pid.cmp(&b.pid) };
        value(b).total_cmp(&value(a)).then_with(by_name)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_terminals_show_fewer_columns() {
        assert_eq!(fitting(200).len(), ALL.len());
        for width in [0, 10, 23, 40, 80, 120] {
            let columns = fitting(width);
            assert!(heading(&columns).chars().count() <= width, "{width}");
        }
        assert!(fitting(40).len() >= 4 && fitting(80).len() >= 9);
    }
}
