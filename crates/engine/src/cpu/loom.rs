//! The parts of the processor engine that the model checker runs: no threads, no system calls.

pub mod park;
pub mod ring;
