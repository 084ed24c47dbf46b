//! Checks of what MPI programs require to run over Memferry: an MPI that uses libfabric, the
//! provider, and a libfabric that loads the provider. A child process loads the libraries.

use std::path::Path;

use memferry_bench::host::mpi::launcher::{self, FabricSupport, INSTALL};
use memferry_bench::host::mpi::{Launcher, MpiFamily, provider};

use super::{Check, Need, Status};
use crate::mpi::probe::{self, ProbeResult};

const AN_MPI: &str = "an MPI";
const PROVIDER: &str = "provider";
const PEER_ACCESS: &str = "memory of other ranks";

/// All checks, in the order of display. `reach` is the check of access to the memory of other
/// processes.
pub(super) fn checks(reach: Option<&Check>) -> Vec<Check> {
    let launchers = launcher::all();
    let provider = provider::find().map_err(|error| format!("{error:#}"));
    let mut checks: Vec<_> = launchers.iter().map(an_mpi).collect();
    if launchers.is_empty() {
        checks.push(no_mpi());
    }
    match &provider {
        Ok(file) => {
            for (library, users) in libraries(&launchers) {
                checks.push(loaded(&library, &users, file, probe::query(&library, file)));
            }
        }
        Err(reason) => checks.push(no_provider(reason)),
    }
    if launchers.is_empty() {
        // Without an MPI, its prerequisites are optional too.
        checks.iter_mut().for_each(|check| check.need = Need::OptionalSoftware);
    }
    checks.extend(reach.map(|reach| Check { name: PEER_ACCESS, ..reach.clone() }));
    checks
}

/// Each libfabric once, with the MPIs that use it. The system's libfabric is always included.
fn libraries(launchers: &[Launcher]) -> Vec<(std::path::PathBuf, Vec<String>)> {
    let mut found = vec![(std::path::PathBuf::from(probe::LIBFABRIC), Vec::new())];
    for launcher in launchers.iter().filter(|it| !matches!(it.fabric, FabricSupport::No(_))) {
        let library = probe::libfabric_of(launcher);
        let user = format!("{} {}", launcher.family, launcher.version);
        match found.iter_mut().find(|(known, _)| *known == library) {
            Some((_, users)) => users.push(user),
            None => found.push((library, vec![user])),
        }
    }
    found
}

fn an_mpi(launcher: &Launcher) -> Check {
    let name = match launcher.family {
        MpiFamily::OpenMpi => "Open MPI",
        MpiFamily::Mpich => "MPICH",
    };
    let place = format!("{} ({})", launcher.version, launcher.path.display());
    match &launcher.fabric {
        FabricSupport::Yes => Check::new(name, Status::Ok, format!("{place} uses libfabric")),
        FabricSupport::Unknown => {
            let detail = format!("{place} does not say whether it uses libfabric");
            Check::new(name, Status::Ok, detail)
        }
        FabricSupport::No(reason) => {
            let detail = format!("{place} {reason}: it cannot run over Memferry");
            Check::new(name, Status::Warn, detail)
                .fix("apt install openmpi-bin, or pip install mpich")
        }
    }
}

fn no_mpi() -> Check {
    Check::new(AN_MPI, Status::Missing, "neither Open MPI nor MPICH is in PATH")
        .fix(format!("{INSTALL}; or let MEMFERRY_MPICH or MEMFERRY_OPENMPI name one"))
        .need(Need::OptionalSoftware)
}

fn no_provider(reason: &str) -> Check {
    Check::new(PROVIDER, Status::Missing, reason).fix(provider::BUILD_COMMAND)
}

fn loaded(library: &Path, users: &[String], file: &Path, answer: ProbeResult) -> Check {
    let names = users;
    let users = match users {
        [] => String::new(),
        users => format!(", for {}", users.join(" and ")),
    };
    let library_name = library.display();
    let Some(version) = &answer.libfabric else {
        let reason = answer.provider.err().unwrap_or_default();
        let detail = format!("libfabric{users}: {reason}");
        return Check::new(PROVIDER, Status::Warn, detail).fix("apt install libfabric1");
    };
    match answer.provider {
        Ok(offer) => {
            let file = file.display();
            let detail = format!("libfabric {version}{users} loads {file}, which answers {offer}");
            let check = Check::new(PROVIDER, Status::Ok, detail);
            // A libfabric that no MPI uses does not make the subject ready, so its check has no
            // summary.
            match names {
                [] => check,
                names => check.summary(format!("{} over libfabric {version}", names.join(", "))),
            }
        }
        Err(reason) => {
            let detail = format!("libfabric {version} ({library_name}){users}: {reason}");
            let folder = file.parent().unwrap_or(Path::new("/")).display();
            let cure = format!(
                "{}; to see more: FI_PROVIDER_PATH='{folder}' FI_LOG_LEVEL=debug fi_info -p memferry",
                provider::BUILD_COMMAND
            );
            Check::new(PROVIDER, Status::Missing, detail).fix(cure)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launcher(fabric: FabricSupport) -> Launcher {
        let path = "/usr/bin/mpirun".into();
        Launcher { path, family: MpiFamily::Mpich, version: "4.0.2".into(), fabric }
    }

    #[test]
    fn an_mpi_without_libfabric_comes_with_a_cure() {
        let check = an_mpi(&launcher(FabricSupport::No("was built on UCX alone".into())));
        assert_eq!((check.name, check.status), ("MPICH", Status::Warn));
        assert!(check.detail.contains("cannot run over Memferry"), "{check:?}");
        assert!(check.fix.unwrap().contains("pip install mpich"));
        assert_eq!(an_mpi(&launcher(FabricSupport::Yes)).status, Status::Ok);
    }

    #[test]
    fn a_provider_that_is_not_loaded_is_told_with_the_reason() {
        let file = Path::new("/x/libmemferry-fi.so");
        let library = Path::new(probe::LIBFABRIC);
        let answer = |provider| ProbeResult { libfabric: Some("1.17".into()), provider };
        let good = loaded(library, &["Open MPI 4.1.4".into()], file, answer(Ok("well".into())));
        assert_eq!(good.status, Status::Ok);
        assert!(good.detail.contains("libfabric 1.17, for Open MPI 4.1.4 loads"), "{good:?}");
        let bad = loaded(library, &[], file, answer(Err("dlopen: no symbol".into())));
        assert_eq!(bad.status, Status::Missing);
        assert!(bad.detail.ends_with("dlopen: no symbol"), "{bad:?}");
        assert!(bad.fix.unwrap().contains("FI_PROVIDER_PATH='/x'"));
        let none = ProbeResult { libfabric: None, provider: Err("cannot be loaded".into()) };
        assert_eq!(loaded(library, &[], file, none).status, Status::Warn);
    }

    #[test]
    fn every_libfabric_is_asked_once() {
        let two = [launcher(FabricSupport::Yes), launcher(FabricSupport::Unknown)];
        let asked = libraries(&two);
        assert_eq!(asked.len(), 1);
        assert_eq!(asked[0].1.len(), 2);
    }
}
