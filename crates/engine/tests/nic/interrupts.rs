//! The interrupt of a card wakes a thread that sleeps until it: a model's, or that of the card of a
//! virtual machine, through MSI-X, VFIO and an eventfd.

use std::time::Duration;

use memferry_engine::InterruptSleep;

use crate::card;
use crate::rig::{NicRig, TestCopy, wait_until};

#[test]
fn a_thread_sleeps_until_the_card_has_sent_a_long_copy() {
    const BYTES: usize = 512 << 10;
    let mut rig = NicRig::new(card::engine(), BYTES);
    let channel = rig.channel();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let timeout = Duration::from_secs(60);
            channel.sleep_until_interrupt(timeout, &|| false)
        });
        wait_until("the sleeper", || channel.statistics().sleeps > 0 || sleeper.is_finished());
        // The card is armed. Nobody polls, so only its interrupt ends the sleep.
        let copy = rig.begin(TestCopy { from: 0, to: 0, length: BYTES });
        assert_eq!(sleeper.join().unwrap(), InterruptSleep::Woken);
        assert_eq!((channel.statistics().sleeps, channel.statistics().wakes), (1, 1));
        wait_until("the copy", || {
            channel.poll();
            copy.is_done()
        });
        copy.outcome().unwrap().unwrap();
    });
    assert_eq!(rig.engine.counters().cpu_fallbacks, 0);
}
