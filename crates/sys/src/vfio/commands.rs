//! The shell commands that bind devices to `vfio-pci` and back to kernel drivers. They are only
//! printed: a library must not unbind a device from its kernel driver.

use super::pci::{FileAccess, PciDevice};

/// Commands after which the user's programs can open these devices. Only the missing steps; `None`
/// if no step is missing.
pub fn bind_commands(devices: &[&PciDevice]) -> Option<String> {
    let unbound: Vec<&PciDevice> =
        devices.iter().copied().filter(|device| !device.is_bound_to_vfio()).collect();
    let mut steps = Vec::new();
    if !unbound.is_empty() {
        steps.push("sudo modprobe vfio-pci".to_owned());
        let [before, at, after] = shell_loop(&unbound);
        let driver = format!("/sys/bus/pci/devices/{at}/driver");
        let unbind = match unbound.iter().filter(|device| device.driver.is_some()).count() {
            0 => String::new(),
            all if all == unbound.len() => format!(" && echo {at} | sudo tee {driver}/unbind"),
            _ => format!(" && {{ ! test -e {driver} || echo {at} | sudo tee {driver}/unbind; }}"),
        };
        steps.push(format!(
            "{before}echo vfio-pci | sudo tee /sys/bus/pci/devices/{at}/driver_override{unbind} && \
             echo {at} | sudo tee /sys/bus/pci/drivers_probe{after}"
        ));
    }
    steps.extend(chown_command(devices));
    (!steps.is_empty()).then(|| steps.join(" && "))
}

/// Commands that bind these devices to the kernel's drivers again.
pub fn unbind_commands(devices: &[&PciDevice]) -> String {
    let [before, at, after] = shell_loop(devices);
    format!(
        "{before}echo {at} | sudo tee /sys/bus/pci/devices/{at}/driver/unbind && \
         echo | sudo tee /sys/bus/pci/devices/{at}/driver_override && \
         echo {at} | sudo tee /sys/bus/pci/drivers_probe{after}"
    )
}

/// The command that makes the user the owner of the group files of these devices.
fn chown_command(devices: &[&PciDevice]) -> Option<String> {
    let closed = |device: &&PciDevice| {
        let group = device.group.as_ref()?;
        let is_open = device.is_bound_to_vfio() && group.access == FileAccess::Allowed;
        (!is_open).then(|| format!("/dev/vfio/{}", group.number))
    };
    let mut files: Vec<String> = devices.iter().filter_map(closed).collect();
    files.dedup();
    (!files.is_empty()).then(|| format!("sudo chown $USER {}", files.join(" ")))
}

/// Text before a command, the text for the device address, and text after the command: a loop if
/// there are several devices.
fn shell_loop(devices: &[&PciDevice]) -> [String; 3] {
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
    use super::super::pci::IommuGroup;
    use super::*;

    fn device(address: &str, driver: Option<&str>, group: u32, access: FileAccess) -> PciDevice {
        PciDevice {
            address: address.into(),
            id: (0x8086, 0x10d3),
            class: 0x2_0000,
            driver: driver.map(str::to_owned),
            group: Some(IommuGroup { number: group, other_members: vec![], access }),
            interfaces: vec![],
        }
    }

    #[test]
    fn a_device_is_taken_from_its_driver_and_its_group_made_the_users() {
        let card = device("0000:02:00.0", Some("e1000e"), 7, FileAccess::Missing);
        assert_eq!(
            bind_commands(&[&card]).unwrap(),
            "sudo modprobe vfio-pci && \
             echo vfio-pci | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver_override && \
             echo 0000:02:00.0 | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver/unbind && \
             echo 0000:02:00.0 | sudo tee /sys/bus/pci/drivers_probe && \
             sudo chown $USER /dev/vfio/7"
        );
    }

    #[test]
    fn steps_that_are_done_are_left_out() {
        let unbound = device("0000:02:00.0", None, 7, FileAccess::Missing);
        assert!(!bind_commands(&[&unbound]).unwrap().contains("unbind"));
        let closed = device("0000:02:00.0", Some("vfio-pci"), 7, FileAccess::Denied);
        assert_eq!(bind_commands(&[&closed]).unwrap(), "sudo chown $USER /dev/vfio/7");
        let open = device("0000:02:00.0", Some("vfio-pci"), 7, FileAccess::Allowed);
        assert_eq!(bind_commands(&[&open]), None);
    }

    #[test]
    fn several_devices_are_handed_over_by_one_command() {
        let first = device("0000:00:04.0", Some("ioatdma"), 30, FileAccess::Missing);
        let second = device("0000:00:04.1", Some("ioatdma"), 31, FileAccess::Missing);
        let commands = bind_commands(&[&first, &second]).unwrap();
        assert!(commands.contains("for at in 0000:00:04.0 0000:00:04.1; do "), "{commands}");
        assert!(commands.contains("/devices/$at/driver/unbind"), "{commands}");
        assert!(commands.ends_with("; done && sudo chown $USER /dev/vfio/30 /dev/vfio/31"));
        assert!(unbind_commands(&[&first, &second]).ends_with("drivers_probe; done"));
        let free = device("0000:00:04.2", None, 32, FileAccess::Missing);
        assert!(bind_commands(&[&first, &free]).unwrap().contains("! test -e"));
    }

    #[test]
    fn the_kernels_driver_finds_a_device_that_is_given_back() {
        let card = device("0000:02:00.0", Some("vfio-pci"), 7, FileAccess::Allowed);
        assert_eq!(
            unbind_commands(&[&card]),
            "echo 0000:02:00.0 | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver/unbind && \
             echo | sudo tee /sys/bus/pci/devices/0000:02:00.0/driver_override && \
             echo 0000:02:00.0 | sudo tee /sys/bus/pci/drivers_probe"
        );
    }
}
