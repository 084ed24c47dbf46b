//! What the card copies, and what the processor.

use memferry_sys::residency;

use crate::card;
use crate::rig::{NicRig, TestCopy};

const MIB: usize = 1 << 20;

#[test]
fn nearly_all_of_an_aligned_mebibyte_is_moved_by_the_card() {
    let mut rig = NicRig::new(card::engine(), MIB);
    // In several descriptors.
    let length = 256 << 10;
    let copies = (0..4).map(|part| TestCopy { from: part * length, to: part * length, length });
    rig.copy(&copies.collect::<Vec<_>>());
    let counters = rig.engine.counters();
    assert!(counters.bytes_by_card as f64 >= 0.99 * MIB as f64, "{counters:?}");
    assert_eq!(counters.bytes_by_card + counters.bytes_by_processor, MIB as u64);
    assert_eq!(counters.frames, 128);
}

#[test]
fn an_odd_byte_and_a_short_rest_are_left_to_the_processor() {
    let mut rig = NicRig::new(card::engine(), 1 << 16);
    rig.copy(&[TestCopy { from: 3, to: 4097, length: 1 + 8192 + 100 }]);
    let counters = rig.engine.counters();
    let whole = (counters.bytes_by_card, counters.bytes_by_processor);
    // The processor copies the odd byte at the start, and the rest if it is shorter than the header
    // of a frame.
    assert_eq!(whole.0 + whole.1, 8293, "{counters:?}");
    assert!(whole.1 <= 1 + 2 * 127 && whole.1 > 0, "{counters:?}");
}

#[test]
fn every_length_and_place_arrives_and_nothing_beside_it_changes() {
    let mut rig = NicRig::new(card::engine(), 1 << 18);
    let lengths = [1, 59, 60, 127, 128, 129, 1000, 4095, 4096, 4097, 8191, 8192, 8193, 20_000];
    for length in lengths {
        for (from, to) in [(0, 0), (1, 2), (2, 1), (4095, 4094), (2048, 0), (0, 2048), (77, 33)] {
            rig.copy(&[TestCopy { from, to, length }]);
        }
    }
    assert_eq!(rig.engine.counters().cpu_fallbacks, 0);
}

#[test]
fn memory_that_may_only_be_read_can_be_copied_from() {
    let mut rig = NicRig::new(card::engine(), 1 << 16);
    rig.protect_source();
    rig.copy(&[TestCopy { from: 100, to: 200, length: 30_000 }]);
    assert!(rig.engine.counters().bytes_by_card > 29_000);
}

#[test]
fn no_memory_is_mapped_for_the_card_when_nothing_is_kept() {
    let engine = card::engine();
    let mut rig = NicRig::new(engine.clone(), 1 << 18);
    rig.copy(&[TestCopy { from: 5, to: 6, length: 1 << 17 }]);
    assert!(engine.pages().mapped_counts().0 > 0);
    drop(rig);
    assert_eq!(engine.pages().mapped_counts(), (0, 0));
    drop(engine);
    // Mappings of a real card lock memory, as the kernel counts it.
    if card::address().is_some() {
        assert_eq!(residency::locked_bytes(), 0);
    }
}

#[test]
fn a_card_is_given_back_and_taken_again() {
    for round in 0..5 {
        let mut rig = NicRig::new(card::engine(), 1 << 16);
        rig.copy(&[TestCopy { from: round, to: 2 * round, length: 1 << 15 }]);
    }
}
