//! Engines: implementations that move bytes, behind one contract.
//!
//! [`contract`] defines an engine, [`completion`] the state that an engine reports to, and
//! [`runtime`] what channels of several engines are made of. [`cpu`] needs no hardware; `cuda` drives
//! a GPU, `dsa` and `ioat` Intel's accelerators and `nic` a network card. `testing` (a feature) has the suite
//! that every engine passes, and models of the devices. Plans and policies are in the crate above;
//! this crate does not depend on them.

pub mod completion;
pub mod contract;
#[cfg(not(loom))]
pub mod cpu;
#[cfg(not(loom))]
pub mod cuda;
#[cfg(not(loom))]
pub mod dsa;
#[cfg(not(loom))]
pub mod ioat;
#[cfg(not(loom))]
pub mod nic;
pub mod pci;
pub mod runtime;
#[cfg(all(any(test, feature = "testing"), not(loom)))]
pub mod testing;

pub use completion::{Completion, TransferOutput};
pub use contract::{
    Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, DeviceBuffer,
    Engine, ExecutionError, InterruptSleep, Kernel, MemoryKind, Opcode, OpenError, Sequence,
    SubmitError, Submitted,
};

/// The factories of all engines whose devices a program can select.
#[cfg(not(loom))]
pub fn factories() -> &'static [&'static dyn contract::EngineFactory] {
    static FACTORIES: [&dyn contract::EngineFactory; 4] =
        [&dsa::FACTORY, &ioat::FACTORY, &nic::FACTORY, &cuda::FACTORY];
    &FACTORIES
}
