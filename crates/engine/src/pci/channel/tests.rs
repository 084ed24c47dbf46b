//! Drivers that panic, devices that must be recovered, and devices that raise no interrupt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memferry_sys::EventFd;

use super::*;
use crate::completion::Completion;
use crate::contract::{CostLine, NotificationWrite, Opcode};
use crate::pci::hardware::{HwStatus, PostResult};

/// Accepts everything, and panics when it is polled.
#[derive(Debug)]
struct PanickingHardware {
    is_stopped: Arc<AtomicBool>,
    /// How many ends it reports before it panics.
    reported: usize,
}

// SAFETY: it accesses no memory.
unsafe impl HardwareQueue for PanickingHardware {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {}

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        ended.extend((0..self.reported).map(|_| HwStatus::Ok));
        std::panic::resume_unwind(Box::new("a driver that panics, on purpose"));
    }
}

impl Drop for PanickingHardware {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::SeqCst);
    }
}

#[test]
fn after_a_panic_of_the_driver_the_device_is_stopped_and_the_processor_does_the_rest() {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let hardware = Box::new(PanickingHardware { is_stopped: is_stopped.clone(), reported: 1 });
    let channel = DeviceChannel::new(hardware, 4);
    let mut targets = [[0u8; 8]; 3];
    let completions = [(); 3].map(|()| Arc::new(Completion::whole()));
    let mut batch: Vec<_> = (targets.iter_mut().zip(&completions))
        .map(|(target, completion)| {
            let target = target.as_mut_ptr() as u64;
            // SAFETY: the targets outlive the channel; each completion has only this
            // descriptor.
            let fill = unsafe {
                Descriptor::new(Opcode::Fill, 0, target, 8).completes(completion.clone())
            };
            Some(fill.value(7))
        })
        .collect();
    assert_eq!(channel.submit(&mut batch), Ok(Submitted { first: 1, count: 3 }));
    assert!(channel.poll());
    assert!(is_stopped.load(Ordering::SeqCst), "stopped before any memory is freed");
    assert!(completions.iter().all(|completion| matches!(completion.outcome(), Some(Ok(_)))));
    assert_eq!((channel.completed(), channel.statistics().failed), (3, 2));
    assert_eq!(channel.submit(&mut []), Err(SubmitError::Closed));
    // What the driver has reported is not done again: its owner may use the memory for something else.
    assert_eq!(targets, [[0; 8], [7; 8], [7; 8]]);
}

/// Accepts everything. When it is recovered, everything has failed.
#[derive(Debug)]
struct StoppedHardware {
    posted: usize,
    recoveries: Arc<AtomicUsize>,
}

// SAFETY: it accesses no memory.
unsafe impl HardwareQueue for StoppedHardware {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        self.posted += 1;
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {}

    fn poll_completions(&mut self, _: &mut Vec<HwStatus>) {}

    fn recover(&mut self, ended: &mut Vec<HwStatus>) {
        self.recoveries.fetch_add(1, Ordering::SeqCst);
        ended.extend((0..std::mem::take(&mut self.posted)).map(|_| HwStatus::Failed("stopped")));
    }
}

#[test]
fn a_brief_poll_does_not_recover_a_device_and_does_little_of_its_work() {
    const COUNT: usize = 40;
    let recoveries = Arc::new(AtomicUsize::new(0));
    let hardware = StoppedHardware { posted: 0, recoveries: recoveries.clone() };
    let channel = DeviceChannel::new(Box::new(hardware), COUNT);
    let mut target = [0u8; COUNT];
    let completions = [(); COUNT].map(|()| Arc::new(Completion::whole()));
    let mut batch: Vec<_> = (target.iter_mut().zip(&completions))
        .map(|(byte, completion)| {
            let target = std::ptr::from_mut(byte) as u64;
            // SAFETY: the target outlives the channel; each completion has only this descriptor.
            let fill = unsafe {
                Descriptor::new(Opcode::Fill, 0, target, 1).completes(completion.clone())
            };
            Some(fill.value(7))
        })
        .collect();
    assert_eq!(channel.submit(&mut batch), Ok(Submitted { first: 1, count: COUNT }));
    assert!(!channel.poll_briefly());
    assert_eq!(recoveries.load(Ordering::SeqCst), 0);
    // One step does a bounded part of it, and a brief poll one descriptor of the rest.
    assert!(channel.poll());
    let done = channel.completed();
    assert!(recoveries.load(Ordering::SeqCst) == 1 && done > 0 && done < COUNT as u64, "{done}");
    assert!(channel.poll_briefly());
    assert_eq!((channel.completed(), recoveries.load(Ordering::SeqCst)), (done + 1, 1));
    while channel.poll() {}
    assert!(completions.iter().all(|completion| matches!(completion.outcome(), Some(Ok(_)))));
    drop(channel);
    assert_eq!(target, [7; COUNT]);
}

