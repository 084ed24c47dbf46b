//! How descriptors get to a work queue of the kernel: through its portal, or through `write`.

use memferry_sys::idxd::sysfs::IdxdDevice;
use serde::Serialize;

/// From this version of the device on, the kernel lets every program map portals.
const SAFE_VERSION: u32 = 0x300;
/// From this version of the device on, batches go through `write` too.
const BATCH_WRITE_VERSION: u32 = 0x200;
/// The first release that demands a capability to map the portals of older devices: its change of
/// `drivers/dma/idxd/cdev.c` names INTEL-SA-01084. Updates of older kernels may have the same change.
const FIRST_STRICT_RELEASE: [u32; 3] = [6, 9, 1];
/// The capability that it demands.
const CAPABILITY: &str = "CAP_SYS_RAWIO";

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

/// The way of descriptors to a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SubmissionWay {
    /// Through its portal, which the program maps.
    Portal,
    /// Through `write`.
    Write,
    /// Through its portal if the kernel permits the mapping, else through `write`.
    PortalOrWrite,
}

/// Whether the running kernel demands a capability to map the portal of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Demand {
    /// It does not.
    No,
    /// It does.
    Yes,
    /// Its release alone does not tell.
    Perhaps,
}

/// The capability for the mapping of a portal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct PortalCapability {
    name: &'static str,
    is_demanded: Demand,
    /// Whether this process has it.
    is_held: bool,
    #[serde(skip)]
    release: String,
}

/// How descriptors get to a queue, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Submission {
    pub(super) way: SubmissionWay,
    /// Whether batches go the same way.
    has_batches: bool,
    /// The instruction of the portal.
    instruction: &'static str,
    /// Whether this processor has it.
    has_instruction: bool,
    capability: PortalCapability,
}

impl SubmissionFacts {
    /// The way of descriptors to a queue of a device, which is dedicated or shared.
    pub(super) fn of(&self, device: &IdxdDevice, is_dedicated: bool) -> Submission {
        let (has_instruction, instruction) = match is_dedicated {
            true => (self.has_movdir64b, "movdir64b"),
            false => (self.has_enqcmd, "enqcmd"),
        };
        let capability = self.capability(device);
        let way = match capability.is_demanded {
            _ if !has_instruction => SubmissionWay::Write,
            _ if capability.is_held => SubmissionWay::Portal,
            Demand::No => SubmissionWay::Portal,
            Demand::Yes => SubmissionWay::Write,
            Demand::Perhaps => SubmissionWay::PortalOrWrite,
        };
        let has_batches = way == SubmissionWay::Portal || is_version(device, BATCH_WRITE_VERSION);
        Submission { way, has_batches, instruction, has_instruction, capability }
    }

    /// The capability that the mapping of the portals of a device demands.
    pub(super) fn capability(&self, device: &IdxdDevice) -> PortalCapability {
        let is_demanded = match is_strict(&self.release) {
            _ if is_version(device, SAFE_VERSION) => Demand::No,
            true => Demand::Yes,
            false => Demand::Perhaps,
        };
        let (is_held, release) = (self.has_raw_io, self.release.clone());
        PortalCapability { name: CAPABILITY, is_demanded, is_held, release }
    }
}

/// Whether a device has at least this version.
fn is_version(device: &IdxdDevice, min: u32) -> bool {
    device.version.is_some_and(|version| version >= min)
}

impl PortalCapability {
    /// What the kernel demands, and whether this process has it, for display.
    pub(super) fn text(&self) -> String {
        let release = &self.release;
        let demand = match self.is_demanded {
            Demand::No => {
                return "mapping its portals demands no capability, by its version".into();
            }
            Demand::Yes => format!(
                "Linux {release} demands {CAPABILITY} to map its portals, as all from 6.9.1 on do \
                 (INTEL-SA-01084)"
            ),
            Demand::Perhaps => format!(
                "Linux {release} may demand {CAPABILITY} to map its portals (INTEL-SA-01084: all from \
                 6.9.1 on do, and updates of older ones)"
            ),
        };
        match self.is_held {
            true => format!("{demand}: this process has it"),
            false => format!(
                "{demand}: this process does not have it; a trusted program gets it by sudo setcap \
                 cap_sys_rawio=ep FILE"
            ),
        }
    }
}

