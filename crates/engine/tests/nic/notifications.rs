//! Notification variables that the card writes after the data.

use memferry_engine::completion::Notification;

use crate::card;
use crate::rig::{NicRig, TestCopy};

#[test]
fn the_value_travels_behind_the_data() {
    let mut rig = NicRig::new(card::engine(), 1 << 18);
    let variable = Notification::new(0);
    for (round, length) in [128, 4096, 10_000, 1 << 17].into_iter().enumerate() {
        let value = 0x0102_0304_0506_0700 + round as u64;
        rig.deliver(&[TestCopy { from: 0, to: 0, length }], &variable, value);
        assert_eq!(variable.load(), value);
        assert_eq!(rig.engine.counters().notification_writes, round as u64 + 1);
    }
}

#[test]
fn even_bytes_that_the_processor_copies_are_told_by_the_card() {
    let mut rig = NicRig::new(card::engine(), 1 << 12);
    let variable = Notification::new(0);
    rig.deliver(&[TestCopy { from: 1, to: 3, length: 20 }], &variable, 5);
    let counters = rig.engine.counters();
    assert_eq!((variable.load(), counters.notification_writes), (5, 1));
    assert_eq!((counters.bytes_by_processor, counters.bytes_by_card), (20, 0));
}

#[test]
fn many_small_pieces_go_into_one_target_with_one_notice() {
    const COPY_BYTES: usize = 300;
    let mut rig = NicRig::new(card::engine(), 1 << 18);
    let variable = Notification::new(0);
    let copies: Vec<_> = (0..50)
        .map(|index| TestCopy {
            from: index * 2048 + 14,
            to: index * COPY_BYTES,
            length: COPY_BYTES,
        })
        .collect();
    rig.deliver(&copies, &variable, 9);
    let counters = rig.engine.counters();
    assert_eq!((variable.load(), counters.notification_writes), (9, 1));
    // 15 000 bytes are four pages: about that many frames, and the notification write.
    assert!(counters.frames <= 8, "{counters:?}");
    assert!(counters.bytes_by_card >= 14_000, "{counters:?}");
}
