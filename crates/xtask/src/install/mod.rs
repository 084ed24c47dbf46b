//! `cargo xtask install` builds Memferry for release and installs the program, libadma, the
//! libfabric provider, the libraries to preload and all their files below one prefix. `cargo xtask deb` packs the result of
//! the same steps.

mod artifacts;
mod tree;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::print_line;
pub(crate) use artifacts::Artifacts;
pub(crate) use tree::{FileKind, Tree};

/// The version of all crates of the workspace.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The list of installed files, relative to the prefix.
const MANIFEST: &str = "share/memferry/manifest";

const PKG_CONFIG: &str = include_str!("templates/adma.pc");
const CMAKE: &str = include_str!("templates/AdmaConfig.cmake");
const CMAKE_VERSION: &str = include_str!("templates/AdmaConfigVersion.cmake");

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the installed files are used from, such as /usr/local or ~/.local
    #[arg(long, value_name = "DIR")]
    prefix: PathBuf,
    /// Write below this folder instead of /, for packages
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
    /// Remove what only debuggers read from program and libraries, by `strip`
    #[arg(long)]
    strip: bool,
    /// Cargo's profile: `release` builds in less time, without link-time optimisation
    #[arg(long, value_name = "NAME", default_value = "dist")]
    profile: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let prefix = std::path::absolute(&args.prefix).context("the prefix has no absolute path")?;
    let artifacts = Artifacts::build(&args.profile)?;
    let tree = Tree::new(&root_of(args.destdir.as_deref(), &prefix), args.strip);
    let count = install(tree, &artifacts, &prefix, "share/zsh/site-functions")?.len();
    let root = root_of(args.destdir.as_deref(), &prefix);
    print_line(&format!("{count} files are in {}, listed in {MANIFEST}", root.display()));
    Ok(())
}

/// The folder on this machine that corresponds to the prefix.
pub(crate) fn root_of(destdir: Option<&Path>, prefix: &Path) -> PathBuf {
    match destdir {
        Some(folder) => folder.join(prefix.strip_prefix("/").unwrap_or(prefix)),
        None => prefix.to_owned(),
    }
}

/// Installs all files and returns their paths, relative to the prefix. `zsh` is the folder that zsh
/// searches for completions, which is another one for Debian packages.
pub(crate) fn install(
    mut tree: Tree,
    artifacts: &Artifacts,
    prefix: &Path,
    zsh: &str,
) -> anyhow::Result<Vec<String>> {
    tree.copy(&artifacts.program, "bin/memferry", FileKind::Program)?;
    tree.copy(&artifacts.shared_library, "lib/libadma.so", FileKind::SharedLibrary)?;
    if let Some(archive) = &artifacts.static_library {
        tree.copy(archive, "lib/libadma.a", FileKind::StaticLibrary)?;
    }
    // libfabric loads providers by this form of name.
    tree.copy(&artifacts.provider, "lib/memferry/libmemferry-fi.so", FileKind::SharedLibrary)?;
    let collectives = "lib/memferry/libmemferry-coll.so";
    tree.copy(&artifacts.collectives, collectives, FileKind::SharedLibrary)?;
    let preload = "lib/memferry/libmemferry-preload.so";
    tree.copy(&artifacts.preload, preload, FileKind::SharedLibrary)?;
    install_c_files(&mut tree, prefix)?;
    install_program_files(&mut tree, &artifacts.program, zsh)?;
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let to = format!("share/doc/memferry/{licence}");
        tree.copy(&workspace_root().join(licence), &to, FileKind::Data)?;
    }
    tree.finish(MANIFEST)
}

/// The header, the files by which build systems find libadma, and the examples.
fn install_c_files(tree: &mut Tree, prefix: &Path) -> anyhow::Result<()> {
    let folder = workspace_root().join("crates/c");
    tree.copy(&folder.join("include/adma.h"), "include/adma.h", FileKind::Data)?;
    tree.write(&fill_in(PKG_CONFIG, prefix), "lib/pkgconfig/adma.pc")?;
    tree.write(&fill_in(CMAKE, prefix), "lib/cmake/Adma/AdmaConfig.cmake")?;
    tree.write(&fill_in(CMAKE_VERSION, prefix), "lib/cmake/Adma/AdmaConfigVersion.cmake")?;
    for example in ["overlap.c", "link.c", "window.c"] {
        let to = format!("share/doc/memferry/examples/{example}");
        tree.copy(&folder.join("examples-c").join(example), &to, FileKind::Data)?;
    }
    Ok(())
}

