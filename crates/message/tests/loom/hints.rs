//! Hints: a process that polls no ring, and sleeps on one word for all its peers, misses no cell. A missed
//! one would show as a deadlock.

use loom::sync::Arc;
use loom::thread;

use crate::cells::{self, Reader, Writer};
use crate::futex::{Futex, Socket};
use crate::model;
use crate::ring::hints::HintWords;
use crate::ring::wakeup::{FD_ARMED, FUTEX_ARMED, HINT_ARMED, WakeupFlags};

/// What the processes share: the hints of the owner, and the flags of its connections.
struct Shared {
    hints: HintWords,
    futex: Futex,
    flags: Vec<WakeupFlags>,
    /// One socket for all, which the owner watches.
    socket: Socket,
}

impl Shared {
    /// Called by a peer after it has written.
    fn ring(&self, peer: usize) {
        let flags = self.flags[peer].take_armed();
        if flags & HINT_ARMED != 0 && self.hints.set(peer) & FUTEX_ARMED != 0 {
            self.futex.wake();
        }
        if flags & FD_ARMED != 0 {
            self.socket.send();
        }
    }
}

/// The owner's connections, of which it polls some.
struct Owner {
    shared: Arc<Shared>,
    readers: Vec<Reader>,
    is_polled: Vec<bool>,
}

impl Owner {
    fn take_hints(&mut self) {
        let Self { shared, is_polled, .. } = self;
        shared.hints.take(|peer| is_polled[peer] = true);
    }

    fn is_any_ready(&self) -> bool {
        let polled = self.readers.iter().zip(&self.is_polled);
        polled.filter(|(_, is_polled)| **is_polled).any(|(reader, _)| reader.consumer.is_ready())
    }

    /// Takes the cells of the rings that it polls.
    fn poll(&mut self) {
        self.take_hints();
        let polled = self.readers.iter_mut().zip(&self.is_polled);
        polled.filter(|(_, is_polled)| **is_polled).for_each(|(reader, _)| while reader.take() {});
    }

    /// Stops polling the rings that are polled, each after a last poll.
    fn leave_rings(&mut self) {
        for (peer, reader) in self.readers.iter().enumerate() {
            if self.is_polled[peer] {
                self.shared.flags[peer].arm(HINT_ARMED);
                self.is_polled[peer] = reader.consumer.is_ready();
            }
        }
    }

    /// Sleeps on the word of the hints.
    fn sleep_on_word(&mut self) {
        let shared = self.shared.clone();
        shared.hints.wakeup().arm(FUTEX_ARMED);
        self.leave_rings();
        if !self.is_any_ready() && !shared.hints.has_any() {
            shared.futex.wait(shared.hints.wakeup().word(), FUTEX_ARMED);
        }
        shared.hints.wakeup().disarm();
    }

    /// Sleeps on the socket, for which all rings are armed, also those that are not polled.
    fn sleep_on_socket(&mut self) {
        for (peer, reader) in self.readers.iter().enumerate() {
            self.shared.flags[peer].arm(HINT_ARMED | FD_ARMED);
            self.is_polled[peer] = reader.consumer.is_ready();
        }
        if !self.is_any_ready() && !self.shared.hints.has_any() {
            self.shared.socket.wait_and_drain();
        }
    }

    fn seen(&self) -> u64 {
        self.readers.iter().map(|reader| reader.seen).sum()
    }
}

/// Makes an owner that polls no ring, and the writers of its peers.
fn owner_of(peers: usize) -> (Owner, Vec<Writer>) {
    let (writers, readers): (Vec<_>, Vec<_>) = (0..peers).map(|_| cells::ends()).unzip();
    let flags: Vec<WakeupFlags> = (0..peers).map(|_| WakeupFlags::default()).collect();
    for flags in &flags {
        flags.arm(HINT_ARMED);
    }
    let (hints, futex, socket) = (HintWords::default(), Futex::new(), Socket::new());
    let shared = Arc::new(Shared { hints, futex, flags, socket });
    (Owner { shared, readers, is_polled: vec![false; peers] }, writers)
}

fn start(owner: &Owner, writers: Vec<Writer>, cells: u64) -> Vec<thread::JoinHandle<()>> {
    let started = writers.into_iter().enumerate().map(|(peer, mut writer)| {
        let shared = owner.shared.clone();
        thread::spawn(move || {
            for _ in 0..cells {
                assert!(writer.has_credit());
                writer.write();
                shared.ring(peer);
            }
        })
    });
    started.collect()
}

fn an_owner_that_sleeps(peers: usize, cells: u64, sleep: fn(&mut Owner)) {
    let (mut owner, writers) = owner_of(peers);
    let there = start(&owner, writers, cells);
    loop {
        owner.poll();
        if owner.seen() == peers as u64 * cells {
            break;
        }
        sleep(&mut owner);
    }
    there.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_peer_whose_ring_is_not_polled_wakes_the_owner() {
    model(4, || an_owner_that_sleeps(1, 1, Owner::sleep_on_word));
    model(4, || an_owner_that_sleeps(1, 1, Owner::sleep_on_socket));
}

#[test]
fn a_ring_that_is_left_again_is_not_missed() {
    model(2, || an_owner_that_sleeps(1, 2, Owner::sleep_on_word));
    model(2, || an_owner_that_sleeps(1, 2, Owner::sleep_on_socket));
}

#[test]
fn two_peers_wake_one_owner() {
    model(2, || an_owner_that_sleeps(2, 1, Owner::sleep_on_word));
}

#[test]
fn an_owner_that_leaves_rings_while_it_polls_misses_no_hint() {
    model(3, || {
        let (mut owner, writers) = owner_of(1);
        let there = start(&owner, writers, 2);
        while owner.seen() < 2 {
            owner.poll();
            owner.leave_rings();
            thread::yield_now();
        }
        there.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
