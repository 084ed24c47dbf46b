//! How descriptors get to the model: through the pages of portals, or by `enqcmd`.

use memferry_testing::HangGuard;

use super::*;
use crate::testing::ioat_model::FaultSchedule;

/// The portal of a queue behind the model's registers.
const SECOND_QUEUE: usize = r::PORTAL_BYTES;

fn copy(rig: &ModelRig) -> DsaOperation {
    DsaOperation::Copy { source: rig.at(SOURCE), target: rig.at(TARGET) }
}

#[test]
fn many_descriptors_go_around_the_page_and_none_is_lost() {
    for builder in [DsaModel::builder(), DsaModel::builder().service(Duration::ZERO)] {
        let rig = ModelRig::enabled(builder);
        for round in 1..=5 * PORTAL_LINES as u64 {
            rig.store(rig.descriptor(copy(&rig), 64, 0));
            wait_until("a copy", || rig.model.counters().descriptors == round);
        }
        assert_eq!(rig.model.counters().doorbells, 5 * PORTAL_LINES as u64);
        rig.assert_clean();
    }
}

#[test]
fn what_was_stored_before_a_register_is_read_has_arrived() {
    let rig = ModelRig::new();
    let delay = Duration::from_secs(3600);
    rig.model.set_faults(DsaFaults { delay, ..DsaFaults::default() });
    for stored in 1..=u64::from(config().size) {
        rig.store(rig.descriptor(copy(&rig), 64, 0));
        assert_eq!(rig.model.counters().doorbells, stored);
    }
    assert_eq!(rig.command(DsaCommand::ResetQueue(0).value()), 0);
    rig.assert_clean();
}

#[test]
fn a_queue_is_reset_during_a_delay() {
    let delay = Duration::from_secs(3600);
    let faults = DsaFaults { delay, ..DsaFaults::default() };
    for builder in [DsaModel::builder().faults(faults), DsaModel::builder().service(delay)] {
        let _guard = HangGuard::new("the reset of a queue");
        let rig = ModelRig::enabled(builder);
        rig.store(rig.descriptor(copy(&rig), 64, 0));
        let is_running = || rig.model.shared.state.lock_after_stores().queues[0].running == 1;
        wait_until("the start", is_running);
        assert_eq!(rig.command(DsaCommand::ResetQueue(0).value()), 0);
        assert_eq!(rig.record(0).code(), status::NONE);
        rig.assert_clean();
    }
}

#[test]
fn a_descriptor_over_another_one_leaves_a_gap_that_is_named() {
    let rig = ModelRig::new();
    rig.model.set_faults(DsaFaults { stalls: FaultSchedule::Always, ..DsaFaults::default() });
    rig.store(rig.descriptor(copy(&rig), 64, 0));
    wait_until("the stall", || rig.model.counters().stalls == 1);
    rig.store_at(2 * PORTAL_STRIDE, rig.descriptor(copy(&rig), 64, 1));
    assert_eq!(rig.model.counters().doorbells, 2, "the device takes it");
    assert!(rig.violation().contains("line 1 of the portal of queue 0"));
}

#[test]
fn a_line_that_is_left_out_is_noticed_by_a_device_whose_registers_nobody_reads() {
    for builder in [DsaModel::builder(), DsaModel::builder().service(Duration::ZERO)] {
        let rig = ModelRig::enabled(builder);
        rig.store_at(PORTAL_STRIDE, rig.descriptor(copy(&rig), 64, 0));
        wait_until("a record", || rig.record(0).code() != status::NONE);
        assert!(rig.violation().contains("line 0 of the portal of queue 0"));
    }
}

#[test]
fn stores_to_no_queue_or_to_another_one_are_named() {
    let rig = ModelRig::new();
    rig.store_at(r::PORTAL_BYTES - PORTAL_STRIDE, rig.descriptor(copy(&rig), 64, 0));
    assert!(rig.violation().contains("to no queue"));
    let rig = ModelRig::new();
    rig.store_at(SECOND_QUEUE, rig.descriptor(copy(&rig), 64, 0));
    assert!(rig.violation().contains("queue 1, which is not enabled"));
}

#[test]
fn a_dedicated_queue_is_not_enqueued_to() {
    let rig = ModelRig::new();
    let descriptor = rig.descriptor(DsaOperation::Noop, 0, 0);
    // SAFETY: it names only memory of the rig.
    assert!(unsafe { rig.portals.enqueue(0, &descriptor.words()) });
    assert!(rig.violation().contains("dedicated"));
}

#[test]
fn descriptors_that_are_stored_while_the_device_is_removed_are_lost() {
    let rig = ModelRig::new();
    rig.model.set_faults(DsaFaults { is_removed: true, ..DsaFaults::default() });
    (0..PORTAL_LINES + 3).for_each(|_| rig.store(rig.descriptor(copy(&rig), 64, 0)));
    rig.model.set_faults(DsaFaults::default());
    assert_eq!((rig.model.counters().doorbells, rig.record(0).code()), (0, status::NONE));
    rig.assert_clean();
}

#[test]
fn a_queue_begins_with_the_first_line_of_its_portal_when_it_is_enabled() {
    let rig = ModelRig::new();
    for _ in 0..3 {
        rig.stores.set(0);
        (0..3).for_each(|_| rig.store(rig.descriptor(copy(&rig), 64, 0)));
        assert_eq!(rig.command(DsaCommand::ResetQueue(0).value()), 0);
        rig.set_queue(0, config());
        assert_eq!(rig.command(DsaCommand::EnableQueue(0).value()), 0);
    }
    rig.assert_clean();
}
