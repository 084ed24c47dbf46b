//! Candidates of the message benches: Memferry's endpoints and links, its peers (MPI, UCX, Rust
//! libraries, the transports of the operating system), and the lower bound.

pub(crate) mod baseline;
#[cfg(feature = "peers")]
pub(crate) mod iceoryx;
#[cfg(feature = "peers")]
pub(crate) mod ipc_channel;
pub(crate) mod memferry_member;
pub(crate) mod mpi;
pub(crate) mod mpi_over_memferry;
pub(crate) mod team_member;
pub(crate) mod transport;
pub(crate) mod ucx;
