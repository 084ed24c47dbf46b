//! The cache of translations and the pin-down cache under the loom model checker, which runs every interleaving that
//! matters:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-memory --release --test loom
//! ```
//!
//! A cell that loom watches stands for what the source attached: it is read by whoever holds a
//! line and written by whoever detaches it. A line that is detached while it is in use shows as two
//! threads in one cell, a lost wake-up as a deadlock, a mixture of two lines as a wrong entry.
//!
//! Memory that is pinned has a number, which rises when other memory is mapped in its place. A pin of
//! memory that is gone shows as a number that is too low.
#![cfg(loom)]

mod cache;
mod leaving;
mod news;
mod promises;

/// Checks a model with at most so many preemptions in one run, which keeps larger ones small
/// enough; practically all known bugs need no more than two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
