//! Copies of Python and NumPy: of bytes objects, of bytearrays, and of arrays, from 1 to 256 MiB.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use memferry_sys::settings;

use super::session::{Sessions, Start, Timer};
use crate::harness::{Budget, set};
use crate::host::process;
use crate::results::outcome::Outcome;
use crate::results::size;
use crate::{Effort, Progress};

const SCRIPT: &str = include_str!("copies.py");
const VARIABLE: &str = "MEMFERRY_PYTHON";
const PROBE: &str = "import sys; print('at', sys.executable)
try:
    import numpy; print('numpy', numpy.__version__)
except ImportError:
    pass";
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// What is copied: the word for the script, and the figure.
const KINDS: [(&str, &str); 3] = [
    ("numpy", "NumPy: numpy.copyto"),
    ("bytearray", "Python: bytearray to bytearray"),
    ("bytes", "Python: bytearray to a new bytes object"),
];
/// The kind and the size of the key.
const REFERENCE: (&str, u64) = ("numpy", 64 << 20);

/// Measures copies. Returns how much longer the interpreter takes for its own work while it is profiled.
pub(super) fn measure(outcome: &mut Outcome, effort: Effort, progress: &dyn Progress) -> f64 {
    let (python, numpy) = match find() {
        Ok(found) => found,
        Err(reason) => {
            outcome.missing.push(format!("Python ({reason})"));
            return f64::NAN;
        }
    };
    match &numpy {
        Some(version) => _ = outcome.versions.insert("NumPy".to_owned(), version.clone()),
        None => outcome.missing.push(format!(
            "NumPy ({} cannot import it: pip install numpy, and let {VARIABLE} name its interpreter)",
            python.display()
        )),
    }
    let command = |start: Start| {
        let mut command = start.command(&python)?;
        command.args(["-c", SCRIPT]);
        Ok(command)
    };
    let mut missing = Vec::new();
    let starts = Start::ALL;
    let mut sessions = Sessions::start("Python", Timer::Program, &starts, command, &mut missing);
    progress.step("the interpreter");
    let rounds = if effort == Effort::Full { 31 } else { 21 };
    let samples = sessions.interleave("interpreter 0", Budget::fixed(rounds, 10), &mut missing);
    outcome.rows.extend(samples.time_rows("Python: lists and dictionaries to JSON and back", 0));
    let overhead = samples.ratio(Start::Plain.series(), Start::Profile.series());
    let starts = [Start::Plain, Start::Copies];
    sessions.retain(&starts);
    for (kind, bytes) in points(effort) {
        if kind == "numpy" && numpy.is_none() {
            continue;
        }
        progress.step(&format!("{kind}, {}", size::format(bytes)));
        let order = format!("{kind} {bytes}");
        let samples = sessions.interleave(&order, Budget::of_groups(effort), &mut missing);
        let figure = KINDS.iter().find(|(word, _)| *word == kind).expect("it is one of them").1;
        outcome.rows.extend(samples.bandwidth_rows(figure, bytes, bytes));
        if (kind, bytes) == REFERENCE {
            let ratio = samples.ratio(Start::Copies.series(), Start::Plain.series());
            set(&mut outcome.summary, "numpy_64m_speedup", ratio);
        }
    }
    outcome.missing.extend(missing);
    overhead
}

/// Kinds and sizes, in the order in which they are measured.
pub(super) fn points(effort: Effort) -> Vec<(&'static str, u64)> {
    let sizes: &[u64] = match effort {
        Effort::Brief => &[64 << 20],
        Effort::Quick => &[1 << 20, 4 << 20, 64 << 20, 256 << 20],
        Effort::Full => &[1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20],
    };
    KINDS.iter().flat_map(|&(kind, _)| sizes.iter().map(move |&bytes| (kind, bytes))).collect()
}

/// The interpreter that `MEMFERRY_PYTHON` names, or `python3` in `PATH`, and the version of its NumPy. The
/// interpreter says itself where it is: what is found may be a script that starts it.
fn find() -> Result<(PathBuf, Option<String>), String> {
    let named = settings::read_variable(VARIABLE, |text| Some(text.to_owned()));
    let program = match named.ok().flatten() {
        Some(name) if name.contains('/') => name.into(),
        Some(name) => process::find(&name).ok_or(format!("{VARIABLE}: there is no {name}"))?,
        None => process::find("python3").ok_or("apt install python3")?,
    };
    let mut command = Command::new(program);
    command.args(["-c", PROBE]);
    let said = process::output(command, PROBE_TIMEOUT)?;
    let word = |name: &str| said.lines().find_map(|line| line.strip_prefix(name));
    let python = word("at ").ok_or_else(|| format!("it said `{}`", said.trim()))?;
    Ok((python.trim().into(), word("numpy ").map(|version| version.trim().to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_effort_measures_the_array_of_the_key() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            assert!(points(effort).contains(&REFERENCE), "{effort:?}");
        }
    }
}
