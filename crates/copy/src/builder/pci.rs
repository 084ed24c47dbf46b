//! Devices on the bus that move memory too, as the builder or the environment names them.

use std::sync::Arc;

use memferry_engine::device::ready;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::nic::{self, NicEngine};
use memferry_engine::{Engine, OpenError};
use memferry_sys::vfio::pci::{E1000E, IOAT, Id};

use super::{Builder, EngineChoice, environment};
use crate::error::BuildError;

/// Whether devices of a kind move memory too.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PciDevices {
    /// None does.
    #[default]
    Off,
    /// All that were handed over to programs, if there are any. None is taken from the kernel.
    IfPresent,
    /// Those at these addresses on the bus, such as `0000:00:04.0`; without them there is no ferry.
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

/// Whether this is an address on the bus: `0000:00:04.0`, or without the first part.
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

/// A kind of devices, as settings name it.
struct Kind {
    setting: &'static str,
    variable: &'static str,
    expected: &'static str,
    most: usize,
    ids: &'static [Id],
}

const IOATS: Kind = Kind {
    setting: "ioat",
    variable: "MEMFERRY_IOAT",
    expected: "off, auto, or addresses on the bus such as 0000:00:04.0, with commas between them",
    most: usize::MAX,
    ids: IOAT,
};

const CARDS: Kind = Kind {
    setting: "nic",
    variable: "MEMFERRY_NIC",
    expected: "off, auto, or the address of one card on the bus such as 0000:02:00.0",
    most: 1,
    ids: E1000E,
};

impl Builder {
    /// Whether Intel's copy engine, I/OAT, moves memory too, beside the processor engine or the
    /// engines named (`MEMFERRY_IOAT`: `off`, `auto`, or addresses; for programs that do not call
    /// this). `memferry doctor` says how devices are handed over. Usual: off.
    pub fn ioat(mut self, devices: PciDevices) -> Self {
        self.ioat = Some(devices);
        self
    }

    /// Whether a network card that talks to itself moves memory too (`MEMFERRY_NIC`). It is slower
    /// than a processor, and leaves that alone. Of those that were handed over, the first is used.
    /// Usual: off.
    pub fn nic(mut self, devices: PciDevices) -> Self {
        self.nic = Some(devices);
        self
    }

    /// The engines of devices that are wanted.
    pub(super) fn open_pci(&self) -> Result<Vec<EngineChoice>, BuildError> {
        let mut choices = Vec::new();
        let wanted = IOATS.wanted(self.ioat.as_ref())?;
        if let Some(engine) = wanted.open(IoatEngine::open)? {
            choices.push(EngineChoice { channels: engine.channels(), engine: Arc::new(engine) });
        }
        let wanted = CARDS.wanted(self.nic.as_ref())?;
        let open = |addresses: &[String]| NicEngine::open(&addresses[0], nic::Settings::default());
        if let Some(engine) = wanted.open(open)? {
            choices.push(EngineChoice { engine: Arc::new(engine), channels: 1 });
        }
        Ok(choices)
    }
}

/// Devices that are to be opened.
struct Wanted {
    addresses: Vec<String>,
    /// Whether there is no ferry without them, and the variable that says so, if it was one.
    is_needed: bool,
    variable: Option<&'static str>,
}

impl Kind {
    /// What the builder says, or the environment.
    fn wanted(&self, set: Option<&PciDevices>) -> Result<Wanted, BuildError> {
        let Self { setting, variable, expected, most, ids } = *self;
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
            PciDevices::Off => Wanted { addresses: Vec::new(), is_needed: false, variable },
            PciDevices::IfPresent => Wanted { addresses: ready(ids), is_needed: false, variable },
            PciDevices::At(addresses) => Wanted { addresses, is_needed: true, variable },
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
            (Err(error), _) if !self.is_needed => {
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
        let error = Builder::new().ioat(named.clone()).build().unwrap_err().to_string();
        assert!(error.contains("ioat") && error.contains("ffff:ff:1f.7"), "{error}");
        let error = Builder::new().nic(named).build().unwrap_err().to_string();
        assert!(error.contains("nic") && error.contains("ffff:ff:1f.7"), "{error}");
        let two = PciDevices::At(vec!["00:01.0".into(), "00:02.0".into()]);
        let error = Builder::new().nic(two).build().unwrap_err().to_string();
        assert!(error.contains("one card"), "{error}");
        assert!(Builder::new().ioat(PciDevices::At(Vec::new())).build().is_err());
        let builder = Builder::new().ioat(PciDevices::IfPresent).nic(PciDevices::IfPresent);
        assert!(builder.build().is_ok());
    }
}
