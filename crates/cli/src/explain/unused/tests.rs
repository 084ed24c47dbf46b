use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use memferry::Ferry;
use memferry::engine::cpu::ProfileSource;
use memferry::engine::ioat::IoatEngine;
use memferry::engine::testing::ioat_model::IoatModel;

use super::*;

/// A made-up machine.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, file: &str, target: &str) {
        let path = self.0.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// Adds a device of the bus, in a group of its own.
    fn pci(self, address: &str, id: (u16, u16), class: &str, driver: Option<&str>) -> Self {
        let folder = format!("sys/bus/pci/devices/{address}");
        self.write(&format!("{folder}/vendor"), &format!("{:#06x}\n", id.0));
        self.write(&format!("{folder}/device"), &format!("{:#06x}\n", id.1));
        self.write(&format!("{folder}/class"), class);
        if let Some(driver) = driver {
            self.link(&format!("{folder}/driver"), &format!("../../drivers/{driver}"));
        }
        self.link(&format!("{folder}/iommu_group"), "../../../kernel/iommu_groups/7");
        self
    }

    fn ioat(self, address: &str, driver: Option<&str>) -> Self {
        self.pci(address, IOAT[0], "0x088000", driver)
    }

    /// Adds a work queue of the first DSA device.
    fn queue(self, name: &str, state: &str, size: &str, has_file: bool) -> Self {
        let folder = "sys/bus/dsa/devices";
        self.write(&format!("{folder}/dsa0/pasid_enabled"), "1");
        for (file, text) in [("state", state), ("type", "user"), ("mode", "shared"), ("size", size)]
        {
            self.write(&format!("{folder}/{name}/{file}"), text);
        }
        if has_file {
            self.write(&format!("dev/dsa/{name}"), "");
        }
        self
    }

    /// Lets this user open VFIO and the group.
    fn vfio(self) -> Self {
        self.write("dev/vfio/vfio", "");
        self.write("dev/vfio/7", "");
        self
    }

    fn unused(&self, engines: &[EngineSummary], asked: &RequestedDevices) -> Vec<UnusedDevice> {
        MachineDevices::with_root(self.0.path()).unused(engines, asked)
    }
}

/// The devices that the arguments ask for.
fn asked(arguments: &[(&str, &str)]) -> RequestedDevices {
    let all = ["dsa", "ioat", "nic", "cuda"].map(|engine| {
        let devices = arguments.iter().find(|(name, _)| *name == engine);
        (engine, devices.map(|(_, devices)| (*devices).to_owned()))
    });
    RequestedDevices::new(&all, |_| None)
}

/// The summary of an engine that uses these devices.
fn engine(name: &str, devices: &[&str]) -> EngineSummary {
    let engine = Arc::new(IoatEngine::over_model(IoatModel::new()).unwrap());
    let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).engine(engine, 1);
    let mut summary = ferry.build().unwrap().plan_context().engines[0].clone();
    summary.name = name.into();
    summary.devices = devices.iter().map(|name| (*name).to_owned()).collect();
    summary
}

fn reasons(unused: &[UnusedDevice]) -> Vec<(&str, &str)> {
    unused.iter().map(|unused| (unused.device.as_str(), unused.reason.as_str())).collect()
}

#[test]
fn a_machine_without_devices_has_no_unused_one() {
    let machine = MachineDevices::with_root(Path::new("/nowhere"));
    assert!(machine.unused(&[], &asked(&[("ioat", "auto")])).is_empty());
}

#[test]
fn a_device_that_was_not_selected_is_named_with_how_to_select_it_and_what_it_lacks() {
    let machine = Machine::new().ioat("0000:00:04.0", Some("ioatdma"));
    let unused = machine.unused(&[], &asked(&[]));
    let reason = "not selected (--ioat or MEMFERRY_IOAT=auto selects such devices); and the kernel driver \
                  ioatdma has it, not vfio-pci";
    assert_eq!(reasons(&unused), [("0000:00:04.0", reason)]);
    assert_eq!(unused[0].engine, "ioat");
    let off = machine.unused(&[], &asked(&[("ioat", "off")]));
    assert!(off[0].reason.starts_with("switched off by --ioat=off; and "), "{off:?}");
}

