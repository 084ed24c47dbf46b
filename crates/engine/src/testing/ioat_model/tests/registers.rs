//! Registers: what they say, and what may be written to them.

use super::*;

fn violations_of(model: &IoatModel, deed: impl FnOnce(&IoatModel)) -> usize {
    let before = model.protocol_violations().len();
    deed(model);
    model.protocol_violations().len() - before
}

#[test]
fn the_device_says_what_it_is() {
    let model = IoatModel::builder().name("here").channels(5).transfer_power(15).build();
    assert_eq!((model.read8(CHANCNT), model.read8(XFERCAP), model.read8(CBVER)), (5, 15, 0x33));
    assert_eq!(model.read32(DMACAPABILITY), DMACAPABILITY_FILL_BLOCK);
    assert_eq!((model.name(), model.is_contiguous()), ("here", false));
    let old = IoatModel::builder().version(0x12).channels(0).build();
    assert_eq!((old.read8(CBVER), old.read8(CHANCNT)), (0x12, 0));
    assert_clean(&model);
}

#[test]
fn a_channel_is_halted_without_an_error_when_it_is_switched_on() {
    let model = IoatModel::new();
    let base = channel_base(0);
    assert_eq!(ChannelState::of(model.read64(base + CHANSTS)), Some(ChannelState::Halted));
    assert_eq!(model.read32(base + CHANERR), 0);
    assert_clean(&model);
}

#[test]
fn registers_keep_what_is_written_unless_they_are_read_only() {
    let model = IoatModel::new();
    let base = channel_base(0);
    model.set16(base + CHANCTRL, CHANCTRL_ERROR_COMPLETION);
    model.set64(base + CHANCMP, 0x12_3456_7890);
    model.set64(base + CHAINADDR, 0xAB_CDEF_0040);
    model.set32(base + CHANERRMASK, 0x30000);
    model.set16(INTRDELAY, 9);
    assert_eq!(model.read16(base + CHANCTRL), CHANCTRL_ERROR_COMPLETION);
    assert_eq!(model.read64(base + CHANCMP), 0x12_3456_7890);
    assert_eq!(model.read64(base + CHAINADDR), 0xAB_CDEF_0040);
    assert_eq!((model.read32(base + CHANERRMASK), model.read16(INTRDELAY)), (0x30000, 9));
    assert_clean(&model);
    let read_only = violations_of(&model, |model| {
        model.set8(CHANCNT, 9);
        model.set8(XFERCAP, 9);
        model.set8(CBVER, 9);
        model.set32(DMACAPABILITY, 9);
        model.set64(base + CHANSTS, 0);
    });
    assert_eq!((read_only, model.read8(CHANCNT), model.read8(XFERCAP)), (5, 1, 20));
    assert_eq!(ChannelState::of(model.read64(base + CHANSTS)), Some(ChannelState::Halted));
}

#[test]
fn addresses_may_be_written_and_read_in_halves() {
    let model = IoatModel::new();
    let base = channel_base(0);
    for register in [CHANCMP, CHAINADDR] {
        model.set32(base + register, 0x1234_5680);
        model.set32(base + register + 4, 0x9A);
        assert_eq!(model.read64(base + register), 0x9A_1234_5680);
        assert_eq!(model.read32(base + register + 4), 0x9A);
    }
    assert_eq!(model.read32(base + CHANSTS), ChannelState::Halted as u32);
    assert_clean(&model);
}

#[test]
fn the_first_who_reads_the_control_register_has_the_channel() {
    let model = IoatModel::new();
    let at = channel_base(0) + CHANCTRL;
    assert_eq!(model.read16(at) & CHANCTRL_IN_USE, 0);
    assert_eq!(model.read16(at) & CHANCTRL_IN_USE, CHANCTRL_IN_USE);
    model.set16(at, 0);
    assert_eq!(model.read16(at) & CHANCTRL_IN_USE, 0);
}

