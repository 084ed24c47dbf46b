//! Engines: implementations that move bytes, behind one contract.
//!
//! [`contract`] defines an engine and [`completion`] the state that an engine reports to. [`cpu`],
//! [`polled`] and [`fault`] need no hardware; `cuda` drives a GPU, `ioat` Intel's copy engine and
//! `nic` a network card. `conformance` (a feature) is the suite that every engine passes. Plans and
//! policies are in the crate above; this crate does not depend on them.

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
mod execute;
#[cfg(not(loom))]
pub mod fault;
#[cfg(not(loom))]
pub mod ioat;
#[cfg(not(loom))]
pub mod nic;
#[cfg(not(loom))]
pub mod pci;
#[cfg(loom)]
#[path = "pci/loom.rs"]
pub mod pci;
#[cfg(not(loom))]
pub mod polled;
#[cfg(not(loom))]
pub mod profile_store;
#[cfg(not(loom))]
mod threaded;

pub use completion::{Completion, TransferOutput};
pub use contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine,
    ExecutionError, Kernel, MemoryKind, Opcode, OpenError, Sequence, SubmitError, Submitted,
};
