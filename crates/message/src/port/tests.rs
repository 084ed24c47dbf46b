//! Tests with two ports of one process, one of which disconnects at a chosen time.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use memferry_sys::Pages;

use super::progress::{Drain, ProgressScope};
use super::wait::{MAX_FUTEX_SLEEPS, SPIN_POLLS};
use super::{Peer, Port, PortState, Started};
use crate::builder::EndpointBuilder;
use crate::endpoint::Endpoint;
use crate::envelope::{Envelope, MatchSpec};
use crate::error::{Disconnect, DisconnectReason, Error, PeerName};
use crate::plan::PathKind;
use crate::ring::wakeup::FUTEX_ARMED;
use crate::segments::Segment;

mod unread;

/// Timeout of a test that hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Two connected endpoints. They make progress only in calls of the test.
struct Pair {
    here: Endpoint,
    there: Endpoint,
    /// The peer handle of `there` at `here`.
    peer: Peer,
}

impl Pair {
    fn new(name: &str) -> Self {
        Self::with(name, &EndpointBuilder::new())
    }

    fn with(name: &str, builder: &EndpointBuilder) -> Self {
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

    /// The error of operations of `here` after the disconnect of `there`.
    fn gone(&self, reason: DisconnectReason) -> Error {
        let peer = PeerName::of_process(self.there.name(), std::process::id());
        Error::PeerDisconnected(Disconnect::new(peer, reason))
    }
}

/// Ends all connections of an endpoint as the exit of its process would: without a control message.
fn simulate_exit(endpoint: &Endpoint) {
    for slot in endpoint.port().lock().protocol.peers.iter_mut() {
        slot.connection = None;
    }
}

/// Runs `f` in a thread of its own. Panics if it does not return within [`TEST_TIMEOUT`].
fn run_with_timeout<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(f()));
    wait.recv_timeout(TEST_TIMEOUT).expect("a call that never returns")
}

#[test]
fn a_wait_ends_whenever_the_end_of_the_peer_is_noticed() {
    // Polls before each sleep on the futex words, and in the last round before the sleep on the epoll set.
    let rounds = (0..=MAX_FUTEX_SLEEPS).map(|round| 1 + round * (SPIN_POLLS + 1));
    for moment in rounds.flat_map(|first| [first, first + SPIN_POLLS / 2, first + SPIN_POLLS]) {
        let outcome = run_with_timeout(move || {
            let pair = Pair::new(&format!("wait-{moment}"));
            let mut target = [0u8; 8];
            let pieces = [Segment::target(target.as_mut_ptr(), target.len())];
            // SAFETY: the target lives until the receive is complete.
            let begun =
                unsafe { pair.port().start_receive(pair.peer.into(), 0, 0, &pieces) }.unwrap();
            let Started::Pending(number) = begun else { panic!("nothing was sent") };
            pair.port().lock().protocol.peers.is_oversubscribed = false;
            let mut polls = 0;
            let gone = pair.gone(DisconnectReason::Exited);
            let outcome = pair.port().block(false, None, |state: &mut PortState| {
                polls += 1;
                if polls == moment {
                    simulate_exit(&pair.there);
                    // Makes the next liveness check due at once.
                    state.protocol.peers.last_liveness_check_ns = 0;
                }
                state.protocol.operations.take_outcome(number)
            });
            (outcome, gone)
        });
        assert_eq!(outcome.0, Some(Err(outcome.1)), "at poll {moment}");
    }
}

#[test]
fn a_wait_that_makes_the_last_copy_of_its_message_does_not_time_out() {
    let pair = Pair::with("last-copy", &EndpointBuilder::new().path(PathKind::Single));
    // Two copies: one in the first poll, one in the first round after it.
    let send = pair.there.isend(pair.there.peers()[0], 1, vec![7u8; 2 << 20]).unwrap();
    let receive = pair.here.irecv(pair.peer, 1, u64::MAX, vec![0u8; 2 << 20]).unwrap();
    // Simulates a thread that waits for the lock, which limits the wait to one round.
    pair.port().lock_waiters.fetch_add(1, Ordering::Relaxed);
    let outcome = receive.wait_timeout(Duration::ZERO);
    pair.port().lock_waiters.fetch_sub(1, Ordering::Relaxed);
    let (received, bytes) = outcome.expect("it is over").unwrap();
    assert!(received.length == 2 << 20 && bytes.iter().all(|&byte| byte == 7));
    send.wait().unwrap();
}

