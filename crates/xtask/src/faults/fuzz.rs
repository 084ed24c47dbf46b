//! The fuzzer: searches for inputs that make a target fail, under AddressSanitizer, guided by code
//! coverage.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, bail};

use super::{FaultRow, require_program, root};
use crate::print_line;

/// The targets, with the maximum length of an input in bytes.
const TARGETS: [(&str, usize); 7] = [
    ("wire", 512),
    ("hello", 500),
    ("accelerators", 512),
    ("rings", 1500),
    ("packets", 2000),
    ("calls", 1000),
    ("files", 4096),
];

/// The duration per target in seconds, in a short and in a long run.
const SHORT_SECS: u64 = 20;
const LONG_SECS: u64 = 3600;
/// The timeout of one input in seconds, much longer than an input takes on a busy machine.
const INPUT_TIMEOUT_SECS: u64 = 100;

/// The compiler flags: the sanitizer, and counters for code coverage.
const FLAGS: &str = "-Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Checks for a C++ compiler, which libFuzzer needs.
pub(super) fn needs() -> anyhow::Result<()> {
    require_program("c++", "g++", "fuzzing")
}

pub(super) fn run(is_long: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
    let seconds = match env::var("MEMFERRY_FUZZ_SECONDS") {
        Ok(text) => text.parse().context("MEMFERRY_FUZZ_SECONDS is a number")?,
        Err(_) => {
            if is_long {
                LONG_SECS
            } else {
                SHORT_SECS
            }
        }
    };
    let folder = root().join("target/fuzz");
    let program = build(&folder)?;
    let most = thread::available_parallelism().map_or(1, usize::from);
    let mut waiting = TARGETS.iter();
    let mut running: Vec<FuzzRun> = Vec::new();
    loop {
        while running.len() < most
            && let Some((name, longest)) = waiting.next()
        {
            running.push(FuzzRun::start(&program, &folder, name, *longest, seconds)?);
        }
        if running.is_empty() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(200));
        for at in (0..running.len()).rev() {
            if running[at].child.try_wait()?.is_some() {
                rows.push(running.swap_remove(at).finish()?);
            }
        }
    }
}

fn build(folder: &Path) -> anyhow::Result<PathBuf> {
    let built = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--locked", "--package", "memferry-fuzz", "--features", "libfuzzer"])
        .args(["--bin", "fuzz", "--target", TARGET])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS)
        .env("CARGO_TARGET_DIR", folder)
        .env("CARGO_INCREMENTAL", "0")
        // Reports contain line numbers.
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
        .status()
        .context("cargo cannot be run")?;
    if !built.success() {
        bail!("the fuzzer cannot be built, see above");
    }
    Ok(folder.join(TARGET).join("debug/fuzz"))
}

/// A running target.
struct FuzzRun {
    name: &'static str,
    child: Child,
    log: PathBuf,
    began: Instant,
}

impl Drop for FuzzRun {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl FuzzRun {
    fn start(
        program: &Path,
        folder: &Path,
        name: &'static str,
        longest: usize,
        seconds: u64,
    ) -> anyhow::Result<Self> {
        print_line(&format!("{name}, for {seconds} s"));
        // Inputs that reach new code are kept, so that the next run starts from them.
        let (corpus, found) = (folder.join("corpus").join(name), folder.join("found"));
        fs::create_dir_all(&corpus).and_then(|()| fs::create_dir_all(&found))?;
        let log = folder.join(format!("{name}.log"));
        let child = Command::new(program)
            .arg(&corpus)
            .arg(root().join("crates/fuzz/kept").join(name))
            .args([format!("-max_total_time={seconds}"), format!("-max_len={longest}")])
            .args([format!("-timeout={INPUT_TIMEOUT_SECS}"), "-len_control=0".into()])
            .arg(format!("-artifact_prefix={}/{name}-", found.display()))
            .env("MEMFERRY_FUZZ", name)
            // Without libfabric one target would do nothing.
            .env("MEMFERRY_REQUIRE", "libfabric")
            // Memory that the library holds until the process exits is not a leak.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()
            .context("the fuzzer cannot be run")?;
        Ok(Self { name, child, log, began: Instant::now() })
    }

    /// Evaluates the log after the target has ended, and returns the number of inputs.
    fn finish(mut self) -> anyhow::Result<FaultRow> {
        let text = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
        let name = self.name;
        if !self.child.wait()?.success() {
            print_line(&text);
            bail!(
                "the fuzzer has found bytes that make {name} fail, see {} and above; keep them in \
                 crates/fuzz/kept/{name}",
                self.log.display()
            );
        }
        let count =
            inputs(&text).with_context(|| format!("{name} does not say what it has done"))?;
        let kept = fs::read_dir(root().join("crates/fuzz/kept").join(name))?.count() as u64;
        if count <= kept {
            bail!("{name}: no more than the {kept} kept inputs were tried");
        }
        let detail = format!("in {} s, {} ways", self.began.elapsed().as_secs(), edges(&text));
        Ok(FaultRow { what: format!("inputs of {name}"), count, detail })
    }
}

/// The number of inputs, from the last line of the log: "Done 1234 runs in 60 second(s)".
fn inputs(log: &str) -> Option<u64> {
    let line = log.lines().rev().find_map(|line| line.strip_prefix("Done "))?;
    line.split(' ').next()?.parse().ok()
}

/// The number of covered edges: "cov: 1234".
fn edges(log: &str) -> &str {
    let last = log.lines().rev().find_map(|line| line.split_once("cov: ")).unwrap_or_default().1;
    last.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_and_ways_are_read_from_what_the_fuzzer_says() {
        let log = "#12\tNEW    cov: 40 ft: 50\n#99\tDONE   cov: 413 ft: 1438 corp: 221\nDone 99 runs in 2 second(s)\n";
        assert_eq!((inputs(log), edges(log)), (Some(99), "413"));
        assert_eq!(inputs("nothing"), None);
    }
}
