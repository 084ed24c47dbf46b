//! Recorded runs: the output of `memferry bench --json`, read from files. A folder is one run with
//! one outcome per bench.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::results::BENCH_NAMES;
use crate::results::outcome::Outcome;

/// Reads files and folders, and returns the outcomes in the order of the benches.
pub fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Outcome>> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    for path in paths {
        for file in files_of(path)? {
            for outcome in read_file(&file)? {
                // A folder may hold repeated runs of a bench; the first file in the sort order is
                // used.
                if outcomes.iter().all(|known| known.bench != outcome.bench) {
                    outcomes.push(outcome);
                }
            }
        }
    }
    if outcomes.is_empty() {
        bail!("no outcome of a bench was found: name files or folders of `memferry bench --json`");
    }
    outcomes.sort_by_key(|outcome| place_of(&outcome.bench));
    Ok(outcomes)
}

/// The file itself, or the JSON files of a folder: `BENCH.json` before `BENCH-again.json`.
fn files_of(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "json") {
            files.push(file);
        }
    }
    files.sort_by_key(|file| {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        (!BENCH_NAMES.contains(&name.as_str()), name)
    });
    Ok(files)
}

/// The outcome of a bench, or the outcomes of a suite.
fn read_file(path: &Path) -> anyhow::Result<Vec<Outcome>> {
    let context = || format!("{} is not the output of `memferry bench --json`", path.display());
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut json: Value = serde_json::from_str(&text).with_context(context)?;
    let found = match json.get_mut("outcomes").map(Value::take) {
        Some(outcomes) => serde_json::from_value(outcomes),
        None => serde_json::from_value(json).map(|outcome| vec![outcome]),
    };
    found.with_context(context)
}

fn place_of(bench: &str) -> usize {
    BENCH_NAMES.iter().position(|name| *name == bench).unwrap_or(BENCH_NAMES.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::sample;
    use crate::results::suite;

    fn write(folder: &Path, name: &str, value: &impl serde::Serialize) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, serde_json::to_string(value).unwrap()).unwrap();
        path
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_the_benches_and_each_bench_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut again = sample::latency();
        again.summary.set("hot_4m_vs_memcpy", 9.0);
        write(folder.path(), "copy-latency-again.json", &again);
        write(folder.path(), "copy-latency.json", &sample::latency());
        write(folder.path(), "apps.json", &sample::empty("apps"));
        fs::write(folder.path().join("README.md"), "text").unwrap();
        let outcomes = read(&[folder.path().to_owned()]).unwrap();
        let names: Vec<_> = outcomes.iter().map(|outcome| outcome.bench.as_str()).collect();
        assert_eq!(names, ["copy-latency", "apps"]);
        assert_eq!(outcomes[0].summary.get("hot_4m_vs_memcpy"), Some(2.31));
    }

    #[test]
    fn the_object_of_a_suite_holds_several_outcomes() {
        let folder = tempfile::tempdir().unwrap();
        let joined = suite::join("all", &sample::suite()).unwrap();
        let path = write(folder.path(), "all.json", &joined);
        assert_eq!(read(&[path]).unwrap().len(), sample::suite().len());
    }

    #[test]
    fn what_is_no_outcome_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "other.json", &serde_json::json!({ "a": 1 }));
        let error = format!("{:#}", read(&[path]).unwrap_err());
        assert!(
            error.contains("other.json is not the output of `memferry bench --json`"),
            "{error}"
        );
        assert!(read(&[folder.path().join("nowhere")]).is_err());
    }
}
