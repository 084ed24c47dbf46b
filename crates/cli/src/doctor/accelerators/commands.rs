//! The commands that bind and configure a device. They are only printed. Each step works if it was done
//! before, and steps that may fail then are joined by `;`.

use std::path::Path;

use memferry_sys::idxd::sysfs::{IdxdDevice, IdxdQueue};
use memferry_sys::vfio::{PciDevice, bind_commands};
use serde::Serialize;

/// The folder of the bus of the kernel's driver.
const BUS: &str = "/sys/bus/dsa";
/// The number of descriptors of the queue that the commands configure.
const QUEUE_SIZE: u32 = 16;
/// The devices that vfio-pci refuses by its denylist, because of INTEL-SA-01084.
const DENIED_ID: (u16, u16) = (0x8086, 0x0b25);

/// The commands that bind a device to the kernel's driver.
pub(super) fn bind_to_idxd(device: &PciDevice) -> String {
    let at = &device.address;
    let unbind = match device.driver {
        Some(_) => format!("echo {at} | sudo tee /sys/bus/pci/devices/{at}/driver/unbind; "),
        None => String::new(),
    };
    format!("sudo modprobe idxd; {unbind}echo {at} | sudo tee /sys/bus/pci/drivers/idxd/bind")
}

/// The commands that bind a device to vfio-pci.
pub(super) fn bind_to_vfio(device: &PciDevice) -> Option<String> {
    const LOAD: &str = "sudo modprobe vfio-pci";
    let commands = bind_commands(&[device])?;
    if device.id != DENIED_ID {
        return Some(commands);
    }
    // The option is read when the module is loaded.
    let load = format!("sudo modprobe -r vfio-pci; {LOAD} disable_denylist=1");
    Some(commands.replacen(LOAD, &load, 1))
}

/// The commands for a queue, in two forms.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct QueueCommands {
    accel_config: String,
    /// The same by the files of sysfs.
    sysfs: String,
    /// Whether the commands disable the device first.
    is_disabled_first: bool,
    /// The enabled queues of the device that end by that.
    ended_queues: Vec<String>,
}

impl QueueCommands {
    /// Commands that are the same with the tool and without.
    fn alike(commands: String) -> Self {
        Self {
            accel_config: commands.clone(),
            sysfs: commands,
            is_disabled_first: false,
            ended_queues: Vec::new(),
        }
    }

    /// What else the commands do, as the end of a sentence; empty if nothing.
    pub(super) fn side_effect(&self) -> String {
        match &self.ended_queues[..] {
            _ if !self.is_disabled_first => String::new(),
            [] => ", and disable the device first".into(),
            ended => format!(", and disable the device first, which ends {}", ended.join(", ")),
        }
    }

    /// The form to show, and the other one if it differs.
    pub(super) fn forms(self, has_tool: bool) -> (String, Option<String>) {
        let Self { accel_config, sysfs, .. } = self;
        let (first, other) = if has_tool { (accel_config, sysfs) } else { (sysfs, accel_config) };
        let other = Some(other).filter(|other| *other != first);
        (first, other)
    }
}

/// The commands that let this user open the file of a queue.
pub(super) fn open_to_user(path: &Path) -> QueueCommands {
    QueueCommands::alike(chgrp(path))
}

/// The commands that create the file of a queue.
pub(super) fn create_file() -> QueueCommands {
    QueueCommands::alike("sudo udevadm trigger; sudo udevadm settle".into())
}

fn chgrp(path: &Path) -> String {
    let path = path.display();
    format!("sudo chgrp \"$(id -gn)\" {path}; sudo chmod 660 {path}")
}

/// Whether a queue only has to be enabled.
pub(super) fn is_ready(device: &IdxdDevice, queue: &IdxdQueue) -> bool {
    let is_configured = queue.is_for_programs && queue.size > 0 && queue.group.is_some();
    device.is_enabled && !queue.is_enabled && is_configured
}

/// The commands that enable a queue and let this user open it, or the reason why there are none. A queue
/// that is not ready is configured as a shared one before.
pub(super) fn enable(device: &IdxdDevice, queue: &IdxdQueue) -> Result<QueueCommands, String> {
    let (accel_config, sysfs, is_disabled_first) = if is_ready(device, queue) {
        let (device, queue) = (&device.name, &queue.name);
        (enable_by_tool(device, queue), enable_by_files(queue, BUS), false)
    } else {
        let target = ConfiguredQueue::of(device, queue).ok_or_else(|| no_room(device, queue))?;
        (target.by_tool(), target.by_files(BUS), target.is_disabled_first)
    };
    let open = chgrp(&Path::new("/dev/dsa").join(&queue.name));
    let complete = |commands: String| format!("{commands}; sudo udevadm settle; {open}");
    // The queue itself may be enabled too, for another use.
    let ended = device.queues.iter().filter(|queue| is_disabled_first && queue.is_enabled);
    Ok(QueueCommands {
        accel_config: complete(accel_config),
        sysfs: complete(sysfs),
        is_disabled_first,
        ended_queues: ended.map(|queue| queue.name.clone()).collect(),
    })
}

/// Why a queue cannot be configured for which no descriptors are left, and what helps.
fn no_room(device: &IdxdDevice, queue: &IdxdQueue) -> String {
    let others = device.queues.iter().filter(|other| other.name != queue.name && other.size > 0);
    let sizes: Vec<_> = others.map(|other| format!("{} has {}", other.name, other.size)).collect();
    match &sizes[..] {
        [] => "the device has no descriptors".into(),
        sizes => format!(
            "the device has no descriptors left for it: {}; give another queue fewer first",
            sizes.join(", ")
        ),
    }
}

