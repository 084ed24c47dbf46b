//! The concurrent cores under the loom model checker, which runs every interleaving that matters:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-engine --release --test loom
//! ```
//!
//! A lost wake-up shows as a deadlock, a missing fence as a stale value or as two threads in one
//! cell. Transfers here move real bytes, which the checker does not watch: what it watches is who
//! moves them, when, and who is told.
#![cfg(loom)]

mod claims;
mod completion;
mod device;
mod launch;
mod park;
mod ring;
mod waiters;

use memferry_engine::{Completion, Descriptor, Operation};

/// A descriptor that moves nothing, and alone reports to a completion.
fn empty(completion: &std::sync::Arc<Completion>) -> Descriptor {
    // SAFETY: no byte is touched, and tests make one of these for each completion.
    unsafe { Descriptor::new(Operation::Copy, 0, 0, 0).completes(completion.clone()) }
}

/// Checks a model with at most so many preemptions in one run, which keeps larger ones small
/// enough; practically all known bugs need no more than two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
