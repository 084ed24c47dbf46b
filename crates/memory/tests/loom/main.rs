//! The translation cache and the pin cache under the loom model checker, which runs every relevant
//! interleaving:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-memory --release --test loom
//! ```
//!
//! A cell that loom tracks stands for the memory that the backend attached: a thread that holds a line reads
//! it, and a thread that detaches the line writes it. A line that is detached while it is in use shows as two
//! threads in one cell, a lost wakeup as a deadlock, a mixture of two lines as a wrong entry.
//!
//! Pinned memory has a number, which rises when other memory is mapped at its address. A pin of memory that
//! is unmapped shows as a number that is too low.
#![cfg(loom)]

mod cache;
mod draining;
mod events;
mod unmonitored;

/// Checks a model with at most `preemptions` preemptions in one run, which keeps larger models small enough.
/// Practically all known bugs need at most two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
