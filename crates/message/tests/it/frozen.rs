//! Peers that stop during a copy, and memory that they may still write: it is not returned before
//! the copy ends or the peer exits.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};

use memferry_message::plan::PathKind;
use memferry_message::{
    DisconnectReason, Endpoint, EndpointBuilder, Error, MatchSpec, Segment, ShareableBuffer,
    Source, TAG_ALL, quarantined_buffers,
};
use memferry_testing::in_own_process;
use memferry_testing::message::process::{self, setting};
use memferry_testing::message::stopping::{self, BYTES, StoppedPeer, send_to_test};
use memferry_testing::message::{Random, TIMEOUT, is_readable, unique, until};

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("claimer") => stopping::claimer(),
        Some("sender") => sender(),
        _ => {}
    }
}

// ---- windows ----

/// A claimer. It exits with the thread that calls this.
fn spawn_claimer(owner: &Endpoint, misbehaves: bool) -> StoppedPeer {
    StoppedPeer::spawn("claimer", owner.name(), misbehaves)
}

fn cooperative() -> Endpoint {
    EndpointBuilder::new().path(PathKind::Cooperative).open(&unique("receiver")).unwrap()
}

/// A buffer that reports when it is freed.
struct DropMarker(Vec<u8>, Arc<AtomicBool>);

// SAFETY: the bytes do not move.
unsafe impl memferry_copy::OwnedTarget for DropMarker {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.0.as_mut_ptr(), self.0.len())
    }
}

impl Drop for DropMarker {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[test]
fn an_owned_buffer_that_a_stopped_peer_may_still_write_is_kept() {
    if !in_own_process() {
        return;
    }
    for (is_dropped, ends) in [(false, false), (true, false), (false, true), (true, true)] {
        let owner = cooperative();
        let freed = Arc::new(AtomicBool::new(false));
        let buffer = DropMarker(vec![0; BYTES], freed.clone());
        let receive = owner.irecv(Source::Any, 1, TAG_ALL, buffer).unwrap();
        let mut child = spawn_claimer(&owner, false);
        child.await_claim(&owner);
        if is_dropped {
            drop(receive);
            owner.close();
        } else {
            owner.close();
            let failed = receive.wait().map(drop).unwrap_err();
            assert_eq!(failed.error, Error::Closed);
            assert!(failed.buffer.is_none(), "a peer may still write to it");
        }
        assert!(!freed.load(Ordering::SeqCst), "it was freed, and a peer may still write to it");
        assert_eq!(quarantined_buffers(), 1);
        if ends {
            child.child.kill();
        } else {
            child.signal(libc::SIGCONT);
            assert_eq!(child.hear(), b'w');
        }
        until("it is freed", || quarantined_buffers() == 0);
        assert!(freed.load(Ordering::SeqCst));
    }
}

#[test]
fn a_scope_is_not_left_before_a_stopped_peer_is_out_of_its_memory() {
    if !in_own_process() {
        return;
    }
    for ends in [false, true] {
        let owner = cooperative();
        let mut memory = vec![0u8; BYTES];
        let is_left = AtomicBool::new(false);
        let mut child = spawn_claimer(&owner, false);
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            let (owner, is_left, memory) = (&owner, &is_left, &mut memory);
            let waiting = threads.spawn(move || {
                owner.scope(|scope| {
                    // Dropping the handle changes nothing.
                    drop(scope.irecv(Source::Any, 1, TAG_ALL, &mut memory[..]).unwrap());
                    child.await_claim(owner);
                    sender.send(child).unwrap();
                });
                memory.fill(0);
                is_left.store(true, Ordering::SeqCst);
            });
            let mut child = receiver.recv().unwrap();
            owner.clone().close();
            wait_unexpected(|| is_left.load(Ordering::SeqCst));
            release(&mut child, ends);
            waiting.join().unwrap();
        });
        assert!(memory.iter().all(|byte| *byte == 0), "it was written after the scope was left");
    }
}

/// Wakes a thread, and counts the wakeups.
struct CountingWaker(std::thread::Thread, AtomicUsize);

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// Polls a future only when it is woken; also returns how often it was.
fn block_on_counting<F: Future + Unpin>(mut future: F, wakes: &AtomicUsize) -> F::Output {
    let counted = Arc::new(CountingWaker(std::thread::current(), AtomicUsize::new(0)));
    let waker = counted.clone().into();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let seen = counted.1.load(Ordering::SeqCst);
        wakes.store(seen, Ordering::SeqCst);
        if let Poll::Ready(output) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        while counted.1.load(Ordering::SeqCst) == seen {
            assert!(Instant::now() < deadline, "the future is not woken");
            std::thread::park_timeout(TIMEOUT);
        }
    }
}

