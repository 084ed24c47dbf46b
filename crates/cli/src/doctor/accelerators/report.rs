//! The devices of Intel's data streaming accelerator and all their work queues, as `memferry doctor
//! --json` prints them and as checks are made of them.

use memferry_sys::idxd::QueueObstacle;
use memferry_sys::idxd::sysfs::{IdxdDevice, IdxdQueue};
use memferry_sys::vfio::PciDevice;
use memferry_sys::vfio::pci::FileAccess;
use serde::Serialize;

use super::AcceleratorFacts;
use super::commands::{self, QueueCommands};
use super::owner::FilePermissions;
use super::submission::{PortalCapability, Submission, SubmissionWay};

/// A device.
#[derive(Debug, Clone, Serialize)]
pub(in crate::doctor) struct DsaReport {
    /// The name of the kernel's driver for it, such as `dsa0`; `None` if another driver has it.
    name: Option<String>,
    /// The address on the bus.
    address: Option<String>,
    /// The driver that has it.
    driver: Option<String>,
    /// The version of the device, such as `1.0`.
    version: Option<String>,
    state: Option<String>,
    numa_node: Option<u32>,
    /// Whether it uses the address spaces of programs, without which these can use no queue;
    /// `None` if the kernel's driver does not have it.
    has_address_spaces: Option<bool>,
    /// The number of descriptors of all its queues together.
    descriptors: Option<u32>,
    /// What the mapping of its portals demands; `None` if the kernel's driver does not have it.
    portal_capability: Option<PortalCapability>,
    queues: Vec<QueueReport>,
}

/// A work queue.
#[derive(Debug, Clone, Serialize)]
pub(super) struct QueueReport {
    pub(super) name: String,
    /// The file that programs open, which exists while the queue is enabled for them.
    file: String,
    mode: Option<&'static str>,
    size: u32,
    max_transfer_bytes: u64,
    max_batch: u32,
    state: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    driver: Option<String>,
    group: Option<u32>,
    /// Who may open the file; `None` if it does not exist.
    permissions: Option<FilePermissions>,
    /// Whether this user may open it.
    may_open: bool,
    /// Whether this program can use it.
    pub(super) is_usable: bool,
    /// Why not.
    #[serde(serialize_with = "obstacle_text")]
    pub(super) obstacle: Option<QueueObstacle>,
    /// By which way this program uses the queue; `None` if it cannot.
    way: Option<SubmissionWay>,
    /// The way once it is usable, by the commands if it needs some.
    when_usable: Submission,
    /// The commands that make it usable.
    pub(super) commands: Option<QueueCommands>,
    /// Why none can make it usable, where that is not the obstacle itself.
    why_no_commands: Option<String>,
    /// Whether it is not usable, and needs no other configuration for that.
    #[serde(skip)]
    pub(super) is_nearly_usable: bool,
}

/// Serialises the text of an obstacle.
fn obstacle_text<S: serde::Serializer>(
    obstacle: &Option<QueueObstacle>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    obstacle.as_ref().map(QueueObstacle::text).serialize(serializer)
}

impl DsaReport {
    /// The reports of all devices: those of the kernel's driver, then the others on the bus.
    pub(super) fn all(facts: &AcceleratorFacts) -> Vec<Self> {
        let others = facts.found.iter().filter(|found| !facts.is_listed(found)).map(Self::of_other);
        facts.devices.iter().map(|device| Self::of(device, facts)).chain(others).collect()
    }

    /// The report of a device of the kernel's driver.
    pub(super) fn of(device: &IdxdDevice, facts: &AcceleratorFacts) -> Self {
        let queues = device.queues.iter().map(|queue| QueueReport::of(device, queue, facts));
        Self {
            name: Some(device.name.clone()),
            address: device.address.clone(),
            driver: Some(super::DRIVER.into()),
            version: device.version.map(|version| format!("{}.{}", version >> 8, version & 0xFF)),
            state: device.state.clone(),
            numa_node: device.numa_node,
            has_address_spaces: Some(device.has_address_spaces),
            descriptors: device.total_size,
            portal_capability: Some(facts.submission.capability(device)),
            queues: queues.collect(),
        }
    }

    /// The report of a device that the kernel's driver does not have.
    fn of_other(found: &PciDevice) -> Self {
        Self {
            name: None,
            address: Some(found.address.clone()),
            driver: found.driver.clone(),
            version: None,
            state: None,
            numa_node: None,
            has_address_spaces: None,
            descriptors: None,
            portal_capability: None,
            queues: Vec::new(),
        }
    }

    pub(super) fn queues(&self) -> &[QueueReport] {
        &self.queues
    }

    /// Whether this program can use a queue of the device.
    pub(super) fn is_usable(&self) -> bool {
        self.queues.iter().any(|queue| queue.is_usable)
    }

    /// The name and the address, for display.
    pub(super) fn title(&self) -> String {
        let name = self.name.as_deref().unwrap_or_default();
        match &self.address {
            Some(address) => format!("{name} at {address}"),
            None => name.to_owned(),
        }
    }

