//! Selection of PCI devices as copy engines, by the builder or the environment.

use std::sync::Arc;

use memferry_engine::ioat::IoatEngine;
use memferry_engine::nic::{self, NicEngine};
use memferry_engine::pci::available_devices;
use memferry_engine::{Engine, OpenError};
use memferry_sys::vfio::pci::{E1000E, IOAT, PciId};

use super::{EngineChoice, FerryBuilder, environment};
use crate::error::BuildError;

/// Selects the PCI devices of one kind that a ferry uses as copy engines.
///
/// ```no_run
/// use memferry::{Ferry, PciDevices};
///
/// let ferry = Ferry::builder().ioat(PciDevices::IfPresent).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PciDevices {
    /// No device is used.
    #[default]
    Off,
    /// All devices that are bound to vfio-pci are used, if there are any. Devices of kernel drivers
    /// are not touched.
    IfPresent,
    /// The devices at these PCI addresses, such as `0000:00:04.0`, are used; building the ferry
    /// fails without them.
    At(Vec<String>),
}

impl PciDevices {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "off" => Some(Self::Off),
            "auto" => Some(Self::IfPresent),
            addresses => {
                let addresses = addresses.split(',').map(str::trim);
                let each = addresses.map(|at| is_address(at).then(|| at.to_owned()));
                each.collect::<Option<Vec<_>>>().map(Self::At)
            }
        }
    }
}

