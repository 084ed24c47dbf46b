//! What the model accepts as a configuration, and what it names as a mistake.

use super::*;
use crate::dsa::registers::{DsaState, command_error as error};

#[test]
fn a_device_is_configured_enabled_and_reset() {
    let rig = ModelRig::new();
    assert_eq!(rig.model.read32(r::GENSTS), DsaState::Enabled as u32);
    assert_eq!(rig.model.enabled_queues(), 1);
    assert_eq!(rig.command(DsaCommand::ResetDevice.value()), 0);
    assert_eq!(rig.model.read32(r::GENSTS), DsaState::Disabled as u32);
    assert_eq!((rig.model.enabled_queues(), rig.model.read64(GROUPS)), (0, 0));
    rig.assert_clean();
}

#[test]
fn wrong_groups_do_not_enable_the_device() {
    for (words, code) in [
        (&[(GROUPS, 1)][..], error::GROUP),
        (&[(GROUPS + r::GROUP_ENGINES, 1)], error::GROUP),
        (&[(GROUPS, 1), (GROUPS + r::GROUP_ENGINES, 1 << 40)], error::GROUP),
        (
            &[
                (GROUPS, 1),
                (GROUPS + r::GROUP_ENGINES, 1),
                (GROUPS + r::GROUP_BYTES, 1),
                (GROUPS + r::GROUP_BYTES + r::GROUP_ENGINES, 2),
            ],
            error::QUEUE_GROUPS,
        ),
    ] {
        let rig = ModelRig::cold(DsaModel::builder());
        words.iter().for_each(|(at, value)| rig.set64(*at, *value));
        assert_eq!(rig.command(DsaCommand::EnableDevice.value()), code, "{words:?}");
        assert!(rig.violation().contains("failed"));
    }
}

#[test]
fn wrong_queues_are_not_enabled() {
    let good = config();
    for (wrong, code) in [
        (QueueConfig { size: 0, ..good }, error::QUEUE_SIZE),
        (QueueConfig { priority: 0, ..good }, error::QUEUE_PRIORITY),
        (QueueConfig { is_dedicated: false, ..good }, error::QUEUE_MODE),
        (QueueConfig { batch_shift: 7, ..good }, error::BATCH_SIZE),
        (QueueConfig { transfer_shift: 22, ..good }, error::TRANSFER_SIZE),
    ] {
        let rig = ModelRig::cold(DsaModel::builder());
        rig.configure();
        rig.set_queue(0, wrong);
        assert_eq!(rig.command(DsaCommand::EnableDevice.value()), 0);
        assert_eq!(rig.command(DsaCommand::EnableQueue(0).value()), code, "{wrong:?}");
        assert!(rig.violation().contains(r::command_reason(code)));
    }
    let rig = ModelRig::cold(DsaModel::builder());
    rig.configure();
    rig.set_queue(0, QueueConfig { size: 65, ..good });
    assert_eq!(rig.command(DsaCommand::EnableDevice.value()), error::TOTAL_SIZE);
}

#[test]
fn a_queue_has_no_more_entries_than_its_portal_has_lines() {
    for (size, code) in [(64, 0), (65, error::QUEUE_SIZE)] {
        let rig = ModelRig::cold(DsaModel::builder().total_size(128));
        rig.configure();
        rig.set_queue(0, QueueConfig { size, ..config() });
        assert_eq!(rig.command(DsaCommand::EnableDevice.value()), 0);
        assert_eq!(rig.command(DsaCommand::EnableQueue(0).value()), code);
    }
}

#[test]
fn tables_are_not_written_while_they_are_in_use() {
    let rig = ModelRig::new();
    rig.set64(GROUPS, 3);
    assert!(rig.violation().contains("group table"));
    let rig = ModelRig::new();
    rig.set32(QUEUES, 8);
    assert!(rig.violation().contains("enabled queue"));
}

#[test]
fn a_command_is_not_written_during_another() {
    let rig = ModelRig::new();
    rig.set32(r::CMD, DsaCommand::ResetQueue(0).value());
    rig.set32(r::CMD, DsaCommand::ResetDevice.value());
    assert!(rig.violation().contains("during another"));
}

#[test]
fn accesses_of_the_wrong_width_or_place_are_named() {
    let rig = ModelRig::cold(DsaModel::builder());
    assert_eq!(rig.model.read32(r::GENCAP), u32::MAX);
    rig.set64(r::GENCAP, 1);
    assert_eq!(rig.model.read64(0x1F0), u64::MAX);
    assert_eq!(rig.model.protocol_violations().len(), 3);
}

#[test]
fn a_removed_device_reads_as_ones_and_returns_as_new() {
    let rig = ModelRig::new();
    rig.model.set_faults(DsaFaults { is_removed: true, ..DsaFaults::default() });
    assert_eq!(rig.model.read32(r::GENSTS), u32::MAX);
    assert!(rig.model.reset().is_err());
    rig.model.set_faults(DsaFaults::default());
    assert_eq!(rig.model.read32(r::GENSTS), DsaState::Disabled as u32);
    rig.assert_clean();
}
