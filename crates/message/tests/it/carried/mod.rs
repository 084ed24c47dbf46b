//! Messages from a remote transport are matched like all others. The transport of this test is a
//! model: two queues in one process.

mod messages;
mod peers;

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::{
    CompletionEntry, CompletionKind, CompletionOptions, DisconnectReason, Endpoint, Envelope,
    Error, MatchSpec, Peer, RemoteEvent, RemoteRma, RemoteRmaOp, RemoteTransport, Segment, Source,
    TAG_ALL,
};

/// Longer messages are announced.
const SMALL: usize = 100;

#[derive(Debug)]
enum ModelPacket {
    Whole(Envelope, Vec<u8>),
    Waits { envelope: Envelope, length: u64, ticket: u64 },
    Wanted { ticket: u64, fetch: u64, length: u64 },
    Data { fetch: u64, bytes: Vec<u8> },
    Gone,
}

/// The messages in flight to each of the two.
type Mailboxes = Arc<Mutex<[VecDeque<ModelPacket>; 2]>>;

/// A transport between two endpoints, each of which has the other as peer 5.
#[derive(Debug)]
struct ModelTransport {
    side: usize,
    mailboxes: Mailboxes,
    waiting: HashMap<u64, Vec<Segment>>,
    fetching: HashMap<u64, Vec<Segment>>,
    completed: Vec<RemoteEvent>,
    credited: Arc<Mutex<u64>>,
}

const PEER_ID: u64 = 5;
const KEY: u64 = 12;

impl ModelTransport {
    fn post(&self, letter: ModelPacket) {
        self.mailboxes.lock().unwrap()[1 - self.side].push_back(letter);
    }
}

fn read(segments: &[Segment]) -> Vec<u8> {
    let bytes = |segment: &Segment| match segment.length {
        0 => Vec::new(),
        // SAFETY: the endpoint keeps the memory of a message until it completes.
        length => unsafe { std::slice::from_raw_parts(segment.address, length) }.to_vec(),
    };
    segments.iter().flat_map(bytes).collect()
}

impl RemoteTransport for ModelTransport {
    fn send(
        &mut self,
        peer: u64,
        number: u64,
        envelope: &Envelope,
        segments: &[Segment],
        late: bool,
    ) {
        assert_eq!(peer, PEER_ID);
        let bytes = read(segments);
        if bytes.len() <= SMALL && !late {
            self.post(ModelPacket::Whole(*envelope, bytes));
            self.completed.push(RemoteEvent::Sent { number, outcome: Ok(()) });
        } else {
            let (envelope, length, ticket) = (*envelope, bytes.len() as u64, number);
            self.waiting.insert(ticket, segments.to_vec());
            self.post(ModelPacket::Waits { envelope, length, ticket });
        }
    }

    fn fetch(&mut self, _: u64, ticket: u64, number: u64, segments: &[Segment], length: u64) {
        self.fetching.insert(number, segments.to_vec());
        self.post(ModelPacket::Wanted { ticket, fetch: number, length });
    }

    fn return_credit(&mut self, _: u64, bytes: u64) {
        *self.credited.lock().unwrap() += bytes;
    }

    /// The memory of the peer is one byte: its address. Only one key exists.
    fn start_rma(&mut self, peer: u64, number: u64, access: &RemoteRma) {
        assert_eq!((peer, access.local.length), (PEER_ID, 1));
        match (access.key, access.op) {
            (KEY, RemoteRmaOp::Put) => {
                assert_eq!(u64::from(read(&[access.local])[0]), access.address);
            }
            // SAFETY: the endpoint keeps the memory of an access until it completes.
            (KEY, RemoteRmaOp::Get) => unsafe { access.local.address.write(access.address as u8) },
            _ => return,
        }
        self.completed.push(RemoteEvent::RmaCompleted { number, outcome: Ok(()) });
    }

    fn poll(&mut self, events: &mut Vec<RemoteEvent>) {
        events.append(&mut self.completed);
        let letters = std::mem::take(&mut self.mailboxes.lock().unwrap()[self.side]);
        for letter in letters {
            match letter {
                ModelPacket::Whole(envelope, bytes) => {
                    events.push(RemoteEvent::Arrived { peer: PEER_ID, envelope, bytes });
                }
                ModelPacket::Waits { envelope, length, ticket } => {
                    let peer = PEER_ID;
                    events.push(RemoteEvent::Rts { peer, envelope, length, ticket });
                }
                ModelPacket::Wanted { ticket, fetch, length } => {
                    let mut bytes = read(&self.waiting.remove(&ticket).unwrap());
                    bytes.truncate(length as usize);
                    self.post(ModelPacket::Data { fetch, bytes });
                    events.push(RemoteEvent::Sent { number: ticket, outcome: Ok(()) });
                }
                ModelPacket::Data { fetch, bytes } => {
                    let mut bytes = &bytes[..];
                    for segment in self.fetching.remove(&fetch).unwrap() {
                        let (now, later) = bytes.split_at(segment.length.min(bytes.len()));
                        // SAFETY: as in `read`, for the length of the segment.
                        unsafe { segment.address.copy_from(now.as_ptr(), now.len()) };
                        bytes = later;
                    }
                    events.push(RemoteEvent::Fetched { number: fetch, outcome: Ok(()) });
                }
                ModelPacket::Gone => {
                    events.push(RemoteEvent::Disconnected {
                        peer: PEER_ID,
                        reason: DisconnectReason::Exited,
                    });
                }
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn can_block(&mut self) -> bool {
        true
    }
}

struct RemoteSide {
    endpoint: Endpoint,
    peer: Peer,
    credited: Arc<Mutex<u64>>,
}

fn sides(name: &str) -> ([RemoteSide; 2], Mailboxes) {
    let boxes = Mailboxes::default();
    let sides = [0, 1].map(|side| {
        let name = format!("carried-{}-{name}-{side}", std::process::id());
        let endpoint = Endpoint::open(&name).unwrap();
        let taken = Arc::<Mutex<u64>>::default();
        let carrier = ModelTransport {
            side,
            mailboxes: boxes.clone(),
            waiting: HashMap::new(),
            fetching: HashMap::new(),
            completed: Vec::new(),
            credited: taken.clone(),
        };
        endpoint.set_remote_transport(Box::new(carrier)).unwrap();
        let other = endpoint.remote_peer(PEER_ID).unwrap();
        assert_eq!(endpoint.remote_id(other), Some(PEER_ID));
        RemoteSide { endpoint, peer: other, credited: taken }
    });
    (sides, boxes)
}

fn completions(sides: &[RemoteSide; 2], of: usize, count: usize) -> Vec<CompletionEntry> {
    let mut found = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(200);
    while found.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} reports came", found.len());
        sides[1 - of].endpoint.progress();
        sides[of].endpoint.poll_completions(&mut found);
    }
    found
}

fn options(context: u64) -> CompletionOptions {
    CompletionOptions { context, ..CompletionOptions::default() }
}

fn target(bytes: &mut [u8]) -> [Segment; 1] {
    [Segment::target(bytes.as_mut_ptr(), bytes.len())]
}
