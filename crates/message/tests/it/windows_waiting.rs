//! Waiting for a word of a window, among threads that move messages.

use std::time::Duration;

use memferry_message::{EndpointBuilder, PutNotification, Rights};
use memferry_testing::message::{pair, until};

#[test]
fn a_notification_wakes_the_owner_while_another_thread_moves_messages() {
    // The progress thread sleeps on the rings, and this thread on the progress thread.
    let pair = pair(&EndpointBuilder::new().background(true));
    let window = pair.there.expose(vec![0u8; 64], Rights::READ_WRITE).unwrap();
    let other = pair.here.expose(vec![0u8; 64], Rights::READ_WRITE).unwrap();
    let there = pair.here.attach(pair.to_there, window.handle()).unwrap();
    let here = pair.there.attach(pair.to_here, other.handle()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1..=2000 {
                window.wait(0, None, |seen| seen == value).unwrap();
                here.put_notify(0, &[], PutNotification { offset: 0, value }).unwrap();
            }
        });
        for value in 1..=2000 {
            there.put_notify(0, &[], PutNotification { offset: 0, value }).unwrap();
            other.wait(0, None, |seen| seen == value).unwrap();
        }
    });
}

#[test]
fn a_notification_reaches_a_sleeper_while_another_thread_takes_a_message() {
    let pair = pair(&EndpointBuilder::new());
    let window = pair.there.expose(vec![0u8; 64], Rights::READ_WRITE).unwrap();
    let remote = pair.here.attach(pair.to_there, window.handle()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1..=6 {
                window.wait(0, None, |seen| seen == value).unwrap();
                window.store(8, value);
            }
        });
        scope.spawn(|| {
            for value in 1..=6 {
                // Takes the wakeup flags from the thread that sleeps.
                pair.there.recv(pair.to_here, value, memferry_message::TAG_ALL, &mut []).unwrap();
            }
        });
        for value in 1..=6 {
            // Long enough for the one to block on descriptors; the other comes and goes.
            std::thread::sleep(Duration::from_millis(90));
            remote.put_notify(16, &[], PutNotification { offset: 0, value }).unwrap();
            pair.here.send(pair.to_there, value, &[]).unwrap();
            until("the waiting thread has seen it", || window.load(8) == value);
        }
    });
}

#[test]
fn a_panic_in_what_is_waited_for_leaves_nothing_behind() {
    let pair = pair(&EndpointBuilder::new());
    let window = pair.there.expose(vec![0u8; 64], Rights::READ_WRITE).unwrap();
    let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut polls = 0;
        window.wait(0, None, |_| {
            polls += 1;
            assert!(polls < 3, "on purpose");
            false
        })
    }));
    assert!(waited.is_err());
    drop(window.withdraw().unwrap());
    // Other threads sleep and wake as before.
    let again = pair.there.expose(vec![0u8; 64], Rights::READ_WRITE).unwrap();
    assert_eq!(again.wait(0, Some(Duration::from_millis(100)), |_| false), Ok(None));
}
