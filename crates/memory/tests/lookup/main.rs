//! Handle lookup from outside: what callers see, what the source sees, alone and in a crowd.
#![cfg(not(loom))]

mod behaviour;
mod speed;
mod support;
