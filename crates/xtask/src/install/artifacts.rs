//! Building the files to install with cargo, and finding them.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;

/// The packages whose files are installed.
const PACKAGES: [&str; 5] = [
    "memferry-cli",
    "memferry-c",
    "memferry-fabric",
    "memferry-mpi-collectives",
    "memferry-preload",
];

/// The files that cargo builds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Artifacts {
    pub(crate) program: PathBuf,
    pub(crate) shared_library: PathBuf,
    pub(crate) static_library: Option<PathBuf>,
    pub(crate) provider: PathBuf,
    pub(crate) collectives: PathBuf,
    pub(crate) preload: PathBuf,
}

impl Artifacts {
    /// Builds the packages with a profile, in one call because they share dependencies.
    pub(crate) fn build(profile: &str) -> anyhow::Result<Self> {
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.current_dir(super::workspace_root());
        command.args(["build", "--locked", "--profile", profile]);
        for package in PACKAGES {
            command.args(["-p", package]);
        }
        command.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
        let output = command.output().context("cargo cannot be run")?;
        ensure!(output.status.success(), "Memferry could not be built");
        Self::among(&String::from_utf8(output.stdout).context("the messages of cargo")?)
    }

    /// Finds the files in cargo's JSON messages.
    fn among(messages: &str) -> anyhow::Result<Self> {
        let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let artifacts: Vec<Value> =
            messages.filter(|message| message["reason"] == "compiler-artifact").collect();
        let find = |target: &str, kind: &str, extension: &str| {
            let has_kind = |artifact: &&Value| {
                artifact["target"]["name"] == target
                    && artifact["target"]["kind"]
                        .as_array()
                        .is_some_and(|it| it.contains(&kind.into()))
            };
            let files =
                artifacts.iter().filter(has_kind).filter_map(|it| it["filenames"].as_array());
            let mut paths = files.flatten().filter_map(Value::as_str).map(PathBuf::from);
            paths.find(|path| path.extension().unwrap_or_default() == extension)
        };
        let missing = |name: &str| format!("cargo has not built {name}");
        Ok(Self {
            program: find("memferry", "bin", "").with_context(|| missing("memferry"))?,
            shared_library: find("adma", "cdylib", "so").with_context(|| missing("libadma.so"))?,
            static_library: find("adma", "staticlib", "a"),
            provider: find("memferry_fi", "cdylib", "so")
                .with_context(|| missing("the provider"))?,
            collectives: find("memferry_coll", "cdylib", "so")
                .with_context(|| missing("the collectives"))?,
            preload: find("memferry_preload", "cdylib", "so")
                .with_context(|| missing("the library for unmodified programs"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(name: &str, kinds: &[&str], files: &[&str]) -> String {
        serde_json::json!({
            "reason": "compiler-artifact",
            "target": {"name": name, "kind": kinds},
            "filenames": files,
        })
        .to_string()
    }

    #[test]
    fn the_files_are_found_among_the_messages() {
        let messages = [
            artifact("memferry", &["lib"], &["/t/libmemferry.rlib", "/t/libmemferry.rmeta"]),
            artifact("memferry", &["bin"], &["/t/memferry"]),
            artifact("adma", &["cdylib", "staticlib", "rlib"], &["/t/libadma.so", "/t/libadma.a"]),
            artifact("memferry_fi", &["cdylib", "rlib"], &["/t/f.rlib", "/t/libmemferry_fi.so"]),
            artifact("memferry_coll", &["cdylib", "rlib"], &["/t/libmemferry_coll.so"]),
            artifact("memferry_preload", &["cdylib", "rlib"], &["/t/libmemferry_preload.so"]),
            "no json".into(),
        ];
        let found = Artifacts::among(&messages.join("\n")).unwrap();
        let expected = Artifacts {
            program: "/t/memferry".into(),
            shared_library: "/t/libadma.so".into(),
            static_library: Some("/t/libadma.a".into()),
            provider: "/t/libmemferry_fi.so".into(),
            collectives: "/t/libmemferry_coll.so".into(),
            preload: "/t/libmemferry_preload.so".into(),
        };
        assert_eq!(found, expected);
        let error = Artifacts::among(&messages[..3].join("\n")).unwrap_err().to_string();
        assert!(error.contains("provider"), "{error}");
    }
}
