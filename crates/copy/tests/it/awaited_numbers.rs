//! Futures, eventfds, orderings and drops of small transfers, whose only state is a sequence: they
//! put nothing into the ring and never block, however full the ring is and on whatever thread.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crate::common::{builder, pattern};
use memferry_copy::{Ferry, Options, OwnedTarget, OwnedTransfer, Request, Transfer};

/// A timeout longer than any test takes, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Small enough to be one descriptor, large enough not to be complete before it is checked.
const LENGTH: usize = 16 << 10;

fn ferry(capacity: usize) -> Ferry {
    builder().channels(1).inline_bytes(0).capacity(capacity).build().unwrap()
}

/// Runs a closure that must return.
fn ends(what: &str, work: impl FnOnce() + Send + 'static) {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = tell.send(());
    });
    match told.recv_timeout(TIMEOUT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} does not end"),
        _ => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::yield_now();
    }
}

/// Blocks the thread of a channel until it is opened.
#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    is_entered: AtomicBool,
    /// The caller dropped the buffer itself: its copy was complete.
    is_missed: AtomicBool,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// A buffer whose drop blocks at the gate, if a channel drops it.
struct Gated(Vec<u8>, Arc<Gate>);

// SAFETY: the bytes are those of a vector that this value owns.
unsafe impl OwnedTarget for Gated {
    fn target(&mut self) -> (*mut u8, usize) {
        self.0.target()
    }
}

impl Drop for Gated {
    fn drop(&mut self) {
        if std::thread::current().name().is_some_and(|name| name.starts_with("memferry-")) {
            self.1.is_entered.store(true, Ordering::SeqCst);
            let is_open = self.1.is_open.lock().unwrap();
            drop(self.1.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
        } else {
            self.1.is_missed.store(true, Ordering::SeqCst);
        }
    }
}

/// Blocks the only channel of a ferry at a gate. Nothing else is in its ring then.
fn stop_at_gate(ferry: &Ferry) -> Arc<Gate> {
    let gate = Arc::new(Gate::default());
    let deadline = Instant::now() + TIMEOUT;
    loop {
        assert!(Instant::now() < deadline, "every copy is over before its handle is dropped");
        gate.is_missed.store(false, Ordering::SeqCst);
        let target = Gated(vec![0; LENGTH], gate.clone());
        // Dropped by the channel, if the copy is not complete already.
        drop(ferry.icopy(vec![1u8; LENGTH], target).unwrap());
        if !gate.is_missed.load(Ordering::SeqCst) {
            until("the channel is at the gate", || gate.is_entered.load(Ordering::SeqCst));
            return gate;
        }
    }
}

/// Submits copies until the ring is full; returns the accepted ones.
fn fill_ring(ferry: &Ferry) -> Vec<OwnedTransfer<Vec<u8>, Vec<u8>>> {
    let mut taken = Vec::new();
    loop {
        let copy = ferry.icopy(pattern(LENGTH, 1), vec![0u8; LENGTH]).unwrap();
        // A copy that a full ring rejects is complete at once.
        if copy.is_done() {
            return taken;
        }
        taken.push(copy);
    }
}

/// Counts its wakeups.
#[derive(Default)]
struct Counting(AtomicU32);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn nothing_waits_for_room_in_a_full_ring() {
    ends("the test", || {
        let ferry = ferry(8);
        let gate = stop_at_gate(&ferry);
        let mut copies = fill_ring(&ferry);
        let last = copies.pop().expect("a ring takes something");

        // All of this while the channel is blocked.
        let event = last.transfer().event().unwrap();
        let counting = Arc::new(Counting::default());
        let waker = Waker::from(counting.clone());
        let mut context = Context::from_waker(&waker);
        let mut awaited = pin!(last);
        assert!(awaited.as_mut().poll(&mut context).is_pending());
        let (source, mut target) = (pattern(LENGTH, 2), vec![0; LENGTH]);
        let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), LENGTH);
        let options = Options::new().after(awaited.transfer());
        // SAFETY: both live until after the wait below.
        let ordered = unsafe { ferry.start_raw(request.with(options)) }.unwrap();
        drop(copies);
        assert!(!ordered.is_done() && event.drain() == 0 && counting.0.load(Ordering::SeqCst) == 0);
        gate.open();

