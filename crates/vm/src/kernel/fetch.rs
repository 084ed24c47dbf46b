//! Download of a kernel from the distribution, without installing it. Files that a machine does not
//! need are discarded. The cache only contains complete kernels: each process unpacks into a folder
//! of its own and renames it at the end. If two processes do so at the same time, the second uses
//! the kernel of the first.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use std::{env, fs, io};

use super::{Kernel, KernelError, modules};

/// Metapackages of the newest kernel. The kernels for virtual machines come first: they are
/// smaller, and an emulated processor decompresses them faster.
const PACKAGES: [&str; 3] = ["linux-image-cloud-amd64", "linux-image-amd64", "linux-image-virtual"];

/// The prefix of a folder that is not complete yet.
pub(super) const PARTIAL_PREFIX: &str = ".unpacking-";

/// The age from which an incomplete folder counts as left behind by a killed process.
const MAX_PARTIAL_AGE: Duration = Duration::from_secs(24 * 60 * 60);

pub(super) fn is_partial(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(PARTIAL_PREFIX.as_bytes())
}

/// Checks that the programs for the download are installed.
pub(super) fn tools() -> Result<(), KernelError> {
    let paths = env::var_os("PATH").unwrap_or_default();
    for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
        if !env::split_paths(&paths).any(|folder| folder.join(tool).is_file()) {
            return Err(KernelError::NoPackages { tool });
        }
    }
    Ok(())
}

/// Downloads the newest kernel into the cache.
pub(super) fn fetch(cache: &Path) -> Result<Kernel, KernelError> {
    tools()?;
    let refused = |error| KernelError::Cache { folder: cache.to_owned(), error };
    let package =
        PACKAGES.iter().find_map(|name| kernel_behind(name)).ok_or(KernelError::Unknown)?;
    fs::create_dir_all(cache).map_err(refused)?;
    sweep(cache);
    let work =
        tempfile::Builder::new().prefix(PARTIAL_PREFIX).tempdir_in(cache).map_err(refused)?;
    let unpacked = work.path().join("unpacked");
    download(&package, work.path(), &unpacked)?;
    let kept = work.path().join("kept");
    store(&Kernel::in_folder(&unpacked)?, &unpacked, &kept).map_err(refused)?;
    let place = cache.join(&package);
    install(&kept, &place, &work.path().join("broken")).map_err(refused)?;
    Kernel::in_folder(&place)
}

/// The kernel package that a metapackage depends on.
fn kernel_behind(package: &str) -> Option<String> {
    let mut command = Command::new("apt-cache");
    let output = run(command.args(["show", "--no-all-versions", package])).ok()?;
    kernel_in(&String::from_utf8_lossy(&output.stdout))
}

fn kernel_in(description: &str) -> Option<String> {
    let depends = description.lines().find_map(|line| line.strip_prefix("Depends:"))?;
    let mut names = depends.split([',', '|']).filter_map(|name| name.split_whitespace().next());
    let kernel = names.find(|name| {
        let version = name.strip_prefix("linux-image-");
        version.is_some_and(|version| version.starts_with(|first: char| first.is_ascii_digit()))
    });
    kernel.map(Into::into)
}

/// Downloads and unpacks a package. Some distributions have the modules in a separate package.
fn download(package: &str, folder: &Path, target: &Path) -> Result<(), KernelError> {
    // `APT::Sandbox::User=root` lets apt write into a folder that only this user can access.
    let get = |package: &str| {
        let mut command = Command::new("apt-get");
        run(command
            .args(["-qq", "-o", "APT::Sandbox::User=root", "download", package])
            .current_dir(folder))
    };
    get(package)?;
    let modules = package.replace("linux-image-", "linux-modules-");
    if run(Command::new("apt-cache").args(["show", &modules])).is_ok() {
        get(&modules)?;
    }
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for file in files.filter(|file| file.extension() == Some(OsStr::new("deb"))) {
        run(Command::new("dpkg-deb").arg("-x").arg(file).arg(target))?;
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<Output, KernelError> {
    let failed = |command: &Command, said: String| {
        let name = command.get_program().to_string_lossy();
        let about = command.get_args().last().unwrap_or_default().to_string_lossy();
        KernelError::Failed { command: format!("{name} … {about}"), said }
    };
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| failed(command, error.to_string()))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(command, said.trim().replace('\n', "; ")))
}

