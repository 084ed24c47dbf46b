//! A library for `LD_PRELOAD` that executes collectives of unmodified MPI programs among ranks of one
//! host, and passes everything else on to the MPI library through its profiling interface (`PMPI_`).
//!
//! The library is built without the headers of any MPI. A handle is a pointer in Open MPI and a number
//! of 32 bits in MPICH, so that both fit into a register, and both are passed on unchanged.
//! `library` finds out which MPI library the program uses, `handles` knows its predefined handles.
//!
//! All ranks of a communicator must decide in the same way whether a call is executed here. The
//! decision about a communicator is made once, by an exchange over MPI (`communicator`, `bootstrap`). The decision
//! about a call depends only on what MPI requires to be equal at all ranks: the bytes of a block, and for
//! reductions the operation and the datatype. Datatypes of calls that only move bytes may differ from
//! rank to rank; a rank whose datatype is not contiguous packs its data (`packing`).

mod bootstrap;
pub mod calls;
mod communicator;
mod handles;
mod library;
mod moves;
mod packing;
mod progress;
mod reductions;
mod report;
mod team;
