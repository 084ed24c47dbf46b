//! A queue whose work queue ends descriptors when the test says so, in any order.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use memferry_sys::EventFd;
use memferry_sys::portal::PortalWords;
use memferry_sys::sync::lock;

use super::super::record::status;
use super::super::work_queue::QueueCheck;
use super::*;
use crate::contract::{Opcode, PinnedLocation};
use crate::pci::CoherentMemory;

/// The handle of the interrupt.
const HANDLE: u16 = 1;
/// The status and the first word of a record of success.
const SUCCESS: u64 = status::SUCCESS as u64;
const FAILURE: u64 = status::HARDWARE as u64;

/// What the work queue has, and whether it refuses more.
#[derive(Debug, Default)]
struct PortState {
    submitted: Vec<DsaDescriptor>,
    is_refusing: bool,
}

/// A work queue that executes nothing by itself.
#[derive(Debug, Clone)]
struct ManualPort {
    state: Arc<Mutex<PortState>>,
    /// The number of calls that submit.
    calls: Arc<AtomicU64>,
    event: Arc<EventFd>,
    size: usize,
    max_batch: usize,
}

impl ManualPort {
    /// A work queue of `size` entries, and its queue.
    fn open(size: usize, max_batch: usize) -> (Self, DsaQueue) {
        let event = Arc::new(EventFd::new().unwrap());
        let port = Self { state: Arc::default(), calls: Arc::default(), event, size, max_batch };
        let tuning = DsaTuning::published();
        let queue = DsaQueue::new(Box::new(port.clone()), 8, &tuning, Arc::default()).unwrap();
        lock(&port.state).submitted.clear();
        (port, queue)
    }

    fn refuse(&self, is_refusing: bool) {
        lock(&self.state).is_refusing = is_refusing;
    }

    /// Which of the submissions raise an interrupt.
    fn raising(&self) -> Vec<bool> {
        let raises = |descriptor: &DsaDescriptor| descriptor.interrupt() == Some(HANDLE);
        lock(&self.state).submitted.iter().map(raises).collect()
    }

    fn submitted(&self) -> usize {
        lock(&self.state).submitted.len()
    }

    /// Ends a submission. What a batch names is then not executed.
    fn end(&self, number: usize) {
        self.end_with(number, SUCCESS);
    }

    fn end_with(&self, number: usize, record: u64) {
        end(&lock(&self.state).submitted[number], record);
    }
}

/// Writes the first word of the record of a descriptor.
fn end(descriptor: &DsaDescriptor, first_word: u64) {
    let record = descriptor.record().unwrap() as *mut u64;
    // SAFETY: the record of a descriptor that has not ended is memory of the queue, which exists, and
    // which the queue accesses by atomic loads.
    unsafe { AtomicU64::from_ptr(record) }.store(first_word, Ordering::Release);
}

// SAFETY: it accesses no memory of a descriptor.
unsafe impl WorkQueue for ManualPort {
    fn limits(&self) -> QueueLimits {
        let (size, max_batch) = (self.size, self.max_batch);
        QueueLimits { size, max_bytes: 1 << 20, max_batch, opcodes: u64::MAX, cache_control: false }
    }

    fn allocate(&self, bytes: usize) -> io::Result<CoherentMemory> {
        CoherentMemory::shared_virtual(bytes)
    }

    fn address(&self, _: Option<PinnedLocation<'_>>, address: u64, _: u64) -> Option<u64> {
        Some(address)
    }

    unsafe fn submit(&mut self, descriptors: &[PortalWords]) -> Result<usize, QueueStop> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut state = lock(&self.state);
        if state.is_refusing {
            return Ok(0);
        }
        for words in descriptors {
            let descriptor = DsaDescriptor::from_words(*words);
            if descriptor.operation() == Some(DsaOperation::Noop) {
                end(&descriptor, SUCCESS);
            }
            state.submitted.push(descriptor);
        }
        Ok(descriptors.len())
    }

    fn check(&mut self) -> Result<QueueCheck, QueueStop> {
        Ok(QueueCheck::Running)
    }

    fn restart(&mut self) -> bool {
        true
    }

    fn resolve_fault(&self, _: u64, _: bool, _: u64) -> FaultResolution {
        FaultResolution::Unsupported
    }

    fn find_bad_memory(&self, _: u64, _: bool, _: u64) -> Option<u64> {
        None
    }

    fn interrupt(&self) -> Option<(u16, Arc<EventFd>)> {
        Some((HANDLE, self.event.clone()))
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(1000)
    }
}

/// Posts a fill of aligned memory, which nothing accesses.
fn post(queue: &mut DsaQueue) {
    // SAFETY: the port executes nothing.
    let fill = unsafe { Descriptor::new(Opcode::Fill, 0, 1 << 20, 64) };
    assert!(matches!(queue.post(&fill, None), PostResult::Accepted));
}

/// Posts a fill that is ordered after all before it.
fn post_ordered(queue: &mut DsaQueue) {
    // SAFETY: the port executes nothing.
    let fill = unsafe { Descriptor::new(Opcode::Fill, 0, 1 << 20, 64) }.ordered();
    assert!(matches!(queue.post(&fill, None), PostResult::Accepted));
}

