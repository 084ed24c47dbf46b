//! The claim slot of a cooperative message: every chunk is copied once, published when it is
//! copied, and no chunk is claimed after a close.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::ring::claims::{ChunkClaims, SenderProgress};
use crate::{cells, model};

const GENERATION: u16 = 5;
const COPIED: u32 = 9;

/// A claim slot and the target of its message, a word for each chunk. The model checker detects a
/// read of a word before its writer is done.
struct Message {
    claims: ChunkClaims,
    target: Vec<UnsafeCell<u32>>,
}

impl Message {
    fn new(chunks: u64) -> Arc<Self> {
        let claims = ChunkClaims::default();
        claims.open(GENERATION);
        Arc::new(Self { claims, target: (0..chunks).map(|_| UnsafeCell::new(0)).collect() })
    }

    fn chunks(&self) -> u64 {
        self.target.len() as u64
    }

    fn copy(&self, chunk: u64) {
        // SAFETY: the chunk belongs to the side that claimed it; loom checks it.
        self.target[chunk as usize].with_mut(|word| unsafe { *word = COPIED });
    }

    fn is_copied(&self, chunk: u64) -> bool {
        // SAFETY: called only for published chunks; loom checks it.
        self.target[chunk as usize].with(|word| unsafe { *word }) == COPIED
    }

    fn claim_back(&self) -> Option<u64> {
        self.claims.claim_back(GENERATION, self.chunks()).expect("the receiver is honest")
    }

    fn claim_front(&self) -> Option<u64> {
        self.claims.claim_front(GENERATION, self.chunks()).expect("the sender is honest")
    }

    fn load(&self) -> SenderProgress {
        self.claims.load(GENERATION, self.chunks()).expect("the sender is honest")
    }

    /// The sender: claims, copies and publishes, until no chunk is left, or up to a limit.
    fn help(&self, times: u64) -> u64 {
        let mut chunks = 0;
        while let Some(chunk) = self.claim_back().filter(|_| chunks < times) {
            self.copy(chunk);
            chunks += 1;
            self.claims.publish(GENERATION, SenderProgress { chunks, returned: None });
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
        assert!(!message.claims.has_unclaimed(GENERATION, 3));
    });
}

#[test]
fn what_the_sender_has_told_is_there() {
    model(4, || {
        let message = Message::new(3);
        let sender = sender(&message, 3);
        // The sender claims from the back: the chunks that it has published are the last ones.
        for _ in 0..2 {
            let load = message.load().chunks;
            assert!((3 - load..3).all(|chunk| message.is_copied(chunk)));
        }
        sender.join().unwrap();
        assert_eq!(message.load(), SenderProgress { chunks: 3, returned: None });
    });
}

#[test]
fn a_close_beside_claims_leaves_exactly_what_was_claimed() {
    model(4, || {
        let message = Message::new(3);
        let sender = sender(&message, 3);
        let own = u64::from(message.claim_front().is_some());
        let held = message.claims.close(GENERATION, 3).expect("the sender is honest");
        // Closed: the sender gets no more chunks.
        assert_eq!(message.claim_back(), None);
        assert_eq!(sender.join().unwrap(), held);
        assert_eq!(message.load().chunks, held);
        assert!(own + held <= 3);
        assert!((3 - held..3).all(|chunk| message.is_copied(chunk)));
    });
}

#[test]
fn a_late_sender_gets_nothing_of_the_next_message() {
    model(4, || {
        let message = Message::new(2);
        let late = sender(&message, 2);
        let held = message.claims.close(GENERATION, 2).expect("the sender is honest");
        // As in the library: the slot is reused only when the claimed chunks are published.
        if message.load().chunks == held {
            message.claims.open(GENERATION + 1);
            for front in 0..2 {
                assert_eq!(message.claims.claim_front(GENERATION + 1, 2), Ok(Some(front)));
            }
            assert_eq!(late.join().unwrap(), held);
            assert_eq!(message.claims.load(GENERATION + 1, 2).map(|load| load.chunks), Ok(0));
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
                    message.claims.publish(GENERATION, SenderProgress { chunks: 0, returned });
                }
                returned
            }
        });
        while let Some(chunk) = message.claim_front() {
            message.copy(chunk);
        }
        if let Some(chunk) = message.load().returned {
            message.copy(chunk);
        }
        let returned = sender.join().unwrap();
        assert_eq!(message.load().returned, returned);
        let all_but_returned = (0..2).filter(|chunk| Some(*chunk) != returned);
        assert!(all_but_returned.into_iter().all(|chunk| message.is_copied(chunk)));
    });
}

#[test]
fn a_sender_that_was_told_of_a_record_finds_it_open() {
    model(4, || {
        let message = Message::new(1);
        assert_eq!(message.help(1), 1);
        message.claims.close(GENERATION, 1).expect("the sender is honest");
        let (mut notes, mut at_sender) = cells::ends();
        let next = GENERATION + 1;
        let sender = thread::spawn({
            let message = message.clone();
            move || {
                let load = at_sender.take();
                if load {
                    assert_eq!(message.claims.claim_back(next, 1), Ok(Some(0)));
                    message.claims.publish(next, SenderProgress { chunks: 1, returned: None });
                }
                u64::from(load)
            }
        });
        message.claims.open(next);
        notes.write();
        let early = message.claims.load(next, 1).map(|load| load.chunks).expect("the slot is open");
        let done = sender.join().unwrap();
        assert!(early <= done, "a count of the previous message");
        assert_eq!(message.claims.load(next, 1).map(|load| load.chunks), Ok(done));
    });
}
