//! Lost and corrupted frames, and cards that fail.

use std::sync::Arc;

use memferry_engine::completion::Notification;
use memferry_engine::nic::NicConfig;
use memferry_engine::testing::nic_model::{NicFaults, NicModel};

use crate::card;
use crate::rig::{NicRig, TestCopy};

/// Copies of all lengths, long ones after short ones too, to targets that are not adjacent.
fn assorted_copies() -> Vec<TestCopy> {
    let lengths = [8192, 130, 9000, 128, 4096, 700, 8192, 8192, 2000, 16_384, 129, 20_000];
    let (mut to, mut copies) = (4, Vec::new());
    for length in lengths {
        copies.push(TestCopy { from: to / 2, to, length });
        to += length + 2 * (length % 7) + 2;
    }
    copies
}

#[test]
fn lost_frames_are_sent_again_and_never_land_beyond_a_target() {
    for lose_every in [2, 3, 5, 11] {
        let faults = NicFaults { lose_every: Some(lose_every), ..NicFaults::default() };
        let mut rig = NicRig::new(card::faulty_engine(NicConfig::default(), faults), 1 << 18);
        rig.copy(&assorted_copies());
        let counters = rig.engine.counters();
        assert!(counters.retransmits > 0, "{counters:?}");
    }
}

#[test]
fn a_notice_does_not_overtake_a_frame_that_was_lost() {
    for lose_every in [2, 3, 4] {
        let faults = NicFaults { lose_every: Some(lose_every), ..NicFaults::default() };
        let mut rig = NicRig::new(card::faulty_engine(NicConfig::default(), faults), 1 << 18);
        let variable = Notification::new(0);
        for value in 1..6 {
            let length = 1 << 16;
            let to = value as usize * 64;
            rig.deliver(&[TestCopy { from: 0, to, length }], &variable, value);
            assert_eq!(variable.load(), value);
        }
    }
}

#[test]
fn no_value_lands_in_the_variable_of_another_transfer() {
    for lose_every in [2, 3] {
        // Before the rig, whose drop ends everything in flight.
        let variables: Vec<_> = (0..20).map(|_| Notification::new(0)).collect();
        let faults = NicFaults { lose_every: Some(lose_every), ..NicFaults::default() };
        let mut rig = NicRig::new(card::faulty_engine(NicConfig::default(), faults), 1 << 18);
        // Some are so short that the rings contain only values, with long ones between them.
        let copies = variables.iter().enumerate().map(|(index, variable)| {
            let length = if index % 4 == 3 { 6000 } else { 30 };
            (TestCopy { from: 0, to: index * 8192, length }, variable, index as u64 + 1)
        });
        rig.deliver_each(&copies.collect::<Vec<_>>());
    }
}

#[test]
fn damaged_frames_are_noticed_by_their_sums_and_sent_again() {
    let faults = NicFaults { damage_every: Some(3), ..NicFaults::default() };
    let settings = NicConfig { verify_checksums: true };
    let mut rig = NicRig::new(card::faulty_engine(settings, faults), 1 << 18);
    rig.copy(&assorted_copies());
    let counters = rig.engine.counters();
    assert!(counters.retransmits > 0, "{counters:?}");
}

#[test]
fn when_everything_is_lost_the_processor_does_it() {
    let faults = NicFaults { lose_every: Some(1), ..NicFaults::default() };
    let mut rig = NicRig::new(card::faulty_engine(NicConfig::default(), faults), 1 << 18);
    let variable = Notification::new(0);
    rig.deliver(&[TestCopy { from: 0, to: 10, length: 100_000 }], &variable, 3);
    assert_eq!(variable.load(), 3);
    let counters = rig.engine.counters();
    assert_eq!((counters.bytes_by_card, counters.notification_writes), (0, 0), "{counters:?}");
    assert!(counters.cpu_fallbacks > 0);
}

/// A model, because real cards do not fail on demand.
fn modelled() -> (Arc<NicModel>, NicRig) {
    let model = NicModel::new();
    let engine = card::over(model.clone(), NicConfig::default());
    (model, NicRig::new(engine, 1 << 18))
}

#[test]
fn a_card_that_stalls_is_started_again() {
    let (model, mut rig) = modelled();
    model.set_faults(NicFaults { stalls: true, ..NicFaults::default() });
    rig.copy(&[TestCopy { from: 0, to: 0, length: 1 << 17 }]);
    let counters = rig.engine.counters();
    assert!(counters.retransmits > 0 && counters.cpu_fallbacks == 0, "{counters:?}");
    assert_eq!(counters.bytes_by_card, 1 << 17);
}

#[test]
fn a_card_that_is_gone_loses_its_memory_and_the_processor_goes_on() {
    let (model, mut rig) = modelled();
    rig.copy(&[TestCopy { from: 0, to: 0, length: 1 << 16 }]);
    model.set_faults(NicFaults { is_removed: true, ..NicFaults::default() });
    rig.copy(&[TestCopy { from: 0, to: 3, length: 1 << 16 }]);
    assert_eq!(rig.engine.pages().mapped_counts(), (0, 0));
    // No memory can be pinned any more.
    let engine = rig.engine.clone();
    drop(rig);
    drop(engine);
    assert_eq!(model.mapped_pages(), 0);
}

#[test]
fn a_card_that_cannot_be_stopped_when_it_is_dropped_loses_its_memory() {
    let (model, mut rig) = modelled();
    rig.copy(&[TestCopy { from: 0, to: 0, length: 1 << 16 }]);
    let engine = rig.engine.clone();
    model.set_faults(NicFaults { is_removed: true, ..NicFaults::default() });
    drop(rig);
    assert!(engine.pages().is_revoked());
    drop(engine);
    assert_eq!(model.mapped_pages(), 0);
}

#[test]
fn the_driver_makes_no_mistakes_that_the_model_sees() {
    let (model, mut rig) = modelled();
    rig.copy(&assorted_copies());
    model.set_faults(NicFaults { lose_every: Some(4), ..NicFaults::default() });
    rig.copy(&assorted_copies());
    drop(rig);
    assert_eq!(model.stats().protocol_violations, Vec::<String>::new());
    assert_eq!(model.mapped_pages(), 0);
}
