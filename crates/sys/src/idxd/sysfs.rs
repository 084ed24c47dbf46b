//! DSA devices and their queues, as sysfs describes them. Nothing is changed.
//!
//! All files are under one root directory: `/` on a machine, a temporary tree in tests. Contents
//! are read as untrusted text: what is missing or unreadable has a default or is `None`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::vfio::pci::{FileAccess, file_access, names};

/// A device of the `idxd` driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdxdDevice {
    /// Its name, such as `dsa0`.
    pub name: String,
    /// Its address on the bus, if the link to it can be read.
    pub address: Option<String>,
    /// The version, with the major number in bits 8 and above.
    pub version: Option<u32>,
    /// Whether the device is enabled.
    pub is_enabled: bool,
    /// Its state in the kernel's words, such as `enabled`, if it can be read.
    pub state: Option<String>,
    /// Whether the device uses address spaces of processes. Without it, no program can use a queue.
    pub has_address_spaces: bool,
    /// The NUMA node; `None` if there is only one.
    pub numa_node: Option<u32>,
    /// The supported opcodes, a bit for each, of the first 64.
    pub opcodes: Option<u64>,
    /// The number of descriptors that all queues have together.
    pub total_size: Option<u32>,
    /// Its queues, in order.
    pub queues: Vec<IdxdQueue>,
}

/// A queue of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdxdQueue {
    /// Its name, such as `wq0.1`.
    pub name: String,
    /// The file that programs open.
    pub path: PathBuf,
    /// Whether this process may open the file.
    pub access: FileAccess,
    /// Whether the queue is enabled.
    pub is_enabled: bool,
    /// Its state in the kernel's words, such as `disabled`, if it can be read.
    pub state: Option<String>,
    /// Whether it is for programs: its type is `user`.
    pub is_for_programs: bool,
    /// Its type in the kernel's words: `user`, `kernel`, or `none` if it is not configured.
    pub kind: Option<String>,
    /// The driver for which it is configured, such as `user`; older kernels do not tell it.
    pub driver: Option<String>,
    /// The group of queues and engines that it is in.
    pub group: Option<u32>,
    /// Whether it is dedicated to one opener; `None` if it is not configured.
    pub is_dedicated: Option<bool>,
    /// The number of descriptors.
    pub size: u32,
    /// The maximum length of a descriptor in bytes.
    pub max_transfer_bytes: u64,
    /// The maximum number of descriptors of a batch.
    pub max_batch: u32,
    /// Whether descriptors block on page faults.
    pub block_on_fault: bool,
}

/// The DSA bus in sysfs.
#[derive(Debug, Clone)]
pub struct IdxdBus {
    root: PathBuf,
}

impl Default for IdxdBus {
    fn default() -> Self {
        Self::with_root("/")
    }
}