#[test]
fn accesses_that_make_no_sense_are_kept_as_mistakes() {
    let model = IoatModel::new();
    let base = channel_base(0);
    let wrong = violations_of(&model, |model| {
        assert_eq!(model.read32(CHANCNT), u32::MAX);
        assert_eq!(model.read8(base + CHANSTS), u8::MAX);
        assert_eq!(model.read64(base + DMACOUNT), u64::MAX);
        assert_eq!(model.read32(base + CHANSTS + 2), u32::MAX);
        assert_eq!(model.read32(0x7C), u32::MAX);
        assert_eq!(model.read16(channel_base(1) + DMACOUNT), u16::MAX);
        model.set32(base + DMACOUNT, 1);
        model.set8(base + CHANCTRL, 1);
        model.set16(base + CHANCTRL, 0x8000);
        model.set8(base + CHANCMD, 0x01);
    });
    assert_eq!(wrong, 10);
    assert!(model.protocol_violations()[0].starts_with("0x0 was read with 32 bits"));
    let expected = "0x86 was written with 32 bits as 0x1: the width is not that of the register";
    assert_eq!(model.protocol_violations()[6], expected);
}

#[test]
fn a_chain_is_not_to_be_written_while_the_channel_is_active() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    model.set_faults(IoatFaults { stalls: FaultSchedule::At(1), ..IoatFaults::default() });
    rig.put(IoatDescriptor::null());
    rig.ring();
    let chain = rig.slot(0);
    let wrong = violations_of(&model, |model| {
        model.set64(rig.register(CHAINADDR), 0x4000);
        model.set64(rig.register(CHANCMP), 0x4000);
    });
    assert_eq!((wrong, model.read64(rig.register(CHAINADDR))), (2, chain));
    assert_eq!(model.read64(rig.register(CHANCMP)), rig.word.at(0));
}

#[test]
fn a_doorbell_without_a_chain_is_a_mistake() {
    let model = IoatModel::new();
    let at = channel_base(0) + DMACOUNT;
    assert_eq!(violations_of(&model, |model| model.set16(at, 1)), 1);
    assert_eq!(model.counters(0).doorbells, 1);
}

#[test]
fn a_new_chain_counts_from_the_beginning() {
    let model = IoatModel::new();
    let mut rig = ChannelRig::new(&model);
    for _ in 0..3 {
        rig.run(IoatDescriptor::null());
    }
    assert_eq!(model.read16(rig.register(DMACOUNT)), 3);
    let third = rig.slot(2);
    model.set64(rig.register(CHAINADDR), third);
    assert_eq!(model.read16(rig.register(DMACOUNT)), 0);
    assert_eq!(rig.status() & CHANSTS_COMPLETED, 0);
    assert_eq!(model.read64(rig.register(CDAR)), third);
    rig.set_word(0);
    model.set16(rig.register(DMACOUNT), 1);
    rig.await_word(third);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn memory_is_mapped_only_where_there_is_some() {
    let model = IoatModel::new();
    let pages = Pages::new(2 * page_bytes()).unwrap();
    let at = pages.as_ptr() as usize;
    drop(pages);
    let mut addresses = [0; 2];
    let nowhere = map(&model, page_bytes(), &mut addresses, DmaDirection::ToDevice).unwrap_err();
    assert_eq!(nowhere.raw_os_error(), Some(EFAULT));
    assert_clean(&model);
    let crooked = map(&model, at + 1, &mut addresses, DmaDirection::ToDevice).unwrap_err();
    assert_eq!(crooked.raw_os_error(), Some(EINVAL));
    assert_eq!((model.protocol_violations().len(), model.mapped_pages()), (1, 0));
}

#[test]
fn memory_that_cannot_be_written_is_mapped_for_reading_only() {
    let model = IoatModel::new();
    let pages = Pages::new(page_bytes()).unwrap();
    // SAFETY: removes access rights from a page of the test's own that nothing uses.
    let done = unsafe { libc::mprotect(pages.as_ptr().cast(), page_bytes(), libc::PROT_READ) };
    assert_eq!(done, 0);
    let (at, mut addresses) = (pages.as_ptr() as usize, [0]);
    let refused = map(&model, at, &mut addresses, DmaDirection::Bidirectional).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(EFAULT));
    map(&model, at, &mut addresses, DmaDirection::ToDevice).unwrap();
    model.unmap_pages(&addresses);
    assert_clean(&model);
}

#[test]
fn a_page_may_be_mapped_twice_and_has_two_addresses() {
    let model = IoatModel::new();
    {
        let memory = MappedPages::new(&model, 1);
        let mut again = [0];
        map(&model, memory.pages.as_ptr() as usize, &mut again, DmaDirection::ToDevice).unwrap();
        assert_ne!(memory.addresses, again);
        assert_eq!(model.mapped_pages(), 2);
        model.unmap_pages(&again);
        assert_eq!(violations_of(&model, |model| model.unmap_pages(&again)), 1);
    }
    assert_eq!(model.mapped_pages(), 0);
}
