//! Random traffic with one peer: several sends and receives at a time, every byte checked.

use memferry_message::plan::PathKind;
use memferry_message::{Endpoint, EndpointBuilder, Error, MessageStatus, Operation, Peer, TAG_ANY};

use super::Random;
use super::memory::GuardedBuffer;
use crate::pattern::{fill, first_wrong};

/// The kind and direction of the messages.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// The name of the kind.
    pub name: &'static str,
    /// The path, if it is configured.
    pub path: Option<PathKind>,
    /// The limit of eager messages.
    pub eager_bytes: u64,
    /// Whether the sides access each other's memory.
    pub cross_memory: bool,
    /// Whether buffers are shareable.
    pub shareable: bool,
    /// The maximum length of a message.
    pub most_bytes: usize,
}

const PLAIN: Kind = Kind {
    name: "inline",
    path: None,
    eager_bytes: 8 << 10,
    cross_memory: true,
    shareable: false,
    most_bytes: 48,
};

/// One for each path.
pub const KINDS: [Kind; 8] = [
    PLAIN,
    Kind { name: "eager", eager_bytes: 1 << 20, most_bytes: 200_000, ..PLAIN },
    Kind { name: "single", path: Some(PathKind::Single), most_bytes: 400_000, ..PLAIN },
    Kind { name: "cooperative", path: Some(PathKind::Cooperative), most_bytes: 3 << 20, ..PLAIN },
    Kind { name: "pipeline", cross_memory: false, most_bytes: 1 << 20, ..PLAIN },
    Kind { name: "mapped", shareable: true, most_bytes: 2 << 20, ..PLAIN },
    Kind {
        name: "mapped, the receiver alone",
        path: Some(PathKind::Single),
        cross_memory: false,
        shareable: true,
        most_bytes: 2 << 20,
        ..PLAIN
    },
    Kind {
        name: "offload",
        path: Some(PathKind::Offload),
        shareable: true,
        most_bytes: 3 << 20,
        ..PLAIN
    },
];

impl Kind {
    /// The settings of an endpoint for such messages.
    pub fn builder(&self) -> EndpointBuilder {
        let builder =
            EndpointBuilder::new().eager_bytes(self.eager_bytes).cross_memory(self.cross_memory);
        match self.path {
            Some(path) => builder.path(path),
            None => builder,
        }
    }
}

/// One send or receive that is started again whenever it completes.
struct Slot {
    memory: GuardedBuffer,
    operation: Operation,
    /// The content of a send.
    sent: Option<(u64, usize)>,
}

impl Slot {
    /// Panics if a received message differs from what was sent.
    fn check(&self, received: &MessageStatus) {
        if self.sent.is_none() {
            let bytes = &self.memory.bytes()[..received.length as usize];
            assert_eq!(first_wrong(bytes, received.tag), None, "{received:?}");
        }
    }
}

/// The traffic of one side with one peer.
pub struct Traffic {
    endpoint: Endpoint,
    peer: Peer,
    random: Random,
    slots: Vec<Slot>,
    /// Messages must have the content that their tag names.
    is_strict: bool,
    /// The number of messages sent or received.
    pub done: u64,
}

impl Traffic {
    /// Starts with this many sends and receives at a time.
    pub fn begin(
        (endpoint, peer): (&Endpoint, Peer),
        kind: Kind,
        seed: u64,
        sends: usize,
        receives: usize,
    ) -> Result<Self, Error> {
        let (endpoint, random) = (endpoint.clone(), Random::new(seed));
        let (slots, is_strict, done) = (Vec::new(), true, 0);
        let mut talk = Self { endpoint, peer, random, slots, is_strict, done };
        for number in 0..sends + receives {
            let memory = GuardedBuffer::new(kind.most_bytes, kind.shareable);
            talk.add(memory, number < sends)?;
        }
        Ok(talk)
    }

    fn add(&mut self, mut memory: GuardedBuffer, is_send: bool) -> Result<(), Error> {
        let (max, tag) = (memory.length(), self.random.next_u64());
        let length = match self.random.below(8) {
            0 => max,
            1 => self.random.below(max as u64 / 16) as usize,
            _ => self.random.below(max as u64 + 1) as usize,
        };
        let at = memory.address();
        // SAFETY: the memory is kept in the slot until the operation completes.
        let operation = unsafe {
            if is_send {
                fill(&mut memory.bytes_mut()[..length], tag);
                self.endpoint.isend_raw(self.peer, tag, at, length)
            } else {
                self.endpoint.irecv_raw(self.peer, 0, TAG_ANY, at, max)
            }
        }?;
        let sent = is_send.then_some((tag, length));
        self.slots.push(Slot { memory, operation, sent });
        Ok(())
    }

    /// Makes one step of progress on everything. An error is that of the first message that failed.
    pub fn step(&mut self) -> Result<(), Error> {
        for _ in 0..self.slots.len() {
            let mut slot = self.slots.remove(0);
            let Some(outcome) = slot.operation.test() else {
                self.slots.push(slot);
                continue;
            };
            slot.memory.check_guards();
            match outcome {
                Ok(received) => {
                    if self.is_strict {
                        slot.check(&received);
                    }
                    self.done += 1;
                    self.add(slot.memory, slot.sent.is_some())?;
                }
                Err(error) => {
                    self.slots.push(slot);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// As `step`, with a peer whose messages may have any content.
    pub fn try_step(&mut self) -> Result<(), Error> {
        self.is_strict = false;
        self.step()
    }

    /// Drops everything, after the endpoint is closed.
    pub fn abandon(mut self) {
        assert_eq!(self.pending(), 0);
        self.slots.iter().for_each(|slot| slot.memory.check_guards());
    }

    /// Waits briefly for the oldest operation.
    pub fn pause(&mut self, moment: std::time::Duration) {
        self.slots[0].operation.wait_timeout(moment);
    }

    /// The number of operations in flight.
    pub fn pending(&mut self) -> usize {
        self.slots
            .iter_mut()
            .filter_map(|slot| slot.operation.test().is_none().then_some(()))
            .count()
    }

    /// The results and memory of all operations, when they are complete.
    pub fn end(self) -> Vec<(Result<MessageStatus, Error>, GuardedBuffer)> {
        let end = |mut slot: Slot| {
            let outcome = slot.operation.test().expect("the operation is complete");
            if let Ok(received) = &outcome {
                slot.check(received);
            }
            // In any case, a source is only read.
            if let Some((tag, length)) = slot.sent {
                assert_eq!(first_wrong(&slot.memory.bytes()[..length], tag), None);
            }
            (outcome, slot.memory)
        };
        self.slots.into_iter().map(end).collect()
    }
}
