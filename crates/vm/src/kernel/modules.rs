//! Which modules of a kernel give a card to a program, and where they are.

use std::fs;
use std::path::{Path, PathBuf};

/// In the order of loading. Kernels differ in what they have of these; see [`NEEDED`].
const MODULES: [&str; 7] = [
    "irqbypass",
    "iommufd",
    "vfio",
    "vfio_virqfd",
    "vfio_iommu_type1",
    "vfio_pci_core",
    "vfio_pci",
];

/// What every kernel has, in a module or in itself.
const NEEDED: [&str; 3] = ["vfio", "vfio_iommu_type1", "vfio_pci"];

/// The names of the parts of the kernel that are no modules.
pub(super) const BUILT_IN: &str = "modules.builtin";

/// The modules' folder of a kernel in an unpacked package.
pub(super) fn folder(package: &Path, version: &str) -> Option<PathBuf> {
    let folders = ["lib/modules", "usr/lib/modules"];
    folders.map(|folder| package.join(folder).join(version)).into_iter().find(|path| path.is_dir())
}

/// The files, in the order of loading. Else, what is missing.
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

/// Every module below a folder, by name. Links are not followed: they lead to sources.
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

/// A module's name: that of its file, in the kernel's spelling.
fn name_of(path: &Path) -> Option<String> {
    let (name, ending) = path.file_name()?.to_str()?.split_once('.')?;
    matches!(ending, "ko" | "ko.gz" | "ko.xz" | "ko.zst").then(|| name.replace('-', "_"))
}
