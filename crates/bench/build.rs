//! Copies the lock file to where the program includes it from: it is in the root of the workspace, or beside
//! this file in a published package.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let folder = |name| PathBuf::from(env::var_os(name).expect("cargo sets the variable"));
    let package = folder("CARGO_MANIFEST_DIR");
    let lock = package.ancestors().map(|it| it.join("Cargo.lock")).find(|it| it.is_file());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", lock.as_deref().unwrap_or(Path::new(".")).display());
    let text = lock.map(|lock| fs::read(lock).expect("the lock file is readable"));
    let copy = folder("OUT_DIR").join("Cargo.lock");
    fs::write(copy, text.unwrap_or_default()).expect("the folder for output is writable");
}
