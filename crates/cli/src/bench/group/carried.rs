//! MPI over Memferry: the same program as that of the MPI peers, with the same library, over Memferry's
//! provider. Each is compared with its own transport alone, never counted as a peer of ours.

use std::path::{Path, PathBuf};

use super::mpi::{self, Installed, MPICH, OPEN_MPI, Transport};
use crate::mpi::launcher::{self, Fabric};
use crate::mpi::{Family, Launcher, command, provider};

/// Open MPI over Memferry.
pub(in crate::bench) const OPEN_MPI_CARRIED: &str = "Open MPI over memferry";
/// MPICH over Memferry.
pub(in crate::bench) const MPICH_CARRIED: &str = "MPICH over memferry";

/// A contestant beside the others.
#[derive(Debug, Clone)]
pub(super) struct Aside {
    pub(super) series: String,
    pub(super) installed: Installed,
    pub(super) member: PathBuf,
    pub(super) transport: Transport,
}

/// Finds what can run over Memferry. `peers` are the MPIs that are measured anyway, with the program
/// that was compiled for each. What is missing goes into `missing`, with its cure.
pub(super) fn find(
    peers: &[(Family, Installed, PathBuf)],
    folder: &Path,
    missing: &mut Vec<String>,
) -> Vec<Aside> {
    let provider = provider::find().map_err(|error| format!("{error:#}"));
    let mut found = Vec::new();
    for family in mpi::FAMILIES {
        let series = match family {
            Family::OpenMpi => OPEN_MPI_CARRIED,
            Family::Mpich => MPICH_CARRIED,
        };
        let peer = peers.iter().find(|(known, ..)| *known == family);
        let entered = provider.clone().and_then(|provider| {
            let (installed, member, is_peer) = choose(family, peer, folder)?;
            let variables = command::settings(&installed.launcher, &provider);
            Ok((installed, member, is_peer, Transport::Memferry(variables)))
        });
        match entered {
            Ok((installed, member, is_peer, transport)) => {
                if !is_peer {
                    // The partner of the comparison must be the same library.
                    let series = own_series(&installed.launcher);
                    let (installed, member) = (installed.clone(), member.clone());
                    found.push(Aside { series, installed, member, transport: Transport::Own });
                }
                found.push(Aside { series: series.into(), installed, member, transport });
            }
            Err(reason) => missing.push(format!("{series} ({reason})")),
        }
    }
    found
}

/// The peer if it can use libfabric, else another of its family that can, compiled here.
fn choose(
    family: Family,
    peer: Option<&(Family, Installed, PathBuf)>,
    folder: &Path,
) -> Result<(Installed, PathBuf, bool), String> {
    let usable = |launcher: &Launcher| !matches!(launcher.fabric, Fabric::No(_));
    if let Some((_, installed, member)) = peer.filter(|(_, it, _)| usable(&it.launcher)) {
        return Ok((installed.clone(), member.clone(), true));
    }
    let others = launcher::all().into_iter().filter(|it| it.family == family && usable(it));
    let Some(launcher) = others.into_iter().next() else { return Err(cure(family, peer)) };
    let installed = Installed::of(launcher)?;
    let member = installed.compile(folder)?;
    Ok((installed, member, false))
}

fn cure(family: Family, peer: Option<&(Family, Installed, PathBuf)>) -> String {
    let unfit = peer.map(|(_, installed, _)| match &installed.launcher.fabric {
        Fabric::No(reason) => format!("{} {reason}; ", installed.launcher),
        _ => String::new(),
    });
    let cure = match family {
        Family::OpenMpi => "apt install openmpi-bin libopenmpi-dev",
        Family::Mpich => "pip install mpich, and let MEMFERRY_MPICH name its mpiexec",
    };
    format!("{}to mend: {cure}", unfit.unwrap_or_default())
}

/// The series of an MPI that is there only to be compared with itself over Memferry.
fn own_series(launcher: &Launcher) -> String {
    format!("{} {}", mpi::series(launcher.family), launcher.version)
}

/// Whether a series belongs to MPI over Memferry: such a row, or one that is its partner alone.
pub(in crate::bench) fn is_aside(series: &str) -> bool {
    let versioned = |name: &str| {
        series.strip_prefix(name).is_some_and(|rest| {
            rest.starts_with(' ') && rest[1..].starts_with(|c: char| c.is_ascii_digit())
        })
    };
    [OPEN_MPI_CARRIED, MPICH_CARRIED].contains(&series) || versioned(OPEN_MPI) || versioned(MPICH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_over_memferry_and_their_partners_stand_aside() {
        for series in [OPEN_MPI_CARRIED, MPICH_CARRIED, "MPICH 5.0.2"] {
            assert!(is_aside(series), "{series}");
        }
        for series in [OPEN_MPI, MPICH, "memferry", "UCX"] {
            assert!(!is_aside(series), "{series}");
        }
    }

    #[test]
    fn an_mpi_that_cannot_is_named_with_the_cure() {
        let launcher = Launcher {
            path: "/usr/bin/mpirun.mpich".into(),
            family: Family::Mpich,
            version: "4.0.2".into(),
            fabric: Fabric::No("was built on UCX alone (ch4:ucx)".into()),
        };
        let text = "MPICH 4.0.2 (/usr/bin/mpirun.mpich) was built on UCX alone (ch4:ucx); to mend: \
                    pip install mpich, and let MEMFERRY_MPICH name its mpiexec";
        let installed = Installed::for_test(launcher);
        let peer = (Family::Mpich, installed, PathBuf::new());
        assert_eq!(cure(Family::Mpich, Some(&peer)), text);
        assert!(cure(Family::OpenMpi, None).starts_with("to mend: apt install"));
    }
}
