//! What the tests of all crates share. The library uses nothing of it.
//!
//! - [`skip`] says that a test cannot run here, or fails it where `MEMFERRY_REQUIRE` says that it must.
//! - [`until`] waits for a state. No test sleeps for a while and hopes that it was long enough.
//!   [`HangGuard`] ends a test that waits for ever.
//! - [`write_program`] and [`copy_program`] make programs that can be run while other tests fork.

mod program;
mod requirement;
mod skip;
mod wait;

pub use program::{copy_program, write_program};
pub use requirement::Requirement;
pub use skip::{is_required, skip, skip_test};
pub use wait::{HangGuard, TIMEOUT, until};
