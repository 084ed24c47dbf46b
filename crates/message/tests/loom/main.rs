//! The shared memory of two processes under the loom model checker, which runs every relevant
//! interleaving:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-message --release --test loom
//! ```
//!
//! Two threads stand for the two processes. A lost wakeup shows as a deadlock, a missing order as a
//! stale value or as two threads in one cell.
#![cfg(loom)]

mod biased;
mod cells;
mod claims;
mod futex;
mod hints;
mod pollers;
mod wakeup;
mod window_gate;

/// The files of the library, with the atomics of the model checker. They are included, not used from the
/// library: nothing above the ring can be built with those atomics, so there is no library then.
#[path = "../../src/ring/mod.rs"]
#[allow(dead_code, unreachable_pub)]
mod ring;

/// Checks a model with at most `preemptions` preemptions in one run, which keeps larger models
/// small enough. Practically all known bugs need at most two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
