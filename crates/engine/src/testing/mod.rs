//! For tests and benches: the suite that every engine passes, models of devices, and engines that
//! only tests use.

pub mod conformance;
pub mod cuda_model;
pub mod dsa_model;
pub mod fault;
pub mod interrupts;
pub mod ioat_model;
mod iova_memory;
pub mod nic_model;
pub mod polled;
