//! Programs that nobody here wrote: a data base, a compressor, a copy between memory files. Most of their time is not in large copies, so that this shows what the
//! library costs as well as what it gives.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::session::{Sessions, Start, Timer};
use crate::group::splitmix64;
use crate::harness::{Budget, FnCandidate, Harness, Sample};
use crate::host::process;
use crate::results::outcome::Outcome;
use crate::{Effort, Progress};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the file that programs read.
const INPUT_BYTES: usize = 64 << 20;
/// The last part of the name of that file.
const INPUT: &str = ".input";

/// A program and its work.
struct Program {
    name: &'static str,
    figure: &'static str,
    /// Whether it takes long enough for its start not to matter.
    is_profiled: bool,
    /// What installs it.
    cure: &'static str,
    /// Its arguments, with the first part of the names of files.
    arguments: fn(&str) -> Vec<String>,
}

const PROGRAMS: [Program; 2] = [
    Program {
        name: "zstd",
        figure: "zstd: compressing 64 MiB, from start to end",
        is_profiled: true,
        cure: "apt install zstd",
        arguments: |prefix| {
            let words = ["-q", "-1", "--single-thread", "-f", "-o", "/dev/null"].map(str::to_owned);
            words.into_iter().chain([format!("{prefix}{INPUT}")]).collect()
        },
    },
    Program {
        name: "dd",
        figure: "dd: 64 MiB from memory file to memory file, from start to end",
        is_profiled: false,
        cure: "apt install coreutils",
        arguments: |prefix| {
            let files = [format!("if={prefix}{INPUT}"), format!("of={prefix}.output")];
            files.into_iter().chain(["bs=16M", "status=none"].map(str::to_owned)).collect()
        },
    },
];

/// The shell of SQLite, which executes lines.
const SQLITE: &str = "sqlite3";
/// A table of small rows with an index.
const ROWS: &str = "begin; create table t(a integer primary key, b text); \
    with recursive n(i) as (select 1 union all select i + 1 from n where i < 60000) \
    insert into t select i, 'row number ' || (i * 7919 % 60000) from n; \
    create index u on t(b); rollback; select 'done';";
/// Large values that are joined.
const VALUES: &str = "with v(x) as materialized (select zeroblob(33554432)), n(i) as (values (1), (2), (3)) \
    select iif(sum(length(cast(x || x as blob))) = 201326592, 'done', 'wrong') from v, n;";

/// Orders, their figures, and whether they count for the overhead of a profile.
const QUERIES: [(&str, &str, bool); 2] = [
    (ROWS, "SQLite: 60,000 rows and an index", true),
    (VALUES, "SQLite: joining values of 32 MiB", false),
];

/// Measures queries of SQLite. Returns how much longer they take while SQLite is profiled.
fn measure_sqlite(outcome: &mut Outcome, effort: Effort) -> f64 {
    let Some(path) = process::find(SQLITE) else {
        outcome.missing.push("SQLite (apt install sqlite3)".to_owned());
        return f64::NAN;
    };
    let command = |start: Start| {
        let mut command = start.command(&path)?;
        command.args(["-batch", ":memory:", "-cmd", "select 'ready';"]);
        Ok(command)
    };
    let mut missing = Vec::new();
    let mut sessions = Sessions::start("SQLite", Timer::Bench, &Start::ALL, command, &mut missing);
    let rounds = if effort == Effort::Full { 31 } else { 15 };
    let mut overhead = f64::NAN;
    for (query, figure, is_profiled) in QUERIES {
        let samples = sessions.interleave(query, Budget::fixed(rounds, 1), &mut missing);
        outcome.rows.extend(samples.time_rows(figure, 0));
        if is_profiled {
            overhead = samples.ratio(Start::Plain.series(), Start::Profile.series());
        }
    }
    outcome.missing.extend(missing);
    overhead
}

/// Measures programs; their files have names that begin with `prefix`. Returns how much longer each takes while
/// it is profiled.
pub(super) fn measure(
    outcome: &mut Outcome,
    effort: Effort,
    prefix: &str,
    progress: &dyn Progress,
) -> anyhow::Result<Vec<f64>> {
    progress.step("SQLite");
    let mut overheads = vec![measure_sqlite(outcome, effort)];
    write_input(&format!("{prefix}{INPUT}")).context("no file for programs to read")?;
    for program in PROGRAMS {
        progress.step(program.name);
        let Some(path) = process::find(program.name) else {
            outcome.missing.push(format!("{} ({})", program.name, program.cure));
            continue;
        };
        let arguments = (program.arguments)(prefix);
        let (path, arguments) = (&path, &arguments);
        let mut candidates = Start::ALL.map(|start| {
            let run = move |_| run_once(start, path, arguments);
            FnCandidate::timed(start.series(), start.role(), run)
        });
        let rounds = if effort == Effort::Full { 15 } else { 7 };
        let samples = Harness::new(Budget::fixed(rounds, 1)).interleave(&mut candidates);
        for failure in samples.failures() {
            let reason = format!("{}: {}", program.name, failure.reason);
            outcome.missing.push(format!("{} ({reason})", failure.series));
        }
        outcome.rows.extend(samples.time_rows(program.figure, 0));
        if program.is_profiled {
            overheads.push(samples.ratio(Start::Plain.series(), Start::Profile.series()));
        }
    }
    Ok(overheads)
}

fn run_once(start: Start, program: &Path, arguments: &[String]) -> Result<Sample, String> {
    let mut command = start.command(program)?;
    command.args(arguments);
    let begin = Instant::now();
    process::output(command, TIMEOUT)?;
    Ok(Sample::of_total(begin.elapsed().as_nanos() as f64))
}

/// Writes text that can be compressed by about half.
fn write_input(path: &str) -> std::io::Result<()> {
    let mut random = 1u64;
    let words: Vec<u8> = std::iter::repeat_with(|| {
        random = splitmix64(random);
        [b'a' + (random % 16) as u8, b'e' + (random >> 8 & 3) as u8, b' ']
    })
    .take(1 << 18)
    .flatten()
    .collect();
    let mut file = File::create(path)?;
    let mut written = 0;
    while written < INPUT_BYTES {
        let part = &words[..words.len().min(INPUT_BYTES - written)];
        file.write_all(part)?;
        written += part.len();
    }
    Ok(())
}
