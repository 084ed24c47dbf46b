//! The file systems that programs expect.

use std::fs;

use rustix::mount::{MountFlags, mount};

/// The types and mount points, in the order of mounting.
const MOUNTS: [(&str, &str); 5] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/dev/shm"),
    ("tmpfs", "/tmp"),
];

pub(super) fn mount_all() -> Result<(), String> {
    for (kind, place) in MOUNTS {
        let made = fs::create_dir_all(place);
        made.and_then(|()| Ok(mount(kind, place, kind, MountFlags::empty(), None)?))
            .map_err(|error| format!("{kind} could not be mounted on {place}: {error}"))?;
    }
    Ok(())
}
