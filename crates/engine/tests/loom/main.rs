//! The concurrent structures of the engine under the loom model checker, which runs every relevant
//! interleaving:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-engine --release --test loom
//! ```
//!
//! A lost wakeup shows as a deadlock, a missing fence as a stale value or as two threads in one
//! cell. Transfers here copy real bytes, which the checker does not track. It tracks which thread
//! copies them, when, and which threads are notified.
#![cfg(loom)]

mod claims;
mod completion;
mod dispatch;
mod help;
mod interrupt;
mod park;
mod pci;
mod reset_guard;
mod ring;
mod waiters;
mod wake_chain;

use memferry_engine::{Completion, Descriptor, Opcode};

/// A descriptor that copies nothing, and is the only one that reports to its completion.
fn empty(completion: &std::sync::Arc<Completion>) -> Descriptor {
    // SAFETY: no byte is accessed, and tests create one of these for each completion.
    unsafe { Descriptor::new(Opcode::Copy, 0, 0, 0).completes(completion.clone()) }
}

/// Checks a model with at most `preemptions` preemptions in one run, which keeps larger models
/// small enough. Practically all known bugs need at most two.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