impl IdxdBus {
    /// The bus in the files under `root`.
    pub fn with_root(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// All devices, sorted by number; empty without the driver.
    pub fn devices(&self) -> Vec<IdxdDevice> {
        let all = names(&self.root.join("sys/bus/dsa/devices"));
        let mut found: Vec<(u32, IdxdDevice)> = all
            .iter()
            .filter_map(|name| Some((number_of(name, "dsa")?, self.device(name, &all))))
            .collect();
        found.sort_by_key(|(number, _)| *number);
        found.into_iter().map(|(_, device)| device).collect()
    }

    /// The queue with a name, such as `wq0.1`.
    pub fn queue(&self, name: &str) -> Option<(IdxdDevice, IdxdQueue)> {
        self.devices().into_iter().find_map(|device| {
            let queue = device.queues.iter().find(|queue| queue.name == name).cloned()?;
            Some((device, queue))
        })
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.root.join("sys/bus/dsa/devices").join(name)
    }

    fn device(&self, name: &str, all: &[String]) -> IdxdDevice {
        let folder = self.folder(name);
        let prefix = format!("wq{}.", name.trim_start_matches("dsa"));
        let mut queues: Vec<(u32, IdxdQueue)> = all
            .iter()
            .filter_map(|queue| Some((number_of(queue, &prefix)?, self.read_queue(queue))))
            .collect();
        queues.sort_by_key(|(number, _)| *number);
        IdxdDevice {
            name: name.to_owned(),
            address: bus_address(&folder),
            version: number(&folder.join("version")).and_then(|at| u32::try_from(at).ok()),
            is_enabled: word(&folder.join("state")).as_deref() == Some("enabled"),
            state: word(&folder.join("state")),
            has_address_spaces: number(&folder.join("pasid_enabled")) == Some(1),
            numa_node: number(&folder.join("numa_node")).and_then(|at| u32::try_from(at).ok()),
            opcodes: text(&folder.join("op_cap")).and_then(|text| first_opcodes(&text)),
            total_size: number(&folder.join("max_work_queues_size"))
                .and_then(|at| u32::try_from(at).ok()),
            queues: queues.into_iter().map(|(_, queue)| queue).collect(),
        }
    }

    fn read_queue(&self, name: &str) -> IdxdQueue {
        let folder = self.folder(name);
        let word = |file: &str| word(&folder.join(file));
        let small = |file: &str| number(&folder.join(file)).and_then(|at| u32::try_from(at).ok());
        let path = self.root.join("dev/dsa").join(name);
        IdxdQueue {
            name: name.to_owned(),
            access: file_access(&path),
            path,
            is_enabled: word("state").as_deref() == Some("enabled"),
            state: word("state"),
            is_for_programs: word("type").as_deref() == Some("user"),
            kind: word("type"),
            driver: word("driver_name"),
            group: small("group_id"),
            is_dedicated: match word("mode").as_deref() {
                Some("dedicated") => Some(true),
                Some("shared") => Some(false),
                _ => None,
            },
            size: small("size").unwrap_or(0),
            max_transfer_bytes: number(&folder.join("max_transfer_size")).unwrap_or(0),
            max_batch: small("max_batch_size").unwrap_or(1),
            block_on_fault: number(&folder.join("block_on_fault")) == Some(1),
        }
    }
}

/// The number behind a prefix, if the rest of the name is one.
fn number_of(name: &str, prefix: &str) -> Option<u32> {
    let digits = name.strip_prefix(prefix)?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

/// The address of the device that the folder is a child of.
fn bus_address(folder: &Path) -> Option<String> {
    let real = fs::canonicalize(folder).ok()?;
    let name = real.parent()?.file_name()?.to_str()?.to_owned();
    (name.split(':').count() == 3).then_some(name)
}

/// The text of a file, without the end of its line.
fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The text of a file that is not empty.
fn word(path: &Path) -> Option<String> {
    text(path).filter(|text| !text.is_empty())
}

/// A decimal or hexadecimal number.
fn number(path: &Path) -> Option<u64> {
    let text = text(path)?;
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The last 64 bits of a bit map. The kernel prints words of 32 bits with commas between them, the
/// highest first; older kernels print words of 64 bits with spaces, the lowest first.
fn first_opcodes(text: &str) -> Option<u64> {
    if text.contains(',') {
        let mut words = text.rsplit(',').map(|word| u32::from_str_radix(word.trim(), 16));
        let (low, high) = (words.next()?.ok()?, words.next()?.ok()?);
        return Some(u64::from(low) | u64::from(high) << 32);
    }
    let first = text.split_whitespace().next()?;
    u64::from_str_radix(first.strip_prefix("0x").unwrap_or(first), 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::QueueObstacle;
    use super::*;

    /// A tree with one device and the given files of its folder and of its first queue.
    fn tree(device: &[(&str, &str)], queue: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/dsa/devices");
        let real = root.path().join("sys/devices/pci0000:6a/0000:6a:01.0/dsa0");
        fs::create_dir_all(&devices).unwrap();
        fs::create_dir_all(real.join("wq0.0")).unwrap();
        for (folder, files) in [(real.clone(), device), (real.join("wq0.0"), queue)] {
            for (name, text) in files {
                fs::write(folder.join(name), text).unwrap();
            }
        }
        std::os::unix::fs::symlink(&real, devices.join("dsa0")).unwrap();
        std::os::unix::fs::symlink(real.join("wq0.0"), devices.join("wq0.0")).unwrap();
        fs::create_dir_all(devices.join("engine0.0")).unwrap();
        root
    }

    const DEVICE: &[(&str, &str)] = &[
        ("state", "enabled\n"),
        ("version", "0x100\n"),
        ("pasid_enabled", "1\n"),
        ("numa_node", "-1\n"),
        ("max_work_queues_size", "128\n"),
        ("op_cap", "00000000,00000000,00000000,00000000,00000000,00000000,00000001,003f03ff\n"),
    ];
    const QUEUE: &[(&str, &str)] = &[
        ("state", "enabled\n"),
        ("type", "user\n"),
        ("driver_name", "user\n"),
        ("group_id", "0\n"),
        ("mode", "shared\n"),
        ("size", "16\n"),
        ("max_transfer_size", "2147483648\n"),
        ("max_batch_size", "1024\n"),
        ("block_on_fault", "0\n"),
    ];

    #[test]
    fn a_device_and_its_queue_are_described() {
        let root = tree(DEVICE, QUEUE);
        fs::create_dir_all(root.path().join("dev/dsa")).unwrap();
        fs::write(root.path().join("dev/dsa/wq0.0"), "").unwrap();
        let devices = IdxdBus::with_root(root.path()).devices();
        let [device] = &devices[..] else { panic!("one device: {devices:?}") };
        assert_eq!(
            (device.name.as_str(), device.address.as_deref()),
            ("dsa0", Some("0000:6a:01.0"))
        );
        assert!(device.is_enabled && device.has_address_spaces);
        assert_eq!((device.version, device.numa_node), (Some(0x100), None));
        assert_eq!(device.opcodes, Some(0x1_003f_03ff));
        let [queue] = &device.queues[..] else { panic!("one queue") };
        assert_eq!((queue.is_dedicated, queue.size, queue.max_batch), (Some(false), 16, 1024));
        assert_eq!(queue.max_transfer_bytes, 1 << 31);
        assert!(QueueObstacle::of(device, queue).is_none() && !queue.block_on_fault);
        assert_eq!((queue.kind.as_deref(), queue.driver.as_deref()), (Some("user"), Some("user")));
        assert_eq!((queue.state.as_deref(), queue.group), (Some("enabled"), Some(0)));
    }

    #[test]
    fn a_queue_without_its_file_or_its_type_is_not_usable() {
        let root = tree(DEVICE, QUEUE);
        let bus = IdxdBus::with_root(root.path());
        let found = || bus.queue("wq0.0").unwrap();
        let obstacle = || QueueObstacle::of(&found().0, &found().1);
        assert_eq!(
            (found().1.access, obstacle()),
            (FileAccess::Missing, Some(QueueObstacle::NoFile))
        );
        fs::create_dir_all(root.path().join("dev/dsa")).unwrap();
        fs::write(root.path().join("dev/dsa/wq0.0"), "").unwrap();
        fs::write(root.path().join("sys/bus/dsa/devices/wq0.0/type"), "kernel\n").unwrap();
        assert_eq!(obstacle(), Some(QueueObstacle::OtherUse("kernel".into())));
        assert!(bus.queue("wq0.1").is_none() && bus.queue("dsa0").is_none());
    }

    #[test]
    fn a_queue_that_is_not_configured_has_no_group_and_no_mode() {
        let files = [("state", "disabled\n"), ("type", "none\n"), ("driver_name", "\n")];
        let more = [("group_id", "-1\n"), ("mode", "[none]\n"), ("size", "0\n")];
        let root = tree(DEVICE, &[&files[..], &more].concat());
        let (_, queue) = IdxdBus::with_root(root.path()).queue("wq0.0").unwrap();
        assert_eq!(
            (queue.state.as_deref(), queue.kind.as_deref()),
            (Some("disabled"), Some("none"))
        );
        assert_eq!((queue.driver, queue.group, queue.is_dedicated), (None, None, None));
        assert!(!queue.is_enabled && !queue.is_for_programs && queue.size == 0);
    }

    #[test]
    fn an_empty_file_says_no_state() {
        let root = tree(&[("state", "\n")], &[("state", "\n")]);
        let (device, queue) = IdxdBus::with_root(root.path()).queue("wq0.0").unwrap();
        assert_eq!((device.state, queue.state), (None, None));
    }

    #[test]
    fn without_the_driver_there_is_no_device() {
        let root = tempfile::tempdir().unwrap();
        assert!(IdxdBus::with_root(root.path()).devices().is_empty());
    }

    #[test]
    fn bit_maps_of_old_and_new_kernels_are_read() {
        assert_eq!(first_opcodes("0x1003f03ff 0x0 0x0 0x0"), Some(0x1_003f_03ff));
        assert_eq!(first_opcodes("00000001,003f03ff"), Some(0x1_003f_03ff));
        assert_eq!(first_opcodes("banana"), None);
        assert_eq!(first_opcodes(""), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn whatever_the_files_contain_is_read_without_a_panic(
            texts in prop::collection::vec(".{0,40}", 15),
        ) {
            let names = DEVICE.iter().map(|(name, _)| *name);
            let device: Vec<_> = names.zip(texts.iter().map(String::as_str)).collect();
            let names = QUEUE.iter().map(|(name, _)| *name);
            let queue: Vec<_> = names.zip(texts[6..].iter().map(String::as_str)).collect();
            let root = tree(&device, &queue);
            let devices = IdxdBus::with_root(root.path()).devices();
            prop_assert_eq!(devices.len(), 1);
            let obstacle = QueueObstacle::of(&devices[0], &devices[0].queues[0]);
            prop_assert!(obstacle.is_some(), "its file does not exist");
        }
    }
}
