//! Handle lookup from outside: what callers see, what the source sees, alone and in a crowd.
#![cfg(not(loom))]

mod behaviour;
mod classes;
mod crowd;
mod model;
mod support;
mod traces;
