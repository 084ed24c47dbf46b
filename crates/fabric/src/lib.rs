//! A libfabric provider named "memferry": programs of libfabric's, MPI above all, exchange messages
//! over Memferry's endpoints without being changed.

#[doc(hidden)]
pub mod abi;

#[allow(dead_code, reason = "the endpoint is not here yet")]
mod remote;
