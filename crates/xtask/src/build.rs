//! Building test programs, and learning from cargo where they are.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context, bail};
use serde_json::Value;

/// A test program of a package, named as in `cargo test --package PACKAGE --test TARGET`. The target
/// `lib` is the tests inside the package's library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestTarget {
    pub(crate) package: String,
    pub(crate) target: String,
}

impl FromStr for TestTarget {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((package, target)) if !package.is_empty() && !target.is_empty() => {
                Ok(Self { package: package.into(), target: target.into() })
            }
            _ => Err("a test is named PACKAGE/TARGET"),
        }
    }
}

impl TestTarget {
    /// Builds the program as `cargo test` would.
    pub(crate) fn build(&self) -> anyhow::Result<PathBuf> {
        let Self { package, target } = self;
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["test", "--no-run", "--message-format=json-render-diagnostics"]);
        command.args(["--package", package.as_str()]);
        match target.as_str() {
            "lib" => command.arg("--lib"),
            target => command.args(["--test", target]),
        };
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        if !output.status.success() {
            bail!("the test {target} of {package} could not be built");
        }
        let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
        executable_in(&messages)
            .with_context(|| format!("cargo built no program for the test {target} of {package}"))
    }
}

/// The test program among cargo's messages, of which the last that has one is it.
fn executable_in(messages: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests = messages.filter(|message| {
        message["reason"] == "compiler-artifact" && message["profile"]["test"] == true
    });
    tests.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_the_messages() {
        let messages = r#"
            {"reason":"compiler-artifact","profile":{"test":false},"executable":"/t/program"}
            no json
            {"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/nic-1"}
            {"reason":"build-finished","success":true}"#;
        assert_eq!(executable_in(messages), Some("/t/nic-1".into()));
        assert_eq!(executable_in(r#"{"reason":"build-finished"}"#), None);
    }

    #[test]
    fn a_test_is_named_by_its_package_and_its_target() {
        let target: TestTarget = "memferry-engine/nic".parse().unwrap();
        assert_eq!((target.package.as_str(), target.target.as_str()), ("memferry-engine", "nic"));
        for wrong in ["nic", "/nic", "memferry-engine/", ""] {
            assert!(wrong.parse::<TestTarget>().is_err(), "{wrong}");
        }
    }
}
