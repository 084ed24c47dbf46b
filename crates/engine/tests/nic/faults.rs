//! Frames that are lost or damaged, and cards that fail.

use std::sync::Arc;

use memferry_engine::completion::Notification;
use memferry_engine::nic::Settings;
use memferry_engine::nic::model::{Faults, NicModel};

use crate::card;
use crate::rig::{Copy, Rig};

/// Copies of all lengths, long ones behind short ones too, to places that do not touch.
fn assorted() -> Vec<Copy> {
    let lengths = [8192, 130, 9000, 128, 4096, 700, 8192, 8192, 2000, 16_384, 129, 20_000];
    let (mut to, mut copies) = (4, Vec::new());
    for length in lengths {
        copies.push(Copy { from: to / 2, to, length });
        to += length + 2 * (length % 7) + 2;
    }
    copies
}

#[test]
fn lost_frames_are_sent_again_and_never_land_beyond_a_target() {
    for lose_every in [2, 3, 5, 11] {
        let faults = Faults { lose_every: Some(lose_every), ..Faults::default() };
        let mut rig = Rig::new(card::faulty_engine(Settings::default(), faults), 1 << 18);
        rig.copy(&assorted());
        let counters = rig.engine.counters();
        assert!(counters.sent_again > 0, "{counters:?}");
    }
}

#[test]
fn a_notice_does_not_overtake_a_frame_that_was_lost() {
    for lose_every in [2, 3, 4] {
        let faults = Faults { lose_every: Some(lose_every), ..Faults::default() };
        let mut rig = Rig::new(card::faulty_engine(Settings::default(), faults), 1 << 18);
        let variable = Notification::new(0);
        for value in 1..6 {
            let length = 1 << 16;
            let to = value as usize * 64;
            rig.deliver(&[Copy { from: 0, to, length }], &variable, value);
            assert_eq!(variable.load(), value);
        }
    }
}

#[test]
fn no_value_lands_in_the_variable_of_another_transfer() {
    for lose_every in [2, 3] {
        // Before the rig, which ends what is under way.
        let variables: Vec<_> = (0..20).map(|_| Notification::new(0)).collect();
        let faults = Faults { lose_every: Some(lose_every), ..Faults::default() };
        let mut rig = Rig::new(card::faulty_engine(Settings::default(), faults), 1 << 18);
        // So short that there is nothing in the rings but values, and long ones between them.
        let copies = variables.iter().enumerate().map(|(index, variable)| {
            let length = if index % 4 == 3 { 6000 } else { 30 };
            (Copy { from: 0, to: index * 8192, length }, variable, index as u64 + 1)
        });
        rig.deliver_each(&copies.collect::<Vec<_>>());
    }
}

#[test]
fn damaged_frames_are_noticed_by_their_sums_and_sent_again() {
    let faults = Faults { damage_every: Some(3), ..Faults::default() };
    let settings = Settings { checks: true };
    let mut rig = Rig::new(card::faulty_engine(settings, faults), 1 << 18);
    rig.copy(&assorted());
    let counters = rig.engine.counters();
    assert!(counters.sent_again > 0, "{counters:?}");
}

#[test]
fn when_everything_is_lost_the_processor_does_it() {
    let faults = Faults { lose_every: Some(1), ..Faults::default() };
    let mut rig = Rig::new(card::faulty_engine(Settings::default(), faults), 1 << 18);
    let variable = Notification::new(0);
    rig.deliver(&[Copy { from: 0, to: 10, length: 100_000 }], &variable, 3);
    assert_eq!(variable.load(), 3);
    let counters = rig.engine.counters();
    assert_eq!((counters.bytes_by_card, counters.notices), (0, 0), "{counters:?}");
    assert!(counters.given_up > 0);
}

/// A model, because real cards do not do this on demand.
fn modelled() -> (Arc<NicModel>, Rig) {
    let model = NicModel::new();
    let engine = card::over(model.clone(), Settings::default());
    (model, Rig::new(engine, 1 << 18))
}

#[test]
fn a_card_that_stalls_is_started_again() {
    let (model, mut rig) = modelled();
    model.set_faults(Faults { stalls: true, ..Faults::default() });
    rig.copy(&[Copy { from: 0, to: 0, length: 1 << 17 }]);
    let counters = rig.engine.counters();
    assert!(counters.sent_again > 0 && counters.given_up == 0, "{counters:?}");
    assert_eq!(counters.bytes_by_card, 1 << 17);
}

#[test]
fn a_card_that_is_gone_loses_its_memory_and_the_processor_goes_on() {
    let (model, mut rig) = modelled();
    rig.copy(&[Copy { from: 0, to: 0, length: 1 << 16 }]);
    model.set_faults(Faults { gone: true, ..Faults::default() });
    rig.copy(&[Copy { from: 0, to: 3, length: 1 << 16 }]);
    assert_eq!(rig.engine.pages().pinned(), (0, 0));
    // Memory that is pinned already is all that there is.
    let engine = rig.engine.clone();
    drop(rig);
    drop(engine);
    assert_eq!(model.mapped_pages(), 0);
}

#[test]
fn the_driver_makes_no_mistakes_that_the_model_sees() {
    let (model, mut rig) = modelled();
    rig.copy(&assorted());
    model.set_faults(Faults { lose_every: Some(4), ..Faults::default() });
    rig.copy(&assorted());
    drop(rig);
    assert_eq!(model.sightings().mistakes, Vec::<String>::new());
    assert_eq!(model.mapped_pages(), 0);
}