        ordered.wait().unwrap();
        assert!(source == target);
        until("the event", || event.drain() == 1);
        until("the waker", || counting.0.load(Ordering::SeqCst) == 1);
        match awaited.as_mut().poll(&mut context) {
            Poll::Ready(Ok((source, target))) => assert!(source == target),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_future_that_is_dropped_or_polled_again_leaves_no_waker_behind() {
    ends("the test", || {
        // A transfer whose only state is a sequence, and one with a completion of its own.
        for length in [LENGTH, 8 << 20] {
            let ferry = ferry(8);
            let gate = stop_at_gate(&ferry);
            let copy = ferry.icopy(pattern(length, 1), vec![0u8; length]).unwrap();
            let [gone, before, last] = [(); 3].map(|()| Arc::new(Counting::default()));
            let is_pending = |future: &mut Transfer, counting: &Arc<Counting>| {
                let waker = Waker::from(counting.clone());
                Pin::new(future).poll(&mut Context::from_waker(&waker)).is_pending()
            };
            let mut awaited = copy.transfer().clone();
            assert!(is_pending(&mut awaited, &before));
            for _ in 0..3 {
                let mut other = awaited.clone();
                assert!(is_pending(&mut other, &gone) && is_pending(&mut other, &gone));
                assert_eq!(Arc::strong_count(&gone), 2, "one waker of one future");
                drop(other);
                assert_eq!(Arc::strong_count(&gone), 1, "no waker of no future");
            }
            assert!(is_pending(&mut awaited, &last));
            assert_eq!(Arc::strong_count(&before), 1, "the last waker is the right one");
            gate.open();
            until("the waker", || last.0.load(Ordering::SeqCst) == 1);
            assert_eq!([gone, before].map(|never| never.0.load(Ordering::SeqCst)), [0, 0]);
            copy.wait().unwrap();
        }
    });
}

#[test]
fn a_ferry_that_ends_tells_everybody_who_waits_for_it() {
    ends("the test", || {
        let ferry = ferry(8);
        let gate = stop_at_gate(&ferry);
        let mut copies: Vec<_> = fill_ring(&ferry).into_iter().map(Box::pin).collect();
        let counting = Arc::new(Counting::default());
        let waker = Waker::from(counting.clone());
        let mut context = Context::from_waker(&waker);
        let mut events = Vec::new();
        for copy in &mut copies {
            assert!(copy.as_mut().poll(&mut context).is_pending());
            events.push(copy.transfer().event().unwrap());
        }
        let ending = std::thread::spawn(move || drop(ferry));
        gate.open();
        ending.join().unwrap();
        let expected = copies.len() as u32;
        assert_eq!(counting.0.load(Ordering::SeqCst), expected, "told before the end");
        assert!(events.iter().all(|event| event.drain() == 1));
        for mut copy in copies {
            assert!(matches!(copy.as_mut().poll(&mut context), Poll::Ready(Ok(_))));
        }
    });
}

/// A buffer that drops another transfer when it is dropped.
struct Dropping(Vec<u8>, Arc<Mutex<Option<Copy>>>);
type Copy = OwnedTransfer<Vec<u8>, Vec<u8>>;

// SAFETY: the bytes are those of a vector that this value owns.
unsafe impl OwnedTarget for Dropping {
    fn target(&mut self) -> (*mut u8, usize) {
        self.0.target()
    }
}

impl Drop for Dropping {
    fn drop(&mut self) {
        let inner = self.1.lock().unwrap().take();
        drop(inner);
    }
}

#[test]
fn a_buffer_may_drop_another_transfer_on_the_thread_of_the_channel() {
    ends("the test", || {
        for _ in 0..20 {
            let ferry = ferry(4);
            let gate = stop_at_gate(&ferry);
            let slot = Arc::new(Mutex::new(None));
            let target = Dropping(vec![0; LENGTH], slot.clone());
            drop(ferry.icopy(vec![1u8; LENGTH], target).unwrap());
            *slot.lock().unwrap() =
                Some(ferry.icopy(vec![1u8; LENGTH], vec![0u8; LENGTH]).unwrap());
            let copies = fill_ring(&ferry);
            gate.open();
            for copy in copies {
                let (source, target) = copy.wait().unwrap();
                assert!(source == target);
            }
            until("the drop", || Arc::strong_count(&slot) == 1);
            assert!(slot.lock().unwrap().is_none());
        }
    });
}

/// A task that its waker polls immediately, on whatever thread, and that copies repeatedly.
struct InlineExecutor {
    ferry: Ferry,
    running: Mutex<Option<Pin<Box<Copy>>>>,
    /// No thread polls, one polls, or one polls and must poll once more.
    state: AtomicU32,
    left: AtomicU64,
    done: mpsc::Sender<()>,
}

const IDLE: u32 = 0;
const POLLING: u32 = 1;
const AGAIN: u32 = 2;

impl InlineExecutor {
    fn start(ferry: &Ferry, count: u64, tell: &mpsc::Sender<()>) -> Arc<Self> {
        Arc::new(Self {
            ferry: ferry.clone(),
            running: Mutex::new(None),
            state: AtomicU32::new(IDLE),
            left: AtomicU64::new(count),
            done: tell.clone(),
        })
    }

    fn poll_next(self: &Arc<Self>) {
        let waker = Waker::from(self.clone());
        let mut context = Context::from_waker(&waker);
        let mut running = self.running.lock().unwrap();
        loop {
            if let Some(copy) = running.as_mut() {
                match copy.as_mut().poll(&mut context) {
                    Poll::Pending => return,
                    Poll::Ready(outcome) => {
                        let (source, target) = outcome.unwrap();
                        assert!(source == target);
                        *running = None;
                        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                            let _ = self.done.send(());
                            return;
                        }
                    }
                }
            }
            let source = vec![self.left.load(Ordering::SeqCst) as u8; 64];
            *running = Some(Box::pin(self.ferry.icopy(source, vec![0u8; 64]).unwrap()));
        }
    }
}

impl Wake for InlineExecutor {
    fn wake(self: Arc<Self>) {
        let claim = |state| Some(if state == IDLE { POLLING } else { AGAIN });
        if self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, claim) != Ok(IDLE) {
            return;
        }
        loop {
            if self.left.load(Ordering::SeqCst) > 0 {
                self.poll_next();
            }
            let release =
                self.state.compare_exchange(POLLING, IDLE, Ordering::SeqCst, Ordering::SeqCst);
            if release.is_ok() {
                return;
            }
            self.state.store(POLLING, Ordering::SeqCst);
        }
    }
}

#[test]
fn wakers_that_poll_on_the_spot_never_stop_a_tiny_ring() {
    const TASKS: usize = 6;
    const EACH: u64 = 60_000;
    for capacity in [1, 2, 8] {
        let ferry = ferry(capacity);
        let (tell, told) = mpsc::channel();
        let tasks: Vec<_> =
            (0..TASKS).map(|_| InlineExecutor::start(&ferry, EACH / 3, &tell)).collect();
        tasks.iter().for_each(|task| task.clone().wake());
        for _ in 0..TASKS {
            told.recv_timeout(TIMEOUT).expect("every task ends");
        }
    }
}

#[test]
fn threads_that_await_hundreds_of_thousands_of_small_copies_come_to_an_end() {
    /// Wakes the thread that created it.
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    ends("the test", || {
        let ferry = ferry(2);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
                    let mut context = Context::from_waker(&waker);
                    for round in 0..100_000u32 {
                        let source = vec![round as u8; 64];
                        let mut copy = pin!(ferry.icopy(source, vec![0u8; 64]).unwrap());
                        loop {
                            match copy.as_mut().poll(&mut context) {
                                Poll::Ready(outcome) => {
                                    let (source, target) = outcome.unwrap();
                                    assert!(source == target);
                                    break;
                                }
                                Poll::Pending => std::thread::park_timeout(TIMEOUT),
                            }
                        }
                    }
                });
            }
        });
    });
}
