//! The devices of this machine that an engine could take and a ferry does not use, each with the reason:
//! what was selected, and what prevents its use, as far as sysfs tells.

use memferry::EngineSelection;
use memferry::engine::factories;
use memferry::plan::EngineSummary;
use memferry_sys::cpu;
use memferry_sys::idxd::QueueObstacle;
use memferry_sys::idxd::sysfs::{IdxdBus, IdxdDevice, IdxdQueue};
use memferry_sys::vfio::pci::{DSA, E1000E, FileAccess, IOAT};
use memferry_sys::vfio::{PciBus, PciDevice, VfioError};
use serde::Serialize;

use super::devices::RequestedDevices;

/// The vendor of GPUs that the engine knows, and the class of displays.
const NVIDIA: u16 = 0x10de;
const DISPLAY: u32 = 0x03;
/// The number of devices with the same reason that the text names.
const MAX_NAMES: usize = 4;

/// A device that a ferry does not use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct UnusedDevice {
    /// The engine that would use it.
    pub(super) engine: &'static str,
    /// Its address on the bus, or its name.
    pub(super) device: String,
    pub(super) reason: String,
}

/// Where the devices of the machine are listed.
#[derive(Debug)]
pub(super) struct MachineDevices {
    bus: PciBus,
    queues: IdxdBus,
    /// Whether the processor has the instruction for the portals of a whole DSA device.
    has_movdir64b: bool,
}

/// A device that an engine could take.
struct Candidate {
    engine: &'static str,
    device: String,
    /// What prevents its use.
    obstacle: Option<String>,
    /// Why an engine that uses other devices does not take it, though nothing prevents that.
    beside_others: &'static str,
}

impl MachineDevices {
    /// The devices of this machine.
    pub(super) fn detect() -> Self {
        Self {
            bus: PciBus::default(),
            queues: IdxdBus::default(),
            has_movdir64b: cpu::info().movdir64b,
        }
    }

    /// The devices in the files under `root`.
    #[cfg(test)]
    pub(super) fn with_root(root: &std::path::Path) -> Self {
        let (bus, queues) = (PciBus::with_root(root), IdxdBus::with_root(root));
        Self { bus, queues, has_movdir64b: true }
    }

    /// The devices that none of these engines uses.
    pub(super) fn unused(
        &self,
        engines: &[EngineSummary],
        requested: &RequestedDevices,
    ) -> Vec<UnusedDevice> {
        let used = |name: &str| {
            let devices = engines.iter().filter(|engine| engine.name == name);
            devices.flat_map(|engine| &engine.devices).collect::<Vec<_>>()
        };
        let is_used = |candidate: &Candidate| {
            // The name of a GPU has more words than its address.
            let words =
                |name: &str| name.split([' ', ',', '(', ')']).any(|word| word == candidate.device);
            used(candidate.engine).iter().any(|name| words(name))
        };
        let mut candidates = self.dsa();
        candidates.extend(self.pci("ioat", IOAT, "opening it failed"));
        candidates.extend(self.pci("nic", E1000E, "the engine uses one card at a time"));
        candidates.extend(self.gpus());
        let unused = candidates.into_iter().filter(|candidate| !is_used(candidate));
        let described = unused.map(|candidate| {
            let has_others = !used(candidate.engine).is_empty();
            let reason = candidate.reason(requested, has_others);
            UnusedDevice { engine: candidate.engine, device: candidate.device, reason }
        });
        described.collect()
    }

    /// The devices with these ids.
    fn pci(
        &self,
        engine: &'static str,
        ids: &[(u16, u16)],
        beside_others: &'static str,
    ) -> Vec<Candidate> {
        let container = self.bus.container_access();
        let candidate = |device: PciDevice| Candidate {
            engine,
            obstacle: pci_obstacle(&device, container),
            device: device.address,
            beside_others,
        };
        self.bus.find(ids).into_iter().map(candidate).collect()
    }

    /// The work queues of the kernel's driver, and the devices of which it lists none.
    fn dsa(&self) -> Vec<Candidate> {
        const PREFERS_QUEUES: &str = "work queues of the kernel come before whole devices";
        let devices = self.queues.devices();
        let mut candidates: Vec<Candidate> = devices
            .iter()
            .flat_map(|device| device.queues.iter().map(move |queue| work_queue(device, queue)))
            .collect();
        let has_queues = |address: &str| {
            let is_same = |device: &&IdxdDevice| device.address.as_deref() == Some(address);
            devices.iter().find(is_same).is_some_and(|device| !device.queues.is_empty())
        };
        let whole = self.pci("dsa", DSA, PREFERS_QUEUES).into_iter();
        candidates.extend(whole.filter(|found| !has_queues(&found.device)).map(|mut found| {
            if !self.has_movdir64b {
                found
                    .obstacle
                    .get_or_insert("this processor has no movdir64b, which it needs".into());
            }
            found
        }));
        candidates
    }