#[test]
fn awaiting_a_raw_operation_whose_memory_is_held_does_not_poll_busily() {
    const INTERVAL: Duration = Duration::from_millis(50);
    if !in_own_process() {
        return;
    }
    for ends in [false, true] {
        let owner = cooperative();
        let mut receive = owner.irecv(Source::Any, 1, TAG_ALL, vec![0u8; BYTES]).unwrap();
        let mut child = spawn_claimer(&owner, false);
        child.await_claim(&owner);
        owner.close();
        let (wakes, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let began = Instant::now();
        let error = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let outcome = block_on_counting(receive.operation(), &wakes);
                is_over.store(true, Ordering::SeqCst);
                outcome
            });
            (0..6).for_each(|_| std::thread::sleep(INTERVAL));
            assert!(!is_over.load(Ordering::SeqCst), "a peer may still write to the memory");
            let woken = wakes.load(Ordering::SeqCst);
            let intervals = began.elapsed().as_millis() / INTERVAL.as_millis();
            assert!(
                woken as u128 <= 10 * intervals,
                "woken {woken} times in {intervals} intervals"
            );
            release(&mut child, ends);
            waiting.join().unwrap().map(drop).unwrap_err()
        });
        assert_eq!(error, Error::Closed);
    }
}

#[test]
fn an_operation_that_was_awaited_before_its_memory_was_held_is_told_when_it_is_not_any_more() {
    if !in_own_process() {
        return;
    }
    for ends in [false, true] {
        until("a chunk was left", || awaited_operation_ends(ends));
    }
}

/// Returns `false` if the receiver was faster than its peer.
fn awaited_operation_ends(ends: bool) -> bool {
    let owner = cooperative();
    let mut receive = owner.irecv(Source::Any, 1, TAG_ALL, vec![0u8; BYTES]).unwrap();
    let event = receive.operation().event().unwrap();
    let wakes = AtomicUsize::new(0);
    let mut child = spawn_claimer(&owner, false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| block_on_counting(receive.operation(), &wakes));
        let was_stopped = child.has_claimed();
        if was_stopped {
            owner.close();
            release(&mut child, ends);
            assert_eq!(waiting.join().unwrap().map(drop), Err(Error::Closed));
            until("its descriptor is readable", || is_readable(&*event));
        } else {
            let _ = waiting.join().unwrap();
        }
        was_stopped
    })
}

