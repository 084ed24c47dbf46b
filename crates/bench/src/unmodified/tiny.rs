//! A program of ten million tiny copies: what the library in front of the C library costs where it can
//! do no good.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::session::{Sessions, Start, Timer};
use crate::Effort;
use crate::group::process_group::REPLY_TIMEOUT;
use crate::harness::{Budget, set};
use crate::host::process;
use crate::results::outcome::Outcome;

const SOURCE: &str = include_str!("tiny.c");
/// Copies of one run.
const COPIES: u64 = 10_000_000;

pub(super) fn measure(outcome: &mut Outcome, effort: Effort, folder: &Path) {
    let program = match compile(folder) {
        Ok(program) => program,
        Err(reason) => {
            outcome.missing.push(format!("a program of tiny copies ({reason})"));
            return;
        }
    };
    let mut missing = Vec::new();
    let mut sessions = Sessions::start(
        "tiny copies",
        Timer::Program,
        &Start::ALL,
        |it| it.command(&program),
        &mut missing,
    );
    let rounds = if effort == Effort::Full { 21 } else { 11 };
    let samples = sessions.interleave("tiny", Budget::fixed(rounds, COPIES), &mut missing);
    outcome.missing.extend(missing);
    outcome.rows.extend(samples.time_rows("a tiny copy", 0));
    let ratio = samples.ratio(Start::Plain.series(), Start::Copies.series());
    set(&mut outcome.summary, "tiny_overhead", ratio);
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
