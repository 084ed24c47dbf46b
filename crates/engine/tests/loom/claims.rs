//! Chunked transfers: each chunk has one owner, the last part to end completes the transfer, and a
//! cancelled transfer never ends with success.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use memferry_engine::completion::{ChunkedWork, Dispatch, Notification, PendingNotification};
use memferry_engine::{Completion, Descriptor, ExecutionError, Kernel, Opcode, TransferOutput};

use crate::{empty, model};

const UNTOUCHED: u8 = 0;
const DONE: u8 = 9;
const NOTIFIED: u64 = 5;

/// A fill of a few bytes. Loom does not track the bytes and the variable: they belong to the thread
/// that has claimed the chunk, or that has seen the completion.
struct Fill {
    completion: Arc<Completion>,
    bytes: *mut u8,
    length: u64,
    variable: *const Notification,
}

// SAFETY: a thread accesses only bytes of chunks that it claimed, or all of them after completion.
unsafe impl Send for Fill {}
// SAFETY: as above.
unsafe impl Sync for Fill {}

impl Fill {
    fn new(length: u64, chunk_bytes: u64) -> Arc<Self> {
        let bytes = Box::into_raw(vec![UNTOUCHED; length as usize].into_boxed_slice()).cast();
        let variable = Box::into_raw(Box::new(Notification::new(0)));
        // SAFETY: both are freed with the fill, which the tests keep until after completion.
        let (work, notify) = unsafe {
            let at = bytes as u64;
            let work =
                ChunkedWork::new(Opcode::Fill, Kernel::Cached, 0, at, length, DONE, chunk_bytes);
            (work, PendingNotification::new(variable, NOTIFIED))
        };
        let completion = Arc::new(Completion::chunked(work).notifying(Some(notify)));
        Arc::new(Self { completion, bytes, length, variable })
    }

    fn part(&self, offset: u64, length: u64) -> Descriptor {
        // SAFETY: the range is inside the bytes, which outlive the descriptor; tests claim the
        // chunks of parts.
        unsafe {
            Descriptor::new(Opcode::Fill, 0, self.bytes as u64 + offset, length)
                .value(DONE)
                .part_of(self.completion.clone(), offset)
        }
    }

    fn claim_all(&self) {
        while self.work().claim_front().is_some() {}
    }

    fn work(&self) -> &ChunkedWork {
        self.completion.work().unwrap()
    }

    fn variable(&self) -> &Notification {
        // SAFETY: freed with the fill.
        unsafe { &*self.variable }
    }

    /// The number of filled bytes. Valid only after completion.
    fn filled(&self) -> u64 {
        assert!(self.completion.is_done());
        // SAFETY: no thread writes after completion.
        let bytes = unsafe { std::slice::from_raw_parts(self.bytes, self.length as usize) };
        bytes.iter().filter(|&&byte| byte == DONE).count() as u64
    }

