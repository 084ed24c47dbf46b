//! A submitter and a poll thread that falls asleep: no descriptor is left without a poll.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use loom::thread;
use memferry_engine::contract::NotificationWrite;
use memferry_engine::pci::channel::DeviceChannel;
use memferry_engine::pci::hardware::{HardwareQueue, HwStatus, PostResult};
use memferry_engine::{Channel, Completion, Descriptor, Opcode};

use crate::model;
use crate::poller::{PollDoorbell, PollThread, ThreadPolledChannel};

/// The targets of the transfers: one byte for each.
static BYTES: [AtomicU8; 2] = [const { AtomicU8::new(0) }; 2];

/// A card that completes the descriptors that it was rung for when it is polled.
#[derive(Debug, Default)]
struct Card {
    posted: usize,
    rung: usize,
}

// SAFETY: the card accesses no memory.
unsafe impl HardwareQueue for Card {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        self.posted += 1;
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {
        self.rung += std::mem::take(&mut self.posted);
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        ended.extend((0..std::mem::take(&mut self.rung)).map(|_| HwStatus::Ok));
    }
}

/// Creates `CHANNELS` polled channels and their poll thread.
fn start<const CHANNELS: usize>() -> ([Arc<ThreadPolledChannel>; CHANNELS], Option<PollThread>) {
    let bell = PollDoorbell::new();
    let channels = [(); CHANNELS].map(|()| {
        let channel = Arc::new(DeviceChannel::new(Box::<Card>::default(), BYTES.len()));
        Arc::new(ThreadPolledChannel::new(channel, bell.clone()))
    });
    let poller = PollThread::start(channels.to_vec(), bell).unwrap();
    assert!(poller.is_some());
    (channels, poller)
}

/// The descriptor of a transfer to the byte of this index.
fn descriptor(index: usize, completion: &Arc<Completion>) -> Descriptor {
    let target = BYTES[index].as_ptr() as u64;
    // SAFETY: the byte is static, and one transfer at a time accesses it; the completion has no
    // other descriptor.
    unsafe { Descriptor::new(Opcode::Fill, 0, target, 1).completes(completion.clone()) }
}

/// Submits, and sleeps until the poll thread has polled the completion.
fn submit_and_sleep(channel: &ThreadPolledChannel, index: usize) {
    let completion = Arc::new(Completion::whole());
    channel.submit_one(descriptor(index, &completion)).unwrap();
    sleep(channel, &completion);
}

fn sleep(channel: &ThreadPolledChannel, completion: &Completion) {
    assert!(completion.wait(0, None));
    assert!(matches!(completion.outcome(), Some(Ok(_))));
    assert_eq!(channel.error_of(u64::MAX), None, "the channel has not broken down");
}

#[test]
fn a_driver_that_falls_asleep_beside_a_submit_is_woken() {
    model(1, || {
        let ([channel], poller) = start();
        submit_and_sleep(&channel, 0);
        // By now the poll thread sleeps again, or is about to.
        submit_and_sleep(&channel, 0);
        drop(poller);
    });
}

#[test]
fn a_driver_that_falls_asleep_beside_two_submitters_is_woken_for_both() {
    model(1, || {
        let ([channel], poller) = start();
        let other = thread::spawn({
            let channel = channel.clone();
            move || submit_and_sleep(&channel, 1)
        });
        submit_and_sleep(&channel, 0);
        other.join().unwrap();
        drop(poller);
    });
}

#[test]
fn a_driver_of_two_channels_is_woken_for_either() {
    model(1, || {
        let (channels, poller) = start::<2>();
        let other = thread::spawn({
            let channel = channels[1].clone();
            move || submit_and_sleep(&channel, 1)
        });
        submit_and_sleep(&channels[0], 0);
        other.join().unwrap();
        drop(poller);
    });
}

#[test]
fn what_somebody_else_polls_out_of_the_channel_leaves_nothing_lying() {
    model(1, || {
        let ([channel], poller) = start();
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
        drop(poller);
        assert_eq!(channel.completed(), 2);
    });
}

#[test]
fn a_driver_that_ends_has_done_what_was_submitted_before() {
    model(1, || {
        let ([channel], poller) = start();
        let completion = Arc::new(Completion::whole());
        channel.submit_one(descriptor(0, &completion)).unwrap();
        drop(poller);
        assert!(completion.is_done());
        channel.submit_one(descriptor(1, &Arc::new(Completion::whole()))).unwrap_err();
    });
}

#[test]
fn a_submit_beside_the_end_of_the_driver_is_carried_out_or_left_to_its_caller() {
    model(1, || {
        let ([channel], poller) = start();
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
        drop(poller);
        other.join().unwrap();
    });
}
