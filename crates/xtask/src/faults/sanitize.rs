//! The tests under AddressSanitizer and ThreadSanitizer: everything is built anew for each, with the runtimes
//! that come with the compiler.

mod linking;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};

use super::{Row, cargo_test, need, passed};
use crate::say;

/// For what the linker is given, and the tests are built for.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A sanitizer: what it is called, what it needs, what cannot be tried under it.
pub(super) struct Sanitizer {
    pub(super) name: &'static str,
    title: &'static str,
    /// What the compilers call it.
    option: &'static str,
    /// The end of its runtime's name.
    runtime: &'static str,
    /// The variable that holds its settings, and these.
    settings: (&'static str, &'static str),
    left_out: &'static [LeftOut],
    /// The tests in C that it is for: parts of their names, or none for all.
    programs: &'static [&'static str],
}

/// The name of a test, or a part that several have, and why a sanitizer is not for it.
type LeftOut = (&'static str, &'static str);

pub(super) const SANITIZERS: [Sanitizer; 2] = [
    Sanitizer {
        name: "address sanitizer",
        title: "AddressSanitizer",
        option: "address",
        runtime: "asan",
        // What the library keeps until the end of the process is no leak.
        settings: ("ASAN_OPTIONS", "detect_leaks=0"),
        left_out: &NOT_BY_ADDRESS,
        programs: &[],
    },
    Sanitizer {
        name: "thread sanitizer",
        title: "ThreadSanitizer",
        option: "thread",
        runtime: "tsan",
        // Tests fork, and children go on with threads of their own.
        settings: ("TSAN_OPTIONS", "die_after_fork=0:history_size=4"),
        left_out: &NOT_BY_THREAD,
        // Not `link_ends`: it counts descriptors, and the program that finds names for a report, also for one that
        // is suppressed, is at the end of two. Not `environment`: it takes away memory that the runtime needs. Not
        // `calls`: it copies the same bytes to one place many times at once, which is a race by intent. The others
        // were not tried.
        programs: &["traffic", "forked_children", "event_loops"],
    },
];

const COMPILER: LeftOut = (
    "a_buffer_in_flight_cannot_be_touched",
    "runs the compiler, which does not find these libraries",
);
const NO_MAPPING: LeftOut = ("with_no_mapping_left", "the sanitizer needs mappings");
const NO_MORE_MAPPINGS: LeftOut =
    ("a_process_that_can_map_nothing_more", "the sanitizer needs mappings");
const LITTLE_KEPT: LeftOut =
    ("a_receiver_that_does_not_receive_keeps_little", "measures memory, which the sanitizer keeps");
const NOT_OPENED: LeftOut = (
    "a_library_that_cannot_be_opened_says_why_in_every_call",
    "takes memory away, which the sanitizer needs",
);

const NOT_BY_ADDRESS: [LeftOut; 7] = [
    COMPILER,
    NO_MAPPING,
    NO_MORE_MAPPINGS,
    LITTLE_KEPT,
    NOT_OPENED,
    ("a_source_that_is_not_there", "names an address that is the sanitizer's"),
    ("other_memory_at_the_same_address", "the sanitizer hands no address out twice"),
];

const NOT_BY_THREAD: [LeftOut; 4] = [COMPILER, NO_MAPPING, NO_MORE_MAPPINGS, LITTLE_KEPT];

/// Test programs of some packages.
struct Tests {
    packages: &'static [&'static str],
    /// As arguments of cargo.
    targets: &'static [&'static str],
}

/// A short run: what has threads in it, in units and under stress.
const SHORT: [Tests; 1] = [Tests {
    packages: &["memferry-engine", "memferry-memory", "memferry-copy", "memferry-message"],
    targets: &["--lib", "--test", "stress"],
}];

/// A long run: all tests below the front doors, and those of the provider in which no foreign program loads it.
const LONG: [Tests; 2] = [
    Tests {
        packages: &[
            "memferry-sys",
            "memferry-engine",
            "memferry-memory",
            "memferry-copy",
            "memferry-message",
        ],
        targets: &["--lib", "--tests"],
    },
    Tests {
        packages: &["memferry-fabric"],
        targets: &["--lib", "--test", "provider", "--test", "frozen"],
    },
];

/// The programs in C, instrumented like the library that they call.
const PROGRAMS: Tests = Tests { packages: &["memferry-c"], targets: &["--test", "programs"] };

/// The runtimes come with the compiler, and one is taken apart.
pub(super) fn needs() -> anyhow::Result<()> {
    need("objcopy", "binutils", "a sanitizer")?;
    linking::check_runtimes()
}