#[test]
fn a_selected_device_is_named_with_what_prevents_its_use() {
    let auto = asked(&[("ioat", "auto")]);
    let reason = |machine: Machine| machine.unused(&[], &auto)[0].reason.clone();
    let bound = || Machine::new().ioat("0000:00:04.0", Some("vfio-pci"));
    assert_eq!(reason(Machine::new().ioat("0000:00:04.0", None)), "it is not bound to vfio-pci");
    assert!(reason(bound()).contains("VFIO is not loaded"), "{}", reason(bound()));
    assert!(reason(bound().vfio()).starts_with("opening it failed"), "{}", reason(bound().vfio()));
}

#[test]
fn devices_beside_those_that_are_used_have_a_reason_and_the_used_ones_none() {
    let machine = Machine::new()
        .ioat("0000:00:04.0", Some("vfio-pci"))
        .ioat("0000:00:04.1", Some("vfio-pci"))
        .pci("0000:02:00.0", E1000E[0], "0x020000", Some("vfio-pci"))
        .pci("0000:03:00.0", E1000E[0], "0x020000", Some("vfio-pci"))
        .vfio();
    let engines = [engine("ioat", &["0000:00:04.0"]), engine("nic", &["0000:02:00.0"])];
    let named = asked(&[("ioat", "00:04.0"), ("nic", "auto")]);
    let unused = machine.unused(&engines, &named);
    assert_eq!(
        reasons(&unused),
        [
            ("0000:00:04.1", "not selected by --ioat=00:04.0"),
            ("0000:03:00.0", "the engine uses one card at a time"),
        ]
    );
}

#[test]
fn work_queues_are_named_with_what_sysfs_says_of_each() {
    let machine = Machine::new()
        .queue("wq0.0", "enabled", "16", true)
        .queue("wq0.1", "disabled", "16", false)
        .queue("wq0.2", "disabled", "0", false)
        .queue("wq0.10", "enabled", "16", true)
        .pci("0000:6a:01.0", DSA[0], "0x088000", Some("vfio-pci"))
        .vfio();
    let unused = machine.unused(&[engine("dsa", &["wq0.10"])], &asked(&[("dsa", "auto")]));
    assert_eq!(
        reasons(&unused),
        [
            ("wq0.0", "opening it failed"),
            ("wq0.1", "it is configured for programs, and not enabled"),
            ("wq0.2", "it is not configured"),
            ("0000:6a:01.0", "work queues of the kernel come before whole devices"),
        ]
    );
}

#[test]
fn a_gpu_is_recognised_by_its_address_in_the_name_of_the_device() {
    let machine = Machine::new()
        .pci("0000:17:00.0", (NVIDIA, 0x2330), "0x030200", Some("nvidia"))
        .pci("0000:18:00.0", (NVIDIA, 0x2330), "0x030200", Some("nouveau"))
        .pci("0000:19:00.0", (NVIDIA, 0x22a3), "0x068000", Some("nvidia"));
    let used = [engine("cuda", &["GPU 0 (Invented GPU, 0000:17:00.0)"])];
    let unused = machine.unused(&used, &asked(&[("cuda", "0")]));
    let reason = "not selected by --gpu=0; and the kernel driver nouveau has it, not nvidia";
    assert_eq!(reasons(&unused), [("0000:18:00.0", reason)]);
    assert_eq!(machine.unused(&[], &asked(&[])).len(), 2);
}

#[test]
fn devices_with_the_same_reason_share_a_line() {
    let mut machine = Machine::new().pci("0000:17:00.0", (NVIDIA, 1), "0x030200", None);
    for function in 0..6 {
        machine = machine.ioat(&format!("0000:00:04.{function}"), Some("ioatdma"));
    }
    let text = lines(&machine.unused(&[], &asked(&[])));
    let all: Vec<_> = text.lines().collect();
    assert_eq!(all.len(), 2, "{text}");
    assert!(all[0].contains("0000:00:04.0, 0000:00:04.1"), "{text}");
    assert!(all[0].contains("0000:00:04.3 and 2 more: not selected"), "{text}");
    assert!(all[1].contains("0000:17:00.0: not selected (--gpu or MEMFERRY_GPU=auto"), "{text}");
}
