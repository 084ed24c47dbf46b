//! Tests of the provider: its tables, libfabric, MPI programs, two hosts.

mod frozen;
mod layout;
mod libfabric;
mod mpi;
mod provider;
mod two_hosts;
