//! Opening the engines of PCI devices.

use memferry_sys::vfio::pci::PciId;

use super::available_devices;
use crate::contract::factory::blame_setting;
use crate::contract::{EngineChoice, EngineFactory, EngineSelection, OpenError, OpenOptions};

/// The factory of the devices of one kind.
#[derive(Debug)]
pub(crate) struct PciFactory {
    pub(crate) name: &'static str,
    pub(crate) variable: &'static str,
    pub(crate) expected: &'static str,
    pub(crate) max_devices: usize,
    pub(crate) ids: &'static [PciId],
    /// Opens one engine over the devices at these addresses, of which there is at least one.
    pub(crate) open: fn(&[String]) -> Result<EngineChoice, OpenError>,
}

impl EngineFactory for PciFactory {
    fn name(&self) -> &'static str {
        self.name
    }

    fn variable(&self) -> &'static str {
        self.variable
    }

    fn expected(&self) -> &'static str {
        self.expected
    }

    fn parse(&self, text: &str) -> Option<EngineSelection> {
        let selection = EngineSelection::parse(text);
        let is_valid = match &selection {
            EngineSelection::Devices(addresses) => addresses.iter().all(|at| is_address(at)),
            EngineSelection::Off | EngineSelection::Auto => true,
        };
        (is_valid && self.accepts(&selection)).then_some(selection)
    }

    fn accepts(&self, selection: &EngineSelection) -> bool {
        match selection {
            EngineSelection::Devices(addresses) => {
                (1..=self.max_devices).contains(&addresses.len())
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
                let addresses = available_devices(self.ids);
                if addresses.is_empty() {
                    return Ok(Vec::new());
                }
                match (self.open)(&addresses) {
                    Ok(choice) => Ok(vec![choice]),
                    Err(error) => {
                        tracing::info!(%error, "a device is not used");
                        Ok(Vec::new())
                    }
                }
            }
            EngineSelection::Devices(addresses) => match (self.open)(addresses) {
                Ok(choice) => Ok(vec![choice]),
                Err(error) if options.by_environment => Err(blame_setting(error, self.variable)),
                Err(error) => Err(error),
            },
        }
    }
}

/// Returns whether the text is a PCI address: `0000:00:04.0`, or the same without the domain.
pub(crate) fn is_address(text: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ioat, nic};

    #[test]
    fn names_of_devices_are_read_as_people_write_them() {
        let parse = |text: &str| ioat::FACTORY.parse(text);
        let at = |addresses: &[&str]| {
            Some(EngineSelection::Devices(addresses.iter().map(|at| (*at).to_owned()).collect()))
        };
        assert_eq!(parse("off"), Some(EngineSelection::Off));
        assert_eq!(parse("auto"), Some(EngineSelection::Auto));
        assert_eq!(parse("0000:00:04.0, 00:04.1"), at(&["0000:00:04.0", "00:04.1"]));
        for wrong in ["", "banana", "AUTO", "1", "00:04", "0000:00:04.00", ", ,", "00:04.0,x"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_one_card_can_be_named() {
        assert_eq!(nic::FACTORY.parse("00:04.0,00:05.0"), None);
        assert_eq!(nic::FACTORY.parse("00:04.0"), Some(EngineSelection::device("00:04.0")));
        assert!(!nic::FACTORY.accepts(&EngineSelection::Devices(Vec::new())));
    }
}