#[test]
fn thousands_of_messages_that_wait_for_their_copy_cost_the_same_each() {
    const MESSAGES: usize = 1500;
    const BYTES: usize = 32 << 10;
    let pair = Pair::with("many-copies", &EndpointBuilder::new().path(PathKind::Single));
    let to_here = pair.there.peers()[0];
    let received: Vec<_> = (0..MESSAGES)
        .map(|_| pair.here.irecv(pair.peer, 1, u64::MAX, vec![0; BYTES]).unwrap())
        .collect();
    let sent: Vec<_> = (0..MESSAGES)
        .map(|index| pair.there.isend(to_here, 1, vec![index as u8; BYTES]).unwrap())
        .collect();
    // All messages that can wait for their copy do so before the first copy.
    while pair.there.port().lock().progress_steps()
        | (pair.port().lock().progress_all(ProgressScope::ControlOnly, Drain::All))
    {}
    let before = pair.port().lock().protocol.steps;
    for (index, mut receive) in received.into_iter().enumerate() {
        let bytes = loop {
            match receive.wait_timeout(Duration::ZERO) {
                Ok(outcome) => break outcome.unwrap().1,
                Err(pending) => receive = pending,
            }
            // The sender processes the FINs, else the ring would have no space for more.
            pair.there.port().lock().progress_steps();
        };
        pair.there.port().lock().progress_steps();
        assert!(bytes.iter().all(|&byte| byte == index as u8), "message {index}");
    }
    for send in sent {
        send.wait().unwrap();
    }
    let steps = pair.port().lock().protocol.steps - before;
    assert!(steps < 200 * MESSAGES as u64, "{steps} steps for {MESSAGES} messages");
}

#[test]
fn many_sends_without_room_do_not_keep_a_waiter_awake() {
    const SENDS: usize = 100;
    let pair = Pair::with("no-room", &EndpointBuilder::new().cross_memory(false));
    let to_here = pair.there.peers()[0];
    let received: Vec<_> = (0..SENDS)
        .map(|_| pair.here.irecv(pair.peer, 1, u64::MAX, vec![0u8; 1 << 20]).unwrap())
        .collect();
    let sent: Vec<_> =
        (0..SENDS).map(|_| pair.there.isend(to_here, 1, vec![7u8; 1 << 20]).unwrap()).collect();
    // All messages are requested and the bounce ring is full: the receiver takes nothing out of it.
    while pair.there.port().lock().progress_steps() {}
    while pair.port().lock().progress_all(ProgressScope::ControlOnly, Drain::All) {}
    while pair.there.port().lock().progress_steps() {}
    for _ in 0..SENDS {
        assert!(!pair.there.port().lock().progress_steps(), "nothing has moved");
    }
    assert!(!pair.there.progress_timeout(Duration::from_millis(1)), "nothing has moved");
    let taking = std::thread::spawn(move || {
        received.into_iter().all(|receive| receive.wait().unwrap().1.iter().all(|&byte| byte == 7))
    });
    sent.into_iter().for_each(|send| drop(send.wait().unwrap()));
    assert!(taking.join().unwrap());
}

#[test]
fn a_probe_that_sleeps_deeply_ends_when_another_thread_notices_the_end_of_the_peer() {
    run_with_timeout(|| {
        let pair = Pair::new("probe");
        let probing = {
            let (here, peer) = (pair.here.clone(), pair.peer);
            std::thread::spawn(move || here.probe(peer, 0, 0))
        };
        while !pair.port().lock().wakeup.sleeper_on_epoll {
            std::thread::sleep(Duration::from_millis(1));
        }
        // This thread holds the lock from the exit on, so it is the one that detects the disconnect.
        let mut state = pair.port().lock();
        simulate_exit(&pair.there);
        assert!(state.check_peers(true));
        drop(state);
        assert_eq!(probing.join().unwrap(), Err(pair.gone(DisconnectReason::Exited)));
    });
}

