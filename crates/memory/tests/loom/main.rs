//! The cache of translations under the loom model checker, which runs every interleaving that
//! matters:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-memory --release --test loom
//! ```
//!
//! A cell that loom watches stands for what the source attached: it is read by whoever holds a
//! line and written by whoever detaches it. A line that is detached while it is in use shows as two
//! threads in one cell, a lost wake-up as a deadlock, a mixture of two lines as a wrong entry.
#![cfg(loom)]

mod cache;
mod leaving;

/// Checks a model with at most so many preemptions in one run, which keeps larger ones small
/// enough; practically all known bugs need no more than two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