/// Ends what was posted when it is polled.
#[derive(Debug, Default)]
struct PromptHardware {
    posted: usize,
}

// SAFETY: it accesses no memory.
unsafe impl HardwareQueue for PromptHardware {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        self.posted += 1;
        PostResult::Accepted
    }

    fn ring_doorbell(&mut self) {}

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        ended.extend((0..std::mem::take(&mut self.posted)).map(|_| HwStatus::Ok));
    }
}

/// Completed descriptors, bytes, depth and sizes of the channel, as another process sees them.
fn seen(name: &str) -> [u64; 4] {
    let own = memferry_sys::stats::reader::processes(Some(std::process::id())).unwrap();
    let mut blocks = own.iter().flat_map(|process| &process.blocks);
    let block = blocks.find(|block| block.kind == "channel" && block.name == name).unwrap();
    ["completed", "bytes", "depth", "sizes"].map(|field| block.sum(field))
}

#[test]
fn a_channel_that_is_polled_is_shown_while_it_waits_and_when_it_is_done() {
    let mut target = [0u8; 8];
    let hardware = Box::<PromptHardware>::default();
    let channel = DeviceChannel::new(hardware, 200).shown_as("model", Some("memferry-seen"));
    assert_eq!(seen("model seen"), [0; 4]);
    let mut submit = |count: usize| {
        let mut batch: Vec<_> = (0..count)
            .map(|_| {
                let completion = Arc::new(Completion::whole());
                let target = target.as_mut_ptr() as u64;
                // SAFETY: the target outlives the channel, and nothing writes to it.
                let fill = unsafe { Descriptor::new(Opcode::Fill, 0, target, 8) };
                // SAFETY: the completion has only this descriptor.
                Some(unsafe { fill.completes(completion) })
            })
            .collect();
        assert_eq!(channel.submit(&mut batch).unwrap().count, count);
    };
    submit(1);
    // A device that hangs is seen to have work.
    assert_eq!(seen("model seen"), [0, 0, 1, 0]);
    assert!(channel.poll());
    assert_eq!(seen("model seen"), [1, 8, 0, 1]);
    submit(150);
    assert!(channel.poll());
    assert_eq!(seen("model seen"), [151, 1208, 0, 151]);
}

/// The control of a quiet device.
#[derive(Debug, Default)]
struct QuietControl {
    /// The numbers of the descriptors that request an interrupt, from 1 on.
    requests: std::sync::Mutex<Vec<usize>>,
    needs_poll: AtomicBool,
    may_end: AtomicBool,
}

/// A device of two descriptors that raises no interrupt.
#[derive(Debug)]
struct QuietHardware {
    control: Arc<QuietControl>,
    posted: usize,
    in_flight: usize,
}

// SAFETY: it accesses no memory.
unsafe impl HardwareQueue for QuietHardware {
    fn post(&mut self, _: &Descriptor, _: Option<NotificationWrite<'_>>) -> PostResult {
        if self.is_full() {
            return PostResult::Full;
        }
        self.posted += 1;
        self.in_flight += 1;
        PostResult::Accepted
    }

    fn request_interrupt(&mut self) {
        lock(&self.control.requests).push(self.posted);
    }

    fn is_full(&self) -> bool {
        self.in_flight == 2
    }

    fn needs_poll(&self) -> bool {
        self.control.needs_poll.load(Ordering::SeqCst)
    }

