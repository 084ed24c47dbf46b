//! The commands by which people hand devices to programs and give them back to the kernel. They are
//! only ever printed: taking a device from the kernel's driver is not for a library to do.

use super::pci::{Access, PciDevice};

/// What to type so that the user's programs can open these devices: only the steps that are missing.
/// `None` where none is.
pub fn hand_over(devices: &[&PciDevice]) -> Option<String> {
    let kept: Vec<&PciDevice> =
        devices.iter().copied().filter(|device| !device.is_handed_over()).collect();
    let mut steps = Vec::new();
    if !kept.is_empty() {
        steps.push("sudo modprobe vfio-pci".to_owned());
        let [before, at, after] = for_each(&kept);
        let driver = format!("/sys/bus/pci/devices/{at}/driver");
        let unbind = match kept.iter().filter(|device| device.driver.is_some()).count() {
            0 => String::new(),
            all if all == kept.len() => format!(" && echo {at} | sudo tee {driver}/unbind"),
            _ => format!(" && {{ ! test -e {driver} || echo {at} | sudo tee {driver}/unbind; }}"),
        };
        steps.push(format!(
            "{before}echo vfio-pci | sudo tee /sys/bus/pci/devices/{at}/driver_override{unbind} && \
             echo {at} | sudo tee /sys/bus/pci/drivers_probe{after}"
        ));
    }
    steps.extend(own(devices));
    (!steps.is_empty()).then(|| steps.join(" && "))
}

/// What to type so that the kernel's own drivers have these devices again.
pub fn give_back(devices: &[&PciDevice]) -> String {
    let [before, at, after] = for_each(devices);
    format!(
        "{before}echo {at} | sudo tee /sys/bus/pci/devices/{at}/driver/unbind && \
         echo | sudo tee /sys/bus/pci/devices/{at}/driver_override && \
         echo {at} | sudo tee /sys/bus/pci/drivers_probe{after}"
    )
}

/// What to type so that the user may open the groups of these devices.
fn own(devices: &[&PciDevice]) -> Option<String> {
    let closed = |device: &&PciDevice| {
        let group = device.group.as_ref()?;
        let is_open = device.is_handed_over() && group.access == Access::Allowed;
        (!is_open).then(|| format!("/dev/vfio/{}", group.number))
    };
    let mut files: Vec<String> = devices.iter().filter_map(closed).collect();
    files.dedup();
    (!files.is_empty()).then(|| format!("sudo chown $USER {}", files.join(" ")))
}

/// What stands before commands, in place of an address, and after them: nothing special for one
/// device, a loop for more.
fn for_each(devices: &[&PciDevice]) -> [String; 3] {
    let addresses: Vec<&str> = devices.iter().map(|device| device.address.as_str()).collect();
    match addresses[..] {
        [one] => [String::new(), one.to_owned(), String::new()],
        _ => {
            let before = format!("for at in {}; do ", addresses.join(" "));
            [before, "$at".to_owned(), "; done".to_owned()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pci::Group;
    use super::*;

    fn device(address: &str, driver: Option<&str>, group: u32, access: Access) -> PciDevice {
        PciDevice {
            address: address.into(),
            id: (0x8086, 0x10d3),
            class: 0x2_0000,
            driver: driver.map(str::to_owned),
            group: Some(Group { number: group, companions: vec![], access }),
            interfaces: vec![],
        }
    }

    #[test]
    fn a_device_is_taken_from_its_driver_and_its_group_made_the_users() {
        let card = device("0000:02:00.0", Some("e1000e"), 7, Access::Missing);
        assert_eq!(
            hand_over(&[&card]).unwrap(),
            "sudo modprobe vfio-pci && \
             echo vfio-pci | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver_override && \
             echo 0000:02:00.0 | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver/unbind && \
             echo 0000:02:00.0 | sudo tee /sys/bus/pci/drivers_probe && \
             sudo chown $USER /dev/vfio/7"
        );
    }

    #[test]
    fn steps_that_are_done_are_left_out() {
        let unbound = device("0000:02:00.0", None, 7, Access::Missing);
        assert!(!hand_over(&[&unbound]).unwrap().contains("unbind"));
        let closed = device("0000:02:00.0", Some("vfio-pci"), 7, Access::Denied);
        assert_eq!(hand_over(&[&closed]).unwrap(), "sudo chown $USER /dev/vfio/7");
        let open = device("0000:02:00.0", Some("vfio-pci"), 7, Access::Allowed);
        assert_eq!(hand_over(&[&open]), None);
    }

    #[test]
    fn several_devices_are_handed_over_by_one_command() {
        let first = device("0000:00:04.0", Some("ioatdma"), 30, Access::Missing);
        let second = device("0000:00:04.1", Some("ioatdma"), 31, Access::Missing);
        let commands = hand_over(&[&first, &second]).unwrap();
        assert!(commands.contains("for at in 0000:00:04.0 0000:00:04.1; do "), "{commands}");
        assert!(commands.contains("/devices/$at/driver/unbind"), "{commands}");
        assert!(commands.ends_with("; done && sudo chown $USER /dev/vfio/30 /dev/vfio/31"));
        assert!(give_back(&[&first, &second]).ends_with("drivers_probe; done"));
        let free = device("0000:00:04.2", None, 32, Access::Missing);
        assert!(hand_over(&[&first, &free]).unwrap().contains("! test -e"));
    }

    #[test]
    fn the_kernels_driver_finds_a_device_that_is_given_back() {
        let card = device("0000:02:00.0", Some("vfio-pci"), 7, Access::Allowed);
        assert_eq!(
            give_back(&[&card]),
            "echo 0000:02:00.0 | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver/unbind && \
             echo | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver_override && \
             echo 0000:02:00.0 | sudo tee /sys/bus/pci/drivers_probe"
        );
    }
}