    /// Checks that the outcome agrees with the filled bytes.
    fn check(&self) {
        match self.completion.outcome().expect("it is over") {
            Ok(TransferOutput { difference, .. }) => {
                assert_eq!((difference, self.filled()), (None, self.length));
            }
            Err(error) => {
                assert_eq!(error, ExecutionError::Cancelled { done_bytes: self.filled() });
                assert!(self.filled() < self.length);
            }
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        // SAFETY: made from boxes of these types in `new`, and freed only here.
        unsafe {
            drop(Vec::from_raw_parts(self.bytes, self.length as usize, self.length as usize));
            drop(Box::from_raw(self.variable.cast_mut()));
        }
    }
}

fn spawn(fill: &Arc<Fill>, act: fn(&Fill)) -> thread::JoinHandle<()> {
    let fill = fill.clone();
    thread::spawn(move || act(&fill))
}

#[test]
fn claims_from_both_ends_cover_every_chunk_once() {
    model(4, || {
        let fill = Fill::new(3, 1);
        let front = thread::spawn({
            let fill = fill.clone();
            move || -> Vec<_> { std::iter::from_fn(|| fill.work().claim_front()).collect() }
        });
        let back = std::iter::from_fn(|| fill.work().claim_back());
        let mut all: Vec<_> = back.map(|chunk| chunk.offset).collect();
        all.extend(front.join().unwrap().iter().map(|chunk| chunk.offset));
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
    });
}

/// Two threads end the transfer while a third waits for its completion. The thread that ends its
/// part second must not complete the transfer again, which the variable would show.
fn ends_once(fill: &Arc<Fill>, first: fn(&Fill), second: fn(&Fill)) {
    let threads = [spawn(fill, first), spawn(fill, second)];
    assert!(fill.completion.wait(0, None));
    fill.check();
    let well = matches!(fill.completion.outcome(), Some(Ok(_)));
    assert_eq!(fill.variable().load(), if well { NOTIFIED } else { 0 });
    fill.variable().store(0);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(fill.variable().load(), 0, "it ended twice");
}

#[test]
fn a_channel_and_a_helping_caller_end_the_transfer_once() {
    model(3, || {
        let from_front = |fill: &Fill| _ = fill.completion.run_from_front();
        let from_back = |fill: &Fill| while fill.completion.help_from_back() {};
        ends_once(&Fill::new(3, 1), from_front, from_back);
    });
}

#[test]
fn two_parts_end_the_transfer_once() {
    model(3, || {
        let fill = Fill::new(2, 1);
        fill.claim_all();
        ends_once(&fill, |fill| _ = fill.part(0, 1).run(), |fill| _ = fill.part(1, 1).run());
    });
}

#[test]
fn two_pieces_of_one_chunk_end_the_transfer_once() {
    model(3, || {
        let fill = Fill::new(5, 5);
        fill.claim_all();
        ends_once(&fill, |fill| _ = fill.part(0, 2).run(), |fill| _ = fill.part(2, 3).run());
    });
}

#[test]
fn a_failed_piece_beside_a_good_one_fails_the_transfer_once() {
    model(3, || {
        let fill = Fill::new(2, 2);
        fill.claim_all();
        let threads = [
            spawn(&fill, |fill| drop(fill.part(0, 1))),
            spawn(&fill, |fill| _ = fill.part(1, 1).run()),
        ];
        assert!(fill.completion.wait(0, None));
        let outcome = fill.completion.outcome();
        assert!(matches!(outcome, Some(Err(ExecutionError::Engine { done_bytes: 0, .. }))));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(fill.variable().load(), 0);
        assert_eq!(fill.completion.ready_bytes(2), 0);
    });
}

#[test]
fn a_cancellation_beside_the_work_never_passes_for_success() {
    model(3, || {
        let from_front = |fill: &Fill| _ = fill.completion.run_from_front();
        ends_once(&Fill::new(2, 1), from_front, |fill| fill.completion.cancel());
    });
}

/// A fill that is ordered after another transfer, and a value that this transfer writes before it
/// ends.
fn held_back() -> (Arc<Completion>, Arc<AtomicU32>, Arc<Fill>) {
    let (first, fill) = (Arc::new(Completion::whole()), Fill::new(2, 1));
    // Without work offers: the dispatching thread executes the chunks that the helper leaves.
    // SAFETY: only claimants of its chunks report to the completion of the fill.
    unsafe { Dispatch::after(std::slice::from_ref(&first), fill.completion.clone(), Vec::new()) };
    (first, Arc::new(AtomicU32::new(0)), fill)
}

fn end_of(first: &Arc<Completion>, data: &Arc<AtomicU32>) -> thread::JoinHandle<()> {
    let (first, data) = (first.clone(), data.clone());
    thread::spawn(move || {
        data.store(7, Ordering::Relaxed);
        empty(&first).run();
    })
}

#[test]
fn a_helper_gets_no_chunk_before_the_data_it_was_held_back_for() {
    model(3, || {
        let (first, data, fill) = held_back();
        let engine = end_of(&first, &data);
        if fill.completion.help_from_back() {
            assert_eq!(data.load(Ordering::Relaxed), 7, "helped before its turn");
        }
        assert!(fill.completion.wait(0, None));
        engine.join().unwrap();
        fill.check();
        assert_eq!(fill.filled(), 2);
    });
}

#[test]
fn a_cancellation_beside_the_launch_ends_what_was_held_back_once() {
    model(3, || {
        let (first, data, fill) = held_back();
        let engine = end_of(&first, &data);
        let canceller = spawn(&fill, |fill| fill.completion.cancel());
        assert!(fill.completion.wait(0, None));
        fill.check();
        fill.variable().store(0);
        engine.join().unwrap();
        canceller.join().unwrap();
        assert_eq!(fill.variable().load(), 0, "it ended twice");
    });
}

#[test]
fn two_cancellations_end_the_transfer_once() {
    model(3, || {
        let cancel = |fill: &Fill| fill.completion.cancel();
        ends_once(&Fill::new(2, 1), cancel, cancel);
    });
}

#[test]
fn the_prefix_that_is_said_to_be_ready_is() {
    model(3, || {
        let fill = Fill::new(3, 1);
        let threads = [
            spawn(&fill, |fill| _ = fill.completion.run_from_front()),
            spawn(&fill, |fill| while fill.completion.help_from_back() {}),
        ];
        let mut ready = 0;
        for _ in 0..2 {
            let now = fill.completion.ready_bytes(3);
            assert!(now >= ready, "the prefix only grows");
            ready = now;
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(fill.completion.ready_bytes(3), 3);
        fill.check();
    });
}
