//! Whoever rests and whoever rings: nothing that came is slept through, which loom would report as
//! a deadlock.

use loom::sync::Arc;
use loom::thread;

use crate::cells::{self, CELLS, Reader, Writer};
use crate::futex::{Futex, Socket};
use crate::model;
use crate::ring::attention::{ASLEEP, AWAY, Attention};
use crate::ring::fullness::{Fullness, NO_MESSAGES, NO_PAYLOADS};
use crate::ring::record::{Finished, Record};

/// One side's word, and where it sleeps.
struct Side {
    attention: Attention,
    futex: Futex,
    socket: Socket,
}

impl Side {
    fn new() -> Arc<Self> {
        let (futex, socket) = (Futex::new(), Socket::new());
        Arc::new(Self { attention: Attention::default(), futex, socket })
    }

    /// For the owner: says that it rests, looks once more, and sleeps if there is nothing.
    fn sleep_unless(&self, way: u32, is_ready: impl FnOnce() -> bool) {
        self.attention.rest(way);
        if !is_ready() {
            match way {
                ASLEEP => self.futex.wait(self.attention.word(), ASLEEP),
                _ => self.socket.wait_and_drain(),
            }
        }
        self.attention.awake();
    }

    /// For the other side, after it has written.
    fn ring(&self) {
        let ways = self.attention.take_ways();
        if ways & ASLEEP != 0 {
            self.futex.wake();
        }
        if ways & AWAY != 0 {
            self.socket.send();
        }
    }
}

fn read_all(reader: &mut Reader, side: &Side, count: u64, way: u32) {
    while reader.seen < count {
        if !reader.take() {
            side.sleep_unless(way, || reader.consumer.is_ready());
        }
    }
}

fn write_and_ring(mut writer: Writer, side: Arc<Side>, count: u64) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for _ in 0..count {
            assert!(writer.has_room());
            writer.write();
            side.ring();
        }
    })
}

fn a_reader_that_sleeps(way: u32, count: u64) {
    let (writer, mut reader) = cells::ends();
    let side = Side::new();
    let there = write_and_ring(writer, side.clone(), count);
    read_all(&mut reader, &side, count, way);
    there.join().unwrap();
}

#[test]
fn a_reader_asleep_on_its_word_is_woken() {
    model(6, || a_reader_that_sleeps(ASLEEP, 1));
}

#[test]
fn a_reader_that_watches_its_socket_is_woken() {
    model(6, || a_reader_that_sleeps(AWAY, 1));
}

// From four preemptions on, loom lets the writer read what it swapped in last instead of what the
// reader stored over it: it does not know that nothing comes between the two halves of a swap.
#[test]
fn a_reader_that_sleeps_again_is_woken_again() {
    model(3, || a_reader_that_sleeps(ASLEEP, 2));
    model(3, || a_reader_that_sleeps(AWAY, 2));
}

#[test]
fn one_ring_after_many_cells_is_enough() {
    model(4, || {
        let (mut writer, mut reader) = cells::ends();
        let side = Side::new();
        let there = thread::spawn({
            let side = side.clone();
            move || {
                (0..2).for_each(|_| writer.write());
                side.ring();
            }
        });
        read_all(&mut reader, &side, 2, ASLEEP);
        there.join().unwrap();
    });
}

#[test]
fn a_reader_that_changes_from_its_word_to_its_socket_is_woken() {
    model(4, || {
        let (writer, mut reader) = cells::ends();
        let side = Side::new();
        let there = write_and_ring(writer, side.clone(), 1);
        while !reader.take() {
            // As if the sleep on the word were over after a while.
            side.attention.rest(ASLEEP);
            side.attention.awake();
            side.sleep_unless(AWAY, || reader.consumer.is_ready());
        }
        there.join().unwrap();
    });
}

#[test]
fn a_writer_without_room_is_woken_by_what_is_given_back() {
    model(3, || {
        let (mut writer, mut reader) = cells::ends();
        let side = Side::new();
        (0..CELLS).for_each(|_| writer.write());
        let there = thread::spawn({
            let side = side.clone();
            move || {
                assert!(reader.take());
                reader.consumer.publish();
                side.ring();
                reader
            }
        });
        // The second look must be for room: a look for cells would miss it.
        while !writer.has_room() {
            side.sleep_unless(ASLEEP, || writer.has_room());
        }
        writer.write();
        let mut reader = there.join().unwrap();
        while reader.take() {}
        assert_eq!(reader.seen, CELLS as u64 + 1);
    });
}

#[test]
fn a_sender_that_was_refused_is_woken_when_there_is_room_again() {
    model(4, || {
        let fullness = Arc::new(Fullness::default());
        fullness.set(NO_MESSAGES);
        let side = Side::new();
        let receiver = thread::spawn({
            let (fullness, side) = (fullness.clone(), side.clone());
            move || {
                fullness.set(0);
                side.ring();
            }
        });
        let is_let = || !fullness.includes(NO_MESSAGES);
        while !is_let() {
            side.sleep_unless(ASLEEP, is_let);
        }
        receiver.join().unwrap();
    });
}

/// What a side sends after the other has said that it is full is bounded by the ring.
#[test]
fn a_sender_that_finds_room_in_the_ring_knows_that_the_receiver_is_full() {
    model(4, || {
        let (mut writer, mut reader) = cells::ends();
        let fullness = Arc::new(Fullness::default());
        (0..CELLS).for_each(|_| writer.write());
        let there = thread::spawn({
            let fullness = fullness.clone();
            move || {
                assert!(reader.take());
                fullness.set(NO_PAYLOADS);
                reader.consumer.publish();
            }
        });
        if writer.has_room() {
            assert!(fullness.includes(NO_PAYLOADS));
        }
        there.join().unwrap();
    });
}

#[test]
fn a_receiver_that_waits_for_the_senders_chunk_is_woken() {
    model(4, || {
        const GENERATION: u16 = 1;
        const CHUNKS: u64 = 1;
        let record = Arc::new(Record::default());
        record.open(GENERATION);
        let side = Side::new();
        let sender = thread::spawn({
            let (record, side) = (record.clone(), side.clone());
            move || {
                assert_eq!(record.claim_back(GENERATION, CHUNKS), Ok(Some(0)));
                record.tell(GENERATION, Finished { chunks: 1, returned: None });
                side.ring();
            }
        });
        // No cell tells of a chunk: the second look must be at the record.
        let is_told = || record.told(GENERATION, CHUNKS).is_ok_and(|told| told.chunks == CHUNKS);
        while !is_told() {
            side.sleep_unless(ASLEEP, is_told);
        }
        sender.join().unwrap();
    });
}

#[test]
fn two_sides_that_wait_for_each_other_both_go_on() {
    model(3, || {
        let (mut to_there, mut at_there) = cells::ends();
        let (mut to_here, mut at_here) = cells::ends();
        let (here, there) = (Side::new(), Side::new());
        let other = thread::spawn({
            let (here, there) = (here.clone(), there.clone());
            move || {
                read_all(&mut at_there, &there, 1, ASLEEP);
                to_here.write();
                here.ring();
            }
        });
        to_there.write();
        there.ring();
        read_all(&mut at_here, &here, 1, ASLEEP);
        other.join().unwrap();
    });
}