impl Submission {
    /// The way and its reason, as the end of "descriptors go".
    pub(super) fn text(&self) -> String {
        let batches = if self.has_batches { "" } else { ", without batches" };
        let Self { instruction, .. } = self;
        match self.way {
            SubmissionWay::Portal => "to its mapped portal".into(),
            SubmissionWay::Write if !self.has_instruction => {
                format!("through write{batches}, because this processor has no {instruction}")
            }
            SubmissionWay::Write => {
                format!("through write{batches}, because this process has no {CAPABILITY}")
            }
            SubmissionWay::PortalOrWrite => format!(
                "to its mapped portal if the kernel permits that without {CAPABILITY}, else through \
                 write{batches}"
            ),
        }
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
    use super::super::tests::device;
    use super::*;

    fn facts(release: &str) -> SubmissionFacts {
        let (has_enqcmd, has_movdir64b) = (true, true);
        SubmissionFacts { has_raw_io: false, has_enqcmd, has_movdir64b, release: release.into() }
    }

    fn submission(facts: &SubmissionFacts, is_dedicated: bool, version: u32) -> Submission {
        let device = IdxdDevice { version: Some(version), ..device(vec![]) };
        facts.of(&device, is_dedicated)
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
        let strict = submission(&facts("6.12.3"), false, 0x100);
        assert_eq!(
            strict.text(),
            "through write, without batches, because this process has no CAP_SYS_RAWIO"
        );
        let text = strict.capability.text();
        assert!(text.starts_with("Linux 6.12.3 demands CAP_SYS_RAWIO"), "{text}");
        assert!(text.contains("does not have it") && text.contains("setcap"), "{text}");
        let unknown = submission(&facts("6.1.0-44-amd64"), false, 0x100);
        assert_eq!(unknown.way, SubmissionWay::PortalOrWrite);
        assert!(unknown.text().ends_with("else through write, without batches"));
        let text = unknown.capability.text();
        assert!(text.starts_with("Linux 6.1.0-44-amd64 may demand CAP_SYS_RAWIO"), "{text}");
        let second = submission(&facts("6.12.3"), false, 0x200);
        assert!(second.text().starts_with("through write, because"), "{}", second.text());
    }

    #[test]
    fn a_program_with_the_capability_or_for_a_later_device_maps_the_portal() {
        let later = submission(&facts("6.12.3"), false, 0x300);
        assert_eq!(later.text(), "to its mapped portal");
        assert!(later.capability.text().contains("demands no capability"));
        let privileged = SubmissionFacts { has_raw_io: true, ..facts("6.12.3") };
        let mapped = submission(&privileged, false, 0x100);
        assert_eq!(mapped.text(), "to its mapped portal");
        assert!(mapped.capability.text().ends_with(": this process has it"));
    }

    #[test]
    fn without_the_instruction_of_a_queue_descriptors_go_through_write() {
        let has_raw_io = true;
        let no_enqcmd = SubmissionFacts { has_enqcmd: false, has_raw_io, ..facts("6.12.3") };
        let shared = submission(&no_enqcmd, false, 0x300).text();
        assert_eq!(shared, "through write, because this processor has no enqcmd");
        assert_eq!(submission(&no_enqcmd, true, 0x300).way, SubmissionWay::Portal);
        let no_movdir = SubmissionFacts { has_movdir64b: false, has_raw_io, ..facts("6.12.3") };
        let dedicated = submission(&no_movdir, true, 0x100).text();
        let reason = "through write, without batches, because this processor has no movdir64b";
        assert_eq!(dedicated, reason);
        assert_eq!(submission(&no_movdir, false, 0x300).way, SubmissionWay::Portal);
    }

    #[test]
    fn the_fields_that_scripts_read_are_words() {
        let json = serde_json::to_value(submission(&facts("6.12.3"), false, 0x100)).unwrap();
        assert_eq!((&json["way"], &json["has_batches"]), (&"write".into(), &false.into()));
        let capability = serde_json::json!(
            {"name": "CAP_SYS_RAWIO", "is_demanded": "yes", "is_held": false}
        );
        assert_eq!(json["capability"], capability);
    }

    #[test]
    fn capabilities_are_read_from_what_the_kernel_says_of_the_process() {
        assert!(has_raw_io("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_raw_io("CapEff:\t0000000000000000\n"));
        assert!(!has_raw_io("CapEff:\tbanana\n") && !has_raw_io(""));
    }
}
