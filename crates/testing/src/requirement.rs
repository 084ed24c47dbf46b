//! Requirements of tests.

use std::fmt;
use std::str::FromStr;

/// Something that a test needs and that not every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Requirement {
    /// `userfaultfd` with mapping events: root, or `vm.unprivileged_userfaultfd=1`.
    Userfaultfd,
    /// `io_uring`, which containers often deny.
    IoUring,
    /// libfabric with its headers and programs.
    Libfabric,
    /// An Open MPI with its compiler.
    OpenMpi,
    /// An MPICH that can use libfabric, with its compiler.
    Mpich,
    /// A C++ compiler.
    CPlusPlus,
    /// QEMU, and several minutes.
    Qemu,
    /// The right to become another user.
    Root,
    /// The right to read and write the memory of other processes of the same user.
    CrossMemory,
    /// The right to create namespaces, and the tools for it.
    Namespaces,
    /// The `cpio` program.
    Cpio,
    /// Two cores.
    Cores,
    /// A GPU with its driver.
    Gpu,
    /// A network card that is bound to vfio-pci.
    Nic,
    /// Programs of others: bash, git, and Python with its own tests.
    Programs,
    /// The right to create cgroups of version 1 with a CPU quota: root, on a kernel that supports
    /// them.
    CpuQuota,
}

impl Requirement {
    /// All requirements.
    pub const ALL: [Self; 16] = [
        Self::Userfaultfd,
        Self::IoUring,
        Self::Libfabric,
        Self::OpenMpi,
        Self::Mpich,
        Self::CPlusPlus,
        Self::Qemu,
        Self::Root,
        Self::CrossMemory,
        Self::Namespaces,
        Self::Cpio,
        Self::Cores,
        Self::Gpu,
        Self::Nic,
        Self::Programs,
        Self::CpuQuota,
    ];

    /// The name in `MEMFERRY_REQUIRE`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Userfaultfd => "userfaultfd",
            Self::IoUring => "io-uring",
            Self::Libfabric => "libfabric",
            Self::OpenMpi => "openmpi",
            Self::Mpich => "mpich",
            Self::CPlusPlus => "c++",
            Self::Qemu => "qemu",
            Self::Root => "root",
            Self::CrossMemory => "cross-memory",
            Self::Namespaces => "namespaces",
            Self::Cpio => "cpio",
            Self::Cores => "cores",
            Self::Gpu => "gpu",
            Self::Nic => "nic",
            Self::Programs => "programs",
            Self::CpuQuota => "cpu-quota",
        }
    }

    /// Whether the requirement is hardware or a property of the kernel. `all` does not include
    /// these, because they cannot be installed.
    pub const fn is_hardware(self) -> bool {
        matches!(self, Self::Cores | Self::Gpu | Self::Nic | Self::CpuQuota)
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Requirement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("no test needs {text:?}; expected `all` or some of {names}")
        })
    }
}

/// The parsed value of `MEMFERRY_REQUIRE`: words, separated by commas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Required {
    /// Whether everything that can be installed is required.
    all: bool,
    named: Vec<Requirement>,
}

impl Required {
    pub(crate) fn includes(&self, requirement: Requirement) -> bool {
        self.named.contains(&requirement) || (self.all && !requirement.is_hardware())
    }
}

impl FromStr for Required {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut required = Self::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word {
                "all" => required.all = true,
                word => required.named.push(word.parse()?),
            }
        }
        Ok(required)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_what_can_be_installed_and_hardware_is_asked_for_by_name() {
        let all: Required = "all".parse().unwrap();
        assert!(all.includes(Requirement::Userfaultfd) && all.includes(Requirement::Mpich));
        assert!(!all.includes(Requirement::Gpu) && !all.includes(Requirement::Nic));
        let both: Required = "all, gpu".parse().unwrap();
        assert!(both.includes(Requirement::Qemu) && both.includes(Requirement::Gpu));
    }

    #[test]
    fn without_a_word_nothing_is_required() {
        let nothing: Required = "".parse().unwrap();
        assert!(!Requirement::ALL.into_iter().any(|any| nothing.includes(any)));
    }

    #[test]
    fn single_requirements_are_named_with_commas_between_them() {
        let some: Required = "c++,libfabric".parse().unwrap();
        let included: Vec<_> =
            Requirement::ALL.into_iter().filter(|any| some.includes(*any)).collect();
        assert_eq!(included, [Requirement::Libfabric, Requirement::CPlusPlus]);
    }

    #[test]
    fn a_word_that_no_test_needs_is_a_mistake() {
        let error = "libfabrics".parse::<Required>().unwrap_err();
        assert!(error.contains("libfabrics") && error.contains("libfabric, "), "{error}");
    }

    #[test]
    fn every_requirement_is_found_by_its_name() {
        for requirement in Requirement::ALL {
            assert_eq!(requirement.name().parse(), Ok(requirement));
        }
    }
}
