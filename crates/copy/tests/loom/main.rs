//! The poll thread of device channels under the loom model checker, which runs every relevant
//! interleaving:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-copy --release --test loom
//! ```
//!
//! Only the poll thread polls in these models, and the channels are those of devices. Work that is
//! left while the poll thread sleeps shows as a deadlock.
#![cfg(loom)]

mod doorbell;

/// The files of the library, with the atomics of the model checker.
#[path = "../../src/poller/mod.rs"]
#[allow(dead_code, unreachable_pub)]
mod poller;

/// Checks a model with at most `preemptions` preemptions in one run, which keeps larger models
/// small enough. Practically all known bugs need at most two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