    fn gpus(&self) -> Vec<Candidate> {
        let is_gpu = |device: &PciDevice| device.id.0 == NVIDIA && device.class >> 16 == DISPLAY;
        let candidate = |device: PciDevice| Candidate {
            engine: "cuda",
            obstacle: match device.driver.as_deref() {
                Some("nvidia") => None,
                Some(driver) => Some(format!("the kernel driver {driver} has it, not nvidia")),
                None => Some("no driver has it".into()),
            },
            device: device.address,
            beside_others: "the engine uses one GPU, the first unless another is named",
        };
        self.bus.devices().into_iter().filter(is_gpu).map(candidate).collect()
    }
}

fn work_queue(device: &IdxdDevice, queue: &IdxdQueue) -> Candidate {
    Candidate {
        engine: "dsa",
        device: queue.name.clone(),
        obstacle: QueueObstacle::of(device, queue).map(|obstacle| obstacle.text()),
        beside_others: match queue.is_dedicated {
            Some(true) => "opening it failed: another program may have this dedicated queue",
            _ => "opening it failed",
        },
    }
}

/// What prevents programs from using a device of the bus. The text does not name the device, so that
/// devices with the same reason are shown together.
fn pci_obstacle(device: &PciDevice, container: FileAccess) -> Option<String> {
    let obstacle = device.open_blocker(container)?;
    Some(match &obstacle {
        VfioError::NoIommu { .. } => "no IOMMU controls it".into(),
        VfioError::NotBoundToVfio { driver: Some(driver), .. } => {
            format!("the kernel driver {driver} has it, not vfio-pci")
        }
        VfioError::NotBoundToVfio { driver: None, .. } => "it is not bound to vfio-pci".into(),
        VfioError::InterfaceInUse { interface, .. } => {
            format!("it is the network interface {}, which is in use", interface.name)
        }
        _ => obstacle.cause(),
    })
}

impl Candidate {
    /// Why it is not used: because of the selection, because of an obstacle, or both.
    fn reason(&self, requested: &RequestedDevices, has_others: bool) -> String {
        let unselected = self.unselected(requested);
        match (unselected, &self.obstacle) {
            (Some(selection), Some(obstacle)) => format!("{selection}; and {obstacle}"),
            (Some(reason), None) => reason,
            (None, Some(obstacle)) => obstacle.clone(),
            (None, None) if has_others => self.beside_others.into(),
            (None, None) => "opening it failed, for a reason that sysfs does not tell".into(),
        }
    }

    /// Why it is not among the devices that were selected.
    fn unselected(&self, requested: &RequestedDevices) -> Option<String> {
        let Some(request) = requested.of(self.engine) else {
            let flag = super::devices::flag(self.engine);
            let factory = factories().iter().find(|factory| factory.name() == self.engine);
            let variable = factory.map_or("", |factory| factory.variable());
            return Some(format!("not selected ({flag} or {variable}=auto selects such devices)"));
        };
        let is_this = |name: &String| {
            let name = name.to_lowercase();
            self.device == name || self.device == format!("0000:{name}")
        };
        match &request.selection {
            EngineSelection::Off => Some(format!("switched off by {}", request.asked)),
            EngineSelection::Auto => None,
            EngineSelection::Devices(names) if names.iter().any(is_this) => None,
            EngineSelection::Devices(_) => Some(format!("not selected by {}", request.asked)),
        }
    }
}

/// The lines for people: devices with the same reason share one.
pub(super) fn lines(unused: &[UnusedDevice]) -> String {
    let mut groups: Vec<(&UnusedDevice, Vec<&str>)> = Vec::new();
    for device in unused {
        let is_alike =
            |first: &UnusedDevice| (first.engine, &first.reason) == (device.engine, &device.reason);
        match groups.iter_mut().find(|(first, _)| is_alike(first)) {
            Some((_, names)) => names.push(&device.device),
            None => groups.push((device, vec![&device.device])),
        }
    }
    let line = |(first, names): &(&UnusedDevice, Vec<&str>)| {
        format!("    {:<9} {}: {}\n", first.engine, join(names), first.reason)
    };
    groups.iter().map(line).collect()
}

/// The first names, and how many more there are.
pub(super) fn join<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(MAX_NAMES).map(AsRef::as_ref).collect();
    let more = names.len() - shown.len();
    match more {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