    /// The properties, and what portals demand, a line each.
    pub(super) fn notes(&self) -> Vec<String> {
        let capability = self.portal_capability.as_ref().map(PortalCapability::text);
        std::iter::once(self.properties()).chain(capability).collect()
    }

    fn properties(&self) -> String {
        let mut parts = vec![self.state.clone().unwrap_or_else(|| "state unknown".into())];
        parts.extend(self.version.as_ref().map(|version| format!("version {version}")));
        parts.extend(self.numa_node.map(|node| format!("NUMA node {node}")));
        let given = self.queues.iter().fold(0u32, |sum, queue| sum.saturating_add(queue.size));
        let of_all = self.descriptors.map(|all| format!(" of {all}")).unwrap_or_default();
        let queues = self.queues.len();
        parts.push(format!("{queues} work queue(s), which have {given}{of_all} descriptors"));
        parts.join(", ")
    }
}

impl QueueReport {
    fn of(device: &IdxdDevice, queue: &IdxdQueue, facts: &AcceleratorFacts) -> Self {
        let obstacle = QueueObstacle::of(device, queue);
        let is_ready = commands::is_ready(device, queue);
        let needs_commands = matches!(
            obstacle,
            Some(
                QueueObstacle::NotConfigured
                    | QueueObstacle::OtherUse(_)
                    | QueueObstacle::NotEnabled
            )
        );
        // What only has to be enabled stays as it is; the commands make all else a shared queue.
        let becomes_shared = needs_commands && !is_ready;
        let is_dedicated = queue.is_dedicated == Some(true) && !becomes_shared;
        let submission = facts.submission.of(device, is_dedicated);
        let commands = obstacle.as_ref().and_then(|obstacle| match obstacle {
            QueueObstacle::NoAddressSpaces => None,
            QueueObstacle::NoFile => Some(Ok(commands::create_file())),
            QueueObstacle::NotPermitted => Some(Ok(commands::open_to_user(&queue.path))),
            _ => Some(commands::enable(device, queue)),
        });
        let (commands, why_no_commands) = match commands.transpose() {
            Ok(commands) => (commands, None),
            Err(reason) => (None, Some(reason)),
        };
        let is_nearly_usable = match &obstacle {
            Some(QueueObstacle::NoFile | QueueObstacle::NotPermitted) => true,
            Some(QueueObstacle::NotEnabled) => is_ready,
            _ => false,
        };
        Self {
            name: queue.name.clone(),
            file: queue.path.display().to_string(),
            mode: queue.is_dedicated.map(|is_dedicated| match is_dedicated {
                true => "dedicated",
                false => "shared",
            }),
            size: queue.size,
            max_transfer_bytes: queue.max_transfer_bytes,
            max_batch: queue.max_batch,
            state: queue.state.clone(),
            kind: queue.kind.clone(),
            driver: queue.driver.clone(),
            group: queue.group,
            permissions: facts.names.permissions(&queue.path),
            may_open: queue.access == FileAccess::Allowed,
            is_usable: obstacle.is_none(),
            way: obstacle.is_none().then_some(submission.way),
            obstacle,
            when_usable: submission,
            commands,
            why_no_commands,
            is_nearly_usable,
        }
    }

    /// Whether two queues are equal for display, except for their names.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        self.verdict() == other.verdict() && self.notes() == other.notes()
    }

    /// Whether it is usable, and by which way, for display behind its name.
    pub(super) fn verdict(&self) -> String {
        match &self.obstacle {
            None => format!("ready; descriptors go {}", self.when_usable.text()),
            Some(obstacle) => format!("not used: {}", obstacle.text()),
        }
    }

    /// The properties, who may open it, and the way if it can be made usable, a line each.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = vec![self.properties(), self.access()];
        notes.extend(self.why_no_commands.clone());
        if !self.is_usable {
            notes.push(format!("once usable: descriptors go {}", self.when_usable.text()));
        }
        notes
    }

    fn properties(&self) -> String {
        let or_none = |word: &Option<String>| word.clone().unwrap_or_else(|| "none".into());
        let group = self.group.map_or_else(|| "none".into(), |group| group.to_string());
        format!(
            "{}, {} descriptors of up to {}, batches of up to {}; {}, type {}, driver {}, group {group}",
            match self.mode {
                Some("dedicated") => "dedicated to one program",
                Some(mode) => mode,
                None => "no mode",
            },
            self.size,
            memferry_bench::results::size::format(self.max_transfer_bytes),
            self.max_batch,
            self.state.as_deref().unwrap_or("state unknown"),
            or_none(&self.kind),
            or_none(&self.driver),
        )
    }

    fn access(&self) -> String {
        let may = if self.may_open { "may" } else { "may not" };
        match &self.permissions {
            None if self.obstacle == Some(QueueObstacle::NoFile) => {
                format!("{}: no such file", self.file)
            }
            None => "no file: a queue has one while it is enabled for programs".into(),
            Some(permissions) => format!("{}: {permissions}; this user {may} open it", self.file),
        }
    }
}
