//! Tests of the engines and of what their channels share.
#![cfg(not(loom))]

mod conformance;
mod cuda;
mod device_names;
mod dsa;
mod fault;
mod interrupts;
mod ioat;
mod small_copies;
mod wake_chain;
