//! Receives that are posted ahead: the sender copies while the receiver makes no call, and a wait for one
//! message copies nothing of the next.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use memferry_message::plan::PathKind;
use memferry_message::{Endpoint, EndpointBuilder, Peer, TAG_ALL};
use memferry_testing::message::{unique, until};

/// A message that is announced, and that the receiver copies alone if it waits.
const SHORT: usize = 24 << 10;
const LONG: usize = 1 << 20;

fn builder() -> EndpointBuilder {
    EndpointBuilder::new().eager_bytes(4 << 10)
}

/// The target of a receive in flight, which another thread may write.
struct Target(Vec<u8>);

impl Target {
    fn new(length: usize) -> Self {
        // Every page is resident.
        Self(vec![1; length])
    }

    fn address(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Whether every byte is `value`, as another thread sees it now.
    fn is_all(&self, value: u8) -> bool {
        // SAFETY: each byte is inside the vector, and every value is a byte.
        self.0.iter().all(|byte| unsafe { std::ptr::read_volatile(byte) } == value)
    }
}

/// What a thread that sends does in turns with one that receives.
fn pair(
    builder: impl Fn() -> EndpointBuilder,
    send: impl FnOnce(&Endpoint, Peer, &AtomicU32) + Send,
    receive: impl FnOnce(&Endpoint, Peer, &AtomicU32) + Send,
) {
    let [one, other] = ["ahead-sender", "ahead-receiver"].map(unique);
    let sender = builder().open(&one).unwrap();
    let receiver = builder().open(&other).unwrap();
    let to = sender.connect(&other).unwrap();
    let from = receiver.connect(&one).unwrap();
    let step = AtomicU32::new(0);
    thread::scope(|threads| {
        threads.spawn(|| send(&sender, to, &step));
        receive(&receiver, from, &step);
    });
}

fn await_step(step: &AtomicU32, number: u32) {
    until("it is this thread's turn", || step.load(Ordering::Acquire) >= number);
}

/// Waits for the announcement of a message, so that a receive finds it there.
fn await_announcement(receiver: &Endpoint, from: Peer, tag: u64) {
    assert!(receiver.probe(from, tag, TAG_ALL).is_ok());
}

#[test]
fn the_sender_copies_a_short_message_while_the_receiver_makes_no_call() {
    if thread::available_parallelism().map_or(1, usize::from) < 2 {
        // Processes that share a core do not copy for each other.
        return;
    }
    let send = |sender: &Endpoint, to: Peer, _: &AtomicU32| {
        for tag in 1..=20 {
            sender.send(to, tag, &[7; SHORT]).unwrap();
        }
    };
    let receive = |receiver: &Endpoint, from: Peer, _: &AtomicU32| {
        for tag in 1..=20 {
            await_announcement(receiver, from, tag);
            let mut target = Target::new(SHORT);
            // SAFETY: the target lives until the wait is over, and is only read meanwhile.
            let receiving =
                unsafe { receiver.irecv_raw(from, tag, TAG_ALL, target.address(), SHORT) };
            until("the sender has copied", || target.is_all(7));
            assert_eq!(receiving.unwrap().wait().unwrap().length, SHORT as u64);
        }
    };
    pair(builder, send, receive);
}

#[test]
fn the_receiver_copies_when_the_sender_makes_no_call() {
    const MESSAGES: u64 = 200;
    let send = |sender: &Endpoint, to: Peer, step: &AtomicU32| {
        let message = [9; SHORT];
        // SAFETY: the message lives until all waits are over.
        let sends = (1..=MESSAGES)
            .map(|tag| unsafe { sender.isend_raw(to, tag, message.as_ptr(), SHORT) }.unwrap());
        let sends: Vec<_> = sends.collect();
        // It makes no call until all have arrived.
        await_step(step, 1);
        for mut send in sends {
            send.wait().unwrap();
        }
    };
    let receive = |receiver: &Endpoint, from: Peer, step: &AtomicU32| {
        for tag in 1..=MESSAGES {
            await_announcement(receiver, from, tag);
            let mut target = Target::new(SHORT);
            // SAFETY: the target lives until the wait is over.
            let receiving =
                unsafe { receiver.irecv_raw(from, tag, TAG_ALL, target.address(), SHORT) };
            receiving.unwrap().wait().unwrap();
            assert!(target.is_all(9), "message {tag}");
        }
        step.store(1, Ordering::Release);
    };
    pair(builder, send, receive);
}

#[test]
fn a_wait_for_a_message_that_is_there_copies_nothing_of_the_next() {
    let send = |sender: &Endpoint, to: Peer, step: &AtomicU32| {
        let messages = [vec![3; LONG], vec![4; LONG]];
        let sends = [0, 1].map(|at| {
            // SAFETY: the messages live until both waits are over.
            unsafe { sender.isend_raw(to, at as u64, messages[at].as_ptr(), LONG) }.unwrap()
        });
        // Calls that copy, until the first message is there; then none.
        until("the first message is there", || {
            sender.progress();
            step.load(Ordering::Acquire) >= 1
        });
        step.store(2, Ordering::Release);
        await_step(step, 3);
        for mut send in sends {
            send.wait().unwrap();
        }
    };
    let receive = |receiver: &Endpoint, from: Peer, step: &AtomicU32| {
        await_announcement(receiver, from, 0);
        await_announcement(receiver, from, 1);
        let (mut first, mut second) = (Target::new(LONG), Target::new(LONG));
        // SAFETY: both targets live until both waits are over, and are only read meanwhile.
        unsafe {
            let one = receiver.irecv_raw(from, 0, TAG_ALL, first.address(), LONG);
            until("the sender has copied", || first.is_all(3));
            step.store(1, Ordering::Release);
            await_step(step, 2);
            let other = receiver.irecv_raw(from, 1, TAG_ALL, second.address(), LONG);
            one.unwrap().wait().unwrap();
            assert!(second.is_all(1), "a wait for the first message has copied the second one");
            other.unwrap().wait().unwrap();
        }
        assert!(second.is_all(4));
        step.store(3, Ordering::Release);
    };
    pair(|| builder().path(PathKind::Cooperative), send, receive);
}
