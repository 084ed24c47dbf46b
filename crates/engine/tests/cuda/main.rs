//! The GPU engine: every way that its copies take, registered memory and what becomes of it, and
//! what remains when the device does not do its part. Over a model of a GPU, and, where nothing has
//! to be injected, over the GPU of the machine too if there is one.
#![cfg(not(loom))]

mod common;
mod directions;
mod faults;
mod job;
mod lifetime;
mod loss;
mod mapping;
mod operations;
mod registration;
