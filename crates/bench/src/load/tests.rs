use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use memferry_testing::write_program;
use tempfile::TempDir;

use super::*;
use crate::results::summary_keys::{KEYS, TargetStatus};

/// What `python -m memferry.bench queue --json` printed, shortened.
const QUEUE: &str = r#"{
 "bench": "python-queue",
 "machine": {"cores": 2, "kernel": "6.1.0"},
 "versions": {"memferry": "0.0.9", "python": "3.11.7", "numpy": "2.4.6"},
 "rows": [
  {"figure": "64 MiB from a worker", "series": "memferry", "bytes": 67108864, "value": 10.5,
   "unit": "GB/s", "low": 10.25, "high": 10.75, "rounds": 5},
  {"figure": "64 MiB from a worker", "series": "multiprocessing.Queue", "bytes": 67108864,
   "value": 1.5, "unit": "GB/s", "low": 1.25, "high": 1.75, "rounds": 5}
 ],
 "missing": ["iceoryx2 (pip install iceoryx2)"],
 "summary": {"queue_64m_vs_multiprocessing": 7.0}
}"#;
const OVERHEAD: &str = r#"{"versions": {"memferry": "0.0.9"}, "rows": [{"figure": "a copy from Python",
 "series": "memferry", "bytes": 8, "value": 250.0, "unit": "ns", "low": 240.0, "high": 260.0,
 "rounds": 5}], "missing": [], "summary": {"python_overhead_us": 0.25}}"#;
const LOAD: &str = r#"{"versions": {"torch": "2.11.0"}, "rows": [{"figure": "file to GPU, not cached",
 "series": "memferry", "bytes": 4294967296, "value": 2.5, "unit": "GB/s", "low": 2.25, "high": 2.75,
 "rounds": 5}], "missing": [], "summary": {"load_warm_vs_safetensors": 6.5}}"#;
/// A machine without a GPU.
const NO_GPU: &str = r#"{"versions": {}, "rows": [], "summary": {},
 "missing": ["Python, load (PyTorch finds no GPU that it can use)"]}"#;

/// An interpreter that is a shell script. `benches` has what it does for each bench.
fn fake(benches: &[(&str, &str)]) -> (TempDir, Python) {
    let cases: String = benches
        .iter()
        .map(|(name, text)| format!("*\"memferry.bench {name} --json\"*)\n{text}\n;;\n"))
        .collect();
    let (folder, path) =
        script(&format!("case \"$*\" in *import*) echo memferry 0.0.9;;\n{cases}esac"));
    (folder, Python::at(path).unwrap())
}

fn script(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("python3");
    write_program(&path, format!("#!/bin/sh\n{text}\n"));
    (folder, path)
}

fn print(json: &str) -> String {
    format!("cat <<'END'\n{json}\nEND")
}

#[derive(Default)]
struct RecordedSteps(RefCell<Vec<String>>);

impl Progress for RecordedSteps {
    fn set_part(&self, _part: usize, _parts: usize) {}
    fn start(&self, _total_steps: u64, _label: &str) {}
    fn step(&self, message: &str) {
        self.0.borrow_mut().push(message.to_owned());
    }
    fn finish(&self) {}
    fn report(&self, _line: &str) {}
}

fn outcome_of(benches: &[(&str, &str)]) -> (Outcome, Vec<String>) {
    let (_folder, python) = fake(benches);
    let (workspace, steps) = (TempWorkspace::new().unwrap(), RecordedSteps::default());
    let mut outcome = Outcome::new("load");
    measure_python(&mut outcome, &python, &workspace, Effort::Brief, &steps);
    (outcome, steps.0.into_inner())
}

#[test]
fn rows_and_keys_of_the_package_become_part_of_the_outcome() {
    let queue = format!("echo 'measuring: 64 MiB from a worker' >&2\n{}", print(QUEUE));
    let benches = [("queue", &*queue), ("overhead", &print(OVERHEAD)), ("load", &print(LOAD))];
    let (outcome, steps) = outcome_of(&benches);
    assert_eq!(outcome.rows.len(), 4);
    assert_eq!(steps, ["64 MiB from a worker"]);
    assert_eq!(outcome.missing, ["iceoryx2 (pip install iceoryx2)"]);
    let judged = |key: &str| outcome.judge(key, outcome.summary.get(key).unwrap());
    assert_eq!(judged("queue_64m_vs_multiprocessing").status, TargetStatus::Reached);
    assert_eq!(judged("load_warm_vs_safetensors").status, TargetStatus::Missed);
    assert_eq!(judged("python_overhead_us").value, "0.250 µs");
    assert_eq!(outcome.versions["memferry"], env!("CARGO_PKG_VERSION"));
    assert_eq!(outcome.versions["memferry, Python"], "0.0.9");
    assert_eq!(outcome.versions["torch"], "2.11.0");
}