/// The result does not depend on this: it only makes sure that a violation is detected.
fn wait_unexpected(happened: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_millis(300);
    while !happened() && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

fn release(child: &mut StoppedPeer, ends: bool) {
    if ends {
        child.child.kill();
    } else {
        child.signal(libc::SIGCONT);
        assert_eq!(child.hear(), b'w');
    }
}

#[test]
fn a_blocking_receive_from_a_peer_that_misbehaves_waits_until_it_is_out_of_the_memory() {
    if !in_own_process() {
        return;
    }
    for ends in [false, true] {
        until("a chunk was left", || blocking_receive_waits(ends));
    }
}

/// Returns `false` if the receiver was faster than its peer.
fn blocking_receive_waits(ends: bool) -> bool {
    let owner = cooperative();
    let mut memory = vec![0u8; BYTES];
    let is_left = AtomicBool::new(false);
    let was_stopped = std::thread::scope(|threads| {
        let (owner, is_left, memory) = (&owner, &is_left, &mut memory);
        let waiting = threads.spawn(move || {
            let outcome = owner.recv(Source::Any, 1, TAG_ALL, &mut memory[..]);
            memory.fill(0);
            is_left.store(true, Ordering::SeqCst);
            outcome
        });
        let mut child = spawn_claimer(owner, true);
        if !child.has_claimed() {
            return false;
        }
        until("it is disconnected", || owner.peers().is_empty());
        // Other peers are served at the same time.
        let myself = owner.self_peer().unwrap();
        owner.send(myself, 9, b"goes on").unwrap();
        owner.recv(myself, 9, TAG_ALL, &mut [0; 7]).unwrap();
        wait_unexpected(|| is_left.load(Ordering::SeqCst));
        release(&mut child, ends);
        let outcome = waiting.join().unwrap();
        assert!(
            matches!(&outcome, Err(Error::PeerDisconnected(gone)) if matches!(gone.reason, DisconnectReason::ProtocolViolation(_))),
            "{outcome:?}"
        );
        true
    });
    assert!(memory.iter().all(|byte| *byte == 0), "it was written after the call returned");
    was_stopped
}

#[test]
fn a_receive_of_several_messages_says_when_a_stopped_peer_is_out_of_its_memory() {
    if !in_own_process() {
        return;
    }
    for (bytes, misbehaves) in
        [(BYTES, false), (2 * BYTES, false), (BYTES, true), (2 * BYTES, true)]
    {
        for ends in [false, true] {
            let owner = cooperative();
            let mut child = spawn_claimer(&owner, misbehaves);
            until("it has connected", || owner.peers().len() == 1);
            let wanted = MatchSpec::tagged(owner.peers()[0], 1, TAG_ALL);
            let mut memory = vec![0u8; bytes];
            let segment = Segment::target(memory.as_mut_ptr(), bytes);
            // SAFETY: it lives until the last completion.
            unsafe { owner.post_multi_receive(&wanted, segment, 6, 8) }.unwrap();
            child.await_claim(&owner);
            if misbehaves {
                until("it is disconnected", || {
                    owner.progress();
                    owner.peers().is_empty()
                });
            } else {
                owner.clone().close();
            }
            let mut reports = Vec::new();
            owner.poll_completions(&mut reports);
            assert!(reports.iter().all(|report| !report.is_last), "a peer may still write to it");
            release(&mut child, ends);
            until("the memory is free", || {
                owner.poll_completions(&mut reports);
                reports.iter().any(|report| report.is_last)
            });
            // The message, and the receive itself if it would have taken more.
            let expected = 1 + usize::from(bytes > BYTES);
            assert_eq!(reports.len(), expected, "{reports:?}");
            assert!(reports.iter().all(|report| report.context == 6 && report.outcome.is_err()));
            let last = reports.iter().filter(|report| report.is_last).count();
            assert!(last == 1 && reports[expected - 1].is_last, "{reports:?}");
            owner.clone().close();
            assert!(!owner.is_busy() && !owner.poll_completions(&mut reports));
        }
    }
}

const LARGE: usize = 4 << 20;

/// Sends a greeting, then large messages until that fails, and reports it: repeatedly. Who has got
/// the greeting knows that the connection is complete, and that the report comes.
fn sender() {
    let data = vec![7u8; LARGE];
    loop {
        let endpoint =
            EndpointBuilder::new().path(PathKind::Cooperative).open(&unique("sender")).unwrap();
        let Ok(peer) = endpoint.connect(&setting("MEMFERRY_TEST_NAME")) else { continue };
        let _ = endpoint.send(peer, 2, &[]);
        while endpoint.send(peer, 1, &data[..]).is_ok() {}
        drop(endpoint);
        send_to_test(b".");
    }
}

#[test]
fn a_shareable_buffer_does_not_change_after_it_was_handed_back() {
    if !in_own_process() {
        return;
    }
    let name = unique("receiver");
    let mut random = Random::new(Random::fresh_seed());
    let mut child = None;
    let mut kept = 0;
    for round in 0..40 {
        let owner = EndpointBuilder::new().path(PathKind::Cooperative).open(&name).unwrap();
        let child = child.get_or_insert_with(|| StoppedPeer::spawn("sender", &name, false));
        let buffer = ShareableBuffer::new(LARGE).unwrap();
        let mut receive = owner.irecv(Source::Any, 1, TAG_ALL, buffer).unwrap();
        let mut greeting = owner.irecv(Source::Any, 2, TAG_ALL, vec![0u8; 0]).unwrap();
        until("the greeting arrives", || {
            owner.progress();
            greeting.is_done()
        });
        // During the copy, most likely.
        for _ in 0..random.below(12) {
            owner.progress();
        }
        child.signal(libc::SIGSTOP);
        child.await_stop();
        if receive.is_done() {
            drop(receive.wait());
            owner.close();
            child.signal(libc::SIGCONT);
            assert_eq!(child.hear(), b'.');
            continue;
        }
        owner.close();
        let mut buffer = receive.wait().map(drop).unwrap_err().buffer;
        kept += usize::from(buffer.is_none());
        if let Some(buffer) = &mut buffer {
            buffer.fill(0);
        }
        child.signal(libc::SIGCONT);
        assert_eq!(child.hear(), b'.');
        let later = buffer.iter().flat_map(|buffer| buffer.iter()).filter(|byte| **byte != 0);
        assert_eq!(later.count(), 0, "round {round}: written after it was returned");
        until("the quarantined memory is freed", || quarantined_buffers() == 0);
    }
    memferry_testing::message::say(format_args!(
        "{kept} of 40 buffers were kept while the peer was stopped"
    ));
}
