//! The long forms of checks that are scripts of `.ci`.

use std::process::Command;

use anyhow::{Context, ensure};

use super::{FaultRow, root};

/// Builds what the scripts run, in one call because its parts share dependencies.
const BUILD: &str = "cargo build --release --locked -p memferry-cli -p memferry-c -p memferry-fabric \
                     -p memferry-mpi-collectives -p memferry-preload";

/// Runs a script of the workspace.
fn run(what: &str, script: &str, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    let command = format!("{BUILD} && {script}");
    let status = Command::new("bash").args(["-c", &command]).current_dir(root()).status();
    ensure!(status.context("bash cannot be run")?.success(), "{what}: {script} failed");
    rows.push(FaultRow { what: what.into(), count: 1, detail: script.into() });
    Ok(())
}

/// Every MPI, with up to 64 ranks.
pub(super) fn mpi(_: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    run("MPI programs", ".ci/mpi --long", rows)
}

/// What is installed and packed, as it is released.
pub(super) fn packages(_: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    run("installation and packages", ".ci/packaging dist", rows)?;
    run("the Python package", ".ci/python dist", rows)
}

/// Every bench in full.
pub(super) fn benches(_: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    run("benches", "target/release/memferry bench --all --json > target/bench-all.json", rows)
}
