//! The machine on which benches run, the load of its processors, and its programs: MPIs and others.

#[cfg(feature = "run")]
pub(crate) mod load;
pub mod machine;
pub mod mpi;
pub mod process;
