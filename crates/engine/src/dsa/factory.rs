//! Opening the engine by a selection: queues of the kernel, or devices that are bound to vfio-pci.

use std::sync::Arc;

use memferry_sys::idxd::KernelIdxdFiles;
use memferry_sys::idxd::sysfs::IdxdBus;
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
        let devices = IdxdBus::default().devices();
        let queues = devices
            .iter()
            .flat_map(|device| device.queues.iter().map(move |queue| (device, queue)))
            .filter(|(_, queue)| queue.is_usable())
            .filter_map(|(device, queue)| IdxdQueueChoice::of(device, queue));
        let free = IdxdQueueChoice::keep_free(&KernelIdxdFiles, queues.collect());
        if !free.is_empty() {
            return Self::over_kernel_queues(free).map(Some);
        }
        match &available_devices(DSA)[..] {
            [] => Ok(None),
            addresses => Self::open(addresses).map(Some),
        }
    }
}

/// Finds a queue by its name.
fn choose(bus: &IdxdBus, name: &str) -> Result<IdxdQueueChoice, OpenError> {
    let refused = |reason: &dyn std::fmt::Display| open_error(NAME, reason);
    let (device, queue) = bus.queue(name).ok_or_else(|| {
        refused(&format!("there is no work queue {name}: `memferry doctor` lists the queues"))
    })?;
    if !queue.is_enabled || !queue.is_for_programs {
        let text = "is not enabled for programs: `memferry doctor` has the commands";
        return Err(refused(&format!("work queue {name} {text}")));
    }
    let choice = IdxdQueueChoice::of(&device, &queue);
    choice.ok_or_else(|| refused(&format!("work queue {name} is not configured")))
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
    use super::*;

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
        let root = tempfile::tempdir().unwrap();
        let bus = IdxdBus::with_root(root.path());
        let error = DsaEngine::open_queues_of(&bus, &["wq0.0"]).unwrap_err().to_string();
        assert!(error.contains("wq0.0") && error.contains("memferry doctor"), "{error}");
    }
}
