//! Programs in C, compiled here and run with the library preloaded.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with the compiled programs of a test.
pub(crate) struct Programs {
    folder: TempDir,
}

impl Programs {
    /// Compiles programs of `tests/programs`.
    pub(crate) fn compile(names: &[&str]) -> Self {
        let folder = TempDir::new().expect("there is a place for temporary files");
        let programs = Self { folder };
        for name in names {
            programs.compile_with(name, &[]);
        }
        programs
    }

    /// Compiles one program with further options.
    pub(crate) fn compile_with(&self, name: &str, options: &[&str]) {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
        let mut compiler = Command::new("cc");
        compiler.args(["-std=gnu11", "-O2", "-g", "-Wall", "-Werror", "-fno-builtin", "-pthread"]);
        compiler.arg("-o").arg(self.path(name)).arg(sources.join(name).with_extension("c"));
        let output = compiler.args(options).output().expect("there is a C compiler");
        assert!(output.status.success(), "compiling {name}: {}", text(&output));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command with the library preloaded.
    pub(crate) fn preloaded(&self, name: &str) -> Command {
        preloaded(self.path(name))
    }
}

/// A command with the library preloaded.
pub(crate) fn preloaded(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library());
    command
}

/// The library, which cargo puts beside the tests.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let library = test.with_file_name("libmemferry_preload.so");
    assert!(library.exists(), "{} is missing", library.display());
    library
}

/// Runs a command that must succeed, and returns its output.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{out}\n{err}", output.status)
}
