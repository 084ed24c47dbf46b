//! `load`: files to memory and to a GPU, and what the Python package adds. Loads to host memory are
//! measured here; everything that needs Python libraries is measured by `python -m memferry.bench`,
//! whose rows and keys become part of the outcome.

mod host_files;
mod python;
mod script;

use anyhow::Context;

use crate::Progress;
use crate::group::workspace::TempWorkspace;
use crate::results::outcome::Outcome;
use crate::{Bench, Effort};
use python::{Python, PythonBench};

pub(crate) static BENCH: Bench = Bench::new(
    "load",
    "Files to memory and to a GPU, against read, mmap, safetensors and PyTorch; copies from Python",
    run,
);

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    // A wrong MEMFERRY_PYTHON fails before anything is measured.
    let python = python::find()?;
    let figures = python.as_ref().map_or(0, |_| PythonBench::all_figures());
    progress.start(host_files::steps(effort) + figures, &outcome.bench);
    let workspace = TempWorkspace::new().context("no folder for temporary files")?;
    host_files::measure(&mut outcome, &workspace, effort, progress)?;
    match python {
        Ok(python) => measure_python(&mut outcome, &python, &workspace, effort, progress),
        Err(reason) => outcome.missing.push(format!("Python ({reason})")),
    }
    outcome.notes.extend(notes());
    Ok(outcome)
}

/// Runs the benches of the Python package. One that fails is a failure of Memferry's own; the
/// others go on.
fn measure_python(
    outcome: &mut Outcome,
    python: &Python,
    workspace: &TempWorkspace,
    effort: Effort,
    progress: &dyn Progress,
) {
    outcome.versions.insert("memferry, Python".into(), python.package_version().to_owned());
    for bench in PythonBench::ALL {
        let step = &mut |figure: &str| progress.step(figure);
        match python.measure(bench, effort, workspace.folder(), step) {
            Ok(measured) => measured.add_to(outcome),
            Err(reason) => {
                outcome.missing.push(format!("memferry in Python, {} ({reason})", bench.name()));
            }
        }
    }
}

fn notes() -> [String; 2] {
    [
        "Host memory: the file is in the page cache, and opening it is part of the time. New memory is \
         allocated for every load; memory in use is always the same. The mapping is mapped, copied \
         with memcpy and unmapped every time. All bytes are compared before they are timed."
            .into(),
        "From Python: every loader delivers tensors on the GPU, and the device is synchronised before \
         the clock stops. The pinned copy has no file: it is the limit. A worker's array goes from \
         memory to memory; ours lies in a ShareableBuffer. `python -m memferry.bench` measures the \
         same alone."
            .into(),
    ]
}

#[cfg(test)]
mod tests;
