//! Tests of the worker processes of the bench `lookup`, and of the replay of their traces.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use memferry_sys::affinity;
use serde_json::{Value, json};

/// Worker processes that execute commands; the first one replies.
struct LookupWorkers {
    members: Vec<Child>,
    replies: BufReader<ChildStdout>,
}

impl LookupWorkers {
    /// Starts the workers. The leader records its lookups to files whose names begin with `trace`.
    fn start(name: &str, size: usize, trace: &Path) -> Self {
        let name = format!("memferry-test-{}-{name}", std::process::id());
        let cores = affinity::allowed_cores();
        let start = |rank: usize| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_memferry"));
            command.args(["worker", "lookup", "--name", &name]);
            for (option, value) in
                [("--rank", rank), ("--size", size), ("--core", cores[rank % cores.len()])]
            {
                command.args([option, &value.to_string()]);
            }
            if rank == 0 {
                command.env("MEMFERRY_LOOKUP_TRACE", trace);
            }
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it is built")
        };
        let mut members: Vec<Child> = (0..size).map(start).collect();
        let answers = BufReader::new(members[0].stdout.take().expect("it has a mouth"));
        let mut crew = Self { members, replies: answers };
        assert_eq!(crew.read_reply(), "ready");
        crew
    }

    fn read_reply(&mut self) -> String {
        let mut line = String::new();
        self.replies.read_line(&mut line).expect("it speaks");
        line.trim().to_owned()
    }

    fn request(&mut self, order: &Value) -> Value {
        for member in &mut self.members {
            writeln!(member.stdin.as_mut().expect("it has ears"), "{order}").expect("it listens");
        }
        let answer = self.read_reply();
        serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{order}: `{answer}`"))
    }

    /// Runs a program over an endpoint and returns its number.
    fn run(&mut self, endpoint: usize) -> u64 {
        let answer = self.request(&json!({ "Run": endpoint }));
        assert!(answer["Ran"]["ns"].as_f64().is_some_and(|ns| ns > 0.0), "{answer}");
        answer["Ran"]["digest"].as_u64().expect("a number")
    }

    fn end(mut self) {
        for member in &mut self.members {
            drop(member.stdin.take());
        }
        for mut member in self.members {
            assert!(member.wait().expect("it ends").success());
        }
    }
}

fn cache(line_entries: usize) -> Value {
    let shape = json!({ "entries": 16384, "line_entries": line_entries, "ways": 4 });
    json!({ "Open": { "Cache": { "shape": shape, "most_lines": null } } })
}

#[test]
fn every_program_comes_to_the_same_result_over_the_full_table_and_over_a_cache() {
    let folder = tempfile::tempdir().expect("a place for files");
    let programs = [
        ("Fourier", 64),
        ("Lu", 128),
        ("Radix", 1 << 16),
        ("Ocean", 64),
        ("Water", 64),
        ("Random", 8),
        ("Sparse", 1),
    ];
    for size in [2, 4] {
        let name = format!("results-{size}");
        let mut crew = LookupWorkers::start(&name, size, &folder.path().join("trace"));
        for (kind, scale) in programs {
            let begun = crew.request(&json!({ "Begin": { "kind": kind, "scale": scale } }));
            assert_eq!(begun, "Done", "{kind}");
            assert_eq!(crew.request(&json!({ "Open": "Full" })), "Done", "{kind}");
            assert_eq!(crew.request(&cache(64)), "Done", "{kind}");
            let results = [0, 1, 1, 0].map(|endpoint| crew.run(endpoint));
            assert!(results.iter().all(|result| *result == results[0]), "{kind}: {results:?}");
            assert_eq!(crew.request(&json!("End")), "Done", "{kind}");
        }
        crew.end();
    }
}

#[test]
fn what_a_worker_records_is_replayed_with_every_shape() {
    let folder = tempfile::tempdir().expect("a place for files");
    let mut crew = LookupWorkers::start("trace", 2, &folder.path().join("trace"));
    crew.request(&json!({ "Begin": { "kind": "Fourier", "scale": 64 } }));
    crew.request(&cache(8));
    crew.run(0);
    let report = crew.request(&json!({ "Report": 0 }))["Report"].clone();
    crew.request(&json!({ "Close": 0 }));
    crew.end();

    let traces: Vec<PathBuf> = std::fs::read_dir(folder.path())
        .expect("the folder is there")
        .map(|entry| entry.expect("it can be read").path())
        .collect();
    let [trace] = &traces[..] else { panic!("one endpoint, one trace: {traces:?}") };
    let replay = |options: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_memferry"))
            .arg("replay")
            .arg(trace)
            .args(options)
            .output()
            .expect("the program is built");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let json: Value = serde_json::from_str(&replay(&["--json"])).expect("one object");
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 36);
    let own = rows
        .iter()
        .find(|row| row["entries"] == 16384 && row["line_entries"] == 8 && row["ways"] == 4)
        .expect("the shape that was recorded");
    // No access of this program crosses a line, so nothing is prefetched.
    assert_eq!((&own["send"], &own["receive"]), (&report["send"], &report["receive"]));
    assert!(replay(&[]).contains("C16K L8 A4"));
}

#[test]
fn what_is_no_trace_is_refused() {
    let folder = tempfile::tempdir().expect("a place for files");
    let file = folder.path().join("letter");
    std::fs::write(&file, "dear reader, this is not a trace").expect("it can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_memferry"))
        .arg("replay")
        .arg(&file)
        .output()
        .expect("the program is built");
    assert_eq!(output.status.code(), Some(1));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("letter") && complaint.contains("not a trace"), "{complaint}");
}
