//! A program of ten million tiny copies: what the library in front of the C library costs where it can
//! do no good.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::session::{Sessions, Start, Timer};
use crate::Effort;
use crate::group::process_group::REPLY_TIMEOUT;
use crate::harness::{Budget, Samples, max_or_nan, set};
use crate::host::process;
use crate::results::outcome::Outcome;

const SOURCE: &str = include_str!("tiny.c");
/// Copies of one run.
const COPIES: u64 = 10_000_000;
/// The orders of the program, and their figures.
const ORDERS: [(&str, &str); 2] = [
    ("tiny", "a tiny copy, sizes in a row of 16"),
    ("random", "a tiny copy, sizes that no branch predictor knows"),
];

pub(super) fn measure(outcome: &mut Outcome, effort: Effort, folder: &Path) {
    let program = match compile(folder) {
        Ok(program) => program,
        Err(reason) => {
            outcome.missing.push(format!("a program of tiny copies ({reason})"));
            return;
        }
    };
    // Where a process lies in memory changes the time of tiny copies as long as it runs: so it is started
    // several times.
    let (starts, rounds) = if effort == Effort::Full { (7, 5) } else { (5, 3) };
    let mut all = ORDERS.map(|_| Samples::default());
    let mut missing = Vec::new();
    for _ in 0..starts {
        let command = |start: Start| start.command(&program);
        let name = "tiny copies";
        let mut sessions =
            Sessions::start(name, Timer::Program, &Start::ALL, command, &mut missing);
        for ((order, _), samples) in ORDERS.iter().zip(&mut all) {
            let budget = Budget::fixed(rounds, COPIES);
            samples.append(sessions.interleave(order, budget, &mut missing));
        }
    }
    missing.sort();
    missing.dedup();
    outcome.missing.extend(missing);
    let mut ratios = Vec::new();
    for ((_, figure), samples) in ORDERS.iter().zip(&all) {
        outcome.rows.extend(samples.time_rows(figure, 0));
        let median = |start: Start| samples.median_of_all(start.series(), starts * rounds);
        // The programs of one start are no pair.
        ratios.push(median(Start::Copies) / median(Start::Plain));
    }
    set(&mut outcome.summary, "tiny_overhead", max_or_nan(ratios));
}

fn compile(folder: &Path) -> Result<PathBuf, String> {
    let compiler =
        process::find("cc").ok_or("there is no C compiler: apt install gcc libc6-dev")?;
    let (source, program) = (folder.join("tiny.c"), folder.join("tiny"));
    std::fs::write(&source, SOURCE).map_err(|error| format!("cannot be compiled: {error}"))?;
    let mut command = Command::new(compiler);
    // A compiler that knows `memcpy` would put in instructions where a program has a call.
    command.args(["-std=gnu11", "-O2", "-fno-builtin", "-o"]).arg(&program).arg(&source);
    process::output(command, REPLY_TIMEOUT)?;
    Ok(program)
}
