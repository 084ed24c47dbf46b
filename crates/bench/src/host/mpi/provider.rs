//! Memferry's shared libraries for programs of others: the libfabric provider, which libfabric loads from a
//! folder in `FI_PROVIDER_PATH`, the collectives, which the loader of the system loads before the MPI
//! library, and the library that it loads before the C library.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::ptr;
use std::{env, fs};

use anyhow::{Context, bail, ensure};

/// The variable that names the folder of the provider.
pub const PROVIDER_DIR_VARIABLE: &str = "MEMFERRY_PROVIDER_DIR";
/// The command that builds the provider, for messages.
pub const BUILD_COMMAND: &str = "cargo build --release -p memferry-fabric";

/// A shared library for programs of others.
struct LibraryFile {
    /// What the library is, with its article and without, for messages.
    what: &'static str,
    kind: &'static str,
    /// The file name of the installed library, and that of the library as cargo builds it.
    files: [&'static str; 2],
    build_command: &'static str,
    /// A symbol that the library must have.
    symbol: &'static str,
}

static PROVIDER: LibraryFile = LibraryFile {
    what: "the provider",
    kind: "provider of libfabric",
    files: ["libmemferry-fi.so", "libmemferry_fi.so"],
    build_command: BUILD_COMMAND,
    symbol: "fi_prov_ini",
};

static COLLECTIVES: LibraryFile = LibraryFile {
    what: "the library of collectives",
    kind: "library of collectives",
    files: ["libmemferry-coll.so", "libmemferry_coll.so"],
    build_command: "cargo build --release -p memferry-mpi-collectives",
    symbol: "MPI_Allreduce",
};

static PRELOAD: LibraryFile = LibraryFile {
    what: "the library for unmodified programs",
    kind: "library for unmodified programs",
    files: ["libmemferry-preload.so", "libmemferry_preload.so"],
    build_command: "cargo build --release -p memferry-preload",
    symbol: "mempcpy",
};

static FERRY: LibraryFile = LibraryFile {
    what: "the library for C",
    kind: "library for C",
    files: ["libadma.so", "libadma.so"],
    build_command: "cargo build --release -p memferry-c",
    symbol: "adma_copy",
};

/// Finds the file of the provider and checks that libfabric can load it.
pub fn find() -> anyhow::Result<PathBuf> {
    let found = PROVIDER.find()?;
    let folder = found.parent().unwrap_or(Path::new("/"));
    ensure!(
        !folder.to_string_lossy().contains(':'),
        "libfabric cannot look into {}, because of the colon in its name; move the provider to \
         another folder and let {PROVIDER_DIR_VARIABLE} name that",
        folder.display()
    );
    Ok(found)
}

/// Finds the file of the collectives and checks that it can be preloaded.
pub fn find_collectives() -> anyhow::Result<PathBuf> {
    COLLECTIVES.find_for_preload()
}

/// Finds the library for unmodified programs and checks that it can be preloaded.
pub fn find_preload() -> anyhow::Result<PathBuf> {
    PRELOAD.find_for_preload()
}

/// Finds the library for C programs, whose ferry copies for unmodified programs.
pub fn find_ferry() -> anyhow::Result<PathBuf> {
    FERRY.find()
}

impl LibraryFile {
    fn find_for_preload(&self) -> anyhow::Result<PathBuf> {
        let found = self.find()?;
        ensure!(
            !found.to_string_lossy().contains([':', ' ']),
            "LD_PRELOAD cannot name {}, because of a colon or a space; move the library to another \
             folder and let {PROVIDER_DIR_VARIABLE} name that",
            found.display()
        );
        Ok(found)
    }

    fn find(&self) -> anyhow::Result<PathBuf> {
        let program = env::current_exe().context("where this program is cannot be told")?;
        let set = env::var_os(PROVIDER_DIR_VARIABLE)
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from);
        let found = self.find_in(set.as_deref(), &program)?;
        self.check_file(&found)?;
        Ok(found)
    }

    /// Checks that the file is a shared library with a symbol that it must have. libfabric reports
    /// no error for a file that is not.
    fn check_file(&self, file: &Path) -> anyhow::Result<()> {
        let is_library = has_symbol(file, self.symbol.as_bytes());
        ensure!(
            is_library.with_context(|| format!("{} cannot be read", file.display()))?,
            "{} is no {}; build it again by `{}`",
            file.display(),
            self.kind,
            self.build_command
        );
        Ok(())
    }

    /// The library in the folder that `MEMFERRY_PROVIDER_DIR` names, if the variable is set. Otherwise
    /// the library beside the program, in `../lib/memferry` from there, or in the source tree from
    /// which `cargo install` installed the program. The folder `../lib` itself is not searched, because
    /// libfabric would load every `*fi.so` in it.
    fn find_in(&self, set: Option<&Path>, program: &Path) -> anyhow::Result<PathBuf> {
        let inside = |folder: &Path| {
            self.files.iter().map(|file| folder.join(file)).find(|path| path.is_file())
        };
        let absolute = |path: PathBuf| path.canonicalize().unwrap_or(path);
        if let Some(folder) = set {
            return inside(folder).map(absolute).with_context(|| {
                let (folder, file) = (folder.display(), self.files[0]);
                format!(
                    "{PROVIDER_DIR_VARIABLE} names {folder}, where no {file} is; correct or unset it"
                )
            });
        }
        let beside = program.parent().unwrap_or(Path::new("/"));
        let mut folders = vec![beside.to_owned(), beside.join("../lib/memferry")];
        if ptr::eq(self, &FERRY) {
            // Programs are linked with it.
            folders.push(beside.join("../lib"));
        }
        folders.extend(cargo_build_folder(&beside.join("..")));
        match folders.iter().find_map(|folder| inside(folder)) {
            Some(found) => Ok(absolute(found)),
            None => bail!(self.missing_text(beside, &folders)),
        }
    }

