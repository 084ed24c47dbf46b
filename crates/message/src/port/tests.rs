//! Two ports of one process, and what happens to one of them when the other ends at a chosen moment.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use memferry_sys::Pages;

use super::wait::{LOOKS, SLICES};
use super::{Begun, Peer, Port, State};
use crate::builder::Builder;
use crate::endpoint::Endpoint;
use crate::envelope::{Envelope, Wanted};
use crate::error::{Error, Gone};
use crate::pieces::Piece;
use crate::plan::PathKind;
use crate::ring::attention::ASLEEP;

/// Only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two connected endpoints. Nothing moves unless a test moves it.
struct Pair {
    here: Endpoint,
    there: Endpoint,
    /// `there`, as `here` knows it.
    peer: Peer,
}

impl Pair {
    fn new(name: &str) -> Self {
        Self::with(name, &Builder::new())
    }

    fn with(name: &str, builder: &Builder) -> Self {
        let name = |side: &str| format!("{name}-{side}-{}", std::process::id());
        let here = builder.open(&name("here")).unwrap();
        let there = builder.open(&name("there")).unwrap();
        let peer = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| here.connect(there.name()).unwrap());
            while there.peers().is_empty() {
                std::thread::yield_now();
            }
            connecting.join().unwrap()
        });
        Self { here, there, peer }
    }

    fn port(&self) -> &Port {
        self.here.port()
    }
}

/// Ends all connections of an endpoint as the death of its process would: without a word.
fn die(endpoint: &Endpoint) {
    for slot in &mut endpoint.port().enter().peers {
        slot.connection = None;
    }
}

/// Runs `f` in a thread of its own. Fails if it does not end.
fn ends<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(f()));
    wait.recv_timeout(PATIENCE).expect("a call that never returns")
}

#[test]
fn a_wait_ends_whenever_the_end_of_the_peer_is_noticed() {
    // Polls before each short sleep, and in the last round before the long one.
    let rounds = (0..=SLICES).map(|round| 1 + round * (LOOKS + 1));
    for moment in rounds.flat_map(|first| [first, first + LOOKS / 2, first + LOOKS]) {
        let outcome = ends(move || {
            let pair = Pair::new(&format!("wait-{moment}"));
            let mut target = [0u8; 8];
            let pieces = [Piece::target(target.as_mut_ptr(), target.len())];
            // SAFETY: the target lives until the receive is over.
            let begun =
                unsafe { pair.port().begin_receive(pair.peer.into(), 0, 0, &pieces) }.unwrap();
            let Begun::Underway(number) = begun else { panic!("nothing was sent") };
            pair.port().enter().is_crowded = false;
            let mut polls = 0;
            pair.port().block(false, None, |state: &mut State| {
                polls += 1;
                if polls == moment {
                    die(&pair.there);
                    // As if the last liveness check were long ago: the next one is due at once.
                    state.last_checked_ns = 0;
                }
                state.operations.take_outcome(number)
            })
        });
        assert_eq!(outcome, Some(Err(Error::PeerGone(Gone::Ended))), "at poll {moment}");
    }
}

#[test]
fn a_wait_that_makes_the_last_copy_of_its_message_does_not_time_out() {
    let pair = Pair::with("last-copy", &Builder::new().path(PathKind::Single));
    // Two copies: one in the first look, one in the first turn behind it.
    let send = pair.there.isend(pair.there.peers()[0], 1, vec![7; 2 << 20]).unwrap();
    let receive = pair.here.irecv(pair.peer, 1, u64::MAX, vec![0; 2 << 20]).unwrap();
    // As if another thread waited for the lock: then there is one turn only.
    pair.port().contenders.fetch_add(1, Ordering::Relaxed);
    let outcome = receive.wait_timeout(Duration::ZERO);
    pair.port().contenders.fetch_sub(1, Ordering::Relaxed);
    let (received, bytes) = outcome.expect("it is over").unwrap();
    assert!(received.length == 2 << 20 && bytes.iter().all(|&byte| byte == 7));
    send.wait().unwrap();
}

#[test]
fn a_probe_that_sleeps_deeply_ends_when_another_thread_notices_the_end_of_the_peer() {
    ends(|| {
        let pair = Pair::new("probe");
        let probing = {
            let (here, peer) = (pair.here.clone(), pair.peer);
            std::thread::spawn(move || here.probe(peer, 0, 0))
        };
        while !pair.port().enter().sleeps_deeply {
            std::thread::sleep(Duration::from_millis(1));
        }
        // With the lock held from the end on, this thread is the one that notices it.
        let mut state = pair.port().enter();
        die(&pair.there);
        assert!(state.check_peers(true));
        drop(state);
        assert_eq!(probing.join().unwrap(), Err(Error::PeerGone(Gone::Ended)));
    });
}

