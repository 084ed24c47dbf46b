//! How descriptors get to a work queue of the kernel: through its portal, or through `write`.

use memferry_sys::idxd::sysfs::{IdxdDevice, IdxdQueue};

/// From this version of the device on, the kernel lets every program map portals.
const SAFE_VERSION: u32 = 0x300;
/// From this version of the device on, batches go through `write` too.
const BATCH_WRITE_VERSION: u32 = 0x200;
/// The first release that demands a capability to map the portals of older devices: its change of
/// `drivers/dma/idxd/cdev.c` names INTEL-SA-01084. Updates of older kernels may have the same change.
const FIRST_STRICT_RELEASE: [u32; 3] = [6, 9, 1];

/// What the choice depends on, beside the device.
#[derive(Debug, Clone, Default)]
pub(super) struct SubmissionFacts {
    /// Whether this process has `CAP_SYS_RAWIO`.
    pub(super) has_raw_io: bool,
    /// The instruction for shared queues.
    pub(super) has_enqcmd: bool,
    /// The instruction for dedicated queues.
    pub(super) has_movdir64b: bool,
    /// The release of the running kernel, such as `6.12.3-amd64`.
    pub(super) release: String,
}

impl SubmissionFacts {
    /// The way of descriptors to a queue, and the reason.
    pub(super) fn way(&self, device: &IdxdDevice, queue: &IdxdQueue) -> String {
        let is_at_least = |min: u32| device.version.is_some_and(|version| version >= min);
        let write = match is_at_least(BATCH_WRITE_VERSION) {
            true => "descriptors go through write",
            false => "descriptors go through write, without batches",
        };
        let (has_instruction, instruction) = match queue.is_dedicated {
            Some(true) => (self.has_movdir64b, "movdir64b"),
            _ => (self.has_enqcmd, "enqcmd"),
        };
        let release = &self.release;
        if !has_instruction {
            return format!("this processor has no {instruction}, so {write}");
        }
        if self.has_raw_io || is_at_least(SAFE_VERSION) {
            return "its portal can be mapped".into();
        }
        if is_strict(release) {
            return format!(
                "Linux {release} demands CAP_SYS_RAWIO to map its portal, as all from 6.9.1 on do \
                 (INTEL-SA-01084), so {write}"
            );
        }
        format!(
            "Linux {release} may demand CAP_SYS_RAWIO to map its portal (INTEL-SA-01084: all from 6.9.1 \
             on do, and updates of older ones); then {write}"
        )
    }
}

/// Whether a release is known to demand the capability.
fn is_strict(release: &str) -> bool {
    let number =
        release.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
    let parts: Vec<u32> = number.split('.').map_while(|part| part.parse().ok()).collect();
    parts.len() >= 2 && parts[..] >= FIRST_STRICT_RELEASE[..]
}

/// Whether the process has `CAP_SYS_RAWIO`, by the kernel's description of it.
pub(super) fn has_raw_io(status: &str) -> bool {
    const CAP_SYS_RAWIO: u64 = 1 << 17;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    bits.is_some_and(|bits| bits & CAP_SYS_RAWIO != 0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, queue};
    use super::*;
    use memferry_sys::vfio::pci::FileAccess;

    fn facts(release: &str) -> SubmissionFacts {
        let (has_enqcmd, has_movdir64b) = (true, true);
        SubmissionFacts { has_raw_io: false, has_enqcmd, has_movdir64b, release: release.into() }
    }

    fn way(facts: &SubmissionFacts, is_dedicated: bool, version: u32) -> String {
        let queue = IdxdQueue { is_dedicated: Some(is_dedicated), ..queue(FileAccess::Allowed) };
        let device = IdxdDevice { version: Some(version), ..device(vec![]) };
        facts.way(&device, &queue)
    }

    #[test]
    fn releases_are_compared_by_their_numbers() {
        for strict in ["6.9.1", "6.9.12-amd64", "6.10.0-rc1", "6.10", "6.12+deb13", "7.0.0"] {
            assert!(is_strict(strict), "{strict}");
        }
        for unknown in ["6.9.0", "6.9", "6.1.0-44-amd64", "5.15.0", "6", "", "banana", "9"] {
            assert!(!is_strict(unknown), "{unknown}");
        }
    }

    #[test]
    fn the_capability_that_a_kernel_demands_is_named_with_its_release() {
        let strict = way(&facts("6.12.3"), false, 0x100);
        assert!(strict.starts_with("Linux 6.12.3 demands CAP_SYS_RAWIO"), "{strict}");
        assert!(strict.ends_with("through write, without batches"), "{strict}");
        let unknown = way(&facts("6.1.0-44-amd64"), false, 0x100);
        assert!(unknown.starts_with("Linux 6.1.0-44-amd64 may demand CAP_SYS_RAWIO"), "{unknown}");
        assert!(way(&facts("6.12.3"), false, 0x200).ends_with("through write"));
        assert_eq!(way(&facts("6.12.3"), false, 0x300), "its portal can be mapped");
        let privileged = SubmissionFacts { has_raw_io: true, ..facts("6.12.3") };
        assert_eq!(way(&privileged, false, 0x100), "its portal can be mapped");
    }

    #[test]
    fn without_the_instruction_of_a_queue_descriptors_go_through_write() {
        let has_raw_io = true;
        let no_enqcmd = SubmissionFacts { has_enqcmd: false, has_raw_io, ..facts("6.12.3") };
        assert!(
            way(&no_enqcmd, false, 0x300).contains("no enqcmd, so descriptors go through write")
        );
        assert_eq!(way(&no_enqcmd, true, 0x300), "its portal can be mapped");
        let no_movdir = SubmissionFacts { has_movdir64b: false, has_raw_io, ..facts("6.12.3") };
        assert!(
            way(&no_movdir, true, 0x100).contains("no movdir64b, so descriptors go through write")
        );
        assert_eq!(way(&no_movdir, false, 0x300), "its portal can be mapped");
    }

    #[test]
    fn capabilities_are_read_from_what_the_kernel_says_of_the_process() {
        assert!(has_raw_io("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_raw_io("CapEff:\t0000000000000000\n"));
        assert!(!has_raw_io("CapEff:\tbanana\n") && !has_raw_io(""));
    }
}
