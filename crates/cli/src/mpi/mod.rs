//! MPI programs over Memferry: which MPI there is, where Memferry's libfabric provider is, and the
//! variables that bring the two together. `memferry mpirun` and `memferry env` are the commands;
//! `doctor` and the benches ask the same questions.

pub(crate) mod command;
pub(crate) mod launcher;
pub(crate) mod probe;
pub(crate) mod provider;
pub(crate) mod variables;

pub(crate) use launcher::{Family, Launcher};
