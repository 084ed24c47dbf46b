//! Engines: the things that move bytes, behind one contract.
//!
//! [`contract`] says what an engine is; [`completion`] is what an engine reports to; [`cpu`],
//! [`polled`] and [`fault`] are the engines that need no hardware, `cuda` is that of a GPU, `ioat` that of
//! Intel's copy engine and `nic` that of a network card; `conformance` (a feature) is the suite
//! that every engine passes. Nothing here knows who asked for a copy or why: plans and policies
//! live in the crate above.

pub mod completion;
#[cfg(all(feature = "conformance", not(loom)))]
pub mod conformance;
pub mod contract;
#[cfg(not(loom))]
pub mod cpu;
#[cfg(loom)]
#[path = "cpu/loom.rs"]
pub mod cpu;
#[cfg(not(loom))]
pub mod cuda;
#[cfg(not(loom))]
pub mod device;
#[cfg(loom)]
#[path = "device/loom.rs"]
pub mod device;
mod execute;
#[cfg(not(loom))]
pub mod fault;
#[cfg(not(loom))]
pub mod ioat;
#[cfg(not(loom))]
pub mod nic;
#[cfg(not(loom))]
pub mod polled;
#[cfg(not(loom))]
pub mod saved;
#[cfg(not(loom))]
mod threaded;

pub use completion::{Completion, Finish};
pub use contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine,
    ExecutionError, Kernel, MemoryKind, OpenError, Operation, Sequence, SubmitError, Taken,
};
