//! One progress bar on standard error. It is hidden if standard error is not a terminal, so benches
//! report their steps unconditionally.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};
use memferry_bench::Progress;

use super::print_error;

const TEMPLATE: &str = "{prefix:.bold} {wide_bar:.cyan/blue} {pos}/{len} {elapsed} {msg}";

/// The progress of a run. The benches of a suite use it one after the other.
#[derive(Debug)]
pub(crate) struct TerminalProgress {
    visible: bool,
    part: Mutex<String>,
    bar: Mutex<Option<ProgressBar>>,
}

impl TerminalProgress {
    /// A progress bar that is shown if `visible` is set and standard error is a terminal.
    pub(crate) fn new(visible: bool) -> Self {
        Self { visible, part: Mutex::default(), bar: Mutex::default() }
    }
}

impl Progress for TerminalProgress {
    fn set_part(&self, part: usize, parts: usize) {
        *lock(&self.part) = if parts > 1 { format!("[{part}/{parts}] ") } else { String::new() };
    }

    fn start(&self, total_steps: u64, label: &str) {
        let bar = if self.visible { ProgressBar::new(total_steps) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well formed");
        bar.set_style(style.progress_chars("━╸─"));
        bar.set_prefix(format!("{}{label}", lock(&self.part)));
        // No steady tick: its thread would disturb the copies that are measured.
        bar.tick();
        if let Some(old) = lock(&self.bar).replace(bar) {
            old.finish_and_clear();
        }
    }

    fn step(&self, message: &str) {
        if let Some(bar) = &*lock(&self.bar) {
            bar.set_message(message.to_owned());
            bar.inc(1);
        }
    }

    fn finish(&self) {
        if let Some(bar) = lock(&self.bar).take() {
            bar.finish_and_clear();
        }
    }

    fn report(&self, line: &str) {
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
}
