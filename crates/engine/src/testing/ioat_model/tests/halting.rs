//! The errors of a channel, and how it reports them.

use super::*;

/// A channel, a page to read and a page to write.
fn set_up() -> (ChannelRig, MappedPages, MappedPages) {
    let model = IoatModel::builder().transfer_power(12).build();
    (ChannelRig::new(&model), MappedPages::patterned(&model, 2), MappedPages::new(&model, 2))
}

#[test]
fn addresses_that_are_not_mapped_halt_the_channel() {
    let (mut rig, source, target) = set_up();
    let copies = [
        (IoatDescriptor::copy(0x5000, target.at(0), 8), error::SOURCE_ADDRESS),
        (IoatDescriptor::copy(source.at(0), 0x5000, 8), error::TARGET_ADDRESS),
        (IoatDescriptor::copy(0, target.at(0), 8), error::SOURCE_ADDRESS),
        (IoatDescriptor::fill(1, 0, 8), error::TARGET_ADDRESS),
    ];
    for (descriptor, expected) in copies {
        assert_eq!(rig.fail(descriptor), expected, "{descriptor:?}");
        rig.start();
    }
    assert_eq!(target.bytes(0, 8), [0; 8]);
    assert_eq!(rig.counters().halts, 4);
}

#[test]
fn an_address_is_good_for_nothing_once_it_is_unmapped() {
    let (mut rig, source, target) = set_up();
    let model = rig.model.clone();
    let stale = {
        let gone = MappedPages::new(&model, 1);
        rig.run(IoatDescriptor::copy(source.at(0), gone.at(0), 8));
        gone.at(0)
    };
    let others = MappedPages::new(&model, 20);
    assert!(!others.addresses.contains(&stale));
    assert_eq!(rig.fail(IoatDescriptor::copy(stale, target.at(0), 8)), error::SOURCE_ADDRESS);
}

#[test]
fn nothing_crosses_the_end_of_a_page() {
    let (mut rig, source, target) = set_up();
    let end = page_bytes() - 4;
    let from = IoatDescriptor::copy(source.at(end), target.at(0), 8);
    assert_eq!(rig.fail(from), error::SOURCE_ADDRESS);
    rig.start();
    let to = IoatDescriptor::copy(source.at(0), target.at(end), 8);
    assert_eq!(rig.fail(to), error::TARGET_ADDRESS);
    rig.start();
    rig.run(IoatDescriptor::copy(source.at(end), target.at(end), 4));
    assert!(target.bytes(0, end).iter().all(|&byte| byte == 0));
}

#[test]
fn memory_that_is_only_read_is_not_written() {
    let (mut rig, source, _target) = set_up();
    let read_only = MappedPages::with(&rig.model, 1, DmaDirection::ToDevice);
    let copy = IoatDescriptor::copy(source.at(1), read_only.at(0), 8);
    assert_eq!(rig.fail(copy), error::WRITE_DATA);
    assert_eq!(read_only.bytes(0, 8), [0; 8]);
}

#[test]
fn sizes_of_nothing_and_of_too_much_are_refused() {
    let (mut rig, source, target) = set_up();
    for bytes in [0, 4097, u32::MAX] {
        let copy = IoatDescriptor::copy(source.at(0), target.at(0), bytes);
        assert_eq!(rig.fail(copy), error::LENGTH, "{bytes}");
        rig.start();
    }
    rig.run(IoatDescriptor::copy(source.at(0), target.at(0), 4096));
}

#[test]
fn what_is_no_operation_is_refused() {
    let (mut rig, source, target) = set_up();
    let copy = IoatDescriptor::copy(source.at(0), target.at(0), 8);
    for control in [0x87 << 24, 1 << 11, 1 << 20] {
        assert_eq!(rig.fail_as_is(copy.with_control(control)), error::CONTROL, "{control:#x}");
        rig.start();
    }
}

#[test]
fn a_device_that_cannot_fill_refuses_to() {
    let model = IoatModel::builder().fills(false).build();
    assert_eq!(model.read32(DMACAPABILITY), 0);
    let mut rig = ChannelRig::new(&model);
    let target = MappedPages::new(&model, 1);
    assert_eq!(rig.fail(IoatDescriptor::fill(1, target.at(0), 8)), error::CONTROL);
}

