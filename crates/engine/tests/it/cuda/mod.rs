//! The GPU engine: every route of its copies, registered memory, and the fallbacks after failures
//! of the device. Over a model of a GPU and, if no fault has to be injected, over the GPU of the
//! machine too if there is one.

mod caller;
mod common;
mod cuda_operation;
mod directions;
mod faults;
mod lifetime;
mod loss;
mod mapping;
mod operations;
mod registration;
