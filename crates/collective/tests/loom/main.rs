//! The lines of a team under the loom model checker, which runs every relevant interleaving:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p memferry-collective --release --test loom
//! ```
//!
//! Threads stand for ranks. A lost wakeup shows as a deadlock, a slot that is reused too early as a wrong payload.
#![cfg(loom)]

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// The file of the library, with the atomics of the model checker. It is included, not used from the library: shared
/// memory cannot hold those atomics, so there is no library then.
#[path = "../../src/line.rs"]
#[allow(dead_code)]
mod line;

use line::{Awaited, Header, Line, SLOTS, must_look_for_sleepers};

/// Checks a model with at most `preemptions` preemptions in one run.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// The kernel's part of sleeping: compare and sleep are one step.
struct Futex {
    queue: Mutex<()>,
    sleepers: Condvar,
}

impl Futex {
    fn wait(&self, word: &AtomicU32, expected: u32) {
        let guard = self.queue.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            drop(self.sleepers.wait(guard).unwrap());
        }
    }

    fn wake(&self) {
        let _guard = self.queue.lock().unwrap();
        self.sleepers.notify_all();
    }
}

/// The shared memory of a team, with a futex for each line.
struct Memory {
    header: Header,
    lines: Vec<(Line, Futex)>,
}

impl Memory {
    fn new(ranks: usize) -> Arc<Self> {
        let futex = || Futex { queue: Mutex::new(()), sleepers: Condvar::new() };
        let lines = (0..ranks).map(|_| (Line::default(), futex())).collect();
        Arc::new(Self { header: Header::default(), lines })
    }

    fn has_arrived(&self, awaited: Awaited, phase: u64) -> bool {
        match awaited {
            Awaited::Rank(rank) => self.lines[rank].0.has_published(phase),
            Awaited::All => self.lines.iter().all(|(line, _)| line.has_published(phase)),
        }
    }

    /// As `Shared::publish`.
    fn publish(&self, rank: usize, phase: u64, payload: u64) {
        let line = &self.lines[rank].0;
        line.slot(phase).fill(7, &payload.to_ne_bytes());
        line.publish(phase);
        if must_look_for_sleepers(&self.header) {
            for (line, futex) in &self.lines {
                if line.take_sleeper(|awaited, phase| self.has_arrived(awaited, phase)) {
                    futex.wake();
                }
            }
        }
    }

    /// As `Shared::sleep`, until it has arrived.
    fn wait(&self, rank: usize, awaited: Awaited, phase: u64) {
        let (line, futex) = &self.lines[rank];
        while !self.has_arrived(awaited, phase) {
            line.arm(&self.header, awaited, phase);
            if !self.has_arrived(awaited, phase) {
                let (word, expected) = line.sleep_word();
                futex.wait(word, expected);
            }
            line.disarm(&self.header);
        }
    }

    fn payload(&self, rank: usize, phase: u64) -> u64 {
        let mut bytes = [0; 8];
        let slot = self.lines[rank].0.slot(phase);
        assert_eq!(slot.mark(), 7);
        slot.read(0, &mut bytes);
        u64::from_ne_bytes(bytes)
    }
}

/// Starts a thread for each rank from 1 on, and runs rank 0 here.
fn run(ranks: usize, rank: impl Fn(&Memory, usize) + Clone + Send + Sync + 'static) {
    let memory = Memory::new(ranks);
    let start = |other| {
        let (memory, rank) = (memory.clone(), rank.clone());
        thread::spawn(move || rank(&memory, other))
    };
    let threads: Vec<_> = (1..ranks).map(start).collect();
    rank(&memory, 0);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// All ranks read the payloads of all ranks.
fn meet(memory: &Memory, own: usize, phase: u64) {
    memory.publish(own, phase, 100 * phase + own as u64);
    memory.wait(own, Awaited::All, phase);
    for rank in 0..memory.lines.len() {
        assert_eq!(memory.payload(rank, phase), 100 * phase + rank as u64);
    }
}

#[test]
fn two_ranks_that_sleep_meet_twice() {
    model(3, || run(2, |memory, own| (1..=2).for_each(|phase| meet(memory, own, phase))));
}

#[test]
fn of_three_ranks_the_last_one_wakes_the_others() {
    model(2, || run(3, |memory, own| meet(memory, own, 1)));
}

#[test]
fn a_rank_that_waits_for_one_other_is_woken() {
    model(4, || {
        run(2, |memory, own| match own {
            0 => memory.publish(0, 1, 5),
            _ => {
                memory.publish(1, 1, 0);
                memory.wait(1, Awaited::Rank(0), 1);
                assert_eq!(memory.payload(0, 1), 5);
            }
        });
    });
}

#[test]
fn a_slot_is_reused_only_when_it_was_read() {
    // A root that broadcasts goes ahead of its reader as far as there are slots, and no further.
    let phases = SLOTS as u64 + 1;
    model(2, move || {
        run(2, move |memory, own| {
            for phase in 1..=phases {
                if phase > SLOTS as u64 {
                    memory.wait(own, Awaited::All, phase + 1 - SLOTS as u64);
                }
                memory.publish(own, phase, phase);
                if own == 1 {
                    memory.wait(1, Awaited::Rank(0), phase);
                    assert_eq!(memory.payload(0, phase), phase);
                }
            }
        });
    });
}
