//! The interrupt of a card wakes a thread that sleeps until it: a model's, or that of the card of a
//! virtual machine, through MSI-X, VFIO and an eventfd.

use std::time::Duration;

use memferry_engine::InterruptSleep;

use crate::card;
use crate::rig::{NicRig, TestCopy, wait_until};

#[test]
fn a_thread_sleeps_until_the_card_has_sent_a_long_copy() {
    const BYTES: usize = 2 << 20;
    let timeout = Duration::from_secs(200);
    let mut rig = NicRig::new(card::engine(), BYTES);
    let channel = rig.channel();
    // A copy may be over before the card is armed; then nobody sleeps.
    while channel.statistics().wakes == 0 {
        let copy = rig.begin(TestCopy { from: 0, to: 0, length: BYTES });
        // Nobody polls meanwhile, so only the interrupt of the card ends the sleep.
        let slept = channel.sleep_until_interrupt(timeout, &|| copy.is_done());
        assert_eq!(slept, InterruptSleep::Woken);
        wait_until("the copy", || {
            channel.poll();
            copy.is_done()
        });
        copy.outcome().unwrap().unwrap();
    }
    assert_eq!((channel.statistics().sleeps, channel.statistics().wakes), (1, 1));
    assert_eq!(rig.engine.counters().cpu_fallbacks, 0);
}
