//! Running one test program to its end, or to the end of its time.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use super::backtraces;
use super::watch::Watch;
use crate::print_line;
use crate::test_counts::{TestCounts, failed_in, result_in};

/// The intervals between polls for the exit of a program, between looks at its output, and between
/// reports that it is still running.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(20);
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// A program that runs tests.
#[derive(Debug, Clone)]
pub(super) struct TestJob {
    pub(super) name: String,
    /// The program and its arguments.
    pub(super) words: Vec<OsString>,
    pub(super) folder: Option<PathBuf>,
    pub(super) environment: Vec<(&'static str, OsString)>,
    /// How long one test may take.
    pub(super) test_limit: Duration,
}

/// The outcome of a program.
#[derive(Debug)]
pub(super) struct JobOutcome {
    pub(super) is_good: bool,
    pub(super) counts: TestCounts,
    /// The names of the failed tests. Empty if the program failed without naming one.
    pub(super) failed: Vec<String>,
    pub(super) text: String,
    pub(super) seconds: f64,
}

impl TestJob {
    /// Runs the program to its end.
    pub(super) fn run(&self) -> JobOutcome {
        let began = Instant::now();
        let (exited_well, text) =
            self.run_to_end().unwrap_or_else(|error| (false, format!("{error:#}\n")));
        let results: Vec<TestCounts> = text.lines().filter_map(result_in).collect();
        let counts = results.iter().copied().fold(TestCounts::default(), TestCounts::plus);
        // A program without a result line has not run its tests.
        let is_good = exited_well && !results.is_empty() && counts.failed == 0;
        let failed = failed_in(&text);
        JobOutcome { is_good, counts, failed, text, seconds: began.elapsed().as_secs_f64() }
    }

    /// The command that repeats the run, for a shell.
    pub(super) fn repeat_command(&self) -> String {
        let mut text = String::new();
        if let Some(folder) = &self.folder {
            let _ = write!(text, "cd {} &&", quoted(&folder.display().to_string()));
        }
        for (name, value) in &self.environment {
            let _ = write!(text, " {name}={}", quoted(&value.to_string_lossy()));
        }
        for word in &self.words {
            let _ = write!(text, " {}", quoted(&word.to_string_lossy()));
        }
        text.trim_start().to_owned()
    }

    fn spawn(&self, output: &fs::File) -> anyhow::Result<Child> {
        let mut command = Command::new(&self.words[0]);
        command
            .args(&self.words[1..])
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        let parent = getpid();
        let prepare = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have exited before the signal was set.
            if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
        };
        // SAFETY: between fork and exec, the closure makes two system calls, takes no lock and
        // allocates nothing: errors are numbers. The thread that starts the program waits for its
        // end.
        unsafe { command.pre_exec(prepare) };
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
            .with_context(|| format!("{} cannot be run", self.words[0].display()))
    }

    /// Returns whether the program succeeded, and its output.
    fn run_to_end(&self) -> anyhow::Result<(bool, String)> {
        // One file for both outputs preserves the order of the lines.
        let output = tempfile::NamedTempFile::new().context("a file for the output of tests")?;
        let mut child = self.spawn(output.as_file())?;
        let began = Instant::now();
        let (mut watch, mut next_watch) = (Watch::new(self.test_limit, began), began);
        let mut next_report = began + REPORT_INTERVAL;
        let read =
            || fs::read(output.path()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            thread::sleep(EXIT_POLL_INTERVAL);
            let now = Instant::now();
            if now >= next_watch {
                next_watch = now + WATCH_INTERVAL;
                if let Some(hung) = watch.look(&read()?, now) {
                    return Ok((false, self.end_hanging(&mut child, &hung, &read)?));
                }
            }
            if now >= next_report {
                next_report = now + REPORT_INTERVAL;
                let text = read()?;
                let last = text.trim_end().lines().next_back().unwrap_or("no output yet");
                let seconds = (now - began).as_secs();
                print_line(&format!("      {seconds:4} s  {}, still running: {last}", self.name));
            }
        };
        let mut text = read()?;
        if !status.success() {
            let _ = writeln!(text, "{}: {status}", self.name);
        }
        Ok((status.success(), text))
    }

    /// Ends a program with a test that took too long. Returns its output with the backtraces of its
    /// processes.
    fn end_hanging(
        &self,
        child: &mut Child,
        test: &str,
        read: &dyn Fn() -> std::io::Result<String>,
    ) -> anyhow::Result<String> {
        let processes = backtraces::family(child.id());
        let found = backtraces::of(&processes);
        let mut text = read()?;
        let seconds = self.test_limit.as_secs();
        // In the form of a result, so that the test is counted.
        let _ = writeln!(text, "\ntest {test} ... FAILED");
        let _ = writeln!(text, "{test} exceeded its limit of {seconds} s. All threads:\n{found}");
        backtraces::kill(&processes);
        child.wait()?;
        Ok(text)
    }
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,+@%".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use memferry_testing::until;

    use super::*;

    fn job(script: &str, limit: Duration) -> TestJob {
        TestJob {
            name: "job".into(),
            words: ["sh", "-c", script].map(OsString::from).to_vec(),
            folder: None,
            environment: Vec::new(),
            test_limit: limit,
        }
    }

    #[test]
    fn a_program_whose_test_takes_too_long_is_ended_and_shown_with_its_children() {
        let job = job("printf 'test a::b ... '; sleep 1000 & wait", Duration::ZERO);
        let output = tempfile::NamedTempFile::new().unwrap();
        let mut child = job.spawn(output.as_file()).unwrap();
        let read = || fs::read_to_string(output.path());
        until("the child sleeps", || {
            read().unwrap().contains("a::b") && backtraces::family(child.id()).len() == 2
        });
        let text = job.end_hanging(&mut child, "a::b", &read).unwrap();
        assert_eq!(failed_in(&text), ["a::b"]);
        assert!(text.contains("a::b exceeded its limit of 0 s"), "{text}");
        assert!(text.contains("sleep 1000"), "{text}");
    }

    #[test]
    fn a_run_is_repeated_by_a_line_for_a_shell() {
        let mut job = job("it's", Duration::ZERO);
        job.environment.push(("SEED", "5".into()));
        job.folder = Some("/a b".into());
        assert_eq!(job.repeat_command(), r"cd '/a b' && SEED=5 sh -c 'it'\''s'");
    }
}
