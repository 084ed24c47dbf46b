//! `memferry mpirun` starts an MPI program over Memferry. `memferry env` prints the variables that
//! `mpirun` sets.

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::anyhow;
use memferry_bench::host::mpi::variables::{self, Variable, launch_variables};
use memferry_bench::host::mpi::{MpiFamily, launcher, provider};
use memferry_sys::settings;
use serde::Serialize;

use super::{one_host, options};
use crate::args::{EnvArgs, MpirunArgs};
use crate::show;

/// Sets the variables and replaces this process by the launcher (`exec`). Returns only if that
/// fails.
pub(crate) fn mpirun(args: &MpirunArgs) -> anyhow::Result<()> {
    let args = options::sort(args)?;
    let (launcher, rest) = launcher::choose(args.mpi.as_deref(), &args.words)?;
    launcher.require_fabric()?;
    check_config()?;
    let mut variables = launch_variables(&launcher, &provider::find()?);
    // This process has named unknown variables; the ranks, with the same environment, do not.
    let checked =
        settings::checked_variables().map(|names| (settings::CHECKED_VARIABLES, names.into()));
    variables.extend(checked);
    let mut preloaded = Vec::new();
    if args.collectives {
        preloaded.push(provider::find_collectives()?);
    }
    if args.shared_heap {
        preloaded.push(provider::find_preload()?);
        let limit = variables::SHARED_HEAP_BYTES.to_string();
        variables.push((variables::SHARED_HEAP, limit.into()));
    }
    if !preloaded.is_empty() {
        let libraries: Vec<&Path> = preloaded.iter().map(PathBuf::as_path).collect();
        variables.push(variables::preload(&libraries));
    }
    if settings::value_of(one_host::REMOTE).is_none()
        && one_host::is_one_host(
            &rest,
            |name| env::var(name).ok(),
            one_host::default_hostfile(&launcher.path),
        )
    {
        variables.push((one_host::REMOTE, "off".into()));
    }
    let mut command = Command::new(&launcher.path);
    if launcher.family == MpiFamily::OpenMpi && rustix::process::geteuid().is_root() {
        // Open MPI refuses to run as root without this option; the user has already chosen to run
        // as root.
        command.arg("--allow-run-as-root");
    }
    let set_by_user = env::vars_os().map(|(name, _)| name);
    command.args(variables::export_options(launcher.family, &variables, set_by_user));
    for name in variables::blocking_variables(launcher.family) {
        command.env_remove(name);
    }
    let error = command.args(rest).envs(variables).exec();
    Err(anyhow!("{} cannot be started: {error}", launcher.path.display()))
}

/// The object that `memferry env --json` prints.
#[derive(Debug, Serialize)]
struct EnvReport {
    mpi: MpiFamily,
    version: String,
    launcher: PathBuf,
    provider: PathBuf,
    variables: BTreeMap<&'static str, String>,
}

/// Prints the variables as shell commands or as JSON.
pub(crate) fn env(args: &EnvArgs) -> anyhow::Result<()> {
    let (launcher, _) = launcher::choose(args.mpi.as_deref(), &[])?;
    launcher.require_fabric()?;
    check_config()?;
    let provider = provider::find()?;
    let variables = launch_variables(&launcher, &provider);
    if args.json {
        let text = |(name, value): Variable| (name, value.to_string_lossy().into_owned());
        return show::print_json(&EnvReport {
            mpi: launcher.family,
            version: launcher.version,
            launcher: launcher.path,
            provider,
            variables: variables.into_iter().map(text).collect(),
        });
    }
    let unset = variables::blocking_variables(launcher.family).iter();
    let unset = unset.filter(|name| env::var_os(name).is_some());
    let unset = unset.map(|name| format!("unset {name}\n"));
    let lines = variables.iter().map(|(name, value)| variables::export(name, value));
    Ok(show::print(&unset.chain(lines).collect::<String>())?)
}

/// Reports an invalid setting before the launcher starts: MPI libraries would only report a missing
/// provider.
fn check_config() -> anyhow::Result<()> {
    memferry::message::EndpointBuilder::new().plan_context()?;
    Ok(())
}
