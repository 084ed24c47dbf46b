//! Tasks of Memferry's developers: `cargo xtask qemu` runs the tests that need a real network card in
//! a virtual machine that has one. This program is also the first process of that machine.

mod build;
mod qemu;
mod tally;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tasks of Memferry's developers")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run the tests that need a network card in a virtual machine that has one
    ///
    /// Takes some minutes, and qemu-system-x86_64. The machine's kernel is fetched by apt the first
    /// time (27 MB, kept in ~/.cache/memferry/vm, nothing is installed), unless MEMFERRY_VM_KERNEL
    /// names a folder with boot/vmlinuz-* and lib/modules.
    Qemu(qemu::Args),
}

fn main() -> ExitCode {
    memferry_vm::guest::enter_if_first();
    let Task::Qemu(args) = Cli::parse().task;
    match qemu::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("xtask: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// What people want to know.
#[allow(clippy::print_stdout, reason = "the only place that writes to the output")]
fn say(line: &str) {
    println!("{line}");
}

/// What went wrong.
#[allow(clippy::print_stderr, reason = "the only place that writes to the error output")]
fn complain(line: &str) {
    eprintln!("{line}");
}