    fn ring_doorbell(&mut self) {}

    fn poll_completions(&mut self, ended: &mut Vec<HwStatus>) {
        if self.control.may_end.load(Ordering::SeqCst) {
            ended.extend((0..std::mem::take(&mut self.in_flight)).map(|_| HwStatus::Ok));
        }
    }
}

/// A channel over a quiet device, whose waiters sleep for `min_bytes` or more.
fn quiet(min_bytes: u32) -> (DeviceChannel, Arc<QuietControl>) {
    let control = Arc::<QuietControl>::default();
    let hardware = QuietHardware { control: control.clone(), posted: 0, in_flight: 0 };
    let ns_per_byte = 50_000.0 / (f64::from(min_bytes) - 0.5);
    let cost = CostLine { startup_ns: 0.0, ns_per_byte };
    let interrupt = ChannelInterrupt::new(Arc::new(EventFd::new().unwrap()), cost);
    let channel = DeviceChannel::new(Box::new(hardware), 8).with_interrupt(Some(interrupt));
    (channel, control)
}

/// Submits a transfer of one byte.
fn submit_byte(channel: &DeviceChannel) -> Arc<Completion> {
    let completion = Arc::new(Completion::whole());
    let target = std::ptr::from_mut(Box::leak(Box::new(0u8))) as u64;
    // SAFETY: the target is never freed, and nothing else uses it; the completion has only this
    // descriptor.
    let fill = unsafe { Descriptor::new(Opcode::Fill, 0, target, 1).completes(completion.clone()) };
    assert_eq!(channel.submit(&mut [Some(fill)]).unwrap().count, 1);
    completion
}

#[test]
fn what_fills_the_device_requests_an_interrupt_though_it_is_short() {
    let (channel, control) = quiet(1000);
    let transfers = [(); 5].map(|()| submit_byte(&channel));
    assert_eq!(*lock(&control.requests), [2]);
    control.may_end.store(true, Ordering::SeqCst);
    while channel.poll() {}
    assert!(transfers.iter().all(|transfer| transfer.is_done()));
    assert_eq!(*lock(&control.requests), [2, 4]);
}

#[test]
fn no_thread_sleeps_while_no_interrupt_will_come() {
    const LONG: Duration = Duration::from_secs(60);
    let (channel, control) = quiet(1);
    let transfer = submit_byte(&channel);
    control.needs_poll.store(true, Ordering::SeqCst);
    let is_done = || transfer.is_done();
    assert_eq!(channel.sleep_until_interrupt(LONG, &is_done), InterruptSleep::NotArmed);
    // Another thread is inside the gate.
    control.needs_poll.store(false, Ordering::SeqCst);
    assert!(channel.gate.try_enter());
    assert_eq!(channel.sleep_until_interrupt(LONG, &is_done), InterruptSleep::NotArmed);
    channel.leave();
    let short = Duration::from_millis(1);
    assert_eq!(channel.sleep_until_interrupt(short, &is_done), InterruptSleep::TimedOut);
    assert_eq!(channel.statistics().sleeps, 1);
    control.may_end.store(true, Ordering::SeqCst);
    assert_eq!(channel.sleep_until_interrupt(LONG, &is_done), InterruptSleep::Woken);
    assert!(is_done());
}

#[test]
fn a_submit_or_a_poll_that_finds_that_no_interrupt_will_come_wakes_the_sleeper() {
    const LONG: Duration = Duration::from_secs(600);
    for submits in [true, false] {
        let (channel, control) = quiet(1);
        let transfer = submit_byte(&channel);
        std::thread::scope(|scope| {
            let sleeper =
                scope.spawn(|| channel.sleep_until_interrupt(LONG, &|| transfer.is_done()));
            while channel.statistics().sleeps == 0 {
                std::thread::yield_now();
            }
            control.needs_poll.store(true, Ordering::SeqCst);
            if submits {
                submit_byte(&channel);
            } else {
                assert!(!channel.poll_briefly());
            }
            assert_eq!(sleeper.join().unwrap(), InterruptSleep::Woken);
        });
        control.may_end.store(true, Ordering::SeqCst);
    }
}
