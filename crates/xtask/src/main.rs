//! Tasks of Memferry's developers: `cargo xtask test` runs all tests and tells which were skipped,
//! `cargo xtask faults` lets everything go wrong once, `cargo xtask qemu` runs the tests that need a real
//! network card in a virtual machine that has one. This program is also the first process of that machine.

mod build;
mod faults;
mod qemu;
mod tally;
mod test;

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
    /// Let every system call fail and processes die at every step, and print a table of what was tried
    Faults(faults::Args),
    /// Run the tests that need a network card in a virtual machine that has one
    ///
    /// Takes some minutes, and qemu-system-x86_64. The machine's kernel is fetched by apt the first
    /// time (27 MB, kept in ~/.cache/memferry/vm, nothing is installed), unless MEMFERRY_VM_KERNEL
    /// names a folder with boot/vmlinuz-* and lib/modules.
    Qemu(qemu::Args),
    /// Run the tests of the workspace, and tell at the end which were skipped and why
    ///
    /// MEMFERRY_REQUIRE makes skips failures: `all` for everything that can be installed, or names
    /// with commas between them, such as `all,gpu`.
    Test(test::Args),
}

fn main() -> ExitCode {
    memferry_vm::guest::enter_if_first();
    let done = match Cli::parse().task {
        Task::Faults(args) => faults::run(&args),
        Task::Qemu(args) => qemu::run(&args),
        Task::Test(args) => test::run(&args),
    };
    match done {
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
