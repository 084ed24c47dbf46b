//! What prevents a process from using a work queue, as far as sysfs and the mode of its file tell.

use super::sysfs::{IdxdDevice, IdxdQueue};
use crate::vfio::pci::FileAccess;

/// The first reason why this process cannot use a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueObstacle {
    /// The device shares no address spaces.
    NoAddressSpaces,
    /// The queue has no descriptors, or no mode.
    NotConfigured,
    /// The queue is configured for another use: its type.
    OtherUse(String),
    /// The queue is configured for programs, but not enabled.
    NotEnabled,
    /// The file does not exist.
    NoFile,
    /// This user may not open the file.
    NotPermitted,
}

impl QueueObstacle {
    /// The first obstacle of a queue of a device; `None` if it can be used.
    pub fn of(device: &IdxdDevice, queue: &IdxdQueue) -> Option<Self> {
        match queue.access {
            _ if !device.has_address_spaces => Some(Self::NoAddressSpaces),
            _ if queue.size == 0 || queue.is_dedicated.is_none() => Some(Self::NotConfigured),
            _ if !queue.is_for_programs => {
                Some(Self::OtherUse(queue.kind.clone().unwrap_or_else(|| "none".into())))
            }
            _ if !queue.is_enabled => Some(Self::NotEnabled),
            FileAccess::Missing => Some(Self::NoFile),
            FileAccess::Denied => Some(Self::NotPermitted),
            FileAccess::Allowed => None,
        }
    }

    /// The reason, for display.
    pub fn text(&self) -> String {
        match self {
            Self::NoAddressSpaces => "its device shares no address spaces with programs".into(),
            Self::NotConfigured => "it is not configured".into(),
            Self::OtherUse(kind) => format!("it is configured for another use (type {kind})"),
            Self::NotEnabled => "it is configured for programs, and not enabled".into(),
            Self::NoFile => "its file does not exist".into(),
            Self::NotPermitted => "this user may not open its file".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::sysfs::IdxdBus;
    use super::*;

    /// The obstacle of a queue with these files in its folder, which replace usual ones.
    fn obstacle(
        pasid_enabled: &str,
        files: &[(&str, &str)],
        has_file: bool,
    ) -> Option<QueueObstacle> {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/dsa/devices");
        let usual = [("state", "enabled"), ("type", "user"), ("mode", "shared"), ("size", "16")];
        for (folder, files) in
            [("dsa0", &[("pasid_enabled", pasid_enabled)][..]), ("wq0.0", &usual), ("wq0.0", files)]
        {
            fs::create_dir_all(devices.join(folder)).unwrap();
            for (name, text) in files {
                fs::write(devices.join(folder).join(name), text).unwrap();
            }
        }
        fs::create_dir_all(root.path().join("dev/dsa")).unwrap();
        if has_file {
            fs::write(root.path().join("dev/dsa/wq0.0"), "").unwrap();
        }
        let (device, queue) = IdxdBus::with_root(root.path()).queue("wq0.0").unwrap();
        QueueObstacle::of(&device, &queue)
    }

    #[test]
    fn the_first_obstacle_of_a_queue_is_told() {
        assert_eq!(obstacle("1", &[], true), None);
        assert_eq!(obstacle("1", &[], false), Some(QueueObstacle::NoFile));
        let disabled = [("state", "disabled")];
        assert_eq!(obstacle("1", &disabled, true), Some(QueueObstacle::NotEnabled));
        let of_kernel = [("type", "kernel")];
        let other_use = QueueObstacle::OtherUse("kernel".into());
        assert!(other_use.text().contains("type kernel"), "{}", other_use.text());
        assert_eq!(obstacle("1", &of_kernel, true), Some(other_use));
        for unused in [("size", "0"), ("mode", "[none]")] {
            assert_eq!(obstacle("1", &[unused], true), Some(QueueObstacle::NotConfigured));
        }
        assert_eq!(obstacle("0", &[], true), Some(QueueObstacle::NoAddressSpaces));
    }
}
