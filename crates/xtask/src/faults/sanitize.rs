//! The tests under AddressSanitizer and ThreadSanitizer. Everything is rebuilt for each, with the
//! runtimes of the compiler.

mod linking;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};

use super::{FaultRow, cargo_test, passed, require_program};
use crate::print_line;

/// The target triple that the tests are built for.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A sanitizer, with its settings and the tests that cannot run under it.
pub(super) struct Sanitizer {
    pub(super) name: &'static str,
    title: &'static str,
    /// The name in compiler options.
    option: &'static str,
    /// The suffix of the name of the runtime.
    runtime: &'static str,
    /// The variable for the settings of the sanitizer, and its value.
    settings: (&'static str, &'static str),
    excluded: &'static [ExcludedTest],
    /// The C tests that run under the sanitizer: parts of their names.
    programs: &'static [&'static str],
}

/// The name of a test, or a part of several names, and the reason why the sanitizer excludes it.
type ExcludedTest = (&'static str, &'static str);

pub(super) const SANITIZERS: [Sanitizer; 2] = [
    Sanitizer {
        name: "address sanitizer",
        title: "AddressSanitizer",
        option: "address",
        runtime: "asan",
        // Memory that the library holds until the process exits is not a leak.
        settings: ("ASAN_OPTIONS", "detect_leaks=0"),
        excluded: &NOT_BY_ADDRESS,
        programs: &["programs::"],
    },
    Sanitizer {
        name: "thread sanitizer",
        title: "ThreadSanitizer",
        option: "thread",
        runtime: "tsan",
        // Tests fork, and the children start threads of their own.
        settings: ("TSAN_OPTIONS", "die_after_fork=0:history_size=4"),
        excluded: &NOT_BY_THREAD,
        // Excluded: `link_ends`, because it counts descriptors, and the symbolizer, which also runs
        // for suppressed reports, holds two pipes. `environment`, because it takes away memory that
        // the runtime needs. `calls`, because it copies the same bytes to one address several times
        // in parallel, which is an intended race. The others were not tried.
        programs: &["traffic", "forked_children", "event_loops"],
    },
];

const COMPILER: ExcludedTest = (
    "a_buffer_in_flight_cannot_be_touched",
    "runs the compiler, which does not find these libraries",
);
const NO_MAPPING: ExcludedTest = ("with_no_mapping_left", "the sanitizer needs mappings");
const NO_MORE_MAPPINGS: ExcludedTest =
    ("a_process_that_can_map_nothing_more", "the sanitizer needs mappings");
const LITTLE_KEPT: ExcludedTest =
    ("a_receiver_that_does_not_receive_keeps_little", "measures memory, which the sanitizer keeps");
const NOT_OPENED: ExcludedTest = (
    "a_library_that_cannot_be_opened_says_why_in_every_call",
    "takes memory away, which the sanitizer needs",
);

/// The runtime makes `mlock` return immediately without locking anything.
const NO_LOCKS: &str = "locks memory, which the sanitizer ignores";
/// The shadow memory is mapped at the addresses that these tests assume to be unmapped.
const SHADOW: &str = "names an address that is the sanitizer's";
/// The runtime checks that the thread that joins another knows its creator, which a forked child
/// does not.
const CHILD_JOINS: &str =
    "a forked child joins a thread of its parent, which the sanitizer does not know there";

const NOT_BY_ADDRESS: [ExcludedTest; 16] = [
    COMPILER,
    NO_MAPPING,
    NO_MORE_MAPPINGS,
    LITTLE_KEPT,
    NOT_OPENED,
    ("a_source_that_is_not_there", SHADOW),
    ("memory_across_the_edges_of_regions_is_copied_without_a_ring", SHADOW),
    ("other_memory_at_the_same_address", "the sanitizer hands no address out twice"),
    ("at_the_limit_of_locked_memory", NO_LOCKS),
    ("a_lock_beyond_the_limit", NO_LOCKS),
    ("a_forked_child_locks_for_itself", NO_LOCKS),
    ("a_page_in_two_locks_stays_locked", NO_LOCKS),
    ("memory_that_is_not_there_or_not_writable", NO_LOCKS),
    ("a_lock_that_would_need_too_many_mappings", NO_LOCKS),
    ("locked_bytes_rise_with_a_lock", NO_LOCKS),
    ("missing_memory_is_neither_mapped_nor_resident", NO_LOCKS),
];

