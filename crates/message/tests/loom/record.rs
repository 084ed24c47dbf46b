//! The record of a message that both sides copy: every chunk once, told when it is there, and
//! nothing claimed behind a close.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::ring::record::{Finished, Record};
use crate::{cells, model};

const GENERATION: u16 = 5;
const COPIED: u32 = 9;

/// A record and the target of its message, a word for each chunk. The model checker watches that
/// nobody reads a word before its writer is done.
struct Message {
    record: Record,
    target: Vec<UnsafeCell<u32>>,
}

impl Message {
    fn new(chunks: u64) -> Arc<Self> {
        let record = Record::default();
        record.open(GENERATION);
        Arc::new(Self { record, target: (0..chunks).map(|_| UnsafeCell::new(0)).collect() })
    }

    fn chunks(&self) -> u64 {
        self.target.len() as u64
    }

    fn copy(&self, chunk: u64) {
        // SAFETY: the chunk belongs to whoever claimed it; loom watches it.
        self.target[chunk as usize].with_mut(|word| unsafe { *word = COPIED });
    }

    fn is_copied(&self, chunk: u64) -> bool {
        // SAFETY: only asked for chunks that are told to be done; loom watches it.
        self.target[chunk as usize].with(|word| unsafe { *word }) == COPIED
    }

    fn claim_back(&self) -> Option<u64> {
        self.record.claim_back(GENERATION, self.chunks()).expect("the receiver is honest")
    }

    fn claim_front(&self) -> Option<u64> {
        self.record.claim_front(GENERATION, self.chunks()).expect("the sender is honest")
    }

    fn told(&self) -> Finished {
        self.record.told(GENERATION, self.chunks()).expect("the sender is honest")
    }

    /// The sender: claims, copies and tells, until there is nothing left, or so often.
    fn help(&self, times: u64) -> u64 {
        let mut chunks = 0;
        while let Some(chunk) = self.claim_back().filter(|_| chunks < times) {
            self.copy(chunk);
            chunks += 1;
            self.record.tell(GENERATION, Finished { chunks, returned: None });
        }
        chunks
    }
}

fn sender(message: &Arc<Message>, times: u64) -> thread::JoinHandle<u64> {
    let message = message.clone();
    thread::spawn(move || message.help(times))
}

#[test]
fn both_sides_together_copy_every_chunk_once() {
    model(4, || {
        let message = Message::new(3);
        let sender = sender(&message, 3);
        let mut own = 0;
        while let Some(chunk) = message.claim_front() {
            message.copy(chunk);
            own += 1;
        }
        assert_eq!(sender.join().unwrap() + own, 3);
        assert!((0..3).all(|chunk| message.is_copied(chunk)));
        assert!(!message.record.has_unclaimed(GENERATION, 3));
    });
}

#[test]
fn what_the_sender_has_told_is_there() {
    model(4, || {
        let message = Message::new(3);
        let sender = sender(&message, 3);
        // The sender goes from the back: what it has told are the last chunks.
        for _ in 0..2 {
            let told = message.told().chunks;
            assert!((3 - told..3).all(|chunk| message.is_copied(chunk)));
        }
        sender.join().unwrap();
        assert_eq!(message.told(), Finished { chunks: 3, returned: None });
    });
}

#[test]
fn a_close_beside_claims_leaves_exactly_what_was_claimed() {
    model(4, || {
        let message = Message::new(3);
        let sender = sender(&message, 3);
        let own = u64::from(message.claim_front().is_some());
        let held = message.record.close(GENERATION, 3).expect("the sender is honest");
        // Closed: whatever the sender does now, it gets no more.
        assert_eq!(message.claim_back(), None);
        assert_eq!(sender.join().unwrap(), held);
        assert_eq!(message.told().chunks, held);
        assert!(own + held <= 3);
        assert!((3 - held..3).all(|chunk| message.is_copied(chunk)));
    });
}

#[test]
fn a_late_sender_gets_nothing_of_the_next_message() {
    model(4, || {
        let message = Message::new(2);
        let late = sender(&message, 2);
        let held = message.record.close(GENERATION, 2).expect("the sender is honest");
        // As in the library: the record is used again only when the claimed chunks are told.
        if message.told().chunks == held {
            message.record.open(GENERATION + 1);
            for front in 0..2 {
                assert_eq!(message.record.claim_front(GENERATION + 1, 2), Ok(Some(front)));
            }
            assert_eq!(late.join().unwrap(), held);
            assert_eq!(message.record.told(GENERATION + 1, 2).map(|told| told.chunks), Ok(0));
        } else {
            late.join().unwrap();
        }
    });
}

#[test]
fn a_chunk_that_the_sender_gives_back_is_the_receivers() {
    model(4, || {
        let message = Message::new(2);
        let sender = thread::spawn({
            let message = message.clone();
            move || {
                let returned = message.claim_back();
                if returned.is_some() {
                    message.record.tell(GENERATION, Finished { chunks: 0, returned });
                }
                returned
            }
        });
        while let Some(chunk) = message.claim_front() {
            message.copy(chunk);
        }
        if let Some(chunk) = message.told().returned {
            message.copy(chunk);
        }
        let returned = sender.join().unwrap();
        assert_eq!(message.told().returned, returned);
        let all_but_returned = (0..2).filter(|chunk| Some(*chunk) != returned);
        assert!(all_but_returned.into_iter().all(|chunk| message.is_copied(chunk)));
    });
}

#[test]
fn a_sender_that_was_told_of_a_record_finds_it_open() {
    model(4, || {
        let message = Message::new(1);
        assert_eq!(message.help(1), 1);
        message.record.close(GENERATION, 1).expect("the sender is honest");
        let (mut notes, mut at_sender) = cells::ends();
        let next = GENERATION + 1;
        let sender = thread::spawn({
            let message = message.clone();
            move || {
                let told = at_sender.take();
                if told {
                    assert_eq!(message.record.claim_back(next, 1), Ok(Some(0)));
                    message.record.tell(next, Finished { chunks: 1, returned: None });
                }
                u64::from(told)
            }
        });
        message.record.open(next);
        notes.write();
        let early = message.record.told(next, 1).map(|told| told.chunks).expect("it is open");
        let done = sender.join().unwrap();
        assert!(early <= done, "a count of the message before");
        assert_eq!(message.record.told(next, 1).map(|told| told.chunks), Ok(done));
    });
}
