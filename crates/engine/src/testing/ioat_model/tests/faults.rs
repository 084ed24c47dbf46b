//! The injected faults of the model.

use super::*;

fn with(change: impl FnOnce(&mut IoatFaults)) -> IoatFaults {
    let mut faults = IoatFaults::default();
    change(&mut faults);
    faults
}

#[test]
fn things_are_counted_from_one() {
    assert!(FaultSchedule::At(2).matches(2) && !FaultSchedule::At(2).matches(4));
    assert!(
        FaultSchedule::Every(2).matches(2)
            && FaultSchedule::Every(2).matches(4)
            && !FaultSchedule::Every(2).matches(3)
    );
    assert!(FaultSchedule::Always.matches(1) && !FaultSchedule::Never.matches(1));
}

#[test]
fn a_descriptor_halts_the_channel_with_the_error_of_the_script() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    rig.run(IoatDescriptor::null());
    model.set_faults(with(|faults| {
        (faults.halts, faults.halt_error) = (FaultSchedule::At(3), error::DEVICE_INTEGRITY);
    }));
    rig.run(IoatDescriptor::null());
    let last = rig.put(IoatDescriptor::null());
    let target = MappedPages::new(&model, 1);
    assert_eq!(rig.fail(IoatDescriptor::fill(1, target.at(0), 8)), error::DEVICE_INTEGRITY);
    assert_eq!(rig.status(), last | ChannelState::Halted as u64);
    assert_eq!((target.bytes(0, 8), rig.counters().halts), (&[0; 8][..], 1));
    rig.start();
    rig.run(IoatDescriptor::null());
}

#[test]
fn a_channel_that_stalls_says_nothing_and_hears_nothing_but_a_reset() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    model.set_faults(with(|faults| faults.stalls = FaultSchedule::At(2)));
    rig.run(IoatDescriptor::null());
    let (word, last) = (rig.word(), rig.slot(0));
    rig.put(IoatDescriptor::null().with_write_back());
    rig.ring();
    wait_until("the stall", || rig.counters().stalls == 1);
    model.set8(rig.register(CHANCMD), CHANCMD_SUSPEND);
    rig.ring();
    assert_eq!(rig.state(), Some(ChannelState::Active));
    assert_eq!((rig.word(), rig.status() & CHANSTS_COMPLETED), (word, last));
    assert_eq!((rig.errors(), rig.counters().descriptors), (0, 1));
    rig.start();
    rig.run(IoatDescriptor::null());
}

#[test]
fn a_lost_word_leaves_the_truth_in_the_register() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    model.set_faults(with(|faults| faults.loses_write_backs = FaultSchedule::At(1)));
    let first = rig.put(IoatDescriptor::null().with_write_back());
    rig.ring();
    wait_until("the register", || rig.status() == first | ChannelState::Idle as u64);
    assert_eq!((rig.word(), rig.counters().write_backs), (0, 0));
    rig.run(IoatDescriptor::null());
    assert_eq!(rig.counters().write_backs, 1);
}

#[test]
fn a_delay_lets_everything_happen_all_the_same() {
    let model = IoatModel::builder().faults(with(|f| f.delay = Duration::from_micros(50))).build();
    let mut rig = ChannelRig::new(&model);
    for _ in 0..20 {
        rig.run(IoatDescriptor::null());
    }
    assert_eq!(rig.counters().descriptors, 20);
}

#[test]
fn resets_that_are_refused_do_not_end() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    model.set_faults(with(|faults| faults.refused_resets = 2));
    for _ in 0..2 {
        model.set8(rig.register(CHANCMD), CHANCMD_RESET);
        assert!((0..1000).all(|_| rig.is_in_reset()));
    }
    rig.start();
    rig.run(IoatDescriptor::null());
    model.set_faults(with(|faults| faults.refused_resets = 1));
    assert_eq!(model.reset().unwrap_err().raw_os_error(), Some(ETIMEDOUT));
    assert!((0..1000).all(|_| rig.is_in_reset()));
    model.reset().unwrap();
    assert!(!rig.is_in_reset());
    rig.start();
    rig.run(IoatDescriptor::null());
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn a_dead_device_reads_as_ones_and_moves_nothing() {
    let model = IoatModel::new();
    {
        let mut rig = ChannelRig::new(&model);
        let target = MappedPages::new(&model, 1);
        model.set_faults(with(|faults| faults.delay = Duration::from_secs(3600)));
        rig.put(IoatDescriptor::fill(!0, target.at(0), 8).with_write_back());
        rig.ring();
        model.set_faults(with(|faults| faults.is_removed = true));
        rig.ring();
        assert_eq!((rig.status(), rig.errors(), model.read8(CBVER)), (u64::MAX, u32::MAX, 0xFF));
        assert_eq!((rig.state(), rig.is_in_reset()), (None, true));
        assert_eq!(model.reset().unwrap_err().raw_os_error(), Some(EIO));
        assert_eq!((target.bytes(0, 8), rig.word()), (&[0; 8][..], 0));
        // A device that returns is in the power-on state.
        model.set_faults(IoatFaults::default());
        assert_eq!(rig.status(), ChannelState::Halted as u64);
        rig.start();
        rig.run(IoatDescriptor::fill(!0, target.at(0), 8));
        model.set_faults(with(|faults| faults.is_removed = true));
    }
    assert_clean(&model);
    let dead = IoatModel::builder().faults(with(|faults| faults.is_removed = true)).build();
    assert_eq!(dead.read8(CHANCNT), 0xFF);
}

#[test]
fn mappings_are_refused_by_number_and_by_size() {
    let model = IoatModel::new();
    let pages = Pages::new(4 * page_bytes()).unwrap();
    let at = pages.as_ptr() as usize;
    let map = |count: usize| {
        let mut addresses = vec![0; count];
        let mapped = map(&model, at, &mut addresses, DmaDirection::Bidirectional);
        mapped.map(|()| addresses).map_err(|error| error.raw_os_error().unwrap())
    };
    model.set_faults(with(|faults| {
        (faults.refuses_maps, faults.map_error) = (FaultSchedule::At(2), ENOSPC);
    }));
    let one = map(1).unwrap();
    assert_eq!(map(1), Err(ENOSPC));
    let other = map(1).unwrap();
    model.set_faults(with(|faults| faults.max_mapped_bytes = Some(4 * page_bytes())));
    assert_eq!(map(3), Err(ENOMEM));
    assert_eq!(model.mapped_pages(), 2);
    model.unmap_pages(&one);
    let rest = map(3).unwrap();
    model.unmap_pages(&other);
    model.unmap_pages(&rest);
    assert_clean(&model);
}