/// Returns whether the text is a PCI address: `0000:00:04.0`, or the same without the domain.
fn is_address(text: &str) -> bool {
    let is_hex = |part: &str, digits: usize| {
        part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let short = match text.split_once(':') {
        Some((domain, rest)) if rest.contains(':') => is_hex(domain, 4).then_some(rest),
        _ => Some(text),
    };
    let parts = short.and_then(|short| short.split_once(':'));
    parts.is_some_and(|(bus, rest)| {
        is_hex(bus, 2)
            && rest
                .split_once('.')
                .is_some_and(|(device, function)| is_hex(device, 2) && is_hex(function, 1))
    })
}

/// A kind of PCI device and its settings.
struct Kind {
    setting: &'static str,
    variable: &'static str,
    expected: &'static str,
    max_devices: usize,
    ids: &'static [PciId],
}

const IOATS: Kind = Kind {
    setting: "ioat",
    variable: "MEMFERRY_IOAT",
    expected: "off, auto, or addresses on the bus such as 0000:00:04.0, with commas between them",
    max_devices: usize::MAX,
    ids: IOAT,
};

const CARDS: Kind = Kind {
    setting: "nic",
    variable: "MEMFERRY_NIC",
    expected: "off, auto, or the address of one card on the bus such as 0000:02:00.0",
    max_devices: 1,
    ids: E1000E,
};

impl FerryBuilder {
    /// Selects I/OAT devices, Intel's copy engine, that copy in addition to the processor engine or
    /// the named engines (`MEMFERRY_IOAT`: `off`, `auto`, or addresses; used if the program does
    /// not call this). `memferry doctor` prints how to bind devices to vfio-pci. Default: off.
    pub fn ioat(mut self, devices: PciDevices) -> Self {
        self.ioat = Some(devices);
        self
    }

    /// Selects a network card in loopback mode as a copy engine (`MEMFERRY_NIC`). It is slower than
    /// a processor, but uses no processor time. `auto` uses the first card that is bound to
    /// vfio-pci. Default: off.
    pub fn nic(mut self, devices: PciDevices) -> Self {
        self.nic = Some(devices);
        self
    }

    /// Opens the engines of the selected devices.
    pub(super) fn open_pci(&self) -> Result<Vec<EngineChoice>, BuildError> {
        let mut choices = Vec::new();
        let wanted = IOATS.wanted(self.ioat.as_ref())?;
        if let Some(engine) = wanted.open(IoatEngine::open)? {
            choices.push(EngineChoice { channels: engine.channels(), engine: Arc::new(engine) });
        }
        let wanted = CARDS.wanted(self.nic.as_ref())?;
        let open = |addresses: &[String]| NicEngine::open(&addresses[0], nic::NicConfig::default());
        if let Some(engine) = wanted.open(open)? {
            choices.push(EngineChoice { engine: Arc::new(engine), channels: 1 });
        }
        Ok(choices)
    }
}

/// The devices to open.
struct Wanted {
    addresses: Vec<String>,
    /// Whether building fails without the devices, and the environment variable that selected them,
    /// if any.
    is_required: bool,
    variable: Option<&'static str>,
}

impl Kind {
    /// Returns the selection of the builder, else that of the environment.
    fn wanted(&self, set: Option<&PciDevices>) -> Result<Wanted, BuildError> {
        let Self { setting, variable, expected, max_devices: most, ids } = *self;
        let is_right = |devices: &PciDevices| match devices {
            PciDevices::At(addresses) => (1..=most).contains(&addresses.len()),
            PciDevices::Off | PciDevices::IfPresent => true,
        };
        let devices = match set {
            Some(devices) if is_right(devices) => devices.clone(),
            Some(wrong) => {
                let (name, value) = (setting, format!("{wrong:?}"));
                return Err(BuildError::Setting { name, value, expected });
            }
            None => environment(variable, expected, |text| {
                PciDevices::from_name(text).filter(is_right)
            })?
            .unwrap_or_default(),
        };
        let variable = set.is_none().then_some(variable);
        Ok(match devices {
            PciDevices::Off => Wanted { addresses: Vec::new(), is_required: false, variable },
            PciDevices::IfPresent => {
                Wanted { addresses: available_devices(ids), is_required: false, variable }
            }
            PciDevices::At(addresses) => Wanted { addresses, is_required: true, variable },
        })
    }
}

impl Wanted {
    fn open<E: Engine>(
        self,
        open: impl FnOnce(&[String]) -> Result<E, OpenError>,
    ) -> Result<Option<E>, BuildError> {
        if self.addresses.is_empty() {
            return Ok(None);
        }
        match (open(&self.addresses), self.variable) {
            (Ok(engine), _) => Ok(Some(engine)),
            (Err(error), _) if !self.is_required => {
                tracing::info!(%error, "a device is not used");
                Ok(None)
            }
            (Err(OpenError::System { engine, reason }), Some(variable)) => {
                let asked = format!("{variable} asks for it: unset it, or set it to auto");
                Err(OpenError::System { engine, reason: format!("{reason} ({asked})") }.into())
            }
            (Err(error), _) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_read_as_people_write_them() {
        let at = |addresses: &[&str]| {
            Some(PciDevices::At(addresses.iter().map(|at| (*at).to_owned()).collect()))
        };
        assert_eq!(PciDevices::from_name("off"), Some(PciDevices::Off));
        assert_eq!(PciDevices::from_name("auto"), Some(PciDevices::IfPresent));
        assert_eq!(
            PciDevices::from_name("0000:00:04.0, 00:04.1"),
            at(&["0000:00:04.0", "00:04.1"])
        );
        for wrong in ["", "banana", "AUTO", "1", "00:04", "0000:00:04.00", ", ,", "00:04.0,x"] {
            assert_eq!(PciDevices::from_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error_only_if_it_was_named() {
        let named = PciDevices::At(vec!["ffff:ff:1f.7".into()]);
        let error = FerryBuilder::new().ioat(named.clone()).build().unwrap_err().to_string();
        assert!(error.contains("ioat") && error.contains("ffff:ff:1f.7"), "{error}");
        let error = FerryBuilder::new().nic(named).build().unwrap_err().to_string();
        assert!(error.contains("nic") && error.contains("ffff:ff:1f.7"), "{error}");
        let two = PciDevices::At(vec!["00:01.0".into(), "00:02.0".into()]);
        let error = FerryBuilder::new().nic(two).build().unwrap_err().to_string();
        assert!(error.contains("one card"), "{error}");
        assert!(FerryBuilder::new().ioat(PciDevices::At(Vec::new())).build().is_err());
        let builder = FerryBuilder::new().ioat(PciDevices::IfPresent).nic(PciDevices::IfPresent);
        assert!(builder.build().is_ok());
    }
}
