//! One of many processes that send to each other at random, and check everything they receive.

use std::collections::{HashMap, VecDeque};
use std::io::{IoSlice, IoSliceMut};

use memferry_message::{Error, Job, MessageStatus, OwnedOperation, Peer, ShareableBuffer, Source};

use super::memory::GuardedBuffer;
use super::{Random, TIMEOUT};
use crate::pattern::{fill, first_wrong, mix, pattern};

/// Set in the tags of messages with counts.
pub const LAST: u64 = 1 << 63;
/// Tags of ordinary messages.
const TAGS: u64 = 5;
const MOST_BYTES: usize = 4 << 20;
/// Posted receives at a time.
const WINDOW: usize = 8;

/// The seed of the bytes of a message.
fn seed(from: usize, to: usize, tag: u64, sequence: u64) -> u64 {
    mix((from as u64) << 48 | (to as u64) << 40 | tag << 32 | sequence)
}

/// A receive, with guards around its memory.
struct Posted {
    operation: memferry_message::Operation,
    memory: GuardedBuffer,
}

/// The state of this process.
pub struct Member<'a> {
    job: &'a Job,
    random: Random,
    sends: Vec<OwnedOperation<Buffer>>,
    /// In the order in which they were posted, which is the order in which they must be matched.
    posted: VecDeque<Posted>,
    /// Memory of completed receives.
    spare: Vec<GuardedBuffer>,
    /// The number of messages sent to each rank under each tag, and received from each.
    sent: HashMap<(usize, u64), u64>,
    received: HashMap<(usize, u64), u64>,
    /// The number of cancelled receives.
    pub cancelled: u64,
}

enum Buffer {
    Plain(Vec<u8>),
    Shareable(ShareableBuffer),
}

// SAFETY: both types are, and an enum of them does not move what they point to.
unsafe impl memferry_copy::OwnedSource for Buffer {
    fn source(&self) -> (*const u8, usize) {
        match self {
            Self::Plain(bytes) => (bytes.as_ptr(), bytes.len()),
            Self::Shareable(buffer) => (buffer.as_ptr(), buffer.len()),
        }
    }
}

impl<'a> Member<'a> {
    /// A member of a job.
    pub fn new(job: &'a Job, seed: u64) -> Self {
        Self {
            job,
            random: Random::new(seed + job.rank() as u64),
            sends: Vec::new(),
            posted: VecDeque::new(),
            spare: (0..WINDOW).map(|n| GuardedBuffer::new(MOST_BYTES, n % 3 == 0)).collect(),
            sent: HashMap::new(),
            received: HashMap::new(),
            cancelled: 0,
        }
    }

    fn length(&mut self) -> usize {
        match self.random.below(40) {
            0 => self.random.below(MOST_BYTES as u64 + 1) as usize,
            1..=12 => self.random.below(300 << 10) as usize,
            13..=24 => self.random.below(10_000) as usize,
            _ => self.random.below(60) as usize,
        }
    }

    /// Sends a random message to a random rank, this process included.
    pub fn send(&mut self) {
        let (me, to) = (self.job.rank(), self.random.below(self.job.size() as u64) as usize);
        let (tag, length) = (self.random.below(TAGS), self.length());
        let sequence = self.sent.entry((to, tag)).or_default();
        let seed = seed(me, to, tag, *sequence);
        *sequence += 1;
        let (endpoint, peer) = (self.job.endpoint(), self.job.peer(to));
        if self.random.chance(4) && length > 100 {
            // In fragments, and all of it before the next.
            let bytes = pattern(length, seed);
            let (one, rest) = bytes.split_at(self.random.below(length as u64) as usize);
            let (two, three) = rest.split_at(rest.len() / 3);
            let segments = [one, two, &[], three].map(IoSlice::new);
            endpoint.scope(|scope| {
                let mut send = scope.isend(peer, tag, &segments[..]).unwrap();
                while send.test().is_none() {
                    self.receive();
                    std::thread::yield_now();
                }
            });
            return;
        }
        let buffer = if self.random.chance(3) && length > 0 {
            let mut buffer = ShareableBuffer::new(length).unwrap();
            fill(&mut buffer, seed);
            Buffer::Shareable(buffer)
        } else {
            Buffer::Plain(pattern(length, seed))
        };
        self.sends.push(endpoint.isend(peer, tag, buffer).unwrap());
        self.sends.retain_mut(|send| !send.is_done());
    }

