//! The models: what threads share, in every order that loom finds.

use std::process::Stdio;

use anyhow::{Context, bail};

use super::{Row, cargo_test, passed, root};
use crate::say;

const PACKAGES: [&str; 4] =
    ["memferry-engine", "memferry-memory", "memferry-copy", "memferry-message"];

pub(super) fn run(_: bool, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let mut count = 0;
    for package in PACKAGES {
        let mut command = cargo_test();
        command.args(["--release", "--package", package, "--test", "loom"]);
        command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", root().join("target-loom"));
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        let text = String::from_utf8_lossy(&output.stdout);
        say(&text);
        match passed(&text) {
            0 => bail!("{package}: no model was checked"),
            _ if !output.status.success() => bail!("{package}: a model is wrong"),
            models => count += models,
        }
    }
    rows.push(Row {
        what: "models of threads".into(),
        count,
        detail: "in every order of 2 to 6 preemptions".into(),
    });
    Ok(())
}
