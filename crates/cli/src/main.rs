//! The program `memferry`: measures copies and messages on this machine, checks what the machine can
//! do, and explains which path a copy or a message takes. This file only sends the arguments to the command they name
//! and turns the result into an exit status: 0 well, 1 failed, 2 called wrongly.

mod args;
mod bench;
mod doctor;
mod explain;
mod figure;
mod machine;
mod mpi;
mod number;
mod outcome;
mod process;
mod replay;
mod report;
#[cfg(test)]
mod sample;
mod show;
mod size;
mod summary_keys;

use std::process::ExitCode;

use args::{Cli, Task};

fn main() -> ExitCode {
    // In a virtual machine that `memferry bench devices` started, this program is the first process.
    memferry_vm::guest::enter_if_first();
    match run(args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            show::complain(&format!("memferry: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Task::Bench(args) => bench::command::run(&args),
        Task::Doctor(args) => doctor::run(args.measure, args.json),
        Task::Explain(args) => explain::run(&args),
        Task::Replay(args) => replay::run(&args.file, args.json),
        Task::Mpirun(args) => mpi::command::mpirun(&args),
        Task::Env(args) => mpi::command::env(&args),
        Task::FabricProbe { library, provider } => mpi::probe::run(&library, &provider),
        Task::Partner { name } => doctor::partner::run(&name),
        Task::DeviceGuest { quick } => bench::devices::guest::run(quick),
        Task::Worker(args) => bench::group::worker::run(&args),
        Task::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut args::command(), "memferry", &mut script);
            Ok(show::print(&String::from_utf8(script)?)?)
        }
    }
}