impl Pair {
    /// Sends from the other side: over at once, as long as there is room in the ring.
    fn send_here(&self, tag: u64, bytes: &[u8]) -> Result<Begun, Error> {
        let to_here = self.there.port().enter().all_peers()[0];
        let pieces = [Piece::source(bytes.as_ptr(), bytes.len())];
        // SAFETY: the tests' messages are constants or small enough to be over at once.
        unsafe { self.there.port().begin_send(to_here, tag, &pieces) }
    }

    /// Takes the next message without waiting for one.
    fn take(&self, tag: u64) -> Result<u8, Error> {
        let mut target = [0u8; 8];
        let pieces = [Piece::target(target.as_mut_ptr(), target.len())];
        // SAFETY: a receive that is not over at once ends the test.
        let begun = unsafe { self.port().begin_receive(self.peer.into(), tag, u64::MAX, &pieces) }?;
        match begun {
            Begun::Over(outcome) => outcome.map(|_| target[0]),
            Begun::Underway(_) => panic!("the message is neither here nor lost"),
        }
    }
}

/// Long enough to be announced; nobody fetches it in these tests.
static LONG: [u8; 1 << 20] = [1; 1 << 20];

#[test]
fn messages_in_the_ring_survive_another_call_of_a_peer_that_has_ended() {
    let pair = Pair::new("redial");
    for number in 0..50 {
        pair.send_here(0, &[number; 8]).unwrap();
    }
    die(&pair.there);
    let mut state = pair.port().enter();
    let id = state.peers[0].connection.as_ref().unwrap().wire.peer.id;
    // What a hello does that it sent before it took the call of this side.
    state.lose_if_ended(id);
    drop(state);
    for number in 0..50 {
        assert_eq!(pair.take(0), Ok(number));
    }
    assert_eq!(pair.take(0), Err(Error::PeerGone(Gone::Ended)));
}

#[test]
fn what_was_sent_before_an_orderly_end_is_received_by_all_kinds_of_receives() {
    let pair = Pair::new("several");
    for number in 0..3 {
        pair.send_here(5, &[number; 8]).unwrap();
    }
    pair.there.clone().close();
    while pair.port().enter().peers[0].connection.is_some() {
        pair.here.progress();
    }
    // By name too, although nobody listens there any more.
    assert_eq!(pair.here.connect(pair.there.name()), Ok(pair.peer));
    assert_eq!(pair.take(5), Ok(0));
    let (mut memory, mut reports) = ([0u8; 64], Vec::new());
    let (piece, wanted) =
        (Piece::target(memory.as_mut_ptr(), 64), Wanted::tagged(pair.peer, 5, u64::MAX));
    // SAFETY: the memory lives until the last report.
    unsafe { pair.here.post_receive_several(&wanted, piece, 9, 8) }.unwrap();
    pair.here.collect(&mut reports);
    let outcomes: Vec<_> = reports.iter().map(|report| report.outcome.clone()).collect();
    assert_eq!(outcomes, [Ok(()), Ok(()), Err(Error::PeerGone(Gone::Closed))]);
    assert_eq!((memory[0], memory[8]), (1, 2));
}

#[test]
fn an_orderly_end_is_told_as_one_even_if_there_was_no_room_to_say_so() {
    let pair = Pair::new("full");
    let mut sent = 0;
    while let Begun::Over(outcome) = pair.send_here(0, &[7; 8]).unwrap() {
        outcome.unwrap();
        sent += 1;
    }
    pair.there.clone().close();
    for _ in 0..sent {
        assert_eq!(pair.take(0), Ok(7));
    }
    while pair.port().enter().peers[0].connection.is_some() {
        pair.here.progress();
    }
    assert_eq!(pair.take(0), Err(Error::PeerGone(Gone::Closed)));
}

#[test]
fn nothing_passes_a_message_whose_memory_is_gone_with_its_sender() {
    let pair = Pair::new("unmapped");
    let (to_here, long) = (pair.there.port().enter().all_peers()[0], Pages::new(4 << 20).unwrap());
    let pieces = [Piece::source(long.as_ptr(), 4 << 20)];
    // SAFETY: it is announced, and given up before the memory goes.
    let begun = unsafe { pair.there.port().begin_send(to_here, 1, &pieces) };
    assert!(matches!(begun, Ok(Begun::Underway(_))));
    pair.send_here(1, &[2; 8]).unwrap();
    let mut target = vec![0u8; 4 << 20];
    let pieces = [Piece::target(target.as_mut_ptr(), target.len())];
    let from = pair.peer.into();
    // SAFETY: the target lives until the receive is over.
    let begun = unsafe { pair.port().begin_receive(from, 1, u64::MAX, &pieces) }.unwrap();
    let Begun::Underway(number) = begun else { panic!("nothing was copied yet") };
    // What a side that closes does first. It has not said so in the ring yet.
    pair.there.port().enter().peers[0].connection.as_ref().unwrap().wire.memory.end();
    drop(long);
    let outcome = loop {
        pair.port().enter().progress();
        if let Some(outcome) = pair.port().enter().operations.take_outcome(number) {
            break outcome;
        }
    };
    assert!(matches!(outcome, Err(Error::PeerGone(_))), "{outcome:?}");
    assert!(matches!(pair.take(1), Err(Error::PeerGone(_))));
}

