//! MPI programs over Memferry: `memferry mpirun` and `memferry env`, and the question to a libfabric
//! whether it loads the provider, for `memferry doctor`.

pub(crate) mod command;
mod one_host;
mod options;
pub(crate) mod probe;