impl Sanitizer {
    pub(super) fn run(&self, is_long: bool, rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let place = Place::new(self)?;
        let (tests, title) = (if is_long { &LONG[..] } else { &SHORT[..] }, self.title);
        let mut count = 0;
        for tests in tests {
            count += place.run(self, tests, &[])?;
        }
        let detail = format!("{} left out, see sanitize.rs", self.left_out.len());
        rows.push(Row { what: format!("tests under {title}"), count, detail });
        if is_long {
            let count = place.run(self, &PROGRAMS, self.programs)?;
            let detail = String::new();
            rows.push(Row { what: format!("tests in C under {title}"), count, detail });
        }
        Ok(())
    }
}

/// Where a sanitizer's build is, and what belongs to it.
struct Place {
    folder: PathBuf,
    flags: String,
    compiler: PathBuf,
    settings: String,
}

impl Place {
    fn new(sanitizer: &Sanitizer) -> anyhow::Result<Self> {
        let Sanitizer { option, runtime, settings: (_, settings), .. } = sanitizer;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("the root")?;
        let folder = root.join("target").join(format!("sanitized-{option}"));
        let reports = folder.join("reports");
        // Those of the last run.
        let _ = fs::remove_dir_all(&reports);
        fs::create_dir_all(&reports).context("a folder for reports")?;
        // The compiler takes the option from those who say that they know it may change. The standard library
        // is not instrumented, which the compiler asks to be told is meant. System calls go through the C library,
        // where the sanitizers see them: what is mapped anew, and what the kernel writes.
        let mut flags = format!(
            "-Zsanitizer={option} --cfg {runtime} --cfg rustix_use_libc \
             -Cunsafe-allow-abi-mismatch=sanitizer"
        );
        let mut settings = format!("{settings}:log_path={}/report", reports.display());
        let mut arguments = Vec::new();
        if *option == "thread" {
            arguments.push(linking::teach_thread_sanitizer(&folder)?);
            flags += &format!(" -Clink-arg={}", arguments[0]);
            let known = root.join("crates/xtask/src/faults/sanitize/thread.supp");
            settings += &format!(":suppressions={}", known.display());
        }
        let compiler = linking::c_compiler(&folder, option, runtime, &arguments)?;
        Ok(Self { folder, flags, compiler, settings })
    }

    /// Runs tests, or those of them whose names have a filter in them, and counts those that passed.
    fn run(&self, sanitizer: &Sanitizer, tests: &Tests, filters: &[&str]) -> anyhow::Result<u64> {
        let mut command = cargo_test();
        command.args(["--no-fail-fast", "--target", TARGET]).args(tests.targets);
        command.args(tests.packages.iter().flat_map(|package| ["--package", package]));
        command
            .arg("--")
            .args(filters)
            .args(sanitizer.left_out.iter().flat_map(|(test, _)| ["--skip", test]));
        let (variable, name) = (sanitizer.settings.0, sanitizer.name);
        command.envs([
            ("RUSTC_BOOTSTRAP", OsStr::new("1")),
            ("RUSTFLAGS", self.flags.as_ref()),
            ("CARGO_TARGET_DIR", self.folder.as_ref()),
            ("CARGO_INCREMENTAL", OsStr::new("0")),
            // Reports name lines; nobody debugs these programs.
            ("CARGO_PROFILE_DEV_DEBUG", OsStr::new("line-tables-only")),
            ("CC", self.compiler.as_ref()),
            (variable, self.settings.as_ref()),
        ]);
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        let (text, reports) = (String::from_utf8_lossy(&output.stdout), self.reports()?);
        if !output.status.success() {
            say(&text);
        }
        reports.iter().for_each(|report| say(report));
        if !output.status.success() || !reports.is_empty() {
            bail!("{name}: something is wrong");
        }
        match passed(&text) {
            0 => bail!("{name}: nothing was checked"),
            count => Ok(count),
        }
    }

    /// What the sanitizer wrote, of whatever process: a test may not look at how a child of it ended.
    fn reports(&self) -> anyhow::Result<Vec<String>> {
        let files = fs::read_dir(self.folder.join("reports")).context("the folder of reports")?;
        files
            .map(|file| Ok(String::from_utf8_lossy(&fs::read(file?.path())?).into_owned()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_of_all_programs_are_counted() {
        let text = "test a ... ok\ntest result: ok. 3 passed; 0 failed\n\
                    test result: FAILED. 5 passed\ntest result: ok. 14 passed; 0 failed\n";
        assert_eq!(passed(text), 17);
        assert_eq!(passed(""), 0);
    }
}
