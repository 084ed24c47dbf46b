//! `memferry bench` without a name: runs the benches of the headline lines, with few sizes, one
//! after the other until the time limit. The longest bench is last, and measures fewer sizes if
//! time is short.

use std::time::{Duration, Instant};

use super::command::measure;
use super::headline::lines;
use super::{Bench, gpu, headline, latency, lookup, overlap, pingpong, suite};
use crate::outcome::{Machine, Outcome};
use crate::show::{self, Paint, Progress};

/// Nothing optional starts after this time; what is running then ends within 60 s.
const START_UNTIL: Duration = Duration::from_secs(42);

/// Benches of the screen.
fn benches() -> [&'static dyn Bench; 5] {
    [&latency::CopyLatency, &overlap::Overlap, &lookup::Lookup, &gpu::Gpu, &pingpong::Pingpong]
}

/// Results of the screen.
pub(super) struct Screen {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) failures: Vec<&'static str>,
    /// Benches that the time limit excluded.
    late: Vec<&'static str>,
}

impl Screen {
    /// Runs the benches. The run continues after a bench that fails.
    pub(super) fn measure(progress: &Progress) -> Self {
        Self::measure_until(&benches(), progress, START_UNTIL)
    }

    fn measure_until(
        benches: &[&'static dyn Bench],
        progress: &Progress,
        start_until: Duration,
    ) -> Self {
        let until = Instant::now() + start_until;
        let mut screen = Self { outcomes: Vec::new(), failures: Vec::new(), late: Vec::new() };
        for (index, bench) in benches.iter().enumerate() {
            if Instant::now() >= until {
                screen.late.push(bench.name());
                continue;
            }
            progress.set_part(index + 1, benches.len());
            match measure(*bench, progress, || bench.run_for_screen(until, progress)) {
                Ok(outcome) => screen.outcomes.push(outcome),
                Err(error) => {
                    show::print_error(&format!("memferry: {error:#}"));
                    screen.failures.push(bench.name());
                }
            }
        }
        screen
    }

    /// The screen as text.
    pub(super) fn text(&self, paint: Paint) -> String {
        let lines = lines(&self.outcomes);
        show::screen::render(&Machine::detect(), &lines, &self.notes(), paint)
    }

    /// The screen as JSON: the object of a suite, and the lines.
    pub(super) fn json(&self) -> anyhow::Result<serde_json::Value> {
        let mut json = suite::join("screen", &self.outcomes)?;
        json["lines"] = serde_json::to_value(headline::lines(&self.outcomes))?;
        Ok(json)
    }

    /// Notes about missing peers, missing benches, and disturbances of the run.
    fn notes(&self) -> Vec<String> {
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
    use crate::bench::Effort;
    use crate::sample;

    struct FakeBench;

    impl Bench for FakeBench {
        fn name(&self) -> &'static str {
            "copy-latency"
        }

        fn about(&self) -> &'static str {
            "Invented numbers."
        }

        fn run(&self, effort: Effort, _progress: &Progress) -> anyhow::Result<Outcome> {
            assert_eq!(effort, Effort::Brief);
            let mut outcome = sample::latency();
            outcome.missing = vec!["UCX (no free port)".to_owned(), "memferry nic".to_owned()];
            Ok(outcome)
        }
    }

    #[test]
    fn the_screen_and_its_json_have_the_same_lines() {
        let progress = Progress::new(false);
        let screen = Screen::measure_until(&[&FakeBench], &progress, START_UNTIL);
        let (text, json) = (screen.text(Paint::plain()), screen.json().unwrap());
        assert_eq!(json["bench"], "screen");
        let lines = json["lines"].as_array().unwrap();
        assert_eq!(lines.len(), 4);
        for line in lines {
            assert!(text.contains(line["text"].as_str().unwrap()), "{text}");
        }
        assert!(text.contains("  Not found: UCX.\n"), "{text}");
    }

    #[test]
    fn no_bench_starts_after_the_time_is_up() {
        let progress = Progress::new(false);
        let benches: [&'static dyn Bench; 2] = [&FakeBench, &FakeBench];
        let screen = Screen::measure_until(&benches, &progress, Duration::ZERO);
        assert!(screen.outcomes.is_empty());
        let text = screen.text(Paint::plain());
        assert!(text.contains("time was up: copy-latency, copy-latency.\n"), "{text}");
    }
}
