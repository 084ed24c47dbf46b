//! MPI over Memferry: the same program and the same library as the MPI peer, over Memferry's
//! provider. Each is compared only with the library's own transport, and is not a peer of Memferry.

use std::path::{Path, PathBuf};

use super::mpi::{self, MpiInstallation, MpiTransport};
use crate::host::mpi::launcher::{self, FabricSupport};
use crate::host::mpi::{Launcher, MpiFamily, provider, variables};
use crate::results::series::{MPICH_OVER_MEMFERRY, OPEN_MPI_OVER_MEMFERRY};

/// A candidate with role `Reference`.
#[derive(Debug, Clone)]
pub(crate) struct MpiOverMemferry {
    pub(crate) series: String,
    pub(crate) installed: MpiInstallation,
    pub(crate) program: PathBuf,
    pub(crate) transport: MpiTransport,
}

/// Finds the MPI installations that can run over Memferry. `peers` are the installations that are
/// measured as peers, with the program compiled for each. Missing ones are added to `missing`, with
/// the fix.
pub(crate) fn find(
    peers: &[(MpiFamily, MpiInstallation, PathBuf)],
    folder: &Path,
    missing: &mut Vec<String>,
) -> Vec<MpiOverMemferry> {
    let provider = provider::find().map_err(|error| format!("{error:#}"));
    let mut found = Vec::new();
    for family in mpi::FAMILIES {
        let series = match family {
            MpiFamily::OpenMpi => OPEN_MPI_OVER_MEMFERRY,
            MpiFamily::Mpich => MPICH_OVER_MEMFERRY,
        };
        let peer = peers.iter().find(|(known, ..)| *known == family);
        let entered = provider.clone().and_then(|provider| {
            let (installed, member, is_peer) = choose(family, peer, folder)?;
            let variables = variables::launch_variables(&installed.launcher, &provider);
            Ok((installed, member, is_peer, MpiTransport::Memferry(variables)))
        });
        match entered {
            Ok((installed, member, is_peer, transport)) => {
                if !is_peer {
                    // The comparison needs the same library with its own transport.
                    let series = own_series(&installed.launcher);
                    let (installed, member) = (installed.clone(), member.clone());
                    found.push(MpiOverMemferry {
                        series,
                        installed,
                        program: member,
                        transport: MpiTransport::Own,
                    });
                }
                found.push(MpiOverMemferry {
                    series: series.into(),
                    installed,
                    program: member,
                    transport,
                });
            }
            Err(reason) => missing.push(format!("{series} ({reason})")),
        }
    }
    found
}

/// Returns the peer if it can use libfabric, else another installation of its family that can, with
/// the program compiled for it.
fn choose(
    family: MpiFamily,
    peer: Option<&(MpiFamily, MpiInstallation, PathBuf)>,
    folder: &Path,
) -> Result<(MpiInstallation, PathBuf, bool), String> {
    let usable = |launcher: &Launcher| !matches!(launcher.fabric, FabricSupport::No(_));
    if let Some((_, installed, member)) = peer.filter(|(_, it, _)| usable(&it.launcher)) {
        return Ok((installed.clone(), member.clone(), true));
    }
    let others = launcher::all().into_iter().filter(|it| it.family == family && usable(it));
    let Some(launcher) = others.into_iter().next() else { return Err(fix(family, peer)) };
    let installed = MpiInstallation::of(launcher)?;
    let member = installed.compile(folder)?;
    Ok((installed, member, false))
}

/// Returns an installation of a family that can use libfabric, the one in `PATH` first.
pub(crate) fn installation(family: MpiFamily) -> Result<MpiInstallation, String> {
    let usable = |launcher: &Launcher| !matches!(launcher.fabric, FabricSupport::No(_));
    if let Ok(found) = mpi::find(family)
        && usable(&found.launcher)
    {
        return Ok(found);
    }
    let mut others = launcher::all().into_iter().filter(|it| it.family == family && usable(it));
    MpiInstallation::of(others.next().ok_or_else(|| fix(family, None))?)
}

fn fix(family: MpiFamily, peer: Option<&(MpiFamily, MpiInstallation, PathBuf)>) -> String {
    let unfit = peer.map(|(_, installed, _)| match &installed.launcher.fabric {
        FabricSupport::No(reason) => format!("{} {reason}; ", installed.launcher),
        _ => String::new(),
    });
    let cure = match family {
        MpiFamily::OpenMpi => "apt install openmpi-bin libopenmpi-dev",
        MpiFamily::Mpich => "pip install mpich, and let MEMFERRY_MPICH name its mpiexec",
    };
    format!("{}to mend: {cure}", unfit.unwrap_or_default())
}

/// Series of an MPI that is measured only to compare it with itself over Memferry.
fn own_series(launcher: &Launcher) -> String {
    format!("{} {}", mpi::series(launcher.family), launcher.version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mpi_that_cannot_is_named_with_the_cure() {
        let launcher = Launcher {
            path: "/usr/bin/mpirun.mpich".into(),
            family: MpiFamily::Mpich,
            version: "4.0.2".into(),
            fabric: FabricSupport::No("was built on UCX alone (ch4:ucx)".into()),
        };
        let text = "MPICH 4.0.2 (/usr/bin/mpirun.mpich) was built on UCX alone (ch4:ucx); to mend: \
                    pip install mpich, and let MEMFERRY_MPICH name its mpiexec";
        let installed = MpiInstallation::for_test(launcher);
        let peer = (MpiFamily::Mpich, installed, PathBuf::new());
        assert_eq!(fix(MpiFamily::Mpich, Some(&peer)), text);
        assert!(fix(MpiFamily::OpenMpi, None).starts_with("to mend: apt install"));
    }
}
