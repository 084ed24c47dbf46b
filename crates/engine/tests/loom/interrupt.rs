//! A thread that sleeps until the interrupt of a device, beside the device and a thread that polls. A
//! lost wake-up shows as a deadlock: nobody else wakes the sleeper, and its timeout never passes.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use memferry_engine::contract::{CostLine, NotificationWrite};
use memferry_engine::pci::channel::{ChannelInterrupt, DeviceChannel};
use memferry_engine::pci::hardware::{HardwareQueue, HwStatus, PostResult};
use memferry_engine::{Channel, Completion, Descriptor, InterruptSleep, Opcode};
use memferry_sys::event::SleepEvent;

use crate::model;

/// The target of the transfers.
static BYTE: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// An eventfd.
#[derive(Debug, Default)]
struct CountedEvent {
    signals: Mutex<u64>,
    signalled: Condvar,
}

impl SleepEvent for CountedEvent {
    fn signal(&self) {
        *self.signals.lock().unwrap() += 1;
        self.signalled.notify_all();
    }

    fn wait(&self, _: Duration) -> bool {
        let mut signals = self.signals.lock().unwrap();
        while *signals == 0 {
            signals = self.signalled.wait(signals).unwrap();
        }
        true
    }

    fn drain(&self) -> u64 {
        std::mem::take(&mut self.signals.lock().unwrap())
    }
}

/// A device that ends everything it has when it is told to.
#[derive(Debug)]
struct Device {
    posted: usize,
    may_end: Arc<AtomicBool>,
}

// SAFETY: the device accesses no memory.
unsafe impl HardwareQueue for Device {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        self.posted += 1;
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {}

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        if self.may_end.load(Ordering::Acquire) {
            ended.extend((0..std::mem::take(&mut self.posted)).map(|_| HwStatus::Ok));
        }
    }
}

/// A channel over a device that has one descriptor.
struct World {
    channel: DeviceChannel,
    event: Arc<CountedEvent>,
    may_end: Arc<AtomicBool>,
    transfer: Arc<Completion>,
}

impl World {
    fn new() -> Arc<Self> {
        let (event, may_end) = (Arc::new(CountedEvent::default()), Arc::default());
        let device = Device { posted: 0, may_end: Arc::clone(&may_end) };
        // A byte takes longer than anybody polls.
        let cost = CostLine { startup_ns: 1e9, ns_per_byte: 1e9 };
        let interrupt = ChannelInterrupt::new(event.clone(), cost);
        let channel = DeviceChannel::new(Box::new(device), 2).with_interrupt(Some(interrupt));
        let transfer = Arc::new(Completion::whole());
        // SAFETY: the byte is static, nothing else accesses it, and the completion has no other
        // descriptor.
        let fill = unsafe {
            Descriptor::new(Opcode::Fill, 0, BYTE.as_ptr() as u64, 1).completes(transfer.clone())
        };
        assert_eq!(channel.submit(&mut [Some(fill)]).unwrap().count, 1);
        Arc::new(Self { channel, event, may_end, transfer })
    }

    /// Waits as a waiter does: sleeps, and polls after each sleep.
    fn wait(&self) {
        while !self.transfer.is_done() {
            let is_done = || self.transfer.is_done();
            let slept = self.channel.sleep_until_interrupt(Duration::from_secs(600), &is_done);
            assert_ne!(slept, InterruptSleep::TimedOut);
            if !self.channel.poll() {
                thread::yield_now();
            }
        }
    }
}

#[test]
fn an_interrupt_at_any_time_wakes_the_sleeper() {
    model(3, || {
        let world = World::new();
        let device = thread::spawn({
            let world = world.clone();
            move || {
                world.may_end.store(true, Ordering::Release);
                world.event.signal();
            }
        });
        world.wait();
        device.join().unwrap();
        assert!(matches!(world.transfer.outcome(), Some(Ok(_))));
    });
}

#[test]
fn a_thread_that_finishes_the_transfer_wakes_the_sleeper_if_no_interrupt_comes() {
    model(3, || {
        let world = World::new();
        let poller = thread::spawn({
            let world = world.clone();
            move || {
                world.may_end.store(true, Ordering::Release);
                while !world.transfer.is_done() {
                    if !world.channel.poll() {
                        thread::yield_now();
                    }
                }
            }
        });
        world.wait();
        poller.join().unwrap();
    });
}

#[test]
fn two_threads_that_want_to_sleep_both_return() {
    model(2, || {
        let world = World::new();
        let other = thread::spawn({
            let world = world.clone();
            move || world.wait()
        });
        world.may_end.store(true, Ordering::Release);
        world.event.signal();
        world.wait();
        other.join().unwrap();
    });
}
