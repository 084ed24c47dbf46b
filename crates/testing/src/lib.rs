//! Helpers for the tests of all crates. The library does not use them.
//!
//! - [`skip`] reports that a test cannot run on this machine, or fails the test if `MEMFERRY_REQUIRE`
//!   requires it.
//! - [`in_own_process`] gives a test a process of its own; [`rerun`] starts a test again with another environment.
//! - [`until`] waits for a state, so that no test depends on the length of a sleep. [`HangGuard`] ends a
//!   test that hangs.
//! - `message` (feature `message`) has other processes, raw peers and memory with guards for tests of
//!   messages; `RingPinner` (feature `pinning`) pins page frames.
//! - [`pattern`] fills memory with bytes that tell their place, and finds the first that is wrong.
//! - [`mpi`] finds the MPIs of this machine.
//! - [`write_program`] and [`copy_program`] create programs that can be run while other tests fork.

#[cfg(feature = "message")]
pub mod message;
pub mod mpi;
mod own_process;
pub mod pattern;
mod program;
mod requirement;
#[cfg(feature = "pinning")]
mod ring_pinner;
mod skip;
mod wait;

pub use own_process::{in_own_process, rerun};
pub use program::{copy_program, write_program};
pub use requirement::Requirement;
#[cfg(feature = "pinning")]
pub use ring_pinner::RingPinner;
pub use skip::{is_required, skip, skip_test};
pub use wait::{HangGuard, TIMEOUT, until};
