//! Chains of descriptors that succeed.

use super::*;

#[test]
fn a_copy_moves_its_bytes_and_no_others_and_says_so() {
    let model = IoatModel::new();
    {
        let mut rig = ChannelRig::new(&model);
        let (source, target) = (MappedPages::patterned(&model, 1), MappedPages::new(&model, 1));
        let address = rig.slot(0);
        rig.run(IoatDescriptor::copy(source.at(100), target.at(7), 1000));
        assert_eq!(target.bytes(7, 1000), source.bytes(100, 1000));
        assert!(target.bytes(0, 7).iter().all(|&byte| byte == 0));
        assert!(target.bytes(1007, 1000).iter().all(|&byte| byte == 0));
        assert_eq!(rig.word(), address | ChannelState::Idle as u64);
        assert_eq!(rig.status(), rig.word());
        let counters = IoatModelCounters {
            descriptors: 1,
            bytes: 1000,
            write_backs: 1,
            doorbells: 1,
            ..IoatModelCounters::default()
        };
        assert_eq!((rig.counters(), model.all_counters()), (counters, counters));
    }
    assert_clean(&model);
}

#[test]
fn a_fill_repeats_its_eight_bytes_and_ends_where_it_should() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    let target = MappedPages::new(&model, 1);
    rig.run(IoatDescriptor::fill(0x0807_0605_0403_0201, target.at(3), 21));
    let expected: Vec<u8> = (0..21).map(|index| index % 8 + 1).collect();
    assert_eq!(target.bytes(3, 21), expected);
    assert_eq!((target.bytes(2, 1), target.bytes(24, 1)), (&[0][..], &[0][..]));
}

#[test]
fn a_null_descriptor_is_finished_and_moves_nothing() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    rig.run(IoatDescriptor::null());
    assert_eq!((rig.counters().descriptors, rig.counters().bytes), (1, 0));
}

#[test]
fn a_chain_goes_round_its_ring_many_times_and_over_the_end_of_the_count() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    let (source, target) = (MappedPages::patterned(&model, 1), MappedPages::new(&model, 1));
    // More descriptors than the 16-bit count can represent.
    let rounds = (1 << 16) / 64 + 10;
    for round in 0..rounds {
        let mut last = 0;
        for index in 0..64 {
            let at = (round + index) % 64 * 64;
            let copy = IoatDescriptor::copy(source.at(at), target.at(at), 64);
            last = rig.put(if index == 63 { copy.with_write_back() } else { copy });
        }
        rig.ring();
        rig.await_word(last);
    }
    assert_eq!(target.bytes(0, 4096), source.bytes(0, 4096));
    let counters = rig.counters();
    assert_eq!(counters.descriptors, rounds as u64 * 64);
    assert_eq!((counters.write_backs, counters.doorbells), (rounds as u64, rounds as u64));
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn descriptors_that_ask_for_no_word_are_seen_in_the_register() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    rig.put(IoatDescriptor::null());
    let last = rig.put(IoatDescriptor::null().with_fence());
    rig.ring();
    wait_until("the end of the chain", || rig.status() == last | ChannelState::Idle as u64);
    assert_eq!((rig.word(), rig.counters().write_backs), (0, 0));
}

#[test]
fn the_device_looks_at_no_descriptor_beyond_the_count() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    let target = MappedPages::new(&model, 1);
    let first = rig.put(IoatDescriptor::null().with_write_back());
    rig.ring();
    rig.await_word(first);
    let second = rig.put(IoatDescriptor::fill(!0, target.at(0), 8).with_write_back());
    assert_eq!((rig.state(), target.bytes(0, 8)), (Some(ChannelState::Idle), &[0; 8][..]));
    rig.ring();
    rig.await_word(second);
    assert_eq!(target.bytes(0, 8), [0xFF; 8]);
}

#[test]
fn contiguous_memory_is_copied_over_the_ends_of_pages() {
    let model = IoatModel::builder().contiguous(true).build();
    assert!(model.is_contiguous());
    let mut rig = ChannelRig::new(&model);
    let (source, target) = (MappedPages::patterned(&model, 4), MappedPages::new(&model, 4));
    let bytes = 3 * page_bytes();
    rig.run(IoatDescriptor::copy(source.at(10), target.at(20), bytes as u32));
    assert_eq!(target.bytes(20, bytes), source.bytes(10, bytes));
    let past_the_end =
        IoatDescriptor::copy(source.at(page_bytes() + 1), target.at(0), bytes as u32);
    assert_eq!(rig.fail(past_the_end), error::SOURCE_ADDRESS);
}

#[test]
fn channels_move_on_without_each_other() {
    let model = IoatModel::builder().channels(3).build();
    let mut rigs: Vec<_> = (0..3).map(|channel| ChannelRig::on(&model, channel)).collect();
    model.set_faults(IoatFaults { stalls: FaultSchedule::At(1), ..IoatFaults::default() });
    rigs[1].put(IoatDescriptor::null());
    rigs[1].ring();
    wait_until("the stall", || rigs[1].counters().stalls == 1);
    for channel in [2, 0] {
        for _ in 0..200 {
            rigs[channel].run(IoatDescriptor::null());
        }
    }
    assert_eq!(rigs[1].counters().descriptors, 0);
    assert_eq!(rigs[1].state(), Some(ChannelState::Active));
    assert_eq!(model.all_counters().doorbells, rigs.iter().map(|rig| rig.put as u64).sum::<u64>());
}

#[test]
fn many_channels_copy_at_the_same_time() {
    let model = IoatModel::builder().channels(4).build();
    std::thread::scope(|scope| {
        for channel in 0..4 {
            let model = &model;
            scope.spawn(move || {
                let mut rig = ChannelRig::on(model, channel);
                for _ in 0..200 {
                    let (source, target) =
                        (MappedPages::patterned(model, 1), MappedPages::new(model, 1));
                    rig.run(IoatDescriptor::copy(source.at(0), target.at(0), 4096));
                    assert_eq!(target.bytes(0, 4096), source.bytes(0, 4096));
                }
            });
        }
    });
    assert_eq!(model.all_counters().bytes, 4 * 200 * 4096);
    assert_clean(&model);
}
