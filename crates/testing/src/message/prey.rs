//! An endpoint that communicates with an honest peer and with every other peer that connects,
//! whatever that one does.

use std::time::{Duration, Instant};

use memferry_message::{Endpoint, Operation, Peer, Source, TAG_ALL, TAG_ANY};

use super::memory::GuardedBuffer;
use super::{Random, until};
use crate::pattern::{fill, first_wrong};

/// The tag of messages with the honest peer.
const HONEST: u64 = 0x1234_5678_9ABC_DEF0;

/// An operation with an untrusted peer, and its memory.
struct VictimOperation {
    peer: Peer,
    operation: Operation,
    memory: GuardedBuffer,
    /// The seed and the length of the message that is sent.
    sent: Option<(u64, usize)>,
}

/// The endpoint that is attacked.
pub struct VictimEndpoint {
    /// The endpoint of the survivor.
    pub endpoint: Endpoint,
    honest: Peer,
    risks: Vec<VictimOperation>,
    random: Random,
    /// The counts for the final report.
    pub exchanged: u64,
    /// The longest time until an end was noticed.
    pub slowest: Duration,
    /// The number of operations that succeeded.
    pub completed: u64,
    /// The number of operations that failed.
    pub failed: u64,
}

/// The honest peer: sends everything back, and checks it.
pub fn honest_peer(name: &str, prey: &str) {
    let endpoint = Endpoint::open(name).unwrap();
    let peer = endpoint.connect(prey).unwrap();
    endpoint.send(peer, HONEST, b"here").unwrap();
    let mut buffer = vec![0; 2 << 20];
    for number in 0.. {
        let Ok(received) = endpoint.recv(peer, HONEST, TAG_ALL, &mut buffer) else { return };
        let bytes = &buffer[..received.length as usize];
        assert_eq!(first_wrong(bytes, number), None, "message {number}");
        endpoint.send(peer, HONEST, bytes).unwrap();
    }
}

impl VictimEndpoint {
    /// Waits for the honest peer.
    pub fn new(endpoint: Endpoint, seed: u64) -> Self {
        let honest = endpoint.recv(Source::Any, HONEST, TAG_ALL, &mut [0; 8]).unwrap().source;
        Self {
            endpoint,
            honest,
            risks: Vec::new(),
            random: Random::new(seed),
            exchanged: 0,
            slowest: Duration::ZERO,
            completed: 0,
            failed: 0,
        }
    }

    /// One message to the honest peer and back.
    pub fn exchange(&mut self) {
        let began = Instant::now();
        let length = self.random.pick(&[10, 1000, 20_000, 200_000, 1 << 20]);
        let (mut there, mut back) = (GuardedBuffer::plain(length), GuardedBuffer::plain(length));
        fill(there.bytes_mut(), self.exchanged);
        let (from, to) = (there.address(), back.address());
        // SAFETY: both live until the operations complete, below.
        let (mut send, mut receive) = unsafe {
            let receive = self.endpoint.irecv_raw(self.honest, HONEST, TAG_ALL, to, length);
            (self.endpoint.isend_raw(self.honest, HONEST, from, length).unwrap(), receive.unwrap())
        };
        until("the honest peer has replied", || {
            self.go_on();
            send.test().is_some() && receive.test().is_some()
        });
        send.wait().unwrap();
        assert_eq!(receive.wait().unwrap().length, length as u64);
        assert_eq!(first_wrong(back.bytes(), self.exchanged), None);
        back.check_guards();
        there.check_guards();
        self.exchanged += 1;
        self.slowest = self.slowest.max(began.elapsed());
    }

    /// Starts operations with all other peers, and handles completed ones.
    pub fn go_on(&mut self) {
        for index in (0..self.risks.len()).rev() {
            let Some(outcome) = self.risks[index].operation.test() else { continue };
            let risk = self.risks.swap_remove(index);
            risk.memory.check_guards();
            if let Some((seed, length)) = risk.sent {
                assert_eq!(first_wrong(&risk.memory.bytes()[..length], seed), None);
            }
            let counter = if outcome.is_ok() { &mut self.completed } else { &mut self.failed };
            *counter += 1;
        }
        for peer in self.endpoint.peers() {
            if peer != self.honest {
                self.start_random_operation(peer);
            }
        }
        self.receive_pending();
    }

    /// Keeps a few sends and receives with a peer in flight.
    fn start_random_operation(&mut self, peer: Peer) {
        while self.risks.iter().filter(|risk| risk.peer == peer).count() < 6 {
            let length = self.random.pick(&[0, 30, 3000, 50_000, 600_000, 3 << 20]);
            let mut memory = GuardedBuffer::new(length, self.random.chance(3));
            let (at, seed) = (memory.address(), self.random.next_u64());
            let (is_send, mask) = (self.random.chance(2), self.random.pick(&[0, 1, TAG_ALL]));
            // SAFETY: the memory is kept until the operation completes.
            let begun = unsafe {
                if is_send {
                    fill(memory.bytes_mut(), seed);
                    self.endpoint.isend_raw(peer, seed % 4, at, length)
                } else {
                    self.endpoint.irecv_raw(peer, seed % 4, mask, at, length)
                }
            };
            let sent = is_send.then_some((seed, length));
            match begun {
                Ok(operation) => self.risks.push(VictimOperation { peer, operation, memory, sent }),
                Err(_) => break,
            }
        }
    }

    /// Receives unexpected messages, including those of disconnected peers.
    fn receive_pending(&mut self) {
        for _ in 0..50 {
            let Ok(Some(gift)) = self.endpoint.iprobe(Source::Any, 0, TAG_ANY) else { break };
            if gift.source == self.honest {
                break;
            }
            let mut memory = GuardedBuffer::plain(self.random.pick(&[0, 100, 100_000]));
            let (at, length) = (memory.address(), memory.length());
            // SAFETY: the memory is kept until the operation completes.
            let begun =
                unsafe { self.endpoint.irecv_raw(gift.source, gift.tag, TAG_ALL, at, length) };
            if let Ok(operation) = begun {
                self.risks.push(VictimOperation {
                    peer: gift.source,
                    operation,
                    memory,
                    sent: None,
                });
            }
        }
    }

    /// Waits until all operations with other than the honest peer are complete, after these have
    /// disconnected.
    pub fn settle(&mut self) {
        until("everything with the others has ended", || {
            self.go_on();
            self.endpoint.peers().len() == 1 && self.risks.is_empty()
        });
    }
}
