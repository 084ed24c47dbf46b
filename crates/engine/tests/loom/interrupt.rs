//! A thread that sleeps until the interrupt of a device, beside the device and a thread that polls. A
//! lost wake-up shows as a deadlock: no thread else wakes the sleeper, and its timeout never passes.
//!
//! Some devices here end what they have when a test permits it. Others execute transfers in a thread, in
//! either order, and raise an interrupt only for those that request one.

use std::collections::VecDeque;
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

/// The number of transfers of a device with a thread.
const TRANSFERS: usize = 2;

/// The transfers that a device has received, and those that it has ended.
#[derive(Debug, Default)]
struct DeviceState {
    /// Whether each raises an interrupt.
    received: Vec<bool>,
    ended: [bool; TRANSFERS],
}

/// The part of a device that its thread and its driver share.
#[derive(Debug, Default)]
struct Hardware {
    state: Mutex<DeviceState>,
    doorbell: Condvar,
    event: CountedEvent,
}

impl SleepEvent for Hardware {
    fn signal(&self) {
        self.event.signal();
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.event.wait(timeout)
    }

    fn drain(&self) -> u64 {
        self.event.drain()
    }
}

impl Hardware {
    /// Ends the transfers in this order, each when it has been received.
    fn run(&self, order: [usize; TRANSFERS]) {
        for number in order {
            let mut state = self.state.lock().unwrap();
            while state.received.len() <= number {
                state = self.doorbell.wait(state).unwrap();
            }
            state.ended[number] = true;
            let raises_interrupt = state.received[number];
            drop(state);
            if raises_interrupt {
                self.event.signal();
            }
        }
    }
}

/// The driver of such a device.
#[derive(Debug)]
struct Driver {
    hardware: Arc<Hardware>,
    /// The number of transfers that the device has space for.
    size: usize,
    /// Transfers that the device has not received, and whether they raise an interrupt.
    pending: VecDeque<bool>,
    /// The number of doorbells that the device refuses.
    refused: usize,
    reported: usize,
    received: usize,
    /// Whether the driver reports that no interrupt will come.
    reports_silence: bool,
}

impl Driver {
    fn publish(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        if self.refused > 0 {
            self.refused -= 1;
            return;
        }
        let mut state = self.hardware.state.lock().unwrap();
        state.received.extend(self.pending.drain(..));
        self.received = state.received.len();
        self.hardware.doorbell.notify_all();
    }
}

// SAFETY: the device accesses no memory.
unsafe impl HardwareQueue for Driver {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        if self.is_full() {
            return PostResult::Full;
        }
        self.pending.push_back(false);
        PostResult::Accepted
    }

    fn request_interrupt(&mut self) {
        *self.pending.back_mut().unwrap() = true;
    }

    fn is_full(&self) -> bool {
        self.received - self.reported + self.pending.len() == self.size
    }

    fn needs_poll(&self) -> bool {
        let state = self.hardware.state.lock().unwrap();
        let in_flight = self.reported..self.received;
        let is_raised = |number: usize| state.received[number] && !state.ended[number];
        let is_silent = !in_flight.is_empty() && !in_flight.clone().any(is_raised);
        self.reports_silence && (is_silent || !self.pending.is_empty())
    }

    fn ring_doorbell(&mut self) {
        self.publish();
    }

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        let state = self.hardware.state.lock().unwrap();
        while self.reported < self.received && state.ended[self.reported] {
            self.reported += 1;
            ended.push(HwStatus::Ok);
        }
        drop(state);
        self.publish();
    }
}

/// A channel over a device with a thread, and its transfers.
struct ThreadWorld {
    channel: DeviceChannel,
    hardware: Arc<Hardware>,
    transfers: [Arc<Completion>; TRANSFERS],
}

/// What a device with a thread is like.
#[derive(Clone, Copy)]
struct DeviceKind {
    size: usize,
    /// Transfers of so many bytes together request an interrupt; each has one byte.
    min_bytes: u32,
    refused: usize,
    reports_silence: bool,
}

