//! The kernel modules that let a program drive a PCI device, and their files.

use std::fs;
use std::path::{Path, PathBuf};

/// The modules in the order of loading. A kernel may lack some of them; see [`NEEDED`].
const MODULES: [&str; 7] = [
    "irqbypass",
    "iommufd",
    "vfio",
    "vfio_virqfd",
    "vfio_iommu_type1",
    "vfio_pci_core",
    "vfio_pci",
];

/// The modules that every kernel must have, as a file or built in.
const NEEDED: [&str; 3] = ["vfio", "vfio_iommu_type1", "vfio_pci"];

/// The file that lists the built-in modules.
pub(super) const BUILT_IN: &str = "modules.builtin";

/// The folder of the modules in an unpacked kernel package.
pub(super) fn folder(package: &Path, version: &str) -> Option<PathBuf> {
    let folders = ["lib/modules", "usr/lib/modules"];
    folders.map(|folder| package.join(folder).join(version)).into_iter().find(|path| path.is_dir())
}

/// The files of the modules, in the order of loading. The error is the name of what is missing.
pub(super) fn find(package: &Path, version: &str) -> Result<Vec<PathBuf>, String> {
    let folder = folder(package, version).ok_or_else(|| format!("lib/modules/{version}"))?;
    let mut files = Vec::new();
    collect(&folder, &mut files);
    let built_in = fs::read_to_string(folder.join(BUILT_IN)).unwrap_or_default();
    let is_built_in =
        |name: &str| built_in.lines().any(|path| name_of(Path::new(path)).as_deref() == Some(name));
    let mut found = Vec::new();
    for name in MODULES {
        match files.iter().find(|(module, _)| module == name) {
            Some((_, path)) => found.push(path.clone()),
            None if NEEDED.contains(&name) && !is_built_in(name) => {
                return Err(format!("module {name} of {version}"));
            }
            None => {}
        }
    }
    Ok(found)
}

/// Collects all modules below a folder, by name. Symbolic links are not followed, because they lead
/// to sources.
fn collect(folder: &Path, files: &mut Vec<(String, PathBuf)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => collect(&path, files),
            Ok(kind) if kind.is_file() => files.extend(name_of(&path).map(|name| (name, path))),
            _ => {}
        }
    }
}

/// The name of a module: its file name, with the kernel's underscores.
fn name_of(path: &Path) -> Option<String> {
    let (name, ending) = path.file_name()?.to_str()?.split_once('.')?;
    matches!(ending, "ko" | "ko.gz" | "ko.xz" | "ko.zst").then(|| name.replace('-', "_"))
}
