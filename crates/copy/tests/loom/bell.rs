//! Whoever submits and the driver that falls asleep: nothing is left lying.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use loom::thread;
use memferry_engine::contract::Notice;
use memferry_engine::device::channel::DeviceChannel;
use memferry_engine::device::hardware::{Ended, Hardware, Posted};
use memferry_engine::{Channel, Completion, Descriptor, Operation};

use crate::driver::{Bell, Driven, Driver};
use crate::model;

/// What the transfers fill: one byte each.
static BYTES: [AtomicU8; 2] = [const { AtomicU8::new(0) }; 2];

/// Ends what it was rung for when it is looked at.
#[derive(Debug, Default)]
struct Card {
    posted: usize,
    rung: usize,
}

// SAFETY: it touches no memory at all.
unsafe impl Hardware for Card {
    fn post(&mut self, _: &Descriptor, _: Option<Notice>) -> Posted {
        self.posted += 1;
        Posted::Taken
    }

    fn ring(&mut self) {
        self.rung += std::mem::take(&mut self.posted);
    }

    fn look(&mut self, ended: &mut Vec<Ended>) {
        ended.extend((0..std::mem::take(&mut self.rung)).map(|_| Ended::Well));
    }
}

/// So many driven channels, one behind the other, and their driver.
fn start<const CHANNELS: usize>() -> ([Arc<Driven>; CHANNELS], Option<Driver>) {
    let bell = Bell::new();
    let channels = [(); CHANNELS].map(|()| {
        let channel = Arc::new(DeviceChannel::new(Box::<Card>::default(), BYTES.len()));
        Arc::new(Driven::new(channel, bell.clone()))
    });
    let driver = Driver::start(channels.to_vec(), bell).unwrap();
    assert!(driver.is_some());
    (channels, driver)
}

/// The descriptor of a transfer over the byte of this index.
fn descriptor(index: usize, completion: &Arc<Completion>) -> Descriptor {
    let target = BYTES[index].as_ptr() as u64;
    // SAFETY: the byte is there for ever, and one transfer at a time has it; its completion has no
    // other descriptor.
    unsafe { Descriptor::new(Operation::Fill, 0, target, 1).completes(completion.clone()) }
}

/// Submits, and sleeps until the driver has polled the end out of the channel.
fn submit_and_sleep(channel: &Driven, index: usize) {
    let completion = Arc::new(Completion::whole());
    channel.submit_one(descriptor(index, &completion)).unwrap();
    sleep(channel, &completion);
}

fn sleep(channel: &Driven, completion: &Completion) {
    assert!(completion.wait(0, None));
    assert!(matches!(completion.outcome(), Some(Ok(_))));
    assert_eq!(channel.error_of(u64::MAX), None, "the channel has not broken down");
}

#[test]
fn a_driver_that_falls_asleep_beside_a_submit_is_woken() {
    model(3, || {
        let ([channel], driver) = start();
        submit_and_sleep(&channel, 0);
        // By now it sleeps again, or is about to.
        submit_and_sleep(&channel, 0);
        drop(driver);
    });
}

#[test]
fn a_driver_that_falls_asleep_beside_two_submitters_is_woken_for_both() {
    model(2, || {
        let ([channel], driver) = start();
        let other = thread::spawn({
            let channel = channel.clone();
            move || submit_and_sleep(&channel, 1)
        });
        submit_and_sleep(&channel, 0);
        other.join().unwrap();
        drop(driver);
    });
}

#[test]
fn a_driver_of_two_channels_is_woken_for_either() {
    model(2, || {
        let (channels, driver) = start::<2>();
        let other = thread::spawn({
            let channel = channels[1].clone();
            move || submit_and_sleep(&channel, 1)
        });
        submit_and_sleep(&channels[0], 0);
        other.join().unwrap();
        drop(driver);
    });
}

#[test]
fn what_somebody_else_polls_out_of_the_channel_leaves_nothing_lying() {
    model(2, || {
        let ([channel], driver) = start();
        let other = thread::spawn({
            let channel = channel.clone();
            move || {
                submit_and_sleep(&channel, 1);
                channel.poll();
            }
        });
        channel.poll();
        submit_and_sleep(&channel, 0);
        other.join().unwrap();
        drop(driver);
        assert_eq!(channel.completed(), 2);
    });
}

#[test]
fn a_driver_that_ends_has_done_what_was_submitted_before() {
    model(3, || {
        let ([channel], driver) = start();
        let completion = Arc::new(Completion::whole());
        channel.submit_one(descriptor(0, &completion)).unwrap();
        drop(driver);
        assert!(completion.is_done());
        channel.submit_one(descriptor(1, &Arc::new(Completion::whole()))).unwrap_err();
    });
}

#[test]
fn a_submit_beside_the_end_of_the_driver_is_carried_out_or_left_to_its_caller() {
    model(3, || {
        let ([channel], driver) = start();
        let other = thread::spawn({
            let channel = channel.clone();
            move || {
                let completion = Arc::new(Completion::whole());
                match channel.submit_one(descriptor(0, &completion)) {
                    Ok(_) => sleep(&channel, &completion),
                    Err(descriptor) => _ = descriptor.run(),
                }
            }
        });
        drop(driver);
        other.join().unwrap();
    });
}