    /// The error text for a library that is in none of the folders, with the commands that install
    /// it.
    fn missing_text(&self, beside: &Path, folders: &[PathBuf]) -> String {
        let searched: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let prefix = match (beside.file_name(), beside.parent()) {
            (Some(name), Some(prefix)) if name == "bin" => prefix,
            _ => Path::new("PREFIX"),
        };
        format!(
            "{} {} is not installed (searched {}); run `cargo xtask install --prefix {}` in the source \
             tree of Memferry, or `{}` and let {PROVIDER_DIR_VARIABLE} name the folder of the result",
            self.what,
            self.files[0],
            searched.join(", "),
            prefix.display(),
            self.build_command
        )
    }
}

/// Whether a file is a shared library in which a name occurs. Names are near its begin, so that hardly any
/// file is read to its end.
fn has_symbol(file: &Path, symbol: &[u8]) -> io::Result<bool> {
    const STEP: u64 = 64 << 10;
    let mut file = fs::File::open(file)?;
    let mut bytes = Vec::new();
    while file.by_ref().take(STEP).read_to_end(&mut bytes)? > 0 {
        if !bytes.starts_with(b"\x7fELF") {
            return Ok(false);
        }
        let from = bytes.len().saturating_sub(STEP as usize + symbol.len());
        if bytes[from..].windows(symbol.len()).any(|part| part == symbol) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The folder `target/release` of the source tree from which `cargo install --path` installed a
/// program below this root. `None` if cargo did not install the program, or installed it from
/// elsewhere.
fn cargo_build_folder(root: &Path) -> Option<PathBuf> {
    let installed = fs::read_to_string(root.join(".crates.toml")).ok()?;
    // The line looks like: "memferry-cli 0.1.0 (path+file:///folder/crates/cli)" = ["memferry"]
    let line = installed.lines().find(|line| line.starts_with("\"memferry-cli "))?;
    let (_, source) = line.split_once("(path+file://")?;
    let (source, _) = source.split_once(')')?;
    let tree = Path::new(source).ancestors().nth(2)?;
    Some(Path::new(&tree.to_string_lossy().replace("%20", " ")).join("target/release"))
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
        let complaint = PROVIDER.find_in(None, &program).unwrap_err().to_string();
        assert!(
            complaint.contains(BUILD_COMMAND) && complaint.contains(PROVIDER_DIR_VARIABLE),
            "{complaint}"
        );
        let installed = root.join("lib/memferry/libmemferry-fi.so");
        fs::write(&installed, "").unwrap();
        assert_eq!(PROVIDER.find_in(None, &program).unwrap(), installed);
        let beside = root.join("bin/libmemferry_fi.so");
        fs::write(&beside, "").unwrap();
        assert_eq!(PROVIDER.find_in(None, &program).unwrap(), beside);
        let elsewhere = root.join("else where");
        let complaint = PROVIDER.find_in(Some(&elsewhere), &program).unwrap_err().to_string();
        assert!(complaint.contains("else where, where no libmemferry-fi.so is"), "{complaint}");
        fs::write(elsewhere.join("libmemferry-fi.so"), "").unwrap();
        assert!(PROVIDER.find_in(Some(&elsewhere), &program).unwrap().starts_with(&elsewhere));
        let complaint = COLLECTIVES.find_in(None, &program).unwrap_err().to_string();
        assert!(complaint.contains("libmemferry-coll.so is not installed"), "{complaint}");
        let collectives = root.join("bin/libmemferry_coll.so");
        fs::write(&collectives, "\x7fELF").unwrap();
        assert_eq!(COLLECTIVES.find_in(None, &program).unwrap(), collectives);
        let complaint = COLLECTIVES.check_file(&collectives).unwrap_err().to_string();
        assert!(complaint.contains("is no library of collectives; build it"), "{complaint}");
    }

    #[test]
    fn a_program_that_cargo_installed_finds_the_provider_in_its_source_tree() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let build = root.join("source tree/target/release");
        fs::create_dir_all(root.join("cargo/bin")).unwrap();
        fs::create_dir_all(&build).unwrap();
        let program = root.join("cargo/bin/memferry");
        let url = format!("{}/source%20tree/crates/cli", root.display());
        let list = format!(
            "[v1]\n\"other 1.0.0 (path+file:///other/crates/cli)\" = [\"other\"]\n\
             \"memferry-cli 0.1.0 (path+file://{url})\" = [\"memferry\"]\n"
        );
        fs::write(root.join("cargo/.crates.toml"), list).unwrap();
        let text = PROVIDER.find_in(None, &program).unwrap_err().to_string();
        let cure = format!("cargo xtask install --prefix {}", root.join("cargo").display());
        assert!(text.contains(&cure), "{text}");
        assert!(text.contains("source tree/target/release"), "{text}");
        let built = build.join("libmemferry_fi.so");
        fs::write(&built, "").unwrap();
        assert_eq!(PROVIDER.find_in(None, &program).unwrap(), built);
    }

    #[test]
    fn a_program_from_a_registry_has_no_source_tree() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cargo_build_folder(folder.path()), None);
        let registry = "registry+https://github.com/rust-lang/crates.io-index";
        let list = format!("[v1]\n\"memferry-cli 0.1.0 ({registry})\" = [\"memferry\"]\n");
        fs::write(folder.path().join(".crates.toml"), list).unwrap();
        assert_eq!(cargo_build_folder(folder.path()), None);
    }
}
