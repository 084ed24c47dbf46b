//! Memory of translations: by component, against the full table; and with a window that is far
//! larger than any table should be.

use super::command::{LookupMode, LookupReport};
use super::session::TranslationSession;
use super::workload::{Problem, ProgramKind};
use crate::replay::CacheShape;
use crate::results::outcome::Row;

/// Size of the large window in GiB.
const SPARSE_GIGABYTES: usize = 64;
/// Lines that stay attached behind the cache while the large window is used.
const SPARSE_LINES: usize = 1024;

/// Share of the full table's bytes that the cache saves.
pub(super) fn saving(cache: &LookupReport, full: &LookupReport) -> f64 {
    1.0 - cache.memory.initiator_bytes() as f64 / full.memory.initiator_bytes() as f64
}

/// Rows of the cache and the full table, by component.
pub(super) fn rows(name: &str, cache: &LookupReport, full: &LookupReport) -> Vec<Row> {
    let figure = format!("bytes for the translations of {name}");
    let mut rows = Vec::new();
    for (table, report) in [("full table", full), ("cache", cache)] {
        let memory = report.memory;
        for (component, bytes) in [
            ("all that copies look at", memory.initiator_bytes()),
            ("entries", memory.entries),
            ("tags", memory.tags),
            ("order of use", memory.order),
            ("tables behind it", memory.table),
            ("processes, queue, counters", memory.fixed_bytes()),
        ] {
            // Components that a table does not have are omitted.
            if bytes > 0 {
                let series = format!("{table}: {component}");
                rows.push(Row::of_rounds(&figure, &series, 0, "bytes", &[bytes as f64]));
            }
        }
    }
    rows
}

/// Uses pages all over a window that is larger than the machine's memory.
pub(super) fn sparse_rows(session: &mut TranslationSession) -> anyhow::Result<Vec<Row>> {
    session.begin(Problem { kind: ProgramKind::Sparse, scale: SPARSE_GIGABYTES })?;
    let table = LookupMode::Cache { shape: CacheShape::REFERENCE, most_lines: Some(SPARSE_LINES) };
    let endpoint = session.open(table)?;
    let before = session.report(endpoint)?;
    session.run(endpoint)?;
    let after = session.report(endpoint)?;
    session.end()?;
    let figure = format!("bytes for the translations of a window of {SPARSE_GIGABYTES} GiB");
    let row =
        |series: &str, bytes: u64| Row::of_rounds(&figure, series, 0, "bytes", &[bytes as f64]);
    let memory = after.memory;
    Ok(vec![
        row("a full table would take (entries alone)", after.attached_window_bytes / 4096 * 8),
        row("cache", memory.initiator_bytes() as u64),
        row("tables behind it", memory.table as u64),
        row("processes, queue, counters", memory.fixed_bytes() as u64),
        row("page tables before", before.page_table_bytes),
        row("page tables after", after.page_table_bytes),
    ])
}

#[cfg(test)]
mod tests {
    use super::super::command::MemoryComponents;
    use super::*;

    #[test]
    fn what_is_saved_is_the_share_of_the_full_table() {
        let report = |entries, table| LookupReport {
            memory: MemoryComponents { entries, table, ..MemoryComponents::default() },
            ..LookupReport::default()
        };
        // The table behind the cache does not count, because copies do not access it.
        assert_eq!(saving(&report(250, 9000), &report(1000, 0)), 0.75);
    }
}
