//! Tests of the program, which run it as a user would.

// They run benches, or members of their groups.
#[cfg(feature = "bench")]
mod devices;
#[cfg(feature = "bench")]
mod lookup;
#[cfg(feature = "bench")]
mod messages;
mod mpi;
mod program;
mod run;
mod top;
#[cfg(feature = "bench")]
mod worker;
