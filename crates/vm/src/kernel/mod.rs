//! The kernel of the machine, with the modules that let a program drive a PCI device. It is a
//! kernel of a distribution, which is unpacked and not installed: from a folder that the user
//! names, from the cache, or downloaded.

mod fetch;
mod modules;

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use thiserror::Error;

/// The variable that names a folder with an unpacked kernel.
pub const VARIABLE: &str = "MEMFERRY_VM_KERNEL";

/// An error while finding or downloading a kernel.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A folder lacks files that a machine needs.
    #[error("no kernel for a virtual machine in {folder}: {missing} is missing")]
    Incomplete {
        /// The folder.
        folder: PathBuf,
        /// The missing file.
        missing: String,
    },
    /// The folder that the user named lacks files that a machine needs.
    #[error(
        "{VARIABLE}={folder}: there is no {missing} there: name a folder with boot/vmlinuz-* and \
         lib/modules, or unset it to have one fetched"
    )]
    Named {
        /// The value of the variable.
        folder: PathBuf,
        /// The missing file.
        missing: String,
    },
    /// There is no folder for the cache.
    #[error(
        "there is no folder to keep a kernel in: set HOME or XDG_CACHE_HOME, or {VARIABLE} to a \
         folder with boot/vmlinuz-* and lib/modules"
    )]
    NoCache,
    /// The host has another package manager.
    #[error(
        "a kernel for virtual machines is fetched with apt-get and dpkg-deb (Debian, Ubuntu), and \
         {tool} is not here: set {VARIABLE} to a folder with boot/vmlinuz-* and lib/modules"
    )]
    NoPackages {
        /// The program that is not installed.
        tool: &'static str,
    },
    /// The package lists contain no kernel.
    #[error(
        "no package with a kernel is known here: sudo apt-get update, or set {VARIABLE} to a folder \
         with boot/vmlinuz-* and lib/modules"
    )]
    Unknown,
    /// The download or the unpacking failed.
    #[error(
        "{command} failed: {said}; is the network there? sudo apt-get update helps if the lists of \
         packages are old"
    )]
    Failed {
        /// The command that failed.
        command: String,
        /// The error output of the command.
        said: String,
    },
    /// The cache could not be written.
    #[error(
        "the kernel could not be kept in {folder}: {error}; set XDG_CACHE_HOME to another place, or \
         {VARIABLE} to a folder with boot/vmlinuz-* and lib/modules"
    )]
    Cache {
        /// The folder of the cache.
        folder: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
}

/// A kernel that can be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The version, as in `vmlinuz-<version>`.
    pub version: String,
    /// The file of the kernel image.
    pub image: PathBuf,
    /// The files of the modules, in the order of loading.
    pub modules: Vec<PathBuf>,
}

impl Kernel {
    /// Finds the kernel that the user named, else one in the cache. It downloads nothing.
    pub fn find() -> Result<Option<Self>, KernelError> {
        if let Some(folder) = env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
            return Self::in_named(Path::new(&folder)).map(Some);
        }
        Ok(cache().and_then(|cache| Self::in_cache(&cache)))
    }

    /// Finds a kernel, or downloads one into the cache.
    pub fn find_or_fetch() -> Result<Self, KernelError> {
        match Self::find()? {
            Some(kernel) => Ok(kernel),
            None => fetch::fetch(&cache().ok_or(KernelError::NoCache)?),
        }
    }

    /// Finds the kernel in the folder of an unpacked package, the newest if there are several. The
    /// root folder of an installed system is valid too.
    pub fn in_folder(folder: &Path) -> Result<Self, KernelError> {
        let missing = |missing: &str| KernelError::Incomplete {
            folder: folder.to_owned(),
            missing: missing.into(),
        };
        let images = fs::read_dir(folder.join("boot")).into_iter().flatten().flatten();
        let (version, image) = images
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Some((name.strip_prefix("vmlinuz-")?.to_owned(), entry.path()))
            })
            .max_by_key(|(version, _)| numbers_of(version))
            .ok_or_else(|| missing("boot/vmlinuz-*"))?;
        let modules = modules::find(folder, &version).map_err(|name| missing(&name))?;
        Ok(Self { version, image, modules })
    }

    /// As [`Kernel::in_folder`], for the folder that the variable names.
    fn in_named(folder: &Path) -> Result<Self, KernelError> {
        Self::in_folder(folder).map_err(|error| match error {
            KernelError::Incomplete { folder, missing } => KernelError::Named { folder, missing },
            error => error,
        })
    }

    fn in_cache(cache: &Path) -> Option<Self> {
        let folders = fs::read_dir(cache).ok()?.flatten();
        let kernels = folders
            .filter(|folder| !fetch::is_partial(&folder.file_name()))
            .filter_map(|folder| Self::in_folder(&folder.path()).ok());
        kernels.max_by_key(|kernel| numbers_of(&kernel.version))
    }
}

