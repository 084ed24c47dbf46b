//! Engines: implementations that move bytes, behind one contract.
//!
//! [`contract`] defines an engine, [`completion`] the state that an engine reports to, and
//! [`runtime`] what channels of several engines are made of. [`cpu`], [`polled`] and [`fault`] need no hardware; `cuda` drives a GPU, `ioat` Intel's copy engine and
//! `nic` a network card. `conformance` (a feature) is the suite that every engine passes. Plans and
//! policies are in the crate above; this crate does not depend on them.

pub mod completion;
#[cfg(all(feature = "conformance", not(loom)))]
pub mod conformance;
pub mod contract;
#[cfg(not(loom))]
pub mod cpu;
#[cfg(not(loom))]
pub mod cuda;
#[cfg(not(loom))]
pub mod fault;
#[cfg(not(loom))]
pub mod ioat;
#[cfg(not(loom))]
pub mod nic;
pub mod pci;
#[cfg(not(loom))]
pub mod polled;
pub mod runtime;

pub use completion::{Completion, TransferOutput};
pub use contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine,
    ExecutionError, Kernel, MemoryKind, Opcode, OpenError, Sequence, SubmitError, Submitted,
};
