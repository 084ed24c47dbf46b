//! One progress bar on standard error. It is hidden if standard error is not a terminal, so benches
//! report their steps unconditionally.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::Instant;

use memferry_bench::Progress;

use super::print_error;

/// The length of the bar.
const CELLS: usize = 40;

/// The progress of a run. The benches of a suite use it one after the other.
#[derive(Debug)]
pub(crate) struct TerminalProgress {
    visible: bool,
    part: Mutex<String>,
    bar: Mutex<Option<Bar>>,
}

#[derive(Debug)]
struct Bar {
    label: String,
    done: u64,
    total: u64,
    start: Instant,
}

impl Bar {
    fn line(&self, message: &str) -> String {
        let full = (self.done * CELLS as u64 / self.total.max(1)).min(CELLS as u64) as usize;
        let (full, rest) = ("━".repeat(full), "─".repeat(CELLS - full));
        let seconds = self.start.elapsed().as_secs();
        format!("{} {full}{rest} {}/{} {seconds} s {message}", self.label, self.done, self.total)
    }
}

impl TerminalProgress {
    /// A progress bar that is shown if `visible` is set and standard error is a terminal.
    pub(crate) fn new(visible: bool) -> Self {
        let visible = visible && std::io::stderr().is_terminal();
        Self { visible, part: Mutex::default(), bar: Mutex::default() }
    }

    /// Writes over the line of before, which the terminal cuts at its edge. No thread does so steadily: it would
    /// disturb the copies that are measured.
    fn draw(&self, line: &str) {
        if self.visible {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K\x1b[?7l{line}\x1b[?7h");
        }
    }
}

impl Progress for TerminalProgress {
    fn set_part(&self, part: usize, parts: usize) {
        *lock(&self.part) = if parts > 1 { format!("[{part}/{parts}] ") } else { String::new() };
    }

    fn start(&self, total_steps: u64, label: &str) {
        let label = format!("{}{label}", lock(&self.part));
        let bar = Bar { label, done: 0, total: total_steps, start: Instant::now() };
        self.draw(&bar.line(""));
        *lock(&self.bar) = Some(bar);
    }

    fn step(&self, message: &str) {
        if let Some(bar) = &mut *lock(&self.bar) {
            bar.done += 1;
            self.draw(&bar.line(message));
        }
    }

    fn finish(&self) {
        if lock(&self.bar).take().is_some() {
            self.draw("");
        }
    }

    fn report(&self, line: &str) {
        self.draw("");
        print_error(line);
    }
}

/// Locks a mutex and ignores poisoning: a panic in another thread leaves the bar in a valid state.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_progress_takes_steps_in_any_order() {
        let progress = TerminalProgress::new(false);
        progress.step("before the start");
        progress.start(2, "copy-latency");
        progress.step("4 KiB");
        progress.start(1, "again");
        progress.finish();
        progress.finish();
    }

    #[test]
    fn the_bar_is_full_at_the_last_step_and_never_longer() {
        let mut bar = Bar { label: "copy".into(), done: 1, total: 2, start: Instant::now() };
        let cells = |bar: &Bar| bar.line("").chars().filter(|&cell| cell == '━').count();
        assert_eq!(cells(&bar), CELLS / 2);
        for done in [2, 3] {
            bar.done = done;
            assert_eq!(cells(&bar), CELLS);
        }
        bar.total = 0;
        assert!(bar.line("4 KiB").starts_with("copy ━") && bar.line("4 KiB").ends_with(" 4 KiB"));
    }
}
