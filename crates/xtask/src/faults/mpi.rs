//! The tests of MPICH, over Memferry and over the MPI's own transport.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use super::{Row, root};
use crate::say;

pub(super) fn run(_: bool, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--release", "--locked", "--package", "memferry-fabric"])
        .status()
        .context("cargo cannot be run")?;
    if !built.success() {
        bail!("the provider cannot be built");
    }
    let mut command = Command::new(root().join("crates/fabric/tests/mpich/run"));
    command.arg(env::var("MEMFERRY_MPICH_SOURCE").unwrap_or_else(|_| "--debian".into()));
    let output = command.stderr(Stdio::inherit()).output().context("the script cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    say(&text);
    if !output.status.success() {
        bail!("a test of MPICH differs, or could not be run");
    }
    let sums = sums(&text);
    if sums[0] == 0 {
        bail!("no test of MPICH was run");
    }
    let [count, left_out, both, known, _] = sums;
    let detail =
        format!("{both} fail on both, {known} differ for a known reason, {left_out} left out");
    rows.push(Row { what: "tests of MPICH that pass".into(), count, detail });
    Ok(())
}

/// The sums of the columns of the table: passed, left out, fail on both, known, differ.
fn sums(table: &str) -> [u64; 5] {
    let mut sums = [0; 5];
    for line in table.lines() {
        let mut words = line.split_whitespace().skip(1).map(str::parse::<u64>);
        let numbers = [(); 5].map(|()| words.next().and_then(Result::ok));
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
        let table =
            "folder passed left\npt2pt 40 2 1 0 0\ndiffers: a 5 1 2 3 4 5 6\ncoll 2 1 0 1 0\n";
        assert_eq!(sums(table), [42, 3, 1, 1, 0]);
    }
}
