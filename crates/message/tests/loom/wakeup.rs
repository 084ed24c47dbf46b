//! Sleeping and doorbells: no wakeup is lost, which loom would report as a deadlock.

use loom::sync::Arc;
use loom::thread;

use crate::cells::{self, CELLS, Reader, Writer};
use crate::futex::{Futex, Socket};
use crate::model;
use crate::ring::backpressure::{Backpressure, NO_EAGER, NO_RTS};
use crate::ring::claims::{ChunkClaims, SenderProgress};
use crate::ring::wakeup::{FD_ARMED, FUTEX_ARMED, WakeupFlags};

/// The flags of one side, and the objects that it sleeps on.
struct Side {
    wakeup: WakeupFlags,
    futex: Futex,
    socket: Socket,
}

impl Side {
    fn new() -> Arc<Self> {
        let (futex, socket) = (Futex::new(), Socket::new());
        Arc::new(Self { wakeup: WakeupFlags::default(), futex, socket })
    }

    /// Called by the owner: arms its wakeup, polls once more, and sleeps if there is nothing.
    fn sleep_unless(&self, way: u32, is_ready: impl FnOnce() -> bool) {
        self.wakeup.arm(way);
        if !is_ready() {
            match way {
                FUTEX_ARMED => self.futex.wait(self.wakeup.word(), FUTEX_ARMED),
                _ => self.socket.wait_and_drain(),
            }
        }
        self.wakeup.disarm();
    }

    /// Called by the peer after it has written.
    fn ring(&self) {
        let ways = self.wakeup.take_armed();
        if ways & FUTEX_ARMED != 0 {
            self.futex.wake();
        }
        if ways & FD_ARMED != 0 {
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
            assert!(writer.has_credit());
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
    model(6, || a_reader_that_sleeps(FUTEX_ARMED, 1));
}

#[test]
fn a_reader_that_watches_its_socket_is_woken() {
    model(6, || a_reader_that_sleeps(FD_ARMED, 1));
}

// From four preemptions on, loom lets the writer read the value that it swapped in last instead of
// the value that the reader stored over it: it does not treat a swap as one step.
#[test]
fn a_reader_that_sleeps_again_is_woken_again() {
    model(3, || a_reader_that_sleeps(FUTEX_ARMED, 2));
    model(3, || a_reader_that_sleeps(FD_ARMED, 2));
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
        read_all(&mut reader, &side, 2, FUTEX_ARMED);
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
            // Simulates a sleep on the word that timed out.
            side.wakeup.arm(FUTEX_ARMED);
            side.wakeup.disarm();
            side.sleep_unless(FD_ARMED, || reader.consumer.is_ready());
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
        // The second poll must be for credits: a poll for cells would miss them.
        while !writer.has_credit() {
            side.sleep_unless(FUTEX_ARMED, || writer.has_credit());
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
        let backpressure = Arc::new(Backpressure::default());
        backpressure.set(NO_RTS);
        let side = Side::new();
        let receiver = thread::spawn({
            let (backpressure, side) = (backpressure.clone(), side.clone());
            move || {
                backpressure.set(0);
                side.ring();
            }
        });
        let is_let = || !backpressure.includes(NO_RTS);
        while !is_let() {
            side.sleep_unless(FUTEX_ARMED, is_let);
        }
        receiver.join().unwrap();
    });
}

/// The number of messages that a side sends after the other has set backpressure is bounded by the
/// ring.
#[test]
fn a_sender_that_finds_room_in_the_ring_knows_that_the_receiver_is_full() {
    model(4, || {
        let (mut writer, mut reader) = cells::ends();
        let backpressure = Arc::new(Backpressure::default());
        (0..CELLS).for_each(|_| writer.write());
        let there = thread::spawn({
            let backpressure = backpressure.clone();
            move || {
                assert!(reader.take());
                backpressure.set(NO_EAGER);
                reader.consumer.publish();
            }
        });
        if writer.has_credit() {
            assert!(backpressure.includes(NO_EAGER));
        }
        there.join().unwrap();
    });
}

#[test]
fn a_receiver_that_waits_for_the_senders_chunk_is_woken() {
    model(4, || {
        const GENERATION: u16 = 1;
        const CHUNKS: u64 = 1;
        let claims = Arc::new(ChunkClaims::default());
        claims.open(GENERATION);
        let side = Side::new();
        let sender = thread::spawn({
            let (claims, side) = (claims.clone(), side.clone());
            move || {
                assert_eq!(claims.claim_back(GENERATION, CHUNKS), Ok(Some(0)));
                claims.publish(GENERATION, SenderProgress { chunks: 1, returned: None });
                side.ring();
            }
        });
        // No cell refers to a chunk: the second poll must read the claim slot.
        let is_told = || claims.load(GENERATION, CHUNKS).is_ok_and(|load| load.chunks == CHUNKS);
        while !is_told() {
            side.sleep_unless(FUTEX_ARMED, is_told);
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
                read_all(&mut at_there, &there, 1, FUTEX_ARMED);
                to_here.write();
                here.ring();
            }
        });
        to_there.write();
        there.ring();
        read_all(&mut at_here, &here, 1, FUTEX_ARMED);
        other.join().unwrap();
    });
}
