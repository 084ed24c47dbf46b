//! Programs that nobody here wrote, with the library preloaded: they give the same output as without.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::Command;

use crate::preload::support::{preloaded, succeed, text};
use memferry_sys::call_profile::{CallProfileFile, VARIABLE};
use memferry_testing::{Requirement, skip};
use tempfile::TempDir;

/// Lets copies from 128 KiB on be shared.
const SHARED: (&str, &str) = ("MEMFERRY_COPIES", "131072,65536,1048576,1,sse2");

/// Lets allocations from 64 KiB on lie in the shared heap.
const HEAP: (&str, &str) = ("MEMFERRY_SHARED_HEAP", "65536");

/// Runs a command without the library, and with every part of it switched on. Compares the outputs.
fn same(program: &str, words: &[&str], folder: &Path) -> Option<String> {
    let plain = match Command::new(program).args(words).current_dir(folder).output() {
        Ok(output) => output,
        Err(_) => {
            skip(Requirement::Programs, format!("{program} is not installed"));
            return None;
        }
    };
    assert!(plain.status.success(), "{program}: {}", text(&plain));
    let file = CallProfileFile::create().expect("there is memory");
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_fd().as_raw_fd());
    for (variable, value) in [("MEMFERRY_TEST_NONE", ""), (VARIABLE, &*path), SHARED, HEAP] {
        let mut command = preloaded(program);
        let output = command.args(words).current_dir(folder).env(variable, value).output().unwrap();
        assert_eq!(output.status, plain.status, "{program} {variable}: {}", text(&output));
        assert_eq!(output.stdout, plain.stdout, "{program} {variable}");
        assert_eq!(output.stderr, plain.stderr, "{program} {variable}: {}", text(&output));
    }
    Some(String::from_utf8_lossy(&plain.stdout).into_owned())
}

fn folder() -> TempDir {
    TempDir::new().expect("there is a place for temporary files")
}

#[test]
fn a_shell_with_pipes_and_many_children_does_the_same() {
    let script = "for i in $(seq 60); do echo $i | (read x; echo $((x * x))); done | sort -n | md5sum; \
                  head -c 3000000 /dev/zero | tr '\\0' x | md5sum; echo ${BASH_VERSION%%.*} | wc -c";
    let output = same("bash", &["-c", script], folder().path()).unwrap_or_default();
    assert!(output.is_empty() || output.lines().count() == 3, "{output}");
}

/// All C programs of the tests, in one call: the compiler and the assembler are children of it.
#[test]
fn a_compiler_compiles_the_same() {
    let folder = folder();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let files = std::fs::read_dir(tests).unwrap().map(|file| file.unwrap().path());
    let mut sources: Vec<_> =
        files.filter(|file| file.extension().is_some_and(|it| it == "c")).collect();
    sources.sort();
    assert!(sources.len() >= 5, "{sources:?}");
    for source in sources {
        let words = ["-std=gnu11", "-O2", "-S", "-o", "-", source.to_str().unwrap()];
        assert!(same("cc", &words, folder.path()).is_some_and(|output| output.contains(".text")));
    }
}

/// A child for every few copies, some of which end without `exit`, and others that start a program.
#[test]
fn a_program_that_forks_a_lot_does_the_same() {
    let script = "import os
def child(turn):
    text = bytes([turn % 251]) * 300000
    if turn % 3 == 0:
        os.execvp('true', ['true'])
    os._exit(len(bytearray(text)[150000:]) // 1000 == 150 and 7)
done = 0
for turn in range(300):
    process = os.fork()
    if process == 0:
        child(turn)
    done += os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(done)";
    let output = same("python3", &["-W", "ignore", "-c", script], folder().path());
    assert!(output.is_none_or(|output| output.trim() == "1400"));
}

#[test]
fn git_stores_and_compares_the_same() {
    let folder = folder();
    if Command::new("git").arg("--version").output().is_err() {
        return skip(Requirement::Programs, "git is not installed");
    }
    let git = |words: &[&str]| {
        let own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "gc.auto=0"];
        let mut command = preloaded("git");
        command.envs([SHARED, HEAP]);
        command.args(own).args(words).current_dir(folder.path());
        command.env("HOME", folder.path()).env("GIT_CONFIG_NOSYSTEM", "1");
        succeed(&mut command)
    };
    git(&["init", "-q", "."]);
    for round in 0..3u8 {
        let text: Vec<u8> = (0..4_000_000u32).map(|at| (at / 7) as u8 ^ round).collect();
        std::fs::write(folder.path().join("large"), text).unwrap();
        std::fs::write(folder.path().join("small"), format!("round {round}\n").repeat(50)).unwrap();
        git(&["add", "."]);
        git(&["commit", "-q", "-m", "a round"]);
    }
    git(&["fsck", "--full", "--strict"]);
    git(&["repack", "-a", "-d", "-q"]);
    for words in [&["log", "-p", "--stat"][..], &["diff", "HEAD~2", "--", "small"]] {
        assert!(same("git", words, folder.path()).is_some_and(|output| !output.is_empty()));
    }
}

/// Python's own tests of bytes and of mapped files.
#[test]
fn python_passes_its_own_tests() {
    let tests = ["test.test_bytes", "test.test_mmap", "test.test_array"];
    let exists = Command::new("python3").args(["-c", "import test.test_bytes"]).output();
    if !exists.is_ok_and(|output| output.status.success()) {
        return skip(Requirement::Programs, "python3 with its tests is not installed");
    }
    let folder = folder();
    let file = CallProfileFile::create().expect("there is memory");
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_fd().as_raw_fd());
    for variables in [[SHARED, HEAP], [(VARIABLE, path.as_str()), HEAP]] {
        let mut command = preloaded("python3");
        command.envs(variables).args(["-m", "unittest"]).args(tests).current_dir(folder.path());
        let output = command.output().unwrap();
        let said = text(&output);
        assert!(output.status.success() && said.contains("\nOK"), "{variables:?}: {said}");
    }
}
