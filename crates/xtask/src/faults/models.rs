//! The loom models: every interleaving of accesses to state that threads share.

use std::process::Stdio;

use anyhow::{Context, bail};

use super::{FaultRow, cargo_test, passed, root};
use crate::print_line;

const PACKAGES: [&str; 5] = [
    "memferry-engine",
    "memferry-memory",
    "memferry-copy",
    "memferry-message",
    "memferry-collective",
];

pub(super) fn run(_: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    let mut count = 0;
    for package in PACKAGES {
        let mut command = cargo_test();
        command.args(["--release", "--package", package, "--test", "loom"]);
        command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", root().join("target-loom"));
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        let text = String::from_utf8_lossy(&output.stdout);
        print_line(&text);
        match passed(&text) {
            0 => bail!("{package}: no model was checked"),
            _ if !output.status.success() => bail!("{package}: a model is wrong"),
            models => count += models,
        }
    }
    rows.push(FaultRow {
        what: "models of threads".into(),
        count,
        detail: "in every order of 2 to 6 preemptions".into(),
    });
    Ok(())
}
