//! `memferry bench` without a name: runs the benches of the headline lines, with few sizes, one
//! after the other until the time limit. The longest bench is last, and measures fewer sizes if
//! time is short.

use std::time::{Duration, Instant};

use crate::Progress;
use crate::copy::{latency, overlap};
use crate::memory::lookup;
use crate::message::pingpong;
use crate::results::headline::{Line, lines};
use crate::results::outcome::Outcome;
use crate::results::suite;
use crate::run::measure;
use crate::{Bench, gpu};

/// Nothing optional starts after this time; what is running then ends within 60 s.
const START_UNTIL: Duration = Duration::from_secs(42);

/// Benches of the screen.
fn benches() -> [&'static Bench; 5] {
    [&latency::BENCH, &overlap::BENCH, &lookup::BENCH, &gpu::BENCH, &pingpong::BENCH]
}

/// Results of the screen.
#[derive(Debug)]
pub struct Screen {
    /// Outcomes of the benches that ran.
    pub outcomes: Vec<Outcome>,
    /// Benches that failed.
    pub failures: Vec<&'static str>,
    /// Benches that the time limit excluded.
    late: Vec<&'static str>,
}

impl Screen {
    /// Runs the benches. The run continues after a bench that fails.
    pub fn measure(progress: &dyn Progress) -> Self {
        Self::measure_until(&benches(), progress, START_UNTIL)
    }

    fn measure_until(
        benches: &[&'static Bench],
        progress: &dyn Progress,
        start_until: Duration,
    ) -> Self {
        let until = Instant::now() + start_until;
        let mut screen = Self { outcomes: Vec::new(), failures: Vec::new(), late: Vec::new() };
        for (index, bench) in benches.iter().enumerate() {
            if Instant::now() >= until {
                screen.late.push(bench.name);
                continue;
            }
            progress.set_part(index + 1, benches.len());
            match measure(bench, progress, || bench.run_for_screen(until, progress)) {
                Ok(outcome) => screen.outcomes.push(outcome),
                Err(error) => {
                    progress.report(&format!("memferry: {error:#}"));
                    screen.failures.push(bench.name);
                }
            }
        }
        screen
    }

    /// The lines of the screen.
    pub fn lines(&self) -> Vec<Line> {
        lines(&self.outcomes)
    }

    /// The screen as JSON: the object of a suite, and the lines.
    pub fn json(&self) -> anyhow::Result<serde_json::Value> {
        let mut json = suite::join("screen", &self.outcomes)?;
        json["lines"] = serde_json::to_value(self.lines())?;
        Ok(json)
    }

    /// Notes about missing peers, missing benches, and disturbances of the run.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let name = |missing: &str| missing.split(" (").next().unwrap_or_default().to_owned();
        let missing = self.outcomes.iter().flat_map(|outcome| outcome.failed_and_missing().1);
        let mut missing: Vec<_> = missing.map(name).collect();
        missing.dedup();
        if !missing.is_empty() {
            notes.push(format!("Not found: {}.", missing.join(", ")));
        }
        if !self.late.is_empty() {
            notes.push(format!("Not measured, because time was up: {}.", self.late.join(", ")));
        }
        let disturbed = self.outcomes.iter().find(|outcome| outcome.disturbance().is_some());
        notes.extend(disturbed.and_then(|outcome| outcome.notes.last().cloned()));
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Effort;
    use crate::registry::NoProgress;
    use crate::results::sample;

    static FAKE: Bench = Bench::new("copy-latency", "Invented numbers.", |_, effort, _| {
        assert_eq!(effort, Effort::Brief);
        let mut outcome = sample::latency();
        outcome.missing = vec!["UCX (no free port)".to_owned(), "memferry nic".to_owned()];
        Ok(outcome)
    });

    #[test]
    fn the_screen_and_its_json_have_the_same_lines() {
        let screen = Screen::measure_until(&[&FAKE], &NoProgress, START_UNTIL);
        let json = screen.json().unwrap();
        assert_eq!(json["bench"], "screen");
        let lines = json["lines"].as_array().unwrap();
        assert_eq!(lines.len(), 4);
        for (line, shown) in lines.iter().zip(screen.lines()) {
            assert_eq!(line["text"], shown.text);
        }
        assert_eq!(screen.notes(), ["Not found: UCX."]);
    }

    #[test]
    fn no_bench_starts_after_the_time_is_up() {
        let benches: [&'static Bench; 2] = [&FAKE, &FAKE];
        let screen = Screen::measure_until(&benches, &NoProgress, Duration::ZERO);
        assert!(screen.outcomes.is_empty());
        let note = "Not measured, because time was up: copy-latency, copy-latency.";
        assert_eq!(screen.notes(), [note]);
    }
}
