//! `memferry mpirun`: starts an MPI program over Memferry. `memferry env`: prints what it would set.

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::anyhow;
use serde::Serialize;

use super::variables::{self, PROVIDER_PATH, Variable};
use super::{Family, Launcher, launcher, provider};
use crate::args::{EnvArgs, MpirunArgs};
use crate::show;

/// Becomes the launcher, with the variables set. Comes back only if that fails.
pub(crate) fn mpirun(args: &MpirunArgs) -> anyhow::Result<()> {
    let (launcher, rest) = launcher::choose(args.mpi.as_deref(), &args.words)?;
    launcher.must_have_fabric()?;
    check_settings()?;
    let variables = settings(&launcher, &provider::find()?);
    let mut command = Command::new(&launcher.path);
    if launcher.family == Family::OpenMpi && rustix::process::geteuid().is_root() {
        // Without it Open MPI refuses; who calls this as root has decided already.
        command.arg("--allow-run-as-root");
    }
    let set_by_user = env::vars_os().map(|(name, _)| name);
    command.args(variables::travelling(launcher.family, &variables, set_by_user));
    for name in variables::in_the_way(launcher.family) {
        command.env_remove(name);
    }
    let error = command.args(rest).envs(variables).exec();
    Err(anyhow!("{} cannot be started: {error}", launcher.path.display()))
}

/// What `memferry env --json` prints.
#[derive(Debug, Serialize)]
struct Settings {
    mpi: Family,
    version: String,
    launcher: PathBuf,
    provider: PathBuf,
    variables: BTreeMap<&'static str, String>,
}

/// Prints the variables, for a shell or as JSON.
pub(crate) fn env(args: &EnvArgs) -> anyhow::Result<()> {
    let (launcher, _) = launcher::choose(args.mpi.as_deref(), &[])?;
    launcher.must_have_fabric()?;
    check_settings()?;
    let provider = provider::find()?;
    let variables = settings(&launcher, &provider);
    if args.json {
        let text = |(name, value): Variable| (name, value.to_string_lossy().into_owned());
        return show::print_json(&Settings {
            mpi: launcher.family,
            version: launcher.version,
            launcher: launcher.path,
            provider,
            variables: variables.into_iter().map(text).collect(),
        });
    }
    let unset = variables::in_the_way(launcher.family).iter();
    let unset = unset.filter(|name| env::var_os(name).is_some());
    let unset = unset.map(|name| format!("unset {name}\n"));
    let lines = variables.iter().map(|(name, value)| variables::export(name, value));
    Ok(show::print(&unset.chain(lines).collect::<String>())?)
}

/// A setting that is not valid is told here: MPI libraries would say that there is no provider.
fn check_settings() -> anyhow::Result<()> {
    memferry::message::Builder::new().facts()?;
    Ok(())
}

/// The variables for a launcher and the file of the provider, in this environment.
pub(crate) fn settings(launcher: &Launcher, provider: &Path) -> Vec<Variable> {
    let folder = provider.parent().unwrap_or(Path::new("/"));
    let already = env::var_os(PROVIDER_PATH);
    variables::for_family(launcher.family, folder, already.as_deref())
}
