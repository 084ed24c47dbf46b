//! What an accelerator and its kernel driver report: completion records in memory, and files in sysfs.
//! No record may name bytes outside of its descriptor, and no file may make a queue usable that is not
//! there.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use memferry_engine::dsa::IdxdQueueChoice;
use memferry_engine::dsa::record::{CompletionRecord, RecordKind, RecordOutcome};
use memferry_sys::idxd::QueueObstacle;
use memferry_sys::idxd::sysfs::IdxdBus;

use crate::script::Script;

/// The files that the driver reads, of a device and of a queue.
const DEVICE_FILES: [&str; 6] =
    ["state", "version", "pasid_enabled", "numa_node", "max_work_queues_size", "op_cap"];
const QUEUE_FILES: [&str; 9] = [
    "state",
    "type",
    "mode",
    "size",
    "max_transfer_size",
    "max_batch_size",
    "block_on_fault",
    "driver_name",
    "group_id",
];

pub(crate) fn run(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    if script.flag() {
        return read_sysfs(script);
    }
    while !script.is_empty() {
        check_record(&mut script);
    }
}

fn check_record(script: &mut Script<'_>) {
    let kind = script.pick(&[RecordKind::Plain, RecordKind::Compare, RecordKind::Crc]);
    let length = script.number() as u32;
    let words = [0; 4].map(|_: u64| script.number());
    match CompletionRecord::from_words(words).decode(kind, length) {
        RecordOutcome::Pending => assert_eq!(words[0] as u8, 0),
        RecordOutcome::Done(None) => assert_ne!(kind, RecordKind::Crc),
        RecordOutcome::Done(Some(value)) => match kind {
            RecordKind::Compare => assert!(value < u64::from(length)),
            _ => assert!(u32::try_from(value).is_ok()),
        },
        RecordOutcome::PageFault { done_bytes, .. } => assert!(done_bytes <= u64::from(length)),
        RecordOutcome::Failed(reason) => assert!(!reason.is_empty()),
    }
}

/// A folder for the files, the same for all inputs of a process.
fn root() -> &'static PathBuf {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let name = format!("memferry-fuzz-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        for folder in ["dsa0", "wq0.0"] {
            fs::create_dir_all(root.join("sys/bus/dsa/devices").join(folder)).expect("a folder");
        }
        root
    })
}

fn read_sysfs(mut script: Script<'_>) {
    let devices = root().join("sys/bus/dsa/devices");
    let files = DEVICE_FILES.map(|name| ("dsa0", name));
    for (folder, name) in files.into_iter().chain(QUEUE_FILES.map(|name| ("wq0.0", name))) {
        let length = script.byte() % 48;
        fs::write(devices.join(folder).join(name), script.bytes(length.into())).expect("a file");
    }
    let found = IdxdBus::with_root(root()).devices();
    for device in &found {
        for queue in &device.queues {
            assert!(QueueObstacle::of(device, queue).is_some(), "its file does not exist");
            let _ = IdxdQueueChoice::of(device, queue);
        }
    }
    assert_eq!(found.len(), 1);
}