impl Pair {
    /// Sends from the other side. The send completes at once if the ring has space.
    fn send_here(&self, tag: u64, bytes: &[u8]) -> Result<Started, Error> {
        let to_here = self.there.port().lock().protocol.peers.all_peers()[0];
        let pieces = [Segment::source(bytes.as_ptr(), bytes.len())];
        // SAFETY: the messages of the tests are constants, or so small that the send completes at once.
        unsafe { self.there.port().start_send(to_here, tag, &pieces) }
    }

    /// Takes the next message without waiting for one.
    fn take(&self, tag: u64) -> Result<u8, Error> {
        let mut target = [0u8; 8];
        let pieces = [Segment::target(target.as_mut_ptr(), target.len())];
        // SAFETY: a receive that does not complete at once ends the test.
        let begun = unsafe { self.port().start_receive(self.peer.into(), tag, u64::MAX, &pieces) }?;
        match begun {
            Started::Completed(outcome) => outcome.map(|_| target[0]),
            Started::Pending(_) => panic!("the message is neither here nor lost"),
        }
    }
}

/// A message long enough to be announced. No test fetches it.
static LONG: [u8; 1 << 20] = [1; 1 << 20];

#[test]
fn messages_in_the_ring_survive_another_call_of_a_peer_that_has_ended() {
    let pair = Pair::new("redial");
    for number in 0..50 {
        pair.send_here(0, &[number; 8]).unwrap();
    }
    simulate_exit(&pair.there);
    let mut state = pair.port().lock();
    let id = state.protocol.peers[0].connection.as_ref().unwrap().wire.peer.id;
    // The effect of a hello that the peer sent before it accepted the connect of this side.
    state.disconnect_if_exited(id);
    drop(state);
    for number in 0..50 {
        assert_eq!(pair.take(0), Ok(number));
    }
    assert_eq!(pair.take(0), Err(pair.gone(DisconnectReason::Exited)));
}

#[test]
fn what_was_sent_before_an_orderly_end_is_received_by_all_kinds_of_receives() {
    let pair = Pair::new("several");
    for number in 0..3 {
        pair.send_here(5, &[number; 8]).unwrap();
    }
    pair.there.clone().close();
    while pair.port().lock().protocol.peers[0].connection.is_some() {
        pair.here.progress();
    }
    // By name too, although no process listens there any more.
    assert_eq!(pair.here.connect(pair.there.name()), Ok(pair.peer));
    assert_eq!(pair.take(5), Ok(0));
    let (mut memory, mut reports) = ([0u8; 64], Vec::new());
    let (piece, wanted) =
        (Segment::target(memory.as_mut_ptr(), 64), MatchSpec::tagged(pair.peer, 5, u64::MAX));
    // SAFETY: the memory lives until the last completion entry.
    unsafe { pair.here.post_multi_receive(&wanted, piece, 9, 8) }.unwrap();
    pair.here.poll_completions(&mut reports);
    let outcomes: Vec<_> = reports.iter().map(|report| report.outcome.clone()).collect();
    assert_eq!(outcomes, [Ok(()), Ok(()), Err(pair.gone(DisconnectReason::Closed))]);
    assert_eq!((memory[0], memory[8]), (1, 2));
}

#[test]
fn an_orderly_end_is_told_as_one_even_if_there_was_no_room_to_say_so() {
    let pair = Pair::new("full");
    let mut sent = 0;
    while let Started::Completed(outcome) = pair.send_here(0, &[7; 8]).unwrap() {
        outcome.unwrap();
        sent += 1;
    }
    pair.there.clone().close();
    for _ in 0..sent {
        assert_eq!(pair.take(0), Ok(7));
    }
    while pair.port().lock().protocol.peers[0].connection.is_some() {
        pair.here.progress();
    }
    assert_eq!(pair.take(0), Err(pair.gone(DisconnectReason::Closed)));
}

