//! The driver of polled channels under the loom model checker, which runs every interleaving that
//! matters:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-copy --release --test loom
//! ```
//!
//! Nobody polls in these models but the driver, and the channels are those of devices. Work that is
//! left while the driver sleeps shows as a deadlock.
#![cfg(loom)]

mod bell;

/// The very files of the library, with the atomics of the model checker.
#[path = "../../src/driver/mod.rs"]
#[allow(dead_code, unreachable_pub)]
mod driver;

/// Checks a model with at most so many preemptions in one run, which keeps larger ones small
/// enough; practically all known bugs need no more than two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
