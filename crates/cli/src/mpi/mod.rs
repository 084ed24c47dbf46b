//! MPI programs over Memferry: the installed MPIs, the location of Memferry's libfabric provider,
//! and the variables that make an MPI use the provider. `memferry mpirun` and `memferry env` are
//! the commands; `doctor` and the benches use the same functions.

pub(crate) mod command;
pub(crate) mod launcher;
pub(crate) mod probe;
pub(crate) mod provider;
pub(crate) mod variables;

pub(crate) use launcher::{Launcher, MpiFamily};
