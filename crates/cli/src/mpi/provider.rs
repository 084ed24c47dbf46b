//! Memferry's libfabric provider: a library that libfabric finds in a folder that it is told of.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, bail, ensure};

/// The variable that names the folder of the provider.
pub(crate) const FOLDER: &str = "MEMFERRY_PROVIDER_DIR";
/// How it is built.
pub(crate) const BUILD: &str = "cargo build --release -p memferry-fabric";
/// Its file when it is installed, and as cargo builds it.
const FILES: [&str; 2] = ["libmemferry-fi.so", "libmemferry_fi.so"];

/// The file of the provider.
pub(crate) fn find() -> anyhow::Result<PathBuf> {
    let program = env::current_exe().context("where this program is cannot be told")?;
    let set = env::var_os(FOLDER).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let found = find_in(set.as_deref(), &program)?;
    let folder = found.parent().unwrap_or(Path::new("/"));
    ensure!(
        !folder.to_string_lossy().contains(':'),
        "libfabric cannot look into {}, because of the colon in its name; move the provider to \
         another folder and let {FOLDER} name that",
        folder.display()
    );
    check_file(&found)?;
    Ok(found)
}

/// Whether the file is what libfabric can load. It would keep silent about one that is not.
fn check_file(file: &Path) -> anyhow::Result<()> {
    const ENTRY: &[u8] = b"fi_prov_ini";
    let bytes = fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let is_library = bytes.starts_with(b"\x7fELF");
    ensure!(
        is_library && bytes.windows(ENTRY.len()).any(|part| part == ENTRY),
        "{} is no provider of libfabric; build it anew by `{BUILD}`",
        file.display()
    );
    Ok(())
}

/// In the folder that was set, if one was; else beside the program or where it is installed.
fn find_in(set: Option<&Path>, program: &Path) -> anyhow::Result<PathBuf> {
    let inside =
        |folder: &Path| FILES.iter().map(|file| folder.join(file)).find(|path| path.is_file());
    let absolute = |path: PathBuf| path.canonicalize().unwrap_or(path);
    if let Some(folder) = set {
        return inside(folder).map(absolute).with_context(|| {
            let folder = folder.display();
            format!("{FOLDER} names {folder}, where no {} is; correct or unset it", FILES[0])
        });
    }
    let beside = program.parent().unwrap_or(Path::new("/"));
    let installed = beside.join("../lib/memferry");
    match inside(beside).or_else(|| inside(&installed)) {
        Some(found) => Ok(absolute(found)),
        None => bail!(
            "the provider {} is neither beside this program ({}) nor in {}; build it by `{BUILD}`, \
             or let {FOLDER} name its folder",
            FILES[0],
            beside.display(),
            installed.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_provider_is_found_beside_the_program_or_where_it_is_installed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let program = root.join("bin/memferry");
        for place in ["bin", "lib/memferry", "else where"] {
            fs::create_dir_all(root.join(place)).unwrap();
        }
        let complaint = find_in(None, &program).unwrap_err().to_string();
        assert!(complaint.contains(BUILD) && complaint.contains(FOLDER), "{complaint}");
        let installed = root.join("lib/memferry/libmemferry-fi.so");
        fs::write(&installed, "").unwrap();
        assert_eq!(find_in(None, &program).unwrap(), installed);
        let beside = root.join("bin/libmemferry_fi.so");
        fs::write(&beside, "").unwrap();
        assert_eq!(find_in(None, &program).unwrap(), beside);
        let elsewhere = root.join("else where");
        let complaint = find_in(Some(&elsewhere), &program).unwrap_err().to_string();
        assert!(complaint.contains("else where, where no libmemferry-fi.so is"), "{complaint}");
        fs::write(elsewhere.join("libmemferry-fi.so"), "").unwrap();
        assert!(find_in(Some(&elsewhere), &program).unwrap().starts_with(&elsewhere));
    }
}
