//! Memferry moves memory for programs.
//!
//! Start a copy, compute on, ask whether it is done, use the first bytes while the last still
//! move. Copies go through whatever can move bytes on the machine: spare processor cores, the copy
//! engines of GPUs, Intel's I/OAT, and a network card in loopback.
//!
//! ```
//! use memferry::Ferry;
//!
//! let ferry = Ferry::new()?;
//! let source = vec![1u8; 4 << 20];
//! let mut target = vec![0u8; 4 << 20];
//!
//! // Blocking: small copies are made by this thread, and large ones by several cores.
//! ferry.copy(&source, &mut target)?;
//!
//! // Asynchronous, with buffers that move in and come back.
//! let transfer = ferry.icopy_owned(source, target)?;
//! // ... compute ...
//! let (source, target) = transfer.wait()?;
//! assert_eq!(source, target);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # Three ways to hand over memory
//!
//! | way | call | who keeps the memory alive |
//! |---|---|---|
//! | owned buffers | [`Ferry::icopy_owned`] | the transfer; it hands them back |
//! | scoped borrows | [`Ferry::scope`] | the scope, which cannot be left before its copies are done |
//! | raw pointers | [`Ferry::start`], [`Ferry::icopy`] | the caller (`unsafe`) |
//!
//! # Ways to learn of the end
//!
//! [`Transfer::wait`], [`Transfer::check`], `.await`, [`Transfer::event`] for event loops, a
//! [`Notification`] variable, or a [`Cookie`]: all are views of the same event.

pub use memferry_copy::{
    Buffer, BuildError, Builder, Cookie, CookieError, CudaEngine, DeviceMemory, EngineChoice,
    Error, Failed, Ferry, Finish, Gpu, Notification, Options, OwnedSource, OwnedTarget,
    OwnedTransfer, PciDevices, Piece, PinLimits, PinStatistics, Region, Request, Scope,
    ScopedTransfer, Statistics, Temperature, Transfer, ValidationError, plan, policy, transfer,
};
pub use memferry_engine::{ExecutionError, MemoryKind};
pub use memferry_sys::EventFd;

/// Engines and the contract they meet, for those who write one or pick one.
pub mod engine {
    pub use memferry_engine::*;
}

/// Memory made ready for engines and peers: pinning, the pin-down cache, handles and their lookup.
pub mod memory {
    pub use memferry_memory::*;
}

/// Messages between processes: windows, endpoints, links, jobs, shareable memory.
pub mod message {
    pub use memferry_message::*;
}

/// Facts about the machine and the lowest building blocks.
pub mod sys {
    pub use memferry_sys::copy::stream::Streaming;
    pub use memferry_sys::{affinity, clock, copy, cpu, pages};
}

/// The README's examples, compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct ReadmeExamples;
