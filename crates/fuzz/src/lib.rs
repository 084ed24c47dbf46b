//! Fuzzing of everything in Memferry that reads untrusted bytes: each [`Target`] takes an input and
//! panics on an error. `cargo xtask faults --only fuzzing` searches for inputs that make one fail;
//! those that ever did are stored in `kept/`, with some of high coverage, and a test repeats them.

#![cfg(target_os = "linux")]

mod accelerators;
mod attacker;
mod calls;
mod files;
mod hello;
mod packets;
mod rings;
mod script;
mod wire;

pub use attacker::run_if_attacker;

/// A target of the fuzzer.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, and the folder of its stored inputs.
    pub name: &'static str,
    /// Runs one input; panics on an error.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 7] = [
    Target { name: "wire", run: wire::run },
    Target { name: "hello", run: hello::run },
    Target { name: "rings", run: rings::run },
    Target { name: "packets", run: packets::run },
    Target { name: "calls", run: calls::run },
    Target { name: "files", run: files::run },
    Target { name: "accelerators", run: accelerators::run },
];

/// The target of a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
