//! One progress bar on standard error. It is hidden if standard error is not a terminal, so benches
//! report their steps unconditionally.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

const TEMPLATE: &str = "{prefix:.bold} {wide_bar:.cyan/blue} {pos}/{len} {elapsed} {msg}";

/// The progress of a run. The benches of a suite use it one after the other.
#[derive(Debug)]
pub(crate) struct Progress {
    visible: bool,
    part: Mutex<String>,
    bar: Mutex<Option<ProgressBar>>,
}

impl Progress {
    /// A progress bar that is shown if `visible` is set and standard error is a terminal.
    pub(crate) fn new(visible: bool) -> Self {
        Self { visible, part: Mutex::default(), bar: Mutex::default() }
    }

    /// Sets the number of the current bench within its suite, such as `2/5`.
    pub(crate) fn set_part(&self, part: usize, parts: usize) {
        *lock(&self.part) = if parts > 1 { format!("[{part}/{parts}] ") } else { String::new() };
    }
}

impl Progress {
    /// Starts a bar with `total_steps` steps and finishes the previous bar.
    pub(crate) fn start(&self, total_steps: u64, label: &str) {
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

    /// Reports a finished step, with the label of the next one.
    pub(crate) fn step(&self, message: &str) {
        if let Some(bar) = &*lock(&self.bar) {
            bar.set_message(message.to_owned());
            bar.inc(1);
        }
    }

    /// Removes the bar, so that a table can be printed.
    pub(crate) fn finish(&self) {
        if let Some(bar) = lock(&self.bar).take() {
            bar.finish_and_clear();
        }
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
        let progress = Progress::new(false);
        progress.step("before the start");
        progress.start(2, "copy-latency");
        progress.step("4 KiB");
        progress.start(1, "again");
        progress.finish();
        progress.finish();
    }
}