/// Manual pages and completions, which the program generates.
fn install_program_files(tree: &mut Tree, program: &Path, zsh: &str) -> anyhow::Result<()> {
    let pages = tempfile::tempdir().context("a folder for manual pages")?;
    output_of(Command::new(program).arg("man-pages").arg(pages.path()))?;
    let names = std::fs::read_dir(pages.path())?
        .map(|page| Ok(page?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for name in names {
        tree.copy(&pages.path().join(&name), &format!("share/man/man1/{name}"), FileKind::Data)?;
    }
    let completions = [
        ("bash", "share/bash-completion/completions/memferry".to_owned()),
        ("zsh", format!("{zsh}/_memferry")),
        ("fish", "share/fish/vendor_completions.d/memferry.fish".to_owned()),
    ];
    for (shell, to) in completions {
        let script = output_of(Command::new(program).args(["completions", shell]))?;
        tree.write(&script, &to)?;
    }
    Ok(())
}

/// The output of a command. A command that does not succeed is an error.
pub(crate) fn output_of(command: &mut Command) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{name} cannot be run"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} failed ({}): {errors}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("the output of {name}"))
}

/// The root folder of the workspace that this program was built from.
pub(crate) fn workspace_root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap_or(package)
}

/// Fills in the values of a template.
fn fill_in(template: &str, prefix: &Path) -> String {
    // pkg-config splits options at unescaped spaces. The other templates do not contain the prefix.
    let prefix = prefix.display().to_string().replace(' ', "\\ ");
    template.replace("@PREFIX@", &prefix).replace("@VERSION@", VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_is_below_the_destdir_if_there_is_one() {
        let prefix = Path::new("/usr/local");
        assert_eq!(root_of(None, prefix), prefix);
        assert_eq!(root_of(Some(Path::new("/tmp/x")), prefix), Path::new("/tmp/x/usr/local"));
    }

    #[test]
    fn templates_are_filled_in() {
        let text = fill_in(PKG_CONFIG, Path::new("/opt/mem ferry"));
        assert!(text.contains("prefix=/opt/mem\\ ferry\n"), "{text}");
        assert!(text.contains(&format!("Version: {VERSION}\n")), "{text}");
        for template in [PKG_CONFIG, CMAKE, CMAKE_VERSION] {
            assert!(!fill_in(template, Path::new("/usr")).contains('@'), "{template}");
        }
    }

    #[test]
    fn everything_is_installed_and_listed() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        let script = "#!/bin/sh\ncase $1 in\nman-pages) echo page >\"$2/memferry.1\" ;;\n\
                      completions) echo \"script of $2\" ;;\nesac\n";
        memferry_testing::write_program(&program, script);
        let library = folder.path().join("library");
        std::fs::write(&library, "library").unwrap();
        let artifacts = Artifacts {
            program,
            shared_library: library.clone(),
            static_library: None,
            provider: library.clone(),
            collectives: library.clone(),
            preload: library,
        };
        let prefix = Path::new("/opt/x");
        let root = root_of(Some(folder.path()), prefix);
        let files = install(Tree::new(&root, false), &artifacts, prefix, "share/zsh/some").unwrap();
        for expected in [
            "bin/memferry",
            "include/adma.h",
            "lib/libadma.so",
            "lib/memferry/libmemferry-fi.so",
            "lib/memferry/libmemferry-coll.so",
            "lib/memferry/libmemferry-preload.so",
            "lib/cmake/Adma/AdmaConfig.cmake",
            "share/man/man1/memferry.1",
            "share/zsh/some/_memferry",
            MANIFEST,
        ] {
            assert!(files.iter().any(|file| file == expected), "{expected} in {files:?}");
            assert!(root.join(expected).is_file(), "{expected}");
        }
        assert!(!root.join("lib/libadma.a").exists());
        let read = |file| std::fs::read_to_string(root.join(file)).unwrap();
        assert!(read("lib/pkgconfig/adma.pc").starts_with("prefix=/opt/x\n"));
        assert_eq!(read("share/bash-completion/completions/memferry"), "script of bash\n");
        assert_eq!(read(MANIFEST).lines().collect::<Vec<_>>(), files);
    }
}
