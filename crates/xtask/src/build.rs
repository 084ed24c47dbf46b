//! Building test programs with cargo, and finding their files.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context, bail};
use serde_json::Value;

/// A test program of a package, named as in `cargo test --package PACKAGE --test TARGET`. The
/// target `lib` names the unit tests of the library.
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
        let mut arguments = vec!["--package", package.as_str()];
        match target.as_str() {
            "lib" => arguments.push("--lib"),
            target => arguments.extend(["--test", target]),
        }
        let last = build_tests(&arguments)?.pop();
        let program = last.with_context(|| {
            format!("cargo built no program for the test {target} of {package}")
        })?;
        Ok(program.path)
    }
}

/// A test program that cargo has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestProgram {
    pub(crate) package: String,
    /// The source file, relative to the folder of the package.
    pub(crate) source: String,
    pub(crate) path: PathBuf,
    /// The folder of the package, in which cargo would run the program.
    pub(crate) folder: PathBuf,
}

impl TestProgram {
    /// Whether `cargo test --package PACKAGE --test TEST` runs the program.
    pub(crate) fn is(&self, package: &str, test: &str) -> bool {
        let sources = [format!("tests/{test}.rs"), format!("tests/{test}/main.rs")];
        self.package == package && sources.contains(&self.source)
    }

    /// What cargo would add to its environment.
    pub(crate) fn environment(&self) -> [(&'static str, OsString); 3] {
        // The libraries that cargo has built for the program lie beside it, and above.
        let mut folders: Vec<PathBuf> =
            self.path.ancestors().skip(1).take(2).map(Path::to_owned).collect();
        folders.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
        [
            ("CARGO_MANIFEST_DIR", self.folder.clone().into()),
            ("CARGO_PKG_NAME", self.package.clone().into()),
            ("LD_LIBRARY_PATH", env::join_paths(folders).unwrap_or_default()),
        ]
    }
}

/// Builds the programs that `cargo test` would run with these arguments, in the same order.
pub(crate) fn build_tests(arguments: &[&str]) -> anyhow::Result<Vec<TestProgram>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["test", "--no-run", "--message-format=json-render-diagnostics"]).args(arguments);
    let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
    if !output.status.success() {
        bail!("the tests could not be built");
    }
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    Ok(programs_in(&messages))
}

/// The package name in a package ID such as `path+file:///folder/crates/copy#memferry-copy@0.1.0`,
/// or `path+file:///folder/crates/xtask#0.1.0` if the folder has the same name.
fn package_of(identity: &str) -> &str {
    let (folder, rest) = identity.split_once('#').unwrap_or((identity, ""));
    match rest.split_once('@') {
        Some((name, _)) => name,
        None => folder.rsplit('/').next().unwrap_or(folder),
    }
}

/// The test programs in cargo's JSON messages.
pub(crate) fn programs_in(messages: &str) -> Vec<TestProgram> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs: Vec<TestProgram> = messages
        .filter(|message| {
            message["reason"] == "compiler-artifact" && message["profile"]["test"] == true
        })
        .filter_map(|message| {
            let path = PathBuf::from(message["executable"].as_str()?);
            let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
            let source = Path::new(message["target"]["src_path"].as_str()?);
            let source = source.strip_prefix(&folder).unwrap_or(source).display().to_string();
            let package = package_of(message["package_id"].as_str()?).to_owned();
            Some(TestProgram { package, source, path, folder })
        })
        .collect();
    programs.sort_by(|one, other| (&one.folder, &one.source).cmp(&(&other.folder, &other.source)));
    programs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_among_the_messages() {
        let artifact = |is_test: bool, source: &str, program: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","profile":{{"test":{is_test}}},"executable":"/t/{program}",
                "package_id":"path+file:///w/crates/engine#memferry-engine@0.1.0",
                "manifest_path":"/w/crates/engine/Cargo.toml","target":{{"src_path":"/w/crates/engine/{source}"}}}}"#
            )
            .replace('\n', "")
        };
        let messages = [
            artifact(true, "tests/nic/main.rs", "nic-1"),
            artifact(false, "src/main.rs", "program"),
            "no json".into(),
            artifact(true, "src/lib.rs", "memferry_engine-2"),
            r#"{"reason":"build-finished","success":true}"#.into(),
        ];
        let program = |source: &str, path: &str| TestProgram {
            package: "memferry-engine".into(),
            source: source.into(),
            path: path.into(),
            folder: "/w/crates/engine".into(),
        };
        assert_eq!(
            programs_in(&messages.join("\n")),
            [
                program("src/lib.rs", "/t/memferry_engine-2"),
                program("tests/nic/main.rs", "/t/nic-1")
            ]
        );
        assert_eq!(programs_in(r#"{"reason":"build-finished"}"#), []);
    }

    #[test]
    fn the_name_of_a_package_is_read_from_both_kinds_of_identity() {
        assert_eq!(
            package_of("path+file:///w/crates/engine#memferry-engine@0.1.0"),
            "memferry-engine"
        );
        assert_eq!(package_of("path+file:///w/crates/xtask#0.1.0"), "xtask");
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