#[test]
fn a_chain_that_leads_nowhere_ends_there() {
    let (mut rig, _source, _target) = set_up();
    for (next, expected) in [(0x5000, error::NEXT_ADDRESS), (0, error::NEXT_ADDRESS)] {
        let first = rig.put_as_is(IoatDescriptor::null().with_next(next));
        assert_eq!(rig.fail(IoatDescriptor::null()), expected);
        assert_eq!(rig.status(), first | ChannelState::Halted as u64);
        rig.start();
    }
    let crooked = rig.slot(1) + 8;
    rig.put_as_is(IoatDescriptor::null().with_next(crooked));
    assert_eq!(rig.fail(IoatDescriptor::null()), error::DESCRIPTOR);
}

#[test]
fn a_chain_that_begins_nowhere_does_not_begin() {
    let (mut rig, _source, _target) = set_up();
    for address in [0x5000, 0, rig.slot(0) + 32] {
        rig.model.set64(rig.register(CHAINADDR), address);
        assert_eq!(rig.fail(IoatDescriptor::null()), error::CHAIN_ADDRESS, "{address:#x}");
        rig.start();
    }
}

#[test]
fn a_completion_word_that_is_nowhere_halts_the_channel_after_the_work() {
    let (mut rig, source, target) = set_up();
    let read_only = MappedPages::with(&rig.model, 1, DmaDirection::ToDevice);
    for address in [0x5000, rig.word.at(4), read_only.at(0)] {
        rig.model.set64(rig.register(CHANCMP), address);
        let copy = IoatDescriptor::copy(source.at(0), target.at(0), 8);
        assert_eq!(rig.fail(copy), error::COMPLETION_ADDRESS, "{address:#x}");
        assert_eq!(target.bytes(0, 8), source.bytes(0, 8));
        rig.start();
    }
}

#[test]
fn an_error_is_written_to_the_word_with_the_last_descriptor_that_went_well() {
    let (mut rig, _source, _target) = set_up();
    let good = rig.put(IoatDescriptor::null());
    rig.fail(IoatDescriptor::copy(0x5000, 0x5000, 8));
    wait_until("the word", || rig.word() == good | ChannelState::Halted as u64);
    assert_eq!(rig.status(), rig.word());
}

#[test]
fn an_error_is_not_written_to_the_word_if_nobody_asked_for_it() {
    let (mut rig, _source, _target) = set_up();
    rig.model.set16(rig.register(CHANCTRL), CHANCTRL_ANY_ERROR_ABORT);
    rig.fail(IoatDescriptor::copy(0x5000, 0x5000, 8));
    assert_eq!(rig.word(), 0);
}

#[test]
fn a_halted_channel_does_nothing_until_its_errors_are_cleared_and_a_chain_is_written() {
    let (mut rig, _source, _target) = set_up();
    assert_eq!(rig.fail(IoatDescriptor::copy(0x5000, 0x5000, 8)), error::SOURCE_ADDRESS);
    // A doorbell after the halt is not a violation.
    rig.put(IoatDescriptor::null());
    rig.ring();
    assert_eq!(rig.state(), Some(ChannelState::Halted));
    assert_eq!(rig.model.protocol_violations(), Vec::<String>::new());
    // Without a reset: clear the errors and start a chain at the next descriptor.
    rig.model.set32(rig.register(CHANERR), error::TARGET_ADDRESS);
    assert_eq!(rig.errors(), error::SOURCE_ADDRESS);
    rig.model.set32(rig.register(CHANERR), error::SOURCE_ADDRESS);
    assert_eq!(rig.errors(), 0);
    let rest = rig.slot(1);
    rig.model.set64(rig.register(CHAINADDR), rest);
    rig.model.set16(rig.register(DMACOUNT), 1);
    wait_until("the rest", || rig.status() == rest | ChannelState::Idle as u64);
    assert_eq!(rig.model.protocol_violations(), Vec::<String>::new());
}

impl ChannelRig {
    /// The errors of a descriptor whose control bits are the test's choice.
    fn fail_as_is(&mut self, descriptor: IoatDescriptor) -> u32 {
        self.put(descriptor);
        self.ring();
        self.await_state(ChannelState::Halted);
        self.errors()
    }
}