/// Posts a copy to memory that is not aligned, in two parts.
fn post_in_two_parts(queue: &mut DsaQueue) {
    let before = queue.head;
    // SAFETY: the port executes nothing.
    let copy = unsafe { Descriptor::new(Opcode::Copy, 1 << 24, (1 << 20) + 8, 512 << 10) };
    assert!(matches!(queue.post(&copy, None), PostResult::Accepted));
    assert_eq!(queue.head - before, 2);
}

fn poll(queue: &mut DsaQueue) -> Vec<HwStatus> {
    let mut ended = Vec::new();
    queue.poll_completions(&mut ended);
    ended
}

/// Polls as a thread does before it sleeps; returns the number of ends, and whether the thread must not
/// sleep.
fn arm(queue: &mut DsaQueue) -> (usize, bool) {
    let mut ended = Vec::new();
    queue.arm_interrupt();
    queue.poll_completions(&mut ended);
    (ended.len(), queue.needs_poll())
}

#[test]
fn a_thread_does_not_sleep_while_the_work_queue_refuses_a_descriptor_for_which_it_has_space() {
    let (port, mut queue) = ManualPort::open(4, 1);
    port.refuse(true);
    post(&mut queue);
    queue.request_interrupt();
    queue.ring_doorbell();
    assert_eq!(arm(&mut queue), (0, true));
    port.refuse(false);
    assert_eq!(arm(&mut queue), (0, false));
    // Something raises an interrupt, but later than the work queue takes the next one.
    port.refuse(true);
    post(&mut queue);
    queue.ring_doorbell();
    assert_eq!(arm(&mut queue), (0, true));
    port.refuse(false);
    assert_eq!(arm(&mut queue), (0, false));
    (0..2).for_each(|number| port.end(number));
    assert_eq!(arm(&mut queue), (2, false));
}

#[test]
fn a_thread_does_not_sleep_if_only_submissions_without_an_interrupt_are_left() {
    for max_batch in [1, 2] {
        let (port, mut queue) = ManualPort::open(8, max_batch);
        (0..4).for_each(|_| post(&mut queue));
        queue.request_interrupt();
        queue.ring_doorbell();
        let count = 4 / max_batch;
        assert_eq!(port.raising(), (0..count).map(|n| n + 1 == count).collect::<Vec<_>>());
        assert_eq!(arm(&mut queue), (0, false));
        // The newest ends first.
        port.end(count - 1);
        assert_eq!(arm(&mut queue), (0, true));
        (0..count - 1).for_each(|number| port.end(number));
        assert_eq!(arm(&mut queue), (4, false));
    }
}

#[test]
fn what_takes_the_last_entry_raises_an_interrupt_until_it_ends() {
    let (port, mut queue) = ManualPort::open(2, 1);
    (0..3).for_each(|_| post(&mut queue));
    queue.ring_doorbell();
    assert_eq!(port.raising(), [false, true]);
    port.end(0);
    assert_eq!(arm(&mut queue), (1, false));
    assert_eq!(port.raising(), [false, true, true]);
    (1..3).for_each(|number| port.end(number));
    assert_eq!(arm(&mut queue), (2, false));
}

#[test]
fn what_is_ordered_after_a_descriptor_whose_first_part_failed_is_left_to_the_processor() {
    // Posted before the failure is known, and between the ends of the two parts.
    for is_posted_early in [true, false] {
        let (port, mut queue) = ManualPort::open(8, 1);
        post_in_two_parts(&mut queue);
        queue.ring_doorbell();
        if is_posted_early {
            post_ordered(&mut queue);
        }
        port.end_with(0, FAILURE);
        assert!(poll(&mut queue).is_empty(), "the second part has not ended");
        if !is_posted_early {
            post_ordered(&mut queue);
            queue.ring_doorbell();
        }
        port.end(1);
        let ended = [poll(&mut queue), poll(&mut queue)].concat();
        assert!(matches!(ended[..], [HwStatus::Failed(_), HwStatus::Failed(BEHIND_FAILURE)]));
        assert_eq!(port.submitted(), 2, "the device has not got what is ordered");
    }
}

#[test]
fn what_an_ordered_descriptor_waits_for_raises_an_interrupt_and_polls_submit_nothing() {
    let (port, mut queue) = ManualPort::open(8, 1);
    (0..2).for_each(|_| post(&mut queue));
    post_ordered(&mut queue);
    queue.request_interrupt();
    queue.ring_doorbell();
    assert_eq!(port.raising(), [false, true]);
    let calls = port.calls.load(Ordering::Relaxed);
    assert_eq!(arm(&mut queue), (0, false));
    assert_eq!(port.calls.load(Ordering::Relaxed), calls);
    (0..2).for_each(|number| port.end(number));
    assert_eq!(arm(&mut queue), (2, false));
    assert_eq!(port.raising(), [false, true, true]);
    port.end(2);
    assert_eq!(arm(&mut queue), (1, false));
}

#[test]
fn a_ring_is_full_when_a_descriptor_of_two_parts_has_no_space() {
    let (port, mut queue) = ManualPort::open(64, 1);
    let slots = queue.slots.len();
    for posted in 0..slots {
        assert_eq!(queue.is_full(), posted + 2 > slots, "{posted} of {slots}");
        post(&mut queue);
    }
    queue.ring_doorbell();
    (0..slots).for_each(|number| port.end(number));
    assert_eq!(arm(&mut queue).0, slots);
    assert!(!queue.is_full());
}
