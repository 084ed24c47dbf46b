//! Notification variables that the card sets behind the data.

use memferry_engine::completion::Notification;

use crate::card;
use crate::rig::{Copy, Rig};

#[test]
fn the_value_travels_behind_the_data() {
    let mut rig = Rig::new(card::engine(), 1 << 18);
    let variable = Notification::new(0);
    for (round, length) in [128, 4096, 10_000, 1 << 17].into_iter().enumerate() {
        let value = 0x0102_0304_0506_0700 + round as u64;
        rig.deliver(&[Copy { from: 0, to: 0, length }], &variable, value);
        assert_eq!(variable.load(), value);
        assert_eq!(rig.engine.counters().notices, round as u64 + 1);
    }
}

#[test]
fn even_bytes_that_the_processor_copies_are_told_by_the_card() {
    let mut rig = Rig::new(card::engine(), 1 << 12);
    let variable = Notification::new(0);
    rig.deliver(&[Copy { from: 1, to: 3, length: 20 }], &variable, 5);
    let counters = rig.engine.counters();
    assert_eq!((variable.load(), counters.notices), (5, 1));
    assert_eq!((counters.bytes_by_processor, counters.bytes_by_card), (20, 0));
}

#[test]
fn many_small_pieces_go_into_one_target_with_one_notice() {
    const PIECE: usize = 300;
    let mut rig = Rig::new(card::engine(), 1 << 18);
    let variable = Notification::new(0);
    let pieces: Vec<_> = (0..50)
        .map(|index| Copy { from: index * 2048 + 14, to: index * PIECE, length: PIECE })
        .collect();
    rig.deliver(&pieces, &variable, 9);
    let counters = rig.engine.counters();
    assert_eq!((variable.load(), counters.notices), (9, 1));
    // 15 000 bytes are four pages: about that many frames, and the notice.
    assert!(counters.frames <= 8, "{counters:?}");
    assert!(counters.bytes_by_card >= 14_000, "{counters:?}");
}
