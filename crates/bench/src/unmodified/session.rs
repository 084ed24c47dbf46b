//! Programs that wait for orders, each started as it is and by `memferry run`. A program measures its own
//! copies: how long it takes to start is not in the times.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::group::process_group::{ProcessGroup, REPLY_TIMEOUT};
use crate::harness::{Budget, Candidate, Harness, Role, Sample, Samples};

/// The reply of a program that does not measure.
pub(super) const DONE: &str = "done";

/// How a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// As it is.
    Plain,
    /// By `memferry run --copies`.
    Copies,
    /// By `memferry run --profile`.
    Profile,
}

impl Start {
    pub(super) const ALL: [Self; 3] = [Self::Plain, Self::Copies, Self::Profile];

    pub(super) fn series(self) -> &'static str {
        match self {
            Self::Plain => "as it is",
            Self::Copies => "memferry run --copies",
            Self::Profile => "memferry run --profile",
        }
    }

    pub(super) fn role(self) -> Role {
        if self == Self::Plain { Role::Peer } else { Role::Memferry }
    }

    /// The command of a program, to which its arguments can be added.
    pub(super) fn command(self, program: &Path) -> Result<Command, String> {
        let words: &[&str] = match self {
            Self::Plain => return Ok(Command::new(program)),
            Self::Copies => &["run", "--copies"],
            // Nobody reads the report.
            Self::Profile => &["run", "--profile", "--output", "/dev/null"],
        };
        let memferry = std::env::current_exe().map_err(|error| format!("no program: {error}"))?;
        let mut command = Command::new(memferry);
        command.args(words).arg(program);
        Ok(command)
    }
}

/// Who measures the time of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// The program, which replies with nanoseconds. An order ends with the number of iterations.
    Program,
    /// The bench, from the order until the reply. An order is one iteration.
    Bench,
}

/// A started program.
struct Session {
    start: Start,
    group: ProcessGroup,
}

/// One program, started in several ways.
pub(super) struct Sessions {
    name: String,
    /// Who measures the time of an order.
    timer: Timer,
    sessions: Vec<Session>,
}

impl Sessions {
    /// Starts the program `name` in each way. What cannot be started is added to `missing`.
    pub(super) fn start(
        name: &str,
        timer: Timer,
        starts: &[Start],
        command: impl Fn(Start) -> Result<Command, String>,
        missing: &mut Vec<String>,
    ) -> Self {
        let mut sessions = Vec::new();
        for &start in starts {
            let group = command(start).and_then(|it| ProcessGroup::start(vec![it], REPLY_TIMEOUT));
            match group {
                Ok(group) => sessions.push(Session { start, group }),
                Err(reason) => missing.push(format!("{} ({name}: {reason})", start.series())),
            }
        }
        Self { name: name.to_owned(), timer, sessions }
    }

    /// Ends the programs that were started in other ways.
    pub(super) fn retain(&mut self, starts: &[Start]) {
        self.sessions.retain(|session| starts.contains(&session.start));
    }

    /// Lets all execute an order, interleaved. One that fails is missing from then on.
    pub(super) fn interleave(
        &mut self,
        order: &str,
        budget: Budget,
        missing: &mut Vec<String>,
    ) -> Samples {
        let timer = self.timer;
        let ordered = |session| Ordered { session, order, timer };
        let mut candidates: Vec<_> = self.sessions.iter_mut().map(ordered).collect();
        let samples = Harness::new(budget).interleave(&mut candidates);
        for failure in samples.failures() {
            let (name, reason) = (&self.name, &failure.reason);
            missing.push(format!("{} ({name}, at {order}: {reason})", failure.series));
            self.sessions.retain(|session| session.start.series() != failure.series);
        }
        samples
    }
}

/// A session with an order: what the harness measures.
struct Ordered<'a> {
    session: &'a mut Session,
    order: &'a str,
    timer: Timer,
}

impl Candidate for Ordered<'_> {
    fn series(&self) -> &str {
        self.session.start.series()
    }

    fn role(&self) -> Role {
        self.session.start.role()
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        if self.timer == Timer::Bench {
            let begin = Instant::now();
            for _ in 0..iterations {
                let reply = self.session.group.request(self.order)?;
                if reply.trim() != DONE {
                    return Err(format!("answered `{}`", reply.trim()));
                }
            }
            let total_ns = begin.elapsed().as_nanos() as f64;
            return Ok(Sample::of_total(total_ns).per_iteration(iterations));
        }
        let reply = self.session.group.request(&format!("{} {iterations}", self.order))?;
        Ok(Sample::parse(&reply)?.per_iteration(iterations))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Command, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Ok(command)
    }

    #[test]
    fn a_session_that_fails_is_named_with_its_program_and_the_others_continue() {
        let answers = "echo ready; while read word count; do echo $((count * 5)); done";
        let fails = "echo ready; read word; echo error a byte is wrong; cat >/dev/null";
        let mut missing = Vec::new();
        let command = |start| match start {
            Start::Plain => shell(answers),
            Start::Copies => shell(fails),
            Start::Profile => Err("cannot be started".to_owned()),
        };
        let mut sessions =
            Sessions::start("echo", Timer::Program, &Start::ALL, command, &mut missing);
        let samples = sessions.interleave("word", Budget::fixed(3, 10), &mut missing);
        assert_eq!(samples.median_ns(Start::Plain.series()), 5.0);
        let expected = [
            "memferry run --profile (echo: cannot be started)",
            "memferry run --copies (echo, at word: a byte is wrong)",
        ];
        assert_eq!(missing, expected);
        assert_eq!(sessions.sessions.len(), 1);
    }

    #[test]
    fn a_program_that_does_not_measure_is_timed_from_order_to_reply() {
        let script = "echo ready; while read word; do echo ${word#say-}; done";
        let mut missing = Vec::new();
        let command = |_| shell(script);
        let mut sessions =
            Sessions::start("echo", Timer::Bench, &[Start::Plain], command, &mut missing);
        let samples = sessions.interleave("say-done", Budget::fixed(3, 2), &mut missing);
        assert!(samples.median_ns(Start::Plain.series()) > 0.0 && missing.is_empty());
        sessions.interleave("say-no", Budget::fixed(3, 2), &mut missing);
        assert_eq!(missing, ["as it is (echo, at say-no: answered `no`)"]);
    }
}