#[test]
fn a_machine_without_a_gpu_lacks_a_peer_and_fails_nothing() {
    let benches =
        [("queue", &*print(QUEUE)), ("overhead", &print(OVERHEAD)), ("load", &print(NO_GPU))];
    let (outcome, _) = outcome_of(&benches);
    assert_eq!(outcome.rows.len(), 3);
    assert!(outcome.failed_and_missing().0.is_empty(), "{:?}", outcome.missing);
    assert!(outcome.missing.iter().any(|peer| peer.contains("PyTorch finds no GPU")));
}

#[test]
fn a_missing_package_is_named_with_its_cause_and_cure() {
    let complaint = "ModuleNotFoundError: No module named 'memferry'";
    let (_folder, path) = script(&format!("echo \"{complaint}\" >&2; exit 1"));
    let reason = Python::at(path).unwrap_err();
    assert!(reason.contains(complaint) && reason.contains("pip install crates/python"), "{reason}");
    let reason = Python::at("/nowhere/python3".into()).unwrap_err();
    assert!(reason.contains("cannot be started"), "{reason}");
    let (_folder, path) = script("echo hello");
    let reason = Python::at(path).unwrap_err();
    assert!(reason.contains("is not a Python interpreter: it said `hello`"), "{reason}");
}

#[test]
fn a_failing_script_and_wrong_json_are_failures_of_ours_and_the_rest_goes_on() {
    let fails = "echo 'measuring: something' >&2; echo 'ValueError: out of luck' >&2; exit 3";
    let benches = [("queue", fails), ("overhead", "echo '{\"rows\": 1}'"), ("load", &print(LOAD))];
    let (outcome, _) = outcome_of(&benches);
    let (failed, _) = outcome.failed_and_missing();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed[0].starts_with("memferry in Python, overhead (its output is no outcome"));
    assert_eq!(failed[1], "memferry in Python, queue (exit status: 3: ValueError: out of luck)");
    assert_eq!(outcome.rows.len(), 1);
}

#[test]
fn a_script_that_is_killed_and_leaves_a_child_behind_does_not_block() {
    let start = Instant::now();
    // The child keeps both outputs open.
    let killed = "sleep 1000 & kill -9 $$";
    let (outcome, _) = outcome_of(&[("queue", killed), ("overhead", ":"), ("load", killed)]);
    assert!(start.elapsed() < Duration::from_secs(60));
    let (failed, _) = outcome.failed_and_missing();
    assert_eq!(failed.len(), 3, "{failed:?}");
    assert!(failed[1].contains("signal: 9"), "{failed:?}");
}

#[test]
fn a_script_that_does_not_end_is_ended() {
    let mut command = Command::new("sh");
    command.args(["-c", "echo 'half a line' >&2; exec sleep 1000"]);
    let endless = script::run(command, Duration::from_millis(200), &mut |_| {}).unwrap_err();
    assert_eq!(endless, "it did not end within 200ms: half a line");
}

#[test]
fn the_folder_and_the_extent_reach_the_script() {
    let (_folder, python) = fake(&[("queue", "echo \"$*\" >&2; exit 1")]);
    let said = |effort| {
        let folder = Path::new("/some/folder");
        python.measure(PythonBench::Queue, effort, folder, &mut |_| {}).unwrap_err()
    };
    assert!(said(Effort::Quick).contains("--rounds 3 --gib 0.5 --folder /some/folder"));
    assert!(said(Effort::Full).contains("--rounds 5 --gib 4"));
}

#[test]
fn every_key_of_the_package_is_listed() {
    let source = include_str!("../../../python/python/memferry/bench.py");
    let queue = include_str!("../../../python/python/memferry/_bench_queue.py");
    for known in KEYS.iter().filter(|known| known.bench == "load") {
        let name = format!("\"{}\"", known.key);
        assert!(source.contains(&name) || queue.contains(&name), "{name}");
    }
    let calls = |text: &str| text.matches("bench.key(").count();
    // One key is set without a ratio.
    let listed = KEYS.iter().filter(|known| known.bench == "load").count();
    assert_eq!(calls(source) + calls(queue) + 1, listed);
}