const NOT_BY_THREAD: [ExcludedTest; 20] = [
    COMPILER,
    NO_MAPPING,
    NO_MORE_MAPPINGS,
    LITTLE_KEPT,
    ("a_child_can_copy_and_never_hangs", CHILD_JOINS),
    ("a_forked_child_copies_without_a_pin", CHILD_JOINS),
    ("a_source_that_ends_early_is_copied", SHADOW),
    ("a_source_that_is_not_there", SHADOW),
    ("memory_mapped_anew_beside_registered_memory", SHADOW),
    ("memory_that_is_mapped_anew_at_the_same_place", SHADOW),
    ("memory_that_may_only_be_read_is_a_source", SHADOW),
    ("memory_across_the_edges_of_regions_is_copied_without_a_ring", SHADOW),
    ("at_the_limit_of_locked_memory", NO_LOCKS),
    ("a_lock_beyond_the_limit", NO_LOCKS),
    ("a_forked_child_locks_for_itself", NO_LOCKS),
    ("a_page_in_two_locks_stays_locked", NO_LOCKS),
    ("memory_that_is_not_there_or_not_writable", NO_LOCKS),
    ("a_lock_that_would_need_too_many_mappings", NO_LOCKS),
    ("locked_bytes_rise_with_a_lock", NO_LOCKS),
    ("missing_memory_is_neither_mapped_nor_resident", NO_LOCKS),
];

/// The test programs of some packages.
struct TestSet {
    packages: &'static [&'static str],
    /// The targets, as arguments of cargo.
    targets: &'static [&'static str],
    /// Parts of the names of the tests; empty for all.
    filters: &'static [&'static str],
}

/// The short run: unit tests and stress tests of the crates with threads.
const SHORT: [TestSet; 2] = [
    TestSet {
        packages: &["memferry-engine", "memferry-memory", "memferry-copy", "memferry-message"],
        targets: &["--lib"],
        filters: &[],
    },
    TestSet {
        packages: &["memferry-copy", "memferry-message"],
        targets: &["--test", "it"],
        filters: &["stress::"],
    },
];

/// The long run: all tests below the public interfaces, and the tests of the provider in which no
/// other program loads it.
const LONG: [TestSet; 3] = [
    TestSet {
        packages: &[
            "memferry-sys",
            "memferry-engine",
            "memferry-memory",
            "memferry-copy",
            "memferry-message",
        ],
        targets: &["--lib", "--tests"],
        filters: &[],
    },
    TestSet { packages: &["memferry-fabric"], targets: &["--lib"], filters: &[] },
    TestSet {
        packages: &["memferry-fabric"],
        targets: &["--test", "it"],
        filters: &["provider::", "frozen::"],
    },
];

/// Checks for the runtimes of the compiler, and for the tool that modifies one of them.
pub(super) fn needs() -> anyhow::Result<()> {
    require_program("objcopy", "binutils", "a sanitizer")?;
    linking::check_runtimes()
}

impl Sanitizer {
    pub(super) fn run(&self, is_long: bool, rows: &mut Vec<FaultRow>) -> anyhow::Result<()> {
        let place = SanitizerBuild::new(self)?;
        let (tests, title) = (if is_long { &LONG[..] } else { &SHORT[..] }, self.title);
        let (mut count, mut left_out) = (0, 0);
        for tests in tests {
            let ran = place.run(self, tests)?;
            (count, left_out) = (count + ran.0, left_out + ran.1);
        }
        let detail = format!("{left_out} left out, see sanitize.rs");
        rows.push(FaultRow { what: format!("tests under {title}"), count, detail });
        if is_long {
            // The C programs, instrumented like the library that they call.
            let (packages, targets) = (&["memferry-c"], &["--test", "it"]);
            let programs = TestSet { packages, targets, filters: self.programs };
            let (count, left_out) = place.run(self, &programs)?;
            let detail = format!("{left_out} left out, see sanitize.rs");
            rows.push(FaultRow { what: format!("tests in C under {title}"), count, detail });
        }
        Ok(())
    }
}

