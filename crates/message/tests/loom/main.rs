//! What two processes share, under the loom model checker, which runs every interleaving that
//! matters:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-message --release --test loom
//! ```
//!
//! Two threads stand for the two processes. A lost wake-up shows as a deadlock, a missing order as
//! a stale value or as two threads in one cell.
#![cfg(loom)]

mod attention;
mod cells;
mod futex;
mod pollers;
mod record;
mod visit;

/// The very files of the library, with the atomics of the model checker.
#[path = "../../src/ring/mod.rs"]
#[allow(dead_code, unreachable_pub)]
mod ring;

/// Checks a model with at most so many preemptions in one run, which keeps larger ones small
/// enough; practically all known bugs need no more than two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
