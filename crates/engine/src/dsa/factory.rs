//! Opening the engine by a selection: queues of the kernel, or devices that are bound to vfio-pci.

use std::sync::Arc;

use memferry_sys::idxd::sysfs::IdxdBus;
use memferry_sys::idxd::{KernelIdxdFiles, QueueObstacle};
use memferry_sys::vfio::PciBus;
use memferry_sys::vfio::pci::DSA;

use super::{DsaEngine, IdxdQueueChoice, NAME};
use crate::contract::factory::blame_setting;
use crate::contract::{EngineChoice, EngineFactory, EngineSelection, OpenError, OpenOptions};
use crate::pci::{available_devices, is_address, open_error};

/// The factory of the engine.
pub(crate) static FACTORY: DsaFactory = DsaFactory;

/// Opens queues by names such as `wq0.0`, devices by their addresses on the bus.
#[derive(Debug)]
pub(crate) struct DsaFactory;

impl DsaEngine {
    /// Opens queues of the kernel's driver by their names, such as `wq0.0`, and measures their
    /// copies.
    pub fn open_queues(names: &[impl AsRef<str>]) -> Result<Self, OpenError> {
        Self::open_queues_of(&IdxdBus::default(), names)
    }

    fn open_queues_of(bus: &IdxdBus, names: &[impl AsRef<str>]) -> Result<Self, OpenError> {
        let choices = names.iter().map(|name| choose(bus, name.as_ref()));
        Self::over_kernel_queues(choices.collect::<Result<Vec<_>, _>>()?)
    }

    fn over_kernel_queues(choices: Vec<IdxdQueueChoice>) -> Result<Self, OpenError> {
        // SAFETY: they are queues that sysfs lists below the bus of the driver.
        let engine = unsafe { Self::over_queues(Arc::new(KernelIdxdFiles), choices) };
        Ok(engine.map_err(|error| open_error(NAME, &error))?.measured())
    }

    /// Opens the queues of the kernel's driver that are free; or else the devices that are bound to
    /// vfio-pci. `None` if there is neither.
    fn open_available() -> Result<Option<Self>, OpenError> {
        let queues = usable_queues(&IdxdBus::default());
        let free = IdxdQueueChoice::keep_free(&KernelIdxdFiles, queues);
        if !free.is_empty() {
            return Self::over_kernel_queues(free).map(Some);
        }
        match &available_devices(DSA)[..] {
            [] => Ok(None),
            addresses => Self::open(addresses).map(Some),
        }
    }
}

/// The queues that this process can use, as far as sysfs and the mode of their files tell.
fn usable_queues(bus: &IdxdBus) -> Vec<IdxdQueueChoice> {
    let devices = bus.devices();
    let queues = devices
        .iter()
        .flat_map(|device| device.queues.iter().map(move |queue| (device, queue)))
        .filter(|(device, queue)| QueueObstacle::of(device, queue).is_none())
        .filter_map(|(device, queue)| IdxdQueueChoice::of(device, queue));
    queues.collect()
}

/// Finds a queue by its name, if this process can use it.
fn choose(bus: &IdxdBus, name: &str) -> Result<IdxdQueueChoice, OpenError> {
    let refused = |reason: &dyn std::fmt::Display| open_error(NAME, reason);
    let (device, queue) = bus.queue(name).ok_or_else(|| {
        let has_device = !bus.devices().is_empty() || !PciBus::default().find(DSA).is_empty();
        refused(&missing_queue(name, has_device))
    })?;
    if let Some(obstacle) = QueueObstacle::of(&device, &queue) {
        let (cause, cure) = (obstacle.text(), "`memferry doctor --verbose` says what helps");
        return Err(refused(&format!("work queue {name} cannot be used: {cause}: {cure}")));
    }
    let choice = IdxdQueueChoice::of(&device, &queue);
    choice.ok_or_else(|| refused(&format!("work queue {name} is not configured")))
}

/// The reason for a queue that is not there. Without a device there is no list to look it up in.
fn missing_queue(name: &str, has_device: bool) -> String {
    let rest = match has_device {
        true => ": `memferry doctor --verbose` lists the queues",
        false => ", and no DSA device on this machine",
    };
    format!("there is no work queue {name}{rest}")
}

/// Whether the text is the name of a queue.
fn is_queue(text: &str) -> bool {
    let numbers = text.strip_prefix("wq").and_then(|rest| rest.split_once('.'));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|at| at.is_ascii_digit());
    numbers.is_some_and(|(device, queue)| is_number(device) && is_number(queue))
}

fn open(names: &[String]) -> Result<EngineChoice, OpenError> {
    let is_files = names.iter().all(|name| is_queue(name));
    let engine = if is_files { DsaEngine::open_queues(names) } else { DsaEngine::open(names) }?;
    Ok(choice_of(engine))
}

