//! `memferry replay` simulates translation caches of other shapes with the lookups that a program
//! recorded by `MEMFERRY_LOOKUP_TRACE`. It measures no times and accesses no window.

mod table;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use memferry_memory::lookup::LookupCounters;
use memferry_memory::lookup::trace;

use crate::bench::lookup::shape::CacheShape;
use crate::show;

/// The counters of a trace that was replayed through a cache of one shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReplayResult {
    pub(crate) shape: CacheShape,
    pub(crate) counters: LookupCounters,
}

/// Replays a recorded trace with all cache shapes and prints the misses.
pub(crate) fn run(file: &Path, json: bool) -> anyhow::Result<()> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let replays = sweep(&bytes).with_context(|| format!("cannot replay {}", file.display()))?;
    if json {
        show::print_json(&table::json(file, &replays))?;
    } else {
        show::print(&table::text(file, &replays))?;
    }
    Ok(())
}

/// Replays a trace with every cache shape, on all cores.
pub(crate) fn sweep(bytes: &[u8]) -> anyhow::Result<Vec<ReplayResult>> {
    let shapes: Vec<CacheShape> = CacheShape::all().collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&shape) = shapes.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((shape, trace::replay(bytes, shape.geometry())));
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(shapes.len());
    let mut done = Vec::new();
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        done.extend(work());
        for other in others {
            done.extend(other.join().expect("a replay does not panic"));
        }
    });
    let place = |shape: CacheShape| shapes.iter().position(|known| *known == shape);
    done.sort_by_key(|(shape, _)| place(*shape));
    done.into_iter()
        .map(|(shape, counters)| Ok(ReplayResult { shape, counters: counters? }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_trace_is_refused() {
        let error = sweep(b"not a trace at all").unwrap_err();
        assert!(error.to_string().contains("not a trace"), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = run(Path::new("/nowhere/at/all"), false).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all"), "{error}");
    }
}
