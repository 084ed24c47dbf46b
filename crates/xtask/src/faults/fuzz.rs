//! The fuzzer: looks for bytes that make one of its targets fail, under AddressSanitizer, guided by the code that
//! they reach.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, bail};

use super::{Row, need, root};
use crate::say;

/// A target, and the longest bytes that are worth trying.
const TARGETS: [(&str, usize); 6] = [
    ("wire", 512),
    ("hello", 500),
    ("rings", 1500),
    ("packets", 2000),
    ("calls", 1000),
    ("files", 4096),
];

/// How long each target is tried.
const SHORT: u64 = 60;
const LONG: u64 = 3600;
/// What one input may take, in seconds: much longer than it does on a busy machine.
const PATIENCE: u64 = 100;

/// What the compiler has to put into the code: the sanitizer, and counters of the ways through it.
const FLAGS: &str = "-Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// libFuzzer is C++, and compiled.
pub(super) fn needs() -> anyhow::Result<()> {
    need("c++", "g++", "fuzzing")
}

pub(super) fn run(is_long: bool, rows: &mut Vec<Row>) -> anyhow::Result<()> {
    let seconds = match env::var("MEMFERRY_FUZZ_SECONDS") {
        Ok(text) => text.parse().context("MEMFERRY_FUZZ_SECONDS is a number")?,
        Err(_) => {
            if is_long {
                LONG
            } else {
                SHORT
            }
        }
    };
    let folder = root().join("target/fuzz");
    let program = build(&folder)?;
    let most = thread::available_parallelism().map_or(1, usize::from);
    let mut waiting = TARGETS.iter();
    let mut running: Vec<Running> = Vec::new();
    loop {
        while running.len() < most
            && let Some((name, longest)) = waiting.next()
        {
            running.push(Running::start(&program, &folder, name, *longest, seconds)?);
        }
        if running.is_empty() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(200));
        for at in (0..running.len()).rev() {
            if running[at].child.try_wait()?.is_some() {
                rows.push(running.swap_remove(at).end()?);
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
        // Reports name lines.
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
        .status()
        .context("cargo cannot be run")?;
    if !built.success() {
        bail!("the fuzzer cannot be built, see above");
    }
    Ok(folder.join(TARGET).join("debug/fuzz"))
}

/// A target under way.
struct Running {
    name: &'static str,
    child: Child,
    log: PathBuf,
    began: Instant,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(
        program: &Path,
        folder: &Path,
        name: &'static str,
        longest: usize,
        seconds: u64,
    ) -> anyhow::Result<Self> {
        say(&format!("{name}, for {seconds} s"));
        // What reaches new code is kept between runs: the next one begins there.
        let (corpus, found) = (folder.join("corpus").join(name), folder.join("found"));
        fs::create_dir_all(&corpus).and_then(|()| fs::create_dir_all(&found))?;
        let log = folder.join(format!("{name}.log"));
        let child = Command::new(program)
            .arg(&corpus)
            .arg(root().join("crates/fuzz/kept").join(name))
            .args([format!("-max_total_time={seconds}"), format!("-max_len={longest}")])
            .args([format!("-timeout={PATIENCE}"), "-len_control=0".into()])
            .arg(format!("-artifact_prefix={}/{name}-", found.display()))
            .env("MEMFERRY_FUZZ", name)
            // Without it one target would do nothing.
            .env("MEMFERRY_REQUIRE", "libfabric")
            // What the library keeps until the end of the process is no leak.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()
            .context("the fuzzer cannot be run")?;
        Ok(Self { name, child, log, began: Instant::now() })
    }

    /// It has ended: how many inputs it has tried.
    fn end(mut self) -> anyhow::Result<Row> {
        let text = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
        let name = self.name;
        if !self.child.wait()?.success() {
            say(&text);
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
        let detail = format!("in {} s, {} ways", self.began.elapsed().as_secs(), ways(&text));
        Ok(Row { what: format!("inputs of {name}"), count, detail })
    }
}

/// From the last line: "Done 1234 runs in 60 second(s)".
fn inputs(log: &str) -> Option<u64> {
    let line = log.lines().rev().find_map(|line| line.strip_prefix("Done "))?;
    line.split(' ').next()?.parse().ok()
}

/// The number of edges that were reached: "cov: 1234".
fn ways(log: &str) -> &str {
    let last = log.lines().rev().find_map(|line| line.split_once("cov: ")).unwrap_or_default().1;
    last.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_and_ways_are_read_from_what_the_fuzzer_says() {
        let log = "#12\tNEW    cov: 40 ft: 50\n#99\tDONE   cov: 413 ft: 1438 corp: 221\nDone 99 runs in 2 second(s)\n";
        assert_eq!((inputs(log), ways(log)), (Some(99), "413"));
        assert_eq!(inputs("nothing"), None);
    }
}