/// The queue of a device that is best configured: one that is for programs already, or else one that
/// is not enabled, or else the first; those for which the device has descriptors left come first.
pub(super) fn best_queue(device: &IdxdDevice) -> Option<&IdxdQueue> {
    let is_configured = |queue: &&IdxdQueue| queue.is_for_programs && queue.size > 0;
    let is_free = |queue: &&IdxdQueue| !queue.is_enabled;
    let has_room = |queue: &&IdxdQueue| room(device, queue) > 0;
    let queues = || device.queues.iter();
    let found = queues().find(is_configured);
    let found = found.or_else(|| queues().find(|queue| is_free(queue) && has_room(queue)));
    let found = found.or_else(|| queues().find(is_free));
    found.or(device.queues.first())
}

/// The number of descriptors of a device that its other queues leave to a queue.
fn room(device: &IdxdDevice, queue: &IdxdQueue) -> u32 {
    let others = device.queues.iter().filter(|other| other.name != queue.name);
    let taken = others.fold(0u32, |sum, other| sum.saturating_add(other.size));
    device.total_size.unwrap_or(u32::MAX).saturating_sub(taken)
}

fn enable_by_tool(device: &str, queue: &str) -> String {
    // Kernels with the attribute demand the driver's name.
    format!(
        "test ! -e {BUS}/devices/{queue}/driver_name || sudo accel-config config-wq {device}/{queue} \
         --driver-name=user; sudo accel-config enable-wq {device}/{queue}"
    )
}

fn enable_by_files(queue: &str, bus: &str) -> String {
    format!(
        "sudo sh -c 'cd {bus}/devices/{queue} || exit; \
         test ! -e driver_name || echo user > driver_name; echo {queue} > {bus}/drivers/user/bind'"
    )
}

/// The queue to configure, and the values that depend on the device.
#[derive(Debug)]
struct ConfiguredQueue {
    device: String,
    engine: String,
    queue: String,
    size: u32,
    threshold: u32,
    /// The device has to be disabled before: it is enabled, and this queue is not ready to be, because
    /// it has no descriptors or no group, or is for another use; that cannot be changed then.
    is_disabled_first: bool,
}

impl ConfiguredQueue {
    /// `None` if there are no descriptors for the queue: the kernel refuses what its device does not have.
    fn of(device: &IdxdDevice, queue: &IdxdQueue) -> Option<Self> {
        let number = device.name.trim_start_matches("dsa");
        let is_disabled_first = device.is_enabled;
        let available = match room(device, queue) {
            // A device that is disabled takes the descriptors from all its queues.
            0 if is_disabled_first => device.total_size.unwrap_or(QUEUE_SIZE),
            room => room,
        };
        let size = Some(available.min(QUEUE_SIZE)).filter(|size| *size > 0)?;
        Some(Self {
            engine: format!("engine{number}.0"),
            queue: queue.name.clone(),
            size,
            threshold: size.saturating_sub(1).max(1),
            is_disabled_first,
            device: device.name.clone(),
        })
    }

    fn by_tool(&self) -> String {
        let Self { device, engine, queue, size, threshold, is_disabled_first } = self;
        let disable = match is_disabled_first {
            true => format!("sudo accel-config disable-device {device}; "),
            false => String::new(),
        };
        // Kernels with the attribute demand the driver's name; older ones, and older versions of the
        // tool, do not know it.
        let driver = format!(
            "$(test ! -e /sys/bus/dsa/devices/{queue}/driver_name || echo --driver-name=user)"
        );
        format!(
            "{disable}sudo accel-config config-engine {device}/{engine} --group-id=0; \
             sudo accel-config config-wq {device}/{queue} --group-id=0 --mode=shared --wq-size={size} \
             --threshold={threshold} --priority=10 --type=user {driver} --name=memferry \
             --max-batch-size=64 --max-transfer-size=2097152; \
             sudo accel-config enable-device {device}; \
             sudo accel-config enable-wq {device}/{queue}"
        )
    }

    /// The commands by the files of sysfs, below the folder of the bus.
    fn by_files(&self, bus: &str) -> String {
        let Self { device, engine, queue, size, threshold, is_disabled_first } = self;
        let files = [
            (format!("{engine}/group_id"), "0".to_owned()),
            (format!("{queue}/group_id"), "0".into()),
            (format!("{queue}/mode"), "shared".into()),
            (format!("{queue}/size"), size.to_string()),
            (format!("{queue}/threshold"), threshold.to_string()),
            (format!("{queue}/priority"), "10".into()),
            (format!("{queue}/type"), "user".into()),
            (format!("{queue}/driver_name"), "user".into()),
            (format!("{queue}/name"), "memferry".into()),
        ];
        // Kernels differ in their attributes.
        let write =
            |(file, value): &(String, String)| format!("test ! -e {file} || echo {value} > {file}");
        let writes: Vec<String> = files.iter().map(write).collect();
        let disable = match is_disabled_first {
            true => format!("echo {device} > {bus}/drivers/idxd/unbind; "),
            false => String::new(),
        };
        format!(
            "sudo sh -c 'cd {bus}/devices/{device} || exit; {disable}{}; \
             echo {device} > {bus}/drivers/idxd/bind; \
             echo {queue} > {bus}/drivers/user/bind'",
            writes.join("; ")
        )
    }
}

#[cfg(test)]
mod tests;