#[test]
fn nothing_passes_a_message_that_was_set_aside_and_lost() {
    let pair = Pair::new("claimed");
    assert!(matches!(pair.send_here(1, &LONG), Ok(Begun::Underway(_))));
    pair.send_here(2, &[2; 8]).unwrap();
    let wanted = |tag| Wanted::tagged(pair.peer, tag, u64::MAX);
    for (tag, claim) in [(1, 11), (2, 12)] {
        assert!(pair.here.peek(&wanted(tag), Some(claim)).unwrap().is_some());
    }
    die(&pair.there);
    assert!(pair.port().enter().check_peers(true));
    let (mut memory, mut reports) = ([0u8; 8], Vec::new());
    for claim in [11, 12] {
        let piece = Piece::target(memory.as_mut_ptr(), 8);
        // SAFETY: the memory lives until the reports have come.
        unsafe { pair.here.post_claimed(claim, &[piece], claim) }.unwrap();
    }
    pair.here.collect(&mut reports);
    let gone = Err(Error::PeerGone(Gone::Ended));
    let outcomes: Vec<_> = reports.iter().map(|report| report.outcome.clone()).collect();
    assert_eq!(outcomes, [gone.clone(), gone]);
    let state = pair.port().enter();
    assert_eq!((state.peers[0].kept_count, state.peers[0].kept_bytes), (0, 0));
}

#[test]
fn the_first_send_after_an_orderly_end_fails() {
    let pair = Pair::new("send");
    let to_there = pair.peer;
    pair.there.clone().close();
    let closed = Err(Error::PeerGone(Gone::Closed));
    assert_eq!(pair.here.send(to_there, 0, &[1; 8]), closed);
    assert_eq!(pair.here.inject(to_there, Envelope::tagged(0), &[1; 8]), closed);
}

#[test]
fn handles_are_shown_in_a_line_and_without_the_bytes_of_messages() {
    let pair = Pair::new("shown");
    // Kept messages of others, one of them not complete, and operations of several kinds.
    pair.send_here(1, &[83; 40]).unwrap();
    let announced = pair.there.isend(pair.there.peers()[0], 2, LONG.to_vec()).unwrap();
    pair.here.progress();
    let posted = pair.here.irecv(pair.peer, 3, u64::MAX, vec![83; 8]).unwrap();
    let window = pair.here.expose(vec![83; 64], crate::window::Rights::READ_WRITE).unwrap();
    let mut shown = vec![
        format!("{announced:?}"),
        format!("{posted:?}"),
        format!("{window:?}"),
        format!("{:?}", pair.here),
        format!("{:?}", pair.port()),
        format!("{:?}", pair.port().enter().matching),
    ];
    pair.here.scope(|scope| shown.push(format!("{scope:?}")));
    drop(window);
    for text in &shown {
        assert!(text.len() < 600 && !text.contains("83, 83"), "{text}");
    }
    assert!(shown[0].contains("send") && shown[0].contains("length: 1048576"), "{}", shown[0]);
    assert!(shown[1].contains("posted"), "{}", shown[1]);
}

#[test]
fn a_peer_that_could_not_be_watched_for_want_of_memory_ends_a_wait_all_the_same() {
    ends(|| {
        let pair = Pair::new("unwatched");
        let mut state = pair.port().enter();
        let readiness = state.readiness().unwrap();
        let wire = &state.peers[0].connection.as_ref().unwrap().wire;
        // As if the kernel had refused to add them.
        wire.descriptors().for_each(|descriptor| readiness.remove(descriptor));
        state.is_watch_partial = true;
        drop(state);
        let probing = {
            let (here, peer) = (pair.here.clone(), pair.peer);
            std::thread::spawn(move || here.probe(peer, 0, 0))
        };
        while !pair.port().enter().sleeps_deeply {
            std::thread::sleep(Duration::from_millis(1));
        }
        die(&pair.there);
        assert_eq!(probing.join().unwrap(), Err(Error::PeerGone(Gone::Ended)));
    });
}

#[test]
fn a_sleeper_that_is_woken_before_it_sleeps_does_not_sleep_whoever_polls_meanwhile() {
    let pair = Pair::new("woken-early");
    let mut state = pair.port().enter();
    // As a thread leaves it that lets go of the lock to sleep.
    (state.has_sleeper, state.resting) = (true, ASLEEP);
    let words = state.rest();
    pair.port().wake_sleeper(&mut state);
    state.begin_polling();
    state.end_polling();
    let would_sleep =
        words.iter().all(|(memory, flags)| memory.own_attention().resting() == *flags);
    assert!(!would_sleep);
    (state.has_sleeper, state.resting) = (false, 0);
}