/// The build folder of a sanitizer, with its compiler and flags.
struct SanitizerBuild {
    folder: PathBuf,
    flags: String,
    compiler: PathBuf,
    settings: String,
}

impl SanitizerBuild {
    fn new(sanitizer: &Sanitizer) -> anyhow::Result<Self> {
        let Sanitizer { option, runtime, settings: (_, settings), .. } = sanitizer;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("the root")?;
        let folder = root.join("target").join(format!("sanitized-{option}"));
        let reports = folder.join("reports");
        // Removes the reports of the previous run.
        let _ = fs::remove_dir_all(&reports);
        fs::create_dir_all(&reports).context("a folder for reports")?;
        // The compiler accepts the sanitizer option only with unstable features enabled, and an
        // uninstrumented standard library only with explicit consent. System calls go through the C
        // library, so that the sanitizers see new mappings and memory that the kernel writes.
        let mut flags = format!(
            "-Zsanitizer={option} --cfg {runtime} --cfg rustix_use_libc \
             -Cunsafe-allow-abi-mismatch=sanitizer"
        );
        let mut settings = format!("{settings}:log_path={}/report", reports.display());
        let mut arguments = Vec::new();
        if *option == "thread" {
            arguments.push(linking::build_thread_runtime(&folder)?);
            flags += &format!(" -Clink-arg={}", arguments[0]);
            let known = root.join("crates/xtask/src/faults/sanitize/thread.supp");
            settings += &format!(":suppressions={}", known.display());
        }
        let compiler = linking::c_compiler(&folder, option, runtime, &arguments)?;
        Ok(Self { folder, flags, compiler, settings })
    }

    /// Returns the numbers of passed and of excluded tests.
    fn run(&self, sanitizer: &Sanitizer, tests: &TestSet) -> anyhow::Result<(u64, u64)> {
        let mut command = cargo_test();
        command.args(["--no-fail-fast", "--target", TARGET]).args(tests.targets);
        command.args(tests.packages.iter().flat_map(|package| ["--package", package]));
        command
            .arg("--")
            .args(tests.filters)
            .args(sanitizer.excluded.iter().flat_map(|(test, _)| ["--skip", test]));
        let (variable, name) = (sanitizer.settings.0, sanitizer.name);
        command.envs([
            ("RUSTC_BOOTSTRAP", OsStr::new("1")),
            ("RUSTFLAGS", self.flags.as_ref()),
            ("CARGO_TARGET_DIR", self.folder.as_ref()),
            ("CARGO_INCREMENTAL", OsStr::new("0")),
            // Reports contain line numbers; more debug information is not needed.
            ("CARGO_PROFILE_DEV_DEBUG", OsStr::new("line-tables-only")),
            ("CC", self.compiler.as_ref()),
            (variable, self.settings.as_ref()),
        ]);
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        let (text, reports) = (String::from_utf8_lossy(&output.stdout), self.reports()?);
        if !output.status.success() {
            print_line(&text);
        }
        reports.iter().for_each(|report| print_line(report));
        if !output.status.success() || !reports.is_empty() {
            bail!("{name}: something is wrong");
        }
        match passed(&text) {
            0 => bail!("{name}: nothing was checked"),
            // A set with filters leaves out tests on purpose.
            count if tests.filters.is_empty() => Ok((count, count_filtered(&text))),
            count => Ok((count, 0)),
        }
    }

    /// The reports of the sanitizer from all processes, because a test may ignore the exit status
    /// of a child.
    fn reports(&self) -> anyhow::Result<Vec<String>> {
        let files = fs::read_dir(self.folder.join("reports")).context("the folder of reports")?;
        files
            .map(|file| Ok(String::from_utf8_lossy(&fs::read(file?.path())?).into_owned()))
            .collect()
    }
}

/// The number of excluded tests, from the output of the test harness.
fn count_filtered(text: &str) -> u64 {
    let counts = text.lines().filter(|line| line.starts_with("test result: "));
    let counts = counts.flat_map(|line| line.split("; "));
    counts.filter_map(|count| count.strip_suffix(" filtered out")?.parse::<u64>().ok()).sum()
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
        let text = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.1s\n";
        assert_eq!(count_filtered(&[text, text].concat()), 4);
    }
}