#[test]
fn nothing_passes_a_message_whose_memory_is_gone_with_its_sender() {
    let pair = Pair::new("unmapped");
    let (to_here, long) =
        (pair.there.port().lock().protocol.peers.all_peers()[0], Pages::new(4 << 20).unwrap());
    let pieces = [Segment::source(long.as_ptr(), 4 << 20)];
    // SAFETY: the message is announced, and aborted before the memory is unmapped.
    let begun = unsafe { pair.there.port().start_send(to_here, 1, &pieces) };
    assert!(matches!(begun, Ok(Started::Pending(_))));
    pair.send_here(1, &[2; 8]).unwrap();
    let mut target = vec![0u8; 4 << 20];
    let pieces = [Segment::target(target.as_mut_ptr(), target.len())];
    let from = pair.peer.into();
    // SAFETY: the target lives until the receive is complete.
    let begun = unsafe { pair.port().start_receive(from, 1, u64::MAX, &pieces) }.unwrap();
    let Started::Pending(number) = begun else { panic!("nothing was copied yet") };
    // The first step of a close. The control message is not in the ring yet.
    pair.there.port().lock().protocol.peers[0]
        .connection
        .as_ref()
        .unwrap()
        .wire
        .memory
        .mark_closed();
    drop(long);
    let outcome = loop {
        pair.port().lock().progress();
        if let Some(outcome) = pair.port().lock().protocol.operations.take_outcome(number) {
            break outcome;
        }
    };
    assert!(matches!(outcome, Err(Error::PeerDisconnected(_))), "{outcome:?}");
    assert!(matches!(pair.take(1), Err(Error::PeerDisconnected(_))));
}

#[test]
fn nothing_passes_a_message_that_was_set_aside_and_lost() {
    let pair = Pair::new("claimed");
    assert!(matches!(pair.send_here(1, &LONG), Ok(Started::Pending(_))));
    pair.send_here(2, &[2; 8]).unwrap();
    let wanted = |tag| MatchSpec::tagged(pair.peer, tag, u64::MAX);
    for (tag, claim) in [(1, 11), (2, 12)] {
        assert!(pair.here.peek(&wanted(tag), Some(claim)).unwrap().is_some());
    }
    simulate_exit(&pair.there);
    assert!(pair.port().lock().check_peers(true));
    let (mut memory, mut reports) = ([0u8; 8], Vec::new());
    for claim in [11, 12] {
        let piece = Segment::target(memory.as_mut_ptr(), 8);
        // SAFETY: the memory lives until the completion entries have been returned.
        unsafe { pair.here.post_claimed(claim, &[piece], claim) }.unwrap();
    }
    pair.here.poll_completions(&mut reports);
    let gone = Err(pair.gone(DisconnectReason::Exited));
    let outcomes: Vec<_> = reports.iter().map(|report| report.outcome.clone()).collect();
    assert_eq!(outcomes, [gone.clone(), gone]);
    let state = pair.port().lock();
    assert_eq!(
        (state.protocol.peers[0].unexpected_count, state.protocol.peers[0].unexpected_bytes),
        (0, 0)
    );
}

#[test]
fn the_first_send_after_an_orderly_end_fails() {
    let pair = Pair::new("send");
    let to_there = pair.peer;
    pair.there.clone().close();
    let closed = Err(pair.gone(DisconnectReason::Closed));
    assert_eq!(pair.here.send(to_there, 0, &[1; 8]), closed);
    assert_eq!(pair.here.inject(to_there, Envelope::tagged(0), &[1; 8]), closed);
}