fn choice_of(engine: DsaEngine) -> EngineChoice {
    EngineChoice { channels: engine.channels(), engine: Arc::new(engine) }
}

impl EngineFactory for DsaFactory {
    fn name(&self) -> &'static str {
        NAME
    }

    fn variable(&self) -> &'static str {
        "MEMFERRY_DSA"
    }

    fn expected(&self) -> &'static str {
        "off, auto, work queues such as wq0.0, or addresses on the bus such as 0000:6a:01.0, with \
         commas between them"
    }

    fn parse(&self, text: &str) -> Option<EngineSelection> {
        Some(EngineSelection::parse(text)).filter(|selection| self.accepts(selection))
    }

    fn accepts(&self, selection: &EngineSelection) -> bool {
        match selection {
            EngineSelection::Devices(names) => {
                let all = |is_kind: fn(&str) -> bool| names.iter().all(|name| is_kind(name));
                !names.is_empty() && (all(is_queue) || all(is_address))
            }
            EngineSelection::Off | EngineSelection::Auto => true,
        }
    }

    fn open(
        &self,
        selection: &EngineSelection,
        options: &OpenOptions,
    ) -> Result<Vec<EngineChoice>, OpenError> {
        match selection {
            EngineSelection::Off => Ok(Vec::new()),
            EngineSelection::Auto => {
                let found = DsaEngine::open_available().unwrap_or_else(|error| {
                    tracing::info!(%error, "a device is not used");
                    None
                });
                Ok(found.map(choice_of).into_iter().collect())
            }
            EngineSelection::Devices(names) => match open(names) {
                Ok(choice) => Ok(vec![choice]),
                Err(error) if options.by_environment => Err(blame_setting(error, self.variable())),
                Err(error) => Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::dsa_model::{IdxdModel, IdxdModelOptions};

    #[test]
    fn queues_and_devices_are_named_as_people_write_them() {
        let parse = |text: &str| FACTORY.parse(text);
        let named = |names: &[&str]| {
            Some(EngineSelection::Devices(names.iter().map(|name| (*name).to_owned()).collect()))
        };
        assert_eq!(parse("auto"), Some(EngineSelection::Auto));
        assert_eq!(parse("wq0.0, wq2.11"), named(&["wq0.0", "wq2.11"]));
        assert_eq!(parse("0000:6a:01.0"), named(&["0000:6a:01.0"]));
        for wrong in ["", "wq", "wq0", "wq0.", "wq.1", "wq0.0,6a:01.0", "wq0.0.1", "dsa0"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_queue_that_is_not_there_is_named_with_what_helps() {
        let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
        let bus = IdxdBus::with_root(model.root());
        let error = DsaEngine::open_queues_of(&bus, &["wq9.9"]).unwrap_err().to_string();
        let expected = "there is no work queue wq9.9: `memferry doctor --verbose` lists the queues";
        assert!(error.ends_with(expected), "{error}");
    }

    #[test]
    fn a_queue_of_a_machine_without_the_device_is_not_looked_up_in_a_list() {
        let reason = missing_queue("wq9.9", false);
        assert_eq!(reason, "there is no work queue wq9.9, and no DSA device on this machine");
    }

    #[test]
    fn a_queue_is_opened_neither_by_its_name_nor_by_itself_if_its_device_shares_no_address_spaces()
    {
        let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
        let bus = IdxdBus::with_root(model.root());
        let folder = model.root().join("sys/bus/dsa/devices");
        assert_eq!(usable_queues(&bus), model.queue_choices());
        assert!(choose(&bus, "wq0.0").is_ok() && !model.queue_choices().is_empty());
        fs::write(folder.join("dsa0/pasid_enabled"), "0\n").unwrap();
        assert_eq!((usable_queues(&bus), model.queue_choices()), (vec![], vec![]));
        let error = DsaEngine::open_queues_of(&bus, &["wq0.0"]).unwrap_err().to_string();
        for part in ["wq0.0", "shares no address spaces", "memferry doctor"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_queue_that_is_named_and_cannot_be_used_is_refused_with_the_reason() {
        let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
        let bus = IdxdBus::with_root(model.root());
        let folder = model.root().join("sys/bus/dsa/devices/wq0.0");
        let error = |file: &str, text: &str| {
            let usual = fs::read_to_string(folder.join(file)).unwrap();
            fs::write(folder.join(file), text).unwrap();
            let error = choose(&bus, "wq0.0").unwrap_err().to_string();
            fs::write(folder.join(file), usual).unwrap();
            error
        };
        assert!(error("type", "kernel").contains("another use (type kernel)"));
        assert!(error("state", "disabled").contains("not enabled"));
        assert!(error("mode", "[none]").contains("not configured"));
        fs::remove_file(model.root().join("dev/dsa/wq0.0")).unwrap();
        assert!(choose(&bus, "wq0.0").unwrap_err().to_string().contains("file does not exist"));
    }
}
