//! Suspending, resetting, and removing memory and the device during work.

use super::*;

fn delayed(delay: Duration) -> IoatFaults {
    IoatFaults { delay, ..IoatFaults::default() }
}

/// Descriptors that take longer than any test waits.
fn endless() -> IoatFaults {
    delayed(Duration::from_secs(3600))
}

#[test]
fn a_suspended_channel_waits_for_the_next_doorbell() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    rig.run(IoatDescriptor::null());
    model.set8(rig.register(CHANCMD), CHANCMD_SUSPEND);
    rig.await_state(ChannelState::Suspended);
    rig.run(IoatDescriptor::null());
    assert_eq!(rig.state(), Some(ChannelState::Idle));
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn suspending_lets_the_descriptor_end_that_is_worked_on() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    let target = MappedPages::new(&model, 1);
    // All of them together take longer than this test waits.
    model.set_faults(delayed(Duration::from_millis(300)));
    for index in 0..100 {
        rig.put(IoatDescriptor::fill(!0, target.at(8 * index), 8).with_write_back());
    }
    rig.ring();
    wait_until("the first descriptor", || rig.counters().descriptors > 0);
    model.set8(rig.register(CHANCMD), CHANCMD_SUSPEND);
    rig.await_state(ChannelState::Suspended);
    let done = rig.counters().descriptors as usize;
    assert!(done < 100);
    assert_eq!(rig.status() & CHANSTS_COMPLETED, rig.slot(done - 1));
    assert!(target.bytes(0, 8 * done).iter().all(|&byte| byte == 0xFF));
    assert!(target.bytes(8 * done, 8).iter().all(|&byte| byte == 0));
    model.set_faults(IoatFaults::default());
    rig.ring();
    rig.await_word(rig.slot(99));
}

#[test]
fn a_reset_takes_a_while_and_forgets_all_but_errors() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    rig.fail(IoatDescriptor::copy(0x5000, 0x5000, 8));
    model.set8(rig.register(CHANCMD), CHANCMD_RESET);
    assert!(rig.is_in_reset() && rig.is_in_reset());
    model.set64(rig.register(CHANCMP), 0x1000);
    assert_eq!(model.protocol_violations().len(), 1);
    assert!(model.protocol_violations()[0].ends_with("it was written during a reset"));
    wait_until("the end of the reset", || !rig.is_in_reset());
    assert_eq!(rig.errors(), error::SOURCE_ADDRESS);
    assert_eq!(rig.status(), ChannelState::Halted as u64);
    assert_eq!(model.read64(rig.register(CHANCMP)), 0);
    assert_eq!(model.read64(rig.register(CHAINADDR)), 0);
    assert_eq!(model.read16(rig.register(DMACOUNT)), 0);
    rig.start();
    rig.run(IoatDescriptor::null());
}

#[test]
fn a_reset_gives_up_what_is_being_done() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    let target = MappedPages::new(&model, 1);
    model.set_faults(endless());
    rig.put(IoatDescriptor::fill(!0, target.at(0), 8).with_write_back());
    rig.ring();
    assert_eq!(rig.state(), Some(ChannelState::Active));
    rig.reset();
    assert_eq!((target.bytes(0, 8), rig.word()), (&[0; 8][..], 0));
    assert_eq!(rig.counters().descriptors, 0);
    model.set_faults(IoatFaults::default());
    rig.start();
    rig.run(IoatDescriptor::null());
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn a_reset_of_the_device_stops_all_channels_and_leaves_mappings() {
    let model = IoatModel::builder().channels(2).build();
    {
        let mut rigs = [ChannelRig::on(&model, 0), ChannelRig::on(&model, 1)];
        let target = MappedPages::new(&model, 1);
        model.set_faults(endless());
        for rig in &mut rigs {
            rig.put(IoatDescriptor::fill(!0, target.at(0), 8).with_write_back());
            rig.ring();
        }
        model.set8(INTRCTRL, 1);
        let mapped = model.mapped_pages();
        model.reset().unwrap();
        assert_eq!((model.mapped_pages(), model.read8(INTRCTRL)), (mapped, 0));
        for rig in &rigs {
            assert_eq!((rig.status(), rig.errors()), (ChannelState::Halted as u64, 0));
        }
        model.set_faults(IoatFaults::default());
        assert_eq!(target.bytes(0, 8), [0; 8]);
        for rig in &mut rigs {
            rig.start();
            rig.run(IoatDescriptor::fill(!0, target.at(0), 8));
        }
    }
    assert_clean(&model);
}

#[test]
fn unmapping_waits_for_the_descriptor_that_is_worked_on() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    let mut target = MappedPages::new(&model, 1);
    model.set_faults(delayed(Duration::from_millis(50)));
    let last = rig.put(IoatDescriptor::fill(!0, target.at(0), 8).with_write_back());
    rig.ring();
    // Either it is already running, and then it ends first, or it finds no mapping.
    model.unmap_pages(&target.addresses);
    let after = target.bytes(0, 8).to_vec();
    wait_until("an end", || rig.state() != Some(ChannelState::Active));
    match rig.state() {
        Some(ChannelState::Halted) => assert_eq!(rig.errors(), error::TARGET_ADDRESS),
        _ => assert_eq!((rig.word() & CHANSTS_COMPLETED, &after[..]), (last, &[0xFF; 8][..])),
    }
    assert_eq!(target.bytes(0, 8), after);
    target.addresses.clear();
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn a_model_ends_in_the_middle_of_its_work() {
    let model = IoatModel::builder().channels(2).build();
    let weak = Arc::downgrade(&model);
    let mut rig = ChannelRig::on(&model, 1);
    model.set_faults(endless());
    rig.put(IoatDescriptor::null());
    rig.ring();
    drop(model);
    drop(rig);
    assert_eq!(weak.strong_count(), 0);
}