#[test]
fn handles_are_shown_in_a_line_and_without_the_bytes_of_messages() {
    let pair = Pair::new("shown");
    // Buffered messages, one of them not complete, and operations of several kinds.
    pair.send_here(1, &[83; 40]).unwrap();
    let announced = pair.there.isend(pair.there.peers()[0], 2, LONG.to_vec()).unwrap();
    pair.here.progress();
    let posted = pair.here.irecv(pair.peer, 3, u64::MAX, vec![83u8; 8]).unwrap();
    let window = pair.here.expose(vec![83u8; 64], crate::window::Rights::READ_WRITE).unwrap();
    let mut shown = vec![
        format!("{announced:?}"),
        format!("{posted:?}"),
        format!("{window:?}"),
        format!("{:?}", pair.here),
        format!("{:?}", pair.port()),
        format!("{:?}", pair.port().lock().protocol.matches),
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
    run_with_timeout(|| {
        let pair = Pair::new("unwatched");
        let mut state = pair.port().lock();
        let readiness = state.epoll().unwrap();
        let wire = &state.protocol.peers[0].connection.as_ref().unwrap().wire;
        // Simulates a kernel that refuses to add the descriptors.
        wire.descriptors().for_each(|descriptor| readiness.remove(descriptor));
        state.wakeup.is_epoll_incomplete = true;
        drop(state);
        let probing = {
            let (here, peer) = (pair.here.clone(), pair.peer);
            std::thread::spawn(move || here.probe(peer, 0, 0))
        };
        while !pair.port().lock().wakeup.sleeper_on_epoll {
            std::thread::sleep(Duration::from_millis(1));
        }
        simulate_exit(&pair.there);
        assert_eq!(probing.join().unwrap(), Err(pair.gone(DisconnectReason::Exited)));
    });
}

#[test]
fn a_sleeper_that_is_woken_before_it_sleeps_does_not_sleep_whoever_polls_meanwhile() {
    let pair = Pair::new("woken-early");
    let mut state = pair.port().lock();
    // The state of a thread that unlocks the port to sleep.
    (state.wakeup.has_sleeper, state.wakeup.armed) = (true, FUTEX_ARMED);
    state.arm_wakeups();
    let words = state.futex_words();
    state.wakeup.sleeper_words = Some(std::sync::Arc::new(state.futex_words()));
    pair.port().wake_sleeper(&mut state);
    state.begin_polling();
    state.end_polling();
    let would_sleep =
        words.iter().all(|(word, flags)| word.load(std::sync::atomic::Ordering::Relaxed) == flags);
    assert!(!would_sleep);
    (state.wakeup.has_sleeper, state.wakeup.armed) = (false, 0);
}

#[test]
fn a_peer_that_was_connected_by_its_first_message_wakes_a_sleeper_and_leaves_nothing_to_wake_it_again()
 {
    run_with_timeout(|| {
        let name = |side: &str| format!("lazy-{side}-{}", std::process::id());
        let here = Endpoint::open(&name("here")).unwrap();
        let there = Endpoint::open(&name("there")).unwrap();
        // The set exists before the connect, so that it watches the socket while the connect is pending.
        here.port().lock().epoll().unwrap();
        let peer = here.add_peer(there.name()).unwrap();
        here.send(peer, 1, b"first").unwrap();
        let back = there.recv(crate::Source::Any, 1, u64::MAX, &mut [0; 5]).unwrap().source;
        for _ in 0..3 {
            let sleeping = {
                let here = here.clone();
                std::thread::spawn(move || here.recv(peer, 2, u64::MAX, &mut [0; 4]).unwrap())
            };
            while !here.port().lock().wakeup.sleeper_on_epoll {
                std::thread::sleep(Duration::from_millis(1));
            }
            there.send(back, 2, b"wake").unwrap();
            sleeping.join().unwrap();
        }
        let mut state = here.port().lock();
        assert!(!state.wakeup.is_epoll_incomplete);
        let set = state.epoll().unwrap();
        // The packet of the last wakeup may arrive after the message.
        for _ in 0..100 {
            state.drain_wakeups();
            if !set.wait(Some(Duration::from_millis(10))) {
                return;
            }
        }
        panic!("the set stays readable");
    });
}
