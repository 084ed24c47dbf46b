//! One progress bar on standard error. It hides itself when standard error is not a terminal, so
//! benches report their steps without asking whether anybody watches.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

const TEMPLATE: &str = "{prefix:.bold} {wide_bar:.cyan/blue} {pos}/{len} {elapsed} {msg}";

/// The progress of a run, shared by the benches of a suite one after the other.
#[derive(Debug)]
pub(crate) struct Progress {
    visible: bool,
    part: Mutex<String>,
    bar: Mutex<Option<ProgressBar>>,
}

impl Progress {
    /// A progress that shows itself where it can, or never.
    pub(crate) fn new(visible: bool) -> Self {
        Self { visible, part: Mutex::default(), bar: Mutex::default() }
    }

    /// Says that the next work is one part of several, such as `2/5`.
    pub(crate) fn set_part(&self, part: usize, parts: usize) {
        *lock(&self.part) = if parts > 1 { format!("[{part}/{parts}] ") } else { String::new() };
    }
}

impl Progress {
    /// Begins a work of so many steps; a work begun before is over.
    pub(crate) fn start(&self, total_steps: u64, label: &str) {
        let bar = if self.visible { ProgressBar::new(total_steps) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well formed");
        bar.set_style(style.progress_chars("━╸─"));
        bar.set_prefix(format!("{}{label}", lock(&self.part)));
        // No steady tick: its thread would run beside the copies that are being measured.
        bar.tick();
        if let Some(old) = lock(&self.bar).replace(bar) {
            old.finish_and_clear();
        }
    }

    /// Says that a step is done, and what comes next.
    pub(crate) fn step(&self, message: &str) {
        if let Some(bar) = &*lock(&self.bar) {
            bar.set_message(message.to_owned());
            bar.inc(1);
        }
    }

    /// Takes the bar away, to make room for a table.
    pub(crate) fn finish(&self) {
        if let Some(bar) = lock(&self.bar).take() {
            bar.finish_and_clear();
        }
    }
}

/// A panic elsewhere leaves a bar that is still a bar.
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
