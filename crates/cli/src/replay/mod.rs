//! `memferry replay` shows the misses of recorded lookups with translation caches of other shapes.

mod table;

use std::fs;
use std::path::Path;

use anyhow::Context;
use memferry_bench::replay::sweep;

use crate::show;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_named() {
        let error = run(Path::new("/nowhere/at/all"), false).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all"), "{error}");
    }
}
