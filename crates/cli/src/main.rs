//! The program `memferry`. It measures copies and messages on this machine, checks what the machine
//! supports, and explains which path a copy or a message takes. This file dispatches to the
//! commands and maps their results to an exit status: 0 for success, 1 for a failure, 2 for an
//! invalid command line; `memferry run` has that of its program.

mod args;
#[cfg(feature = "bench")]
mod bench;
mod doctor;
mod explain;
mod load;
mod manual;
mod mpi;
mod replay;
mod report;
mod run;
mod show;
#[cfg(feature = "bench")]
mod timeline;
mod top;

use std::process::ExitCode;

use args::{Cli, CliCommand};

/// The error of `memferry bench` in a program without benches.
#[cfg(not(feature = "bench"))]
const NO_BENCHES: &str = "this program was built without benches; build it with them by `cargo \
                          install --path crates/cli` in the source tree of Memferry (its feature \
                          `bench` is on by default)";

fn main() -> ExitCode {
    // In a virtual machine that `memferry bench devices` started, this program runs as init (PID
    // 1).
    #[cfg(feature = "bench")]
    memferry_bench::guest::run_if_init();
    #[cfg(feature = "bench")]
    if let Some(args) = memferry_bench::worker::WorkerArgs::from_words(std::env::args().skip(1)) {
        memferry_sys::settings::skip_variable_check();
        return exit_code(memferry_bench::worker::run(&args));
    }
    let cli = args::parse();
    if cli.command.is_started_by_memferry() {
        memferry_sys::settings::skip_variable_check();
    } else {
        memferry_sys::settings::check_variables();
    }
    match &cli.command {
        CliCommand::Run(args) => run::run(args).unwrap_or_else(|error| exit_code(Err(error))),
        _ => exit_code(run(cli)),
    }
}

/// The exit status of a result, whose error is printed.
fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            show::print_error(&format!("memferry: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        #[cfg(feature = "bench")]
        CliCommand::Bench(args) => bench::run(&args),
        #[cfg(not(feature = "bench"))]
        CliCommand::Bench { .. } => anyhow::bail!(NO_BENCHES),
        CliCommand::Report(args) => report::command::run(&args),
        CliCommand::Doctor(args) => doctor::run(&args),
        CliCommand::Explain(args) => explain::run(&args),
        CliCommand::Load(args) => load::run(&args),
        CliCommand::Top(args) => top::run(&args),
        CliCommand::Replay(args) => replay::run(&args.file, args.json),
        CliCommand::Mpirun(args) => mpi::command::mpirun(&args),
        // `main` has handled it.
        CliCommand::Run(_) => Ok(()),
        CliCommand::Env(args) => mpi::command::env(&args),
        CliCommand::FabricProbe { library, provider } => mpi::probe::run(&library, &provider),
        CliCommand::ManPages { folder } => manual::write_pages(&folder),
        CliCommand::Partner { name } => doctor::echo_peer::run(&name),
        #[cfg(feature = "bench")]
        CliCommand::DeviceGuest { quick } => memferry_bench::guest::run(quick),
        #[cfg(feature = "bench")]
        CliCommand::Worker(args) => memferry_bench::worker::run(&args),
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut args::command(), "memferry", &mut script);
            Ok(show::print(&String::from_utf8(script)?)?)
        }
    }
}
