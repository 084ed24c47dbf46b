//! `cargo xtask deb` packs the files of `cargo xtask install` for Debian, with `dpkg-deb`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::install::{
    Artifacts, FileKind, Tree, VERSION, install, output_of, root_of, workspace_root,
};
use crate::print_line;

const CONTROL: &str = include_str!("deb/control");
/// The trigger that updates the loader's cache when a library is installed or removed.
const TRIGGERS: &str = "activate-noawait ldconfig\n";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The package; without it, target/debian/memferry_VERSION_ARCHITECTURE.deb
    #[arg(long, value_name = "FILE.deb")]
    output: Option<PathBuf>,
    /// Cargo's profile: `release` builds in less time, without link-time optimisation
    #[arg(long, value_name = "NAME", default_value = "dist")]
    profile: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let architecture = output_of(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    let artifacts = Artifacts::build(&args.profile)?;
    let output = match &args.output {
        Some(file) => file.clone(),
        None => {
            let target =
                artifacts.program.ancestors().nth(2).context("cargo builds below target")?;
            target.join("debian").join(format!("memferry_{VERSION}_{architecture}.deb"))
        }
    };
    fs::create_dir_all(output.parent().unwrap_or(Path::new(".")))?;

    let folder = tempfile::tempdir().context("a folder for the package")?;
    let package = folder.path().join("memferry");
    let prefix = Path::new("/usr");
    let root = root_of(Some(&package), prefix);
    let files =
        install(Tree::new(&root, true), &artifacts, prefix, "share/zsh/vendor-completions")?;
    add_control_files(&package, &root, &files, architecture)?;
    // All files belong to root, regardless of the user who packs them.
    let mut command = Command::new("dpkg-deb");
    command.args(["--build", "--root-owner-group", "-Zxz", "-z3"]).arg(&package).arg(&output);
    output_of(&mut command)?;
    print_line(&format!("{}", output.display()));
    Ok(())
}

/// Adds the control files of the package.
fn add_control_files(
    package: &Path,
    root: &Path,
    files: &[String],
    architecture: &str,
) -> anyhow::Result<()> {
    let mut bytes = 0;
    let mut glibc = (2, 17);
    for file in files {
        let contents = fs::read(root.join(file)).with_context(|| format!("{file} is installed"))?;
        bytes += contents.len();
        // A static archive has no symbol versions: a program that links it depends on the C library
        // of its own build.
        if contents.starts_with(b"\x7fELF") {
            glibc = glibc.max(newest_glibc_symbol(&contents));
        }
    }
    let control = CONTROL
        .replace("@VERSION@", VERSION)
        .replace("@ARCHITECTURE@", architecture)
        .replace("@GLIBC@", &format!("{}.{}", glibc.0, glibc.1))
        .replace("@KIBIBYTES@", &bytes.div_ceil(1024).to_string());
    let mut tree = Tree::new(package, false);
    tree.write(&control, "DEBIAN/control")?;
    tree.write(TRIGGERS, "DEBIAN/triggers")?;
    let licence = workspace_root().join("LICENSE-MIT");
    tree.copy(&licence, "usr/share/doc/memferry/copyright", FileKind::Data)?;
    fs::set_permissions(package, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// The newest glibc version among the symbols that a program or library needs, which are named
/// `GLIBC_2.34` and so on.
fn newest_glibc_symbol(elf: &[u8]) -> (u32, u32) {
    const NAME: &[u8] = b"GLIBC_";
    let after_name = elf.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    let versions = after_name.filter_map(|(start, _)| {
        let rest = &elf[start + NAME.len()..];
        let length = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
        let mut numbers = std::str::from_utf8(&rest[..length]).ok()?.split('.');
        let mut number = || numbers.next()?.parse().ok();
        Some((number()?, number()?))
    });
    versions.max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_symbol_decides_which_c_library_is_needed() {
        let elf = b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.9\0GLIBC_";
        assert_eq!(newest_glibc_symbol(elf), (2, 34));
        assert_eq!(newest_glibc_symbol(b"nothing"), (0, 0));
    }

    #[test]
    fn the_control_file_has_what_dpkg_needs() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("usr");
        let mut tree = Tree::new(&root, false);
        tree.write("\x7fELF GLIBC_2.36\0", "bin/memferry").unwrap();
        tree.write(&"x".repeat(2000), "share/text").unwrap();
        let files = ["bin/memferry".to_owned(), "share/text".to_owned()];
        add_control_files(folder.path(), &root, &files, "amd64").unwrap();
        let control = fs::read_to_string(folder.path().join("DEBIAN/control")).unwrap();
        for line in [
            "Package: memferry",
            &format!("Version: {VERSION}"),
            "Architecture: amd64",
            "Installed-Size: 2",
            "Depends: libc6 (>= 2.36), libgcc-s1",
        ] {
            assert!(control.lines().any(|it| it == line), "{line} in\n{control}");
        }
        assert!(!control.contains('@'), "{control}");
        assert!(root.join("share/doc/memferry/copyright").is_file());
    }
}
