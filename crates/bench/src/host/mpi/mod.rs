//! MPIs of the machine, the location of Memferry's libfabric provider, and the variables that make an
//! MPI use the provider. `memferry mpirun`, `memferry env`, `memferry doctor` and the benches use it.

pub mod launcher;
pub mod provider;
pub mod variables;

pub use launcher::{Launcher, MpiFamily};