/// Checks whether a kernel can be downloaded, without network access.
pub(crate) fn can_be_fetched() -> Result<(), KernelError> {
    cache().ok_or(KernelError::NoCache)?;
    fetch::tools()
}

/// The folder of the cache.
fn cache() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    Some(cache.join("memferry").join("vm"))
}

/// The sort key of a version: 6.1.0-9 precedes 6.1.0-10.
fn numbers_of(version: &str) -> Vec<u64> {
    let numbers = version.split(|character: char| !character.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(version: &str, modules: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        add(folder.path(), version, modules);
        folder
    }

    fn add(folder: &Path, version: &str, modules: &[&str]) {
        let tree = folder.join("lib/modules").join(version).join("kernel/drivers");
        fs::create_dir_all(&tree).unwrap();
        fs::create_dir_all(folder.join("boot")).unwrap();
        fs::write(folder.join("boot").join(format!("vmlinuz-{version}")), "kernel").unwrap();
        for module in modules {
            fs::write(tree.join(module), "module").unwrap();
        }
    }

    fn names(kernel: &Kernel) -> Vec<&str> {
        kernel.modules.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect()
    }

    #[test]
    fn modules_are_found_in_the_order_of_loading_however_they_are_spelled_or_packed() {
        let files = ["vfio_pci.ko.zst", "vfio-pci-core.ko", "e1000e.ko", "vfio_iommu_type1.ko.xz"];
        let folder = package("6.1", &[files.as_slice(), &["vfio.ko", "irqbypass.ko"]].concat());
        let kernel = Kernel::in_folder(folder.path()).unwrap();
        assert_eq!(kernel.version, "6.1");
        let order = ["irqbypass.ko", "vfio.ko", files[3], files[1], files[0]];
        assert_eq!(names(&kernel), order);
    }

    #[test]
    fn a_module_may_be_part_of_the_kernel_but_not_missing() {
        let folder = package("6.1", &["vfio-pci.ko"]);
        let error = Kernel::in_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("module vfio of 6.1 is missing"), "{error}");
        let list = folder.path().join("lib/modules/6.1/modules.builtin");
        fs::write(list, "kernel/vfio.ko\nkernel/vfio_iommu_type1.ko\n").unwrap();
        assert_eq!(names(&Kernel::in_folder(folder.path()).unwrap()), ["vfio-pci.ko"]);
    }

    #[test]
    fn the_newest_kernel_is_taken() {
        let all = ["vfio.ko", "vfio_iommu_type1.ko", "vfio-pci.ko"];
        let folder = package("6.1.0-9-cloud", &all);
        add(folder.path(), "6.1.0-10-cloud", &all);
        assert_eq!(Kernel::in_folder(folder.path()).unwrap().version, "6.1.0-10-cloud");
    }

    #[test]
    fn a_cache_with_unfinished_and_broken_folders_gives_what_is_whole() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(Kernel::in_cache(cache.path()), None);
        let all = ["vfio.ko", "vfio_iommu_type1.ko", "vfio-pci.ko"];
        add(&cache.path().join("linux-image-6.1"), "6.1", &all);
        add(&cache.path().join("linux-image-6.2"), "6.2", &[]);
        add(&cache.path().join(format!("{}x", fetch::PARTIAL_PREFIX)), "6.3", &all);
        assert_eq!(Kernel::in_cache(cache.path()).unwrap().version, "6.1");
    }

    #[test]
    fn an_empty_folder_is_said_to_lack_a_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let error = Kernel::in_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("boot/vmlinuz-* is missing"), "{error}");
    }

    #[test]
    fn a_folder_that_was_named_in_vain_is_told_of_with_the_variable_and_the_cure() {
        let error = Kernel::in_named(Path::new("/nowhere")).unwrap_err().to_string();
        let told = "MEMFERRY_VM_KERNEL=/nowhere: there is no boot/vmlinuz-* there: name a folder";
        assert!(error.starts_with(told), "{error}");
        assert!(error.ends_with("or unset it to have one fetched"), "{error}");
    }
}