    /// Keeps receives posted, completes them in order, and sometimes cancels one.
    pub fn receive(&mut self) {
        while self.posted.len() < WINDOW {
            self.post();
        }
        while let Some(front) = self.posted.front_mut() {
            let Some(outcome) = front.operation.test() else { break };
            let front = self.posted.pop_front().unwrap();
            front.memory.check_guards();
            match outcome {
                Ok(received) => self.check(&received, &front.memory),
                Err(Error::Cancelled(_)) => self.cancelled += 1,
                Err(error) => panic!("{error}"),
            }
            self.spare.push(front.memory);
        }
        if self.random.chance(100)
            && let Some(posted) = self.posted.front()
        {
            posted.operation.cancel();
        }
    }

    /// Posts a receive: from any or one source, for any tag, one tag, or half of them.
    fn post(&mut self) {
        let spare = self.random.below(self.spare.len() as u64) as usize;
        let mut memory = self.spare.swap_remove(spare);
        let (at, tag) = (memory.address(), self.random.below(TAGS));
        let mask = self.random.pick(&[LAST, LAST, u64::MAX, LAST | 1]);
        let from: Source = match self.random.chance(2) {
            true => Source::Any,
            false => self.job.peer(self.random.below(self.job.size() as u64) as usize).into(),
        };
        // SAFETY: the memory is kept with the operation until it completes.
        let operation =
            unsafe { self.job.endpoint().irecv_raw(from, tag, mask, at, MOST_BYTES) }.unwrap();
        self.posted.push_back(Posted { operation, memory });
    }

    fn check(&mut self, received: &MessageStatus, memory: &GuardedBuffer) {
        let from = self.rank(received.source);
        let sequence = self.received.entry((from, received.tag)).or_default();
        let seed = seed(from, self.job.rank(), received.tag, *sequence);
        let wrong = first_wrong(&memory.bytes()[..received.length as usize], seed);
        assert_eq!(wrong, None, "message {sequence} from {from}: {received:?}");
        *sequence += 1;
    }

    fn rank(&self, peer: Peer) -> usize {
        self.job.rank_of(peer).expect("every peer is in the job")
    }

    /// Sends the counts to all ranks, and receives until all messages have arrived. Returns the
    /// number of messages received.
    pub fn finish(&mut self) -> u64 {
        let (size, endpoint) = (self.job.size(), self.job.endpoint());
        let mut last = Vec::new();
        for to in 0..size {
            let counts: Vec<u8> = (0..TAGS)
                .flat_map(|tag| self.sent.get(&(to, tag)).copied().unwrap_or(0).to_le_bytes())
                .collect();
            last.push(endpoint.isend(self.job.peer(to), LAST, counts).unwrap());
        }
        let mut expected = 0;
        for from in 0..size {
            // In two segments, so that this is tested too.
            let (mut one, mut two) = ([0; 16], [0; 24]);
            let mut segments = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            endpoint.scope(|scope| {
                let peer = self.job.peer(from);
                let mut receive = scope.irecv(peer, LAST, u64::MAX, &mut segments[..]).unwrap();
                while receive.test().is_none() {
                    self.receive();
                    std::thread::yield_now();
                }
                assert_eq!(receive.wait().unwrap().length, 40);
            });
            let counts = [&one[..], &two].concat();
            let numbers = counts.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            expected += numbers.sum::<u64>();
        }
        let deadline = std::time::Instant::now() + TIMEOUT;
        while self.received.values().sum::<u64>() < expected {
            assert!(std::time::Instant::now() < deadline, "messages are missing");
            self.receive();
            std::thread::yield_now();
        }
        for posted in self.posted.drain(..) {
            let mut posted = posted;
            posted.operation.cancel();
            assert!(matches!(posted.operation.wait(), Err(Error::Cancelled(_))));
        }
        for send in self.sends.drain(..) {
            assert!(send.wait().is_ok());
        }
        last.into_iter().for_each(|send| drop(send.wait().unwrap()));
        expected
    }
}
