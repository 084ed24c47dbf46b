//! `memferry run` starts a program with the library `libmemferry-preload.so` in front of the C library.

mod elf;
mod profile;
mod program;
mod report;

use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, anyhow};
use memferry::Ferry;
use memferry_bench::host::mpi::{provider, variables};

use memferry_sys::affinity;

use crate::args::RunArgs;

/// The variable by which the library shares copies.
const COPIES_VARIABLE: &str = "MEMFERRY_COPIES";
/// The variable with the library whose ferry copies, if a device is wanted.
const COPY_LIBRARY_VARIABLE: &str = "MEMFERRY_COPY_LIBRARY";
/// The variables that name devices.
const DEVICE_VARIABLES: [&str; 4] =
    ["MEMFERRY_GPU", "MEMFERRY_DSA", "MEMFERRY_IOAT", "MEMFERRY_NIC"];

/// Starts the program. Returns its exit status; with nothing to report, replaces this process by it.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let (name, words) = args.words.split_first().context("no command")?;
    let file = program::find(name)?;
    program::check(&file)?;
    let mut command = Command::new(&file);
    command.arg0(name).args(words);
    let (variable, libraries) = variables::preload(&[&provider::find_preload()?]);
    command.env(variable, libraries);
    if args.shared_heap {
        command.env(variables::SHARED_HEAP, variables::SHARED_HEAP_BYTES.to_string());
    }
    if args.profile {
        return profile::run(command, args);
    }
    if args.copies {
        command.env(COPIES_VARIABLE, shared_copies()?);
        if wants_device(|name| env::var(name).ok()) {
            command.env(COPY_LIBRARY_VARIABLE, provider::find_ferry()?);
        }
    }
    let error = command.exec();
    Err(anyhow!("{} cannot be started: {error}", file.display()))
}

/// Whether the environment names a device or a GPU for copies.
fn wants_device(value_of: impl Fn(&str) -> Option<String>) -> bool {
    DEVICE_VARIABLES.into_iter().filter_map(value_of).any(|value| {
        let value = value.trim();
        !value.is_empty() && !value.eq_ignore_ascii_case("off")
    })
}

/// What the library needs to know about this machine: from which size copies are shared, the largest chunk,
/// from which size stores bypass the caches, how many cores help, and the kernel.
fn shared_copies() -> anyhow::Result<String> {
    // As a ferry with the settings of this environment would do it.
    let ferry = Ferry::new()?;
    let context = ferry.plan_context();
    let machine = &context.profile;
    let helpers = affinity::allowed_cores().len().saturating_sub(1).min(context.spread);
    Ok(format!(
        "{},{},{},{helpers},{}",
        machine.split_bytes,
        machine.chunk_bytes,
        machine.shared_stream_bytes,
        machine.streaming.name()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_wanted_if_a_variable_names_one() {
        let wants = |name: &'static str, value: &'static str| {
            wants_device(move |it| (it == name).then(|| value.to_owned()))
        };
        assert!(wants("MEMFERRY_IOAT", "auto") && wants("MEMFERRY_GPU", "0"));
        assert!(wants("MEMFERRY_NIC", "0000:01:00.0") && wants("MEMFERRY_DSA", "wq0.0"));
        for value in ["off", "OFF", " ", ""] {
            assert!(!wants("MEMFERRY_IOAT", value), "{value}");
        }
        assert!(!wants("MEMFERRY_CHANNELS", "2"));
    }
}
