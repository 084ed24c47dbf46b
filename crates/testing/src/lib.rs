//! Helpers for the tests of all crates. The library does not use them.
//!
//! - [`skip`] reports that a test cannot run on this machine, or fails the test if `MEMFERRY_REQUIRE`
//!   requires it.
//! - [`until`] waits for a state, so that no test depends on the length of a sleep. [`HangGuard`] ends a
//!   test that hangs.
//! - [`write_program`] and [`copy_program`] create programs that can be run while other tests fork.

mod program;
mod requirement;
mod skip;
mod wait;

pub use program::{copy_program, write_program};
pub use requirement::Requirement;
pub use skip::{is_required, skip, skip_test};
pub use wait::{HangGuard, TIMEOUT, until};
