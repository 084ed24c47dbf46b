//! What the tests of all crates share. The library uses nothing of it.

mod program;

pub use program::{copy_program, write_program};
