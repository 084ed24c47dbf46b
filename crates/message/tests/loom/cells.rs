//! The ring of cells: in order, complete, with the payload that was written before, in every lap.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

use crate::model;
use crate::ring::cells::{Cell, Consumer, Producer, Ring};

/// The minimum size of a ring.
pub(crate) const CELLS: usize = 4;

/// A ring and a payload slot for each of its cells. The model checker detects a read of a payload
/// while it is written.
#[derive(Debug)]
pub(crate) struct Half {
    cells: Box<[Cell]>,
    consumed: AtomicU64,
    space: [UnsafeCell<u64>; CELLS],
}

/// The producer, with the memory that it writes.
pub(crate) struct Writer {
    half: Arc<Half>,
    producer: Producer,
}

/// The consumer.
pub(crate) struct Reader {
    half: Arc<Half>,
    pub(crate) consumer: Consumer,
    pub(crate) seen: u64,
}

pub(crate) fn ends() -> (Writer, Reader) {
    let half = Arc::new(Half {
        cells: (0..CELLS).map(|_| Cell::default()).collect(),
        consumed: AtomicU64::new(0),
        space: std::array::from_fn(|_| UnsafeCell::new(0)),
    });
    // SAFETY: both ends hold a reference to the memory for as long as they are used.
    let ring = unsafe { Ring::new(half.cells.as_ptr(), CELLS, &half.consumed) };
    let writer = Writer { half: half.clone(), producer: Producer::new(ring) };
    (writer, Reader { half, consumer: Consumer::new(ring), seen: 0 })
}

fn payload_of(number: u64) -> u64 {
    100 + number
}

impl Writer {
    pub(crate) fn has_credit(&mut self) -> bool {
        self.producer.has_credit().expect("the reader is honest")
    }

    /// Writes the payload and then the cell that refers to it.
    pub(crate) fn write(&mut self) {
        let number = self.producer.position();
        // SAFETY: the span belongs to this side until the cell is written; loom checks it.
        self.half.space[number as usize % CELLS]
            .with_mut(|payload| unsafe { *payload = payload_of(number) });
        self.producer.write(&[7 << 32, number, number, number, number, number, number, !number]);
    }
}

impl Reader {
    /// Takes the next cell, if it is written, and checks it and its payload.
    pub(crate) fn take(&mut self) -> bool {
        let Some(words) = self.consumer.peek() else { return false };
        let number = self.seen;
        assert_eq!((words[0] >> 32, words[1], words[7]), (7, number, !number));
        // SAFETY: the payload of a cell is not written before the cell is freed.
        let payload = self.half.space[number as usize % CELLS].with(|payload| unsafe { *payload });
        assert_eq!(payload, payload_of(number));
        self.seen += 1;
        self.consumer.advance();
        true
    }
}

/// Writes while there are credits, up to a limit. No thread waits in these models: threads that
/// wait for one another without sleeping have endless interleavings.
fn write_up_to(writer: &mut Writer, count: u64) -> u64 {
    let mut written = 0;
    while written < count && writer.has_credit() {
        writer.write();
        written += 1;
    }
    written
}

#[test]
fn a_cell_that_is_seen_is_whole_and_so_is_its_payload() {
    model(4, || {
        let (mut writer, mut reader) = ends();
        let there = thread::spawn(move || write_up_to(&mut writer, 2));
        while reader.seen < 2 && reader.take() {}
        let written = there.join().unwrap();
        while reader.take() {}
        assert_eq!((written, reader.seen), (2, 2));
    });
}

/// The producer begins with a full ring, so that every further cell needs a freed one.
fn lap(more: u64, looks: u64, publish_every: u64) {
    let (mut writer, mut reader) = ends();
    assert_eq!(write_up_to(&mut writer, CELLS as u64), CELLS as u64);
    let there = thread::spawn(move || (write_up_to(&mut writer, more), writer));
    for load in 1..=looks {
        reader.take();
        if load % publish_every == 0 {
            reader.consumer.publish();
        }
    }
    let (written, _writer) = there.join().unwrap();
    while reader.take() {}
    assert_eq!(reader.seen, CELLS as u64 + written);
}

#[test]
fn a_cell_is_written_again_only_after_it_was_given_back() {
    model(4, || lap(2, 2, 1));
}

#[test]
fn cells_that_are_given_back_together_are_free_together() {
    model(4, || lap(2, 2, 2));
}

#[test]
fn what_is_not_published_is_not_overwritten() {
    model(4, || lap(1, 2, 3));
}

#[test]
fn a_second_lap_is_not_taken_for_the_first() {
    model(3, || {
        let (mut writer, mut reader) = ends();
        assert_eq!(write_up_to(&mut writer, CELLS as u64), CELLS as u64);
        while reader.take() {}
        reader.consumer.publish();
        let there = thread::spawn(move || write_up_to(&mut writer, 2));
        (0..2).for_each(|_| _ = reader.take());
        there.join().unwrap();
        while reader.take() {}
        assert_eq!(reader.seen, CELLS as u64 + 2);
    });
}

/// Two rings, of which the second follows the first.
struct GrowingHalf {
    small: Vec<Cell>,
    large: Vec<Cell>,
    consumed: AtomicU64,
}

#[test]
fn a_reader_follows_the_writer_to_the_large_ring() {
    const MARKER: u64 = 9 << 32;
    model(3, || {
        let cells = || (0..CELLS).map(|_| Cell::default()).collect();
        let half =
            Arc::new(GrowingHalf { small: cells(), large: cells(), consumed: AtomicU64::new(0) });
        // SAFETY: both ends hold a reference to the memory for as long as they are used.
        let [small, large] = [&half.small, &half.large]
            .map(|cells| unsafe { Ring::new(cells.as_ptr(), CELLS, &half.consumed) });
        let there = thread::spawn({
            let half = half.clone();
            move || {
                let mut producer = Producer::growing(small, large, [MARKER, 0, 0, 0, 0, 0, 0, 0]);
                for number in 0..CELLS as u64 + 1 {
                    assert!(producer.has_credit().unwrap(), "a ring that grows is never full");
                    producer.write(&[7 << 32, number, 0, 0, 0, 0, 0, !number]);
                }
                drop(half);
            }
        });
        let mut consumer = Consumer::growing(small, large);
        let mut expected = 0;
        while expected <= CELLS as u64 {
            let Some(words) = consumer.peek() else {
                thread::yield_now();
                continue;
            };
            if words[0] & !0xFFFF_FFFF == MARKER {
                consumer.grow().unwrap();
            } else {
                assert_eq!((words[1], words[7]), (expected, !expected));
                expected += 1;
            }
            consumer.advance();
            consumer.publish();
        }
        there.join().unwrap();
        drop(half);
    });
}
