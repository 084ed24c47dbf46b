//! The submission ring, with several producers and one consumer: no entry is lost or duplicated.

use loom::sync::Arc;
use loom::thread;
use memferry_engine::SubmitError;
use memferry_engine::runtime::ring::SubmissionRing;

use crate::model;

/// A value: the number of its submitter, and its index among the values of that submitter.
type Value = (u32, u32);

/// Pushes values one by one until the ring is full, and returns how many were accepted. No thread spins in
/// these models: three threads that wait for one another have endless interleavings.
fn submit(ring: &SubmissionRing<Value>, who: u32, count: u32) -> u32 {
    let taken = |number: &u32| ring.push(&mut [Some((who, *number))]).unwrap().count == 1;
    (1..=count).take_while(taken).count() as u32
}

/// The consumer of a ring.
struct Consumer {
    ring: Arc<SubmissionRing<Value>>,
    finished: u64,
    values: Vec<Value>,
}

impl Consumer {
    fn new(ring: &Arc<SubmissionRing<Value>>) -> Self {
        Self { ring: ring.clone(), finished: 0, values: Vec::new() }
    }

    /// Takes and completes the next value, if there is one.
    fn step(&mut self) -> bool {
        // SAFETY: this is the only consumer, and it takes each number once.
        let Some(value) = (unsafe { self.ring.take(self.finished) }) else {
            return false;
        };
        self.values.push(value);
        self.finished += 1;
        // SAFETY: this thread is the only consumer and has taken everything up to the number.
        unsafe { self.ring.complete(self.finished, 1) };
        true
    }

    /// Takes the remaining values after all submitters have ended, and checks that all accepted values of
    /// each of them were taken, in order.
    fn check(mut self, taken: &[(u32, u32)]) {
        while self.step() {}
        let mut all = 0;
        for &(submitter, count) in taken {
            let of = |value: &&Value| value.0 == submitter;
            let numbers: Vec<_> = self.values.iter().filter(of).map(|value| value.1).collect();
            assert_eq!(numbers, (1..=count).collect::<Vec<_>>(), "of submitter {submitter}");
            all += u64::from(count);
        }
        assert_eq!((self.ring.submitted(), self.ring.completed()), (all, all));
    }
}

/// Two submitters, and a consumer that polls `looks` times concurrently.
fn two_in_one_out(capacity: usize, first: u32, second: u32, looks: u32) {
    let ring = Arc::new(SubmissionRing::new(capacity));
    let mut consumer = Consumer::new(&ring);
    let submitters = [(1, first), (2, second)].map(|(who, count)| {
        let ring = ring.clone();
        thread::spawn(move || (who, submit(&ring, who, count)))
    });
    (0..looks).for_each(|_| _ = consumer.step());
    consumer.check(&submitters.map(|thread| thread.join().unwrap()));
}

#[test]
fn two_submitters_share_a_ring_of_one() {
    model(4, || two_in_one_out(1, 1, 1, 1));
}

#[test]
fn two_submitters_lap_a_ring_of_one() {
    model(3, || two_in_one_out(1, 2, 2, 2));
}

#[test]
fn two_submitters_lap_a_ring_of_two() {
    model(3, || two_in_one_out(2, 2, 2, 3));
}

#[test]
fn one_submitter_laps_a_ring_of_one_again_and_again() {
    model(4, || two_in_one_out(1, 4, 0, 4));
}

#[test]
fn a_batch_beside_a_single_value_keeps_its_order() {
    model(4, || {
        let ring = Arc::new(SubmissionRing::new(2));
        let mut consumer = Consumer::new(&ring);
        let single = thread::spawn({
            let ring = ring.clone();
            move || (1, submit(&ring, 1, 1))
        });
        let batch = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut batch = [Some((2, 1)), None, Some((2, 2))];
                let taken = ring.push(&mut batch).unwrap();
                let left = batch.iter().flatten().count();
                assert_eq!(taken.count + left, 2, "what was not taken is still there");
                assert_eq!(batch[2], (left > 0).then_some((2, 2)), "a prefix was taken");
                let again = ring.push(&mut batch).unwrap();
                assert_eq!(again.count + batch.iter().flatten().count(), left);
                (2, (taken.count + again.count) as u32)
            }
        });
        (0..2).for_each(|_| _ = consumer.step());
        consumer.check(&[single.join().unwrap(), batch.join().unwrap()]);
    });
}

#[test]
fn a_close_beside_pushes_keeps_what_was_taken_and_gives_back_the_rest() {
    model(4, || {
        let ring = Arc::new(SubmissionRing::new(2));
        let submitters = [1, 2].map(|who| {
            let ring = ring.clone();
            thread::spawn(move || {
                let mut batch = [Some((who, 1))];
                match ring.push(&mut batch) {
                    Ok(taken) => {
                        assert!(taken.count == 1 && batch[0].is_none());
                        1
                    }
                    Err(SubmitError::Closed) => {
                        assert!(batch[0].is_some());
                        0
                    }
                    Err(other) => panic!("{other}"),
                }
            })
        });
        ring.close();
        // The loop of a channel's thread: it runs until the ring is closed and empty.
        let mut finished = 0;
        while ring.submitted() > finished {
            // SAFETY: this is the only consumer, and it takes each number once.
            match unsafe { ring.take(finished) } {
                Some(_) => {
                    finished += 1;
                    // SAFETY: this thread is the only consumer and has taken everything up to the number.
                    unsafe { ring.complete(finished, 1) };
                }
                None => thread::yield_now(),
            }
        }
        let taken: u64 = submitters.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!((taken, ring.submitted()), (finished, finished));
        assert_eq!(ring.push(&mut [Some((3, 1))]), Err(SubmitError::Closed));
    });
}

#[test]
fn what_nobody_takes_is_dropped_with_the_ring() {
    model(4, || {
        let value = std::sync::Arc::new(());
        let ring = Arc::new(SubmissionRing::new(2));
        let submitter = thread::spawn({
            let (ring, value) = (ring.clone(), value.clone());
            move || assert_eq!(ring.push(&mut [Some(value.clone()), Some(value)]).unwrap().count, 2)
        });
        // SAFETY: this is the only consumer, and it takes each number once.
        if let Some(taken) = unsafe { ring.take(0) } {
            drop(taken);
            // SAFETY: this thread is the only consumer and has taken everything up to the number.
            unsafe { ring.complete(1, 1) };
        }
        submitter.join().unwrap();
        drop(ring);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    });
}
