//! One side with several threads: one sleeps, another polls the ring for a limited time. While a
//! thread polls, the peer need not ring the doorbell; a thread that stops polling, or leaves to
//! copy, arms the wakeup for the sleeper. The flags, the ring and the steps around them are the
//! library's; the counts stand for those of the port, which its lock protects.

use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;

use crate::cells::{self, Reader, Writer};
use crate::futex::Futex;
use crate::model;
use crate::ring::wakeup::{FUTEX_ARMED, WakeupFlags};

/// One side.
struct Port {
    state: Mutex<State>,
    wakeup: WakeupFlags,
    futex: Futex,
    /// The event that a copy waits for, which never completes by itself.
    received: Condvar,
}

/// The state under the lock.
struct State {
    reader: Reader,
    pollers: u32,
    resting: u32,
    has_sleeper: bool,
}

impl Port {
    fn new() -> (Writer, Arc<Self>) {
        let (writer, reader) = cells::ends();
        let state = State { reader, pollers: 0, resting: 0, has_sleeper: false };
        let (state, received) = (Mutex::new(state), Condvar::new());
        let port = Self { state, wakeup: WakeupFlags::default(), futex: Futex::new(), received };
        (writer, Arc::new(port))
    }

    fn enter(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Takes all cells.
    fn step(&self, state: &mut State) -> bool {
        let before = state.reader.seen;
        while state.reader.take() {}
        let moved = state.reader.seen > before;
        if moved {
            self.received.notify_all();
        }
        moved
    }

    /// Sleeps until a number of cells was taken, by any thread.
    fn sleep_for(&self, count: u64) {
        let mut state = self.enter();
        loop {
            self.step(&mut state);
            if state.reader.seen >= count {
                return;
            }
            (state.has_sleeper, state.resting) = (true, FUTEX_ARMED);
            self.wakeup.arm(FUTEX_ARMED);
            if !self.step(&mut state) {
                drop(state);
                self.futex.wait(self.wakeup.word(), FUTEX_ARMED);
                state = self.enter();
            }
            (state.has_sleeper, state.resting) = (false, 0);
            self.wakeup.disarm();
        }
    }

    /// Wakes the sleeper. The sleeper may not sleep yet, so no thread may arm the wakeup again.
    fn wake_sleeper(&self, state: &mut State) {
        state.resting &= !FUTEX_ARMED;
        self.wakeup.disarm();
        self.futex.wake();
    }

    fn begin_polling(&self, state: &mut State) {
        state.pollers += 1;
        if state.resting != 0 {
            self.wakeup.disarm();
        }
    }

    /// The last polling thread arms the wakeup, and then polls once more.
    fn end_polling(&self, state: &mut State) {
        state.pollers -= 1;
        if state.pollers == 0 && state.resting & FUTEX_ARMED != 0 {
            self.wakeup.arm(state.resting);
            if self.step(state) {
                self.wake_sleeper(state);
            }
        }
    }

    /// Polls `looks` times.
    fn poll(&self, looks: u32) {
        let mut state = self.enter();
        self.begin_polling(&mut state);
        for _ in 0..looks {
            if self.step(&mut state) && state.has_sleeper {
                self.wake_sleeper(&mut state);
            }
            drop(state);
            state = self.enter();
        }
        self.end_polling(&mut state);
    }

    /// Polls, and leaves to make a copy that lasts until a number of cells was taken.
    fn poll_and_copy(&self, count: u64) {
        let mut state = self.enter();
        self.begin_polling(&mut state);
        self.end_polling(&mut state);
        while state.reader.seen < count {
            state = self.received.wait(state).unwrap();
        }
        self.begin_polling(&mut state);
        self.end_polling(&mut state);
    }

    /// Called by the peer after it has written.
    fn ring(&self) {
        if self.wakeup.take_armed() & FUTEX_ARMED != 0 {
            self.futex.wake();
        }
    }
}

fn sleeper(port: &Arc<Port>, count: u64) -> thread::JoinHandle<()> {
    let port = port.clone();
    thread::spawn(move || port.sleep_for(count))
}

fn peer(mut writer: Writer, port: &Arc<Port>) -> thread::JoinHandle<()> {
    let port = port.clone();
    thread::spawn(move || {
        writer.write();
        port.ring();
    })
}

#[test]
fn one_who_looks_no_more_lets_the_peer_ring_for_the_one_that_sleeps() {
    model(3, || {
        let (writer, port) = Port::new();
        let threads = [sleeper(&port, 1), peer(writer, &port)];
        port.poll(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn one_who_copies_is_not_taken_for_one_who_looks() {
    model(3, || {
        let (writer, port) = Port::new();
        let threads = [sleeper(&port, 1), peer(writer, &port)];
        port.poll_and_copy(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn the_last_of_two_who_look_lets_the_peer_ring() {
    model(2, || {
        let (writer, port) = Port::new();
        let other = thread::spawn({
            let port = port.clone();
            move || port.poll(0)
        });
        let threads = [sleeper(&port, 1), peer(writer, &port), other];
        port.poll(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
