//! The variables that make an MPI use Memferry's provider. All functions but
//! [`launch_variables`] are pure: they take the current values and return the new ones.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::{Launcher, MpiFamily};

/// The variable with the folders that libfabric searches for providers, separated by colons.
pub const PROVIDER_PATH: &str = "FI_PROVIDER_PATH";

/// A variable and its value.
pub type Variable = (&'static str, OsString);

/// The variables for an MPI family. `already` is the current value of `FI_PROVIDER_PATH`.
pub fn for_family(family: MpiFamily, folder: &Path, already: Option<&OsStr>) -> Vec<Variable> {
    let path = (PROVIDER_PATH, with_folder(already, folder));
    let plain: &[(&str, &str)] = match family {
        MpiFamily::OpenMpi => &[
            ("OMPI_MCA_pml", "cm"),
            ("OMPI_MCA_mtl", "ofi"),
            ("OMPI_MCA_mtl_ofi_provider_include", "memferry"),
            ("OMPI_MCA_btl", "^ofi"),
        ],
        MpiFamily::Mpich => &[
            ("MPIR_CVAR_CH4_NETMOD", "ofi"),
            ("FI_PROVIDER", "memferry"),
            ("MPIR_CVAR_NOLOCAL", "1"),
        ],
    };
    let plain = plain.iter().map(|&(name, value)| (name, value.into()));
    std::iter::once(path).chain(plain).collect()
}

/// The variables for a launcher and the file of the provider, based on the current environment.
pub fn launch_variables(launcher: &Launcher, provider: &Path) -> Vec<Variable> {
    let folder = provider.parent().unwrap_or(Path::new("/"));
    let already = env::var_os(PROVIDER_PATH);
    for_family(launcher.family, folder, already.as_deref())
}

/// The variable that lets programs load libraries before all others, after those that the user preloads
/// already.
pub fn preload(libraries: &[&Path]) -> Variable {
    const PRELOAD: &str = "LD_PRELOAD";
    let first = env::var_os(PRELOAD).unwrap_or_default();
    let add = |already: OsString, library: &&Path| with_folder(Some(&already), library);
    (PRELOAD, libraries.iter().fold(first, add))
}

/// The variable by which the preloaded library puts allocations from a size on into memory that peers can
/// map.
pub const SHARED_HEAP: &str = "MEMFERRY_SHARED_HEAP";
/// The default of that size.
pub const SHARED_HEAP_BYTES: u64 = 64 << 10;

/// Variables that prevent an MPI family from finding the provider, or the provider from finding
/// other hosts.
pub fn blocking_variables(family: MpiFamily) -> &'static [&'static str] {
    match family {
        MpiFamily::OpenMpi => &["FI_PROVIDER"],
        MpiFamily::Mpich => &[],
    }
}

/// The paths that are already set, followed by `folder`.
fn with_folder(already: Option<&OsStr>, folder: &Path) -> OsString {
    let Some(already) = already.filter(|already| !already.is_empty()) else {
        return folder.into();
    };
    if env::split_paths(already).any(|known| known == folder) {
        return already.into();
    }
    let mut both = already.to_owned();
    both.push(":");
    both.push(folder);
    both
}

/// The options by which Open MPI exports variables to ranks on other hosts: the variables that are
/// set here, and the user's own variables for Memferry and libfabric. MPICH's launcher exports all
/// variables by default.
pub fn export_options(
    family: MpiFamily,
    variables: &[Variable],
    environment: impl Iterator<Item = OsString>,
) -> Vec<OsString> {
    if family == MpiFamily::Mpich {
        return Vec::new();
    }
    let mut names: Vec<OsString> = variables.iter().map(|(name, _)| (*name).into()).collect();
    let wanted = |name: &OsString| {
        name.to_str().is_some_and(|name| {
            let is_ours = name.starts_with("MEMFERRY_") || name.starts_with("FI_");
            is_ours && !blocking_variables(family).contains(&name)
        })
    };
    let mut own: Vec<_> = environment.filter(wanted).collect();
    own.sort();
    names.extend(own.into_iter().filter(|name| variables.iter().all(|(known, _)| known != name)));
    names.into_iter().flat_map(|name| ["-x".into(), name]).collect()
}

/// A shell command that exports a variable, with the value quoted.
pub fn export(name: &str, value: &OsStr) -> String {
    format!("export {name}='{}'\n", value.to_string_lossy().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(variables: &[Variable]) -> Vec<String> {
        variables.iter().map(|(name, value)| format!("{name}={}", value.display())).collect()
    }

    #[test]
    fn open_mpi_gets_the_matching_layer_and_the_provider() {
        let set = for_family(MpiFamily::OpenMpi, Path::new("/opt/lib"), None);
        let expected = [
            "FI_PROVIDER_PATH=/opt/lib",
            "OMPI_MCA_pml=cm",
            "OMPI_MCA_mtl=ofi",
            "OMPI_MCA_mtl_ofi_provider_include=memferry",
            "OMPI_MCA_btl=^ofi",
        ];
        assert_eq!(text(&set), expected);
    }

    #[test]
    fn mpich_gets_the_module_and_the_provider() {
        let set = for_family(MpiFamily::Mpich, Path::new("/opt/lib"), Some(OsStr::new("")));
        let expected = [
            "FI_PROVIDER_PATH=/opt/lib",
            "MPIR_CVAR_CH4_NETMOD=ofi",
            "FI_PROVIDER=memferry",
            "MPIR_CVAR_NOLOCAL=1",
        ];
        assert_eq!(text(&set), expected);
    }

    #[test]
    fn folders_that_are_set_already_stay_in_front() {
        let joined = |already| with_folder(Some(OsStr::new(already)), Path::new("/our lib"));
        assert_eq!(joined("/a:/b"), "/a:/b:/our lib");
        assert_eq!(joined("/a:/our lib:/b"), "/a:/our lib:/b");
        let (name, value) = preload(&[Path::new("/our/lib.so"), Path::new("/other.so")]);
        assert_eq!(name, "LD_PRELOAD");
        assert!(value.to_string_lossy().ends_with("/our/lib.so:/other.so"));
    }

    #[test]
    fn variables_travel_by_name_with_open_mpi_and_by_themselves_with_mpich() {
        let set = [("FI_PROVIDER_PATH", OsString::from("/x"))];
        let environment =
            || ["HOME", "MEMFERRY_CMA", "FI_PROVIDER_PATH", "FI_LOG_LEVEL"].map(OsString::from);
        let words = export_options(MpiFamily::OpenMpi, &set, environment().into_iter());
        assert_eq!(words, ["-x", "FI_PROVIDER_PATH", "-x", "FI_LOG_LEVEL", "-x", "MEMFERRY_CMA"]);
        assert!(export_options(MpiFamily::Mpich, &set, environment().into_iter()).is_empty());
    }

    #[test]
    fn a_shell_reads_back_what_was_exported() {
        assert_eq!(export("A", OsStr::new("two words")), "export A='two words'\n");
        assert_eq!(export("A", OsStr::new("it's")), "export A='it'\\''s'\n");
    }
}
