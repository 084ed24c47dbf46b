//! Arbitrary bytes for everything in Memferry that reads what others have written: each [`Target`] takes some
//! and fails if anything is wrong. `cargo xtask faults --only fuzzing` looks for bytes that make one fail; those
//! that ever did are kept in `kept/`, beside some that reach far, and a test tries them again.

#![cfg(target_os = "linux")]

mod attacker;
mod calls;
mod files;
mod hello;
mod packets;
mod rings;
mod script;
mod wire;

// The peer that speaks the protocol by hand, and memory with guards, are those of the tests of messages.
#[path = "../../message/tests/support/mod.rs"]
mod support;

pub use attacker::run_if_attacker;

/// Something that takes arbitrary bytes.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// What it is called, and the folder of its kept inputs.
    pub name: &'static str,
    /// Fails if anything is wrong.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 6] = [
    Target { name: "wire", run: wire::run },
    Target { name: "hello", run: hello::run },
    Target { name: "rings", run: rings::run },
    Target { name: "packets", run: packets::run },
    Target { name: "calls", run: calls::run },
    Target { name: "files", run: files::run },
];

/// The one of a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