/// Moves the files that a machine needs to a folder of the same layout.
fn store(kernel: &Kernel, unpacked: &Path, kept: &Path) -> io::Result<()> {
    let modules = kept.join("lib/modules").join(&kernel.version);
    fs::create_dir_all(&modules)?;
    fs::create_dir_all(kept.join("boot"))?;
    fs::rename(&kernel.image, kept.join("boot").join(format!("vmlinuz-{}", kernel.version)))?;
    for module in &kernel.modules {
        fs::rename(module, modules.join(module.file_name().unwrap_or_default()))?;
    }
    let list = modules::folder(unpacked, &kernel.version).map(|from| from.join(modules::BUILT_IN));
    match list.filter(|list| list.exists()) {
        Some(list) => fs::rename(list, modules.join(modules::BUILT_IN)),
        None => Ok(()),
    }
}

/// Moves the folder into the cache, unless another process has already done so.
fn install(kept: &Path, place: &Path, broken: &Path) -> io::Result<()> {
    if place.exists() && Kernel::in_folder(place).is_err() {
        // Files of the cached kernel are missing. Another process may have moved the folder away
        // already.
        let _ = fs::rename(place, broken);
    }
    match fs::rename(kept, place) {
        Err(_) if Kernel::in_folder(place).is_ok() => Ok(()),
        other => other,
    }
}

/// Removes incomplete folders that killed processes left behind.
fn sweep(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|metadata| metadata.modified()).map(|at| at.elapsed());
        let is_old = matches!(age, Ok(Ok(age)) if age > MAX_PARTIAL_AGE);
        if is_partial(&entry.file_name()) && is_old {
            let _: Result<(), _> = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_kernel_is_found_among_the_dependencies_of_its_package() {
        let debian = "Package: linux-image-cloud-amd64\nPre-Depends: x\n\
                      Depends: linux-base, linux-image-6.1.0-54-cloud-amd64 (= 6.1.190-1)\n";
        assert_eq!(kernel_in(debian).as_deref(), Some("linux-image-6.1.0-54-cloud-amd64"));
        let ubuntu = "Depends: linux-image-6.8.0-31-generic, linux-modules-extra-6.8.0-31-generic";
        assert_eq!(kernel_in(ubuntu).as_deref(), Some("linux-image-6.8.0-31-generic"));
        assert_eq!(kernel_in("Package: linux-image-amd64\n"), None);
        assert_eq!(kernel_in("Depends: linux-image-amd64\n"), None);
    }

    fn kernel(folder: &Path, mark: &str) -> PathBuf {
        let modules = folder.join("usr/lib/modules/6.1/kernel/x");
        fs::create_dir_all(&modules).unwrap();
        fs::create_dir_all(folder.join("boot")).unwrap();
        fs::write(folder.join("boot/vmlinuz-6.1"), mark).unwrap();
        for name in ["vfio.ko", "vfio_iommu_type1.ko", "e1000e.ko"] {
            fs::write(modules.join(name), name).unwrap();
        }
        fs::write(folder.join("usr/lib/modules/6.1/modules.builtin"), "kernel/vfio-pci.ko")
            .unwrap();
        folder.to_owned()
    }

    #[test]
    fn what_is_kept_is_a_kernel_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let unpacked = kernel(&folder.path().join("unpacked"), "kernel");
        let kept = folder.path().join("kept");
        store(&Kernel::in_folder(&unpacked).unwrap(), &unpacked, &kept).unwrap();
        assert_eq!(Kernel::in_folder(&kept).unwrap().modules.len(), 2);
        assert!(!kept.join("lib/modules/6.1/e1000e.ko").exists());
    }

    #[test]
    fn the_second_to_put_a_kernel_takes_the_first_ones_and_a_broken_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mark = || fs::read_to_string(at("place/boot/vmlinuz-6.1")).unwrap();
        install(&kernel(&at("first"), "first"), &at("place"), &at("broken")).unwrap();
        install(&kernel(&at("second"), "second"), &at("place"), &at("broken")).unwrap();
        assert_eq!(mark(), "first");
        fs::remove_file(at("place/boot/vmlinuz-6.1")).unwrap();
        install(&kernel(&at("third"), "third"), &at("place"), &at("broken")).unwrap();
        assert_eq!(mark(), "third");
    }
}