impl DeviceKind {
    fn world(self) -> Arc<ThreadWorld> {
        let hardware = Arc::<Hardware>::default();
        let driver = Driver {
            hardware: hardware.clone(),
            size: self.size,
            pending: VecDeque::new(),
            refused: self.refused,
            reported: 0,
            received: 0,
            reports_silence: self.reports_silence,
        };
        let ns_per_byte = 50_000.0 / (f64::from(self.min_bytes) - 0.5);
        let cost = CostLine { startup_ns: 0.0, ns_per_byte };
        let interrupt = ChannelInterrupt::new(hardware.clone(), cost);
        let channel =
            DeviceChannel::new(Box::new(driver), TRANSFERS).with_interrupt(Some(interrupt));
        let transfers = [(); TRANSFERS].map(|()| Arc::new(Completion::whole()));
        Arc::new(ThreadWorld { channel, hardware, transfers })
    }
}

impl ThreadWorld {
    fn submit(&self, number: usize) {
        // SAFETY: the byte is static, no thread accesses it, and each completion has only this
        // descriptor.
        let fill = unsafe {
            Descriptor::new(Opcode::Fill, 0, BYTE.as_ptr() as u64, 1)
                .completes(self.transfers[number].clone())
        };
        assert_eq!(self.channel.submit(&mut [Some(fill)]).unwrap().count, 1);
    }

    /// Waits for all transfers as a waiter does.
    fn wait(&self) {
        let is_done = || self.transfers.iter().all(|transfer| transfer.is_done());
        while !is_done() {
            self.channel.sleep_until_interrupt(Duration::from_secs(600), &is_done);
            if !self.channel.poll() {
                thread::yield_now();
            }
        }
    }

    /// Runs the device in a thread, while this one submits what is left and waits.
    fn run(self: &Arc<Self>, order: [usize; TRANSFERS], submit: impl FnOnce(&Self)) {
        let device = thread::spawn({
            let hardware = self.hardware.clone();
            move || hardware.run(order)
        });
        submit(self);
        self.wait();
        device.join().unwrap();
        assert!(self.transfers.iter().all(|one| matches!(one.outcome(), Some(Ok(_)))));
    }
}

#[test]
fn a_device_of_one_transfer_wakes_the_sleeper_after_each() {
    model(3, || {
        // The first one fills the device, and would request no interrupt by its length. The driver does
        // not report that.
        let device = DeviceKind { size: 1, min_bytes: 2, refused: 0, reports_silence: false };
        device.world().run([0, 1], |world| (0..TRANSFERS).for_each(|number| world.submit(number)));
    });
}

#[test]
fn a_device_of_two_transfers_wakes_the_sleeper_in_either_order() {
    for order in [[0, 1], [1, 0]] {
        model(3, move || {
            // Only the second one requests an interrupt, and it may end first.
            let device = DeviceKind { size: 3, min_bytes: 2, refused: 0, reports_silence: true };
            device
                .world()
                .run(order, |world| (0..TRANSFERS).for_each(|number| world.submit(number)));
        });
    }
}

#[test]
fn the_last_transfer_that_a_device_has_space_for_wakes_the_sleeper() {
    model(3, || {
        let device = DeviceKind { size: 2, min_bytes: 2, refused: 0, reports_silence: false };
        device.world().run([0, 1], |world| (0..TRANSFERS).for_each(|number| world.submit(number)));
    });
}

#[test]
fn a_doorbell_that_the_device_refuses_is_rung_again_although_a_thread_wants_to_sleep() {
    for size in 1..=TRANSFERS {
        model(3, move || {
            let device = DeviceKind { size, min_bytes: 1, refused: 1, reports_silence: true };
            device
                .world()
                .run([0, 1], |world| (0..TRANSFERS).for_each(|number| world.submit(number)));
        });
    }
}

#[test]
fn a_doorbell_that_is_refused_beside_a_thread_that_goes_to_sleep_wakes_it() {
    model(2, || {
        let device = DeviceKind { size: 2, min_bytes: 1, refused: 1, reports_silence: true };
        let world = device.world();
        // The device executes when everything is submitted.
        let submitter = thread::spawn({
            let world = world.clone();
            move || {
                (0..TRANSFERS).for_each(|number| world.submit(number));
                world.hardware.run([0, 1]);
            }
        });
        world.wait();
        submitter.join().unwrap();
    });
}
