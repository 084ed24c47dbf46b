//! Developer tasks of Memferry. `cargo xtask test` runs all tests and reports the skipped ones.
//! `cargo xtask faults` runs the fault injection checks. `cargo xtask qemu` runs the tests that
//! need a network card in a virtual machine; this program is also the first process of that
//! machine. `cargo xtask install` and `cargo xtask deb` install and pack Memferry.

mod build;
mod deb;
mod faults;
mod install;
mod qemu;
mod test;
mod test_counts;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tasks of Memferry's developers")]
struct Cli {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Debug, Subcommand)]
enum XtaskCommand {
    /// Pack what `install` installs for Debian
    ///
    /// Takes dpkg-deb and strip, and no root.
    Deb(deb::Args),
    /// Let every system call fail and processes die at every step, and print a table of what was tried
    Faults(faults::Args),
    /// Occupy memory until 1 GiB is left: a load of `test --stress`
    #[command(hide = true)]
    Hog,
    /// Build for release, and install program, libraries, header, manual pages and completions
    Install(install::Args),
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
    memferry_vm::guest::run_if_init();
    let done = match Cli::parse().command {
        XtaskCommand::Deb(args) => deb::run(&args),
        XtaskCommand::Faults(args) => faults::run(&args),
        XtaskCommand::Hog => test::occupy_memory().map(|never| match never {}),
        XtaskCommand::Install(args) => install::run(&args),
        XtaskCommand::Qemu(args) => qemu::run(&args),
        XtaskCommand::Test(args) => test::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&format!("xtask: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints a line to standard output.
#[allow(clippy::print_stdout, reason = "the only place that writes to the output")]
fn print_line(line: &str) {
    println!("{line}");
}

/// Prints a line to standard error.
#[allow(clippy::print_stderr, reason = "the only place that writes to the error output")]
fn print_error(line: &str) {
    eprintln!("{line}");
}
