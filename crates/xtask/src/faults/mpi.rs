//! The tests of MPICH, over Memferry and over the MPI's own transport.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use super::{FaultRow, require_program, root};
use crate::print_line;

/// Checks for the tools that build the tests, and for an MPICH that uses libfabric.
pub(super) fn needs() -> anyhow::Result<()> {
    for program in ["autoconf", "automake", "libtoolize", "make"] {
        let package = if program == "libtoolize" { "libtool" } else { program };
        require_program(program, package, "the tests of MPICH")?;
    }
    let mpich = env::var_os("MEMFERRY_MPICH").map(PathBuf::from).unwrap_or_default();
    if !mpich.join("bin/mpicc").is_file() {
        bail!(
            "the tests of MPICH need one: python3 -m venv target/mpi/mpich && \
             target/mpi/mpich/bin/pip install mpich, then MEMFERRY_MPICH=$PWD/target/mpi/mpich"
        );
    }
    Ok(())
}

pub(super) fn run(_: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--release", "--locked", "--package", "memferry-fabric"])
        .args(["--package", "memferry-mpi-collectives"])
        .env("CARGO_TARGET_DIR", root().join("target"))
        .status()
        .context("cargo cannot be run")?;
    if !built.success() {
        bail!("the provider cannot be built");
    }
    run_tests(&[], "tests of MPICH that pass", rows)?;
    let collectives = ["--collectives", "--folders", "coll"];
    run_tests(&collectives, "its tests of collectives that pass with Memferry's", rows)
}

/// Runs tests of MPICH with options of the script, and adds a row for them.
fn run_tests(options: &[&str], what: &str, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    let mut command = Command::new(root().join("crates/fabric/tests/mpich/run"));
    command.arg("--path").arg(root().join("target/release")).args(options);
    command.arg(env::var("MEMFERRY_MPICH_SOURCE").unwrap_or_else(|_| "--debian".into()));
    let output = command.stderr(Stdio::inherit()).output().context("the script cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    print_line(&text);
    if !output.status.success() {
        bail!("a test of MPICH differs, or could not be run");
    }
    let sums = sums(&text);
    if sums[0] == 0 {
        bail!("no test of MPICH was run");
    }
    let [count, left_out, not_built, both, known, _] = sums;
    let detail = format!(
        "{both} fail on both, {known} differ for a known reason, {left_out} left out, {not_built} not built"
    );
    rows.push(FaultRow { what: what.into(), count, detail });
    Ok(())
}

/// The sums of the columns of the table: passed, left out, not built, fail on both, known, differ.
fn sums(table: &str) -> [u64; 6] {
    let mut sums = [0; 6];
    for line in table.lines() {
        let mut words = line.split_whitespace().skip(1).map(str::parse::<u64>);
        let numbers = [(); 6].map(|()| words.next().and_then(Result::ok));
        if words.next().is_none() && numbers.iter().all(Option::is_some) {
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number.unwrap_or(0));
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_added_and_other_lines_are_not() {
        let table = "folder passed left\npt2pt 40 2 0 1 0 0\ndiffers: a 5 1 2 3 4 5 6 7\ncoll 2 1 3 0 1 0\n";
        assert_eq!(sums(table), [42, 3, 3, 1, 1, 0]);
    }
}
