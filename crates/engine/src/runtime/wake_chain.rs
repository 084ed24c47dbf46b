//! Wake-ups that channels pass on.
//!
//! A thread that submits to many sleeping channels pays for one system call, whatever their number: it
//! wakes the first, and each channel that is woken wakes two others of those that were called meanwhile.
//! One word of the engine has a bit for each channel that somebody has called and nobody has woken, and a
//! mark that a wake-up is under way. Whoever sets the mark wakes a channel. While the mark is set, a call
//! only sets the bit of its channel.
//!
//! No call is lost. Whoever sets the mark has a duty: to clear it while no bit is set, or to wake a
//! channel, which has the duty then. A channel is woken only between its decision to sleep and the end
//! of that sleep, and at the end of every sleep it looks at the mark, so it takes the duty up even if it
//! did not sleep in the end. Several threads may have the duty at once: it ends only while no bit is set.
//! Bits are set only together with the mark, so while there is a bit there is a thread with the duty.
//!
//! The duty may be with a thread that does not get a processor for long. Whoever waits by a channel's own
//! wait wakes that channel itself, a channel that goes to sleep takes up the duty first, and a call that
//! finds the last wake-up some microseconds ago wakes a channel as if the mark were not set. So the others wait
//! for that thread only while nobody does any of this, and no longer than until the scheduler runs it: a thread
//! does not end alone, because the exit or the kill of one is that of the process. A thread that sleeps on
//! a completion does none of this.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use memferry_sys::clock;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::sync::atomic::{AtomicU64, Ordering};

use super::is_engine_thread;
use super::park::Parker;

/// The mark that a wake-up is under way.
const UNDERWAY: u64 = 1 << 63;
/// The maximum number of channels that are woken by each other. Further ones are woken by the caller.
const MAX_MEMBERS: usize = 63;
/// The number of channels that a channel wakes when it is woken: so the number of those that are awake
/// doubles and more with each step.
pub const PASSED_ON: usize = 2;
/// The times of waking a channel after which a wake-up that is under way holds up no other call: a caller that
/// submits for longer than that wakes channels itself meanwhile, and spends half of its time on it at most.
pub const STALL_WAKES: u64 = 2;

/// The channels of an engine that wake each other.
#[derive(Debug)]
pub struct WakeChain {
    /// [`UNDERWAY`], and a bit for each member that was called and not woken. Written by everybody who
    /// calls and who wakes.
    state: CachePadded<AtomicU64>,
    /// When a member was woken last. Written by whoever wakes one.
    woken_ns: AtomicU64,
    /// The time after which a wake-up that is under way holds up no other.
    stall_ns: u64,
    /// A bit for each parker that belongs to a channel. Written when channels are opened and dropped.
    members: CachePadded<AtomicU64>,
    /// Kept for later channels, so that a late wake-up finds it.
    parkers: [OnceLock<Arc<CachePadded<Parker>>>; MAX_MEMBERS],
    /// In a forked child the thread with the duty is missing.
    owner: OwnerProcess,
}

/// The place of a channel among those that wake each other.
#[derive(Debug)]
struct ChainPlace {
    chain: Arc<WakeChain>,
    bit: u64,
}

/// The parker of a channel's thread, which may be woken by another channel.
#[derive(Debug)]
pub struct ChainedParker {
    parker: Arc<CachePadded<Parker>>,
    /// `None`: the caller wakes it.
    place: Option<ChainPlace>,
}

impl WakeChain {
    /// Creates a chain without channels, on a machine where waking one takes a caller so long.
    pub fn new(wake_ns: f64) -> Self {
        Self::with_stall((wake_ns as u64).saturating_mul(STALL_WAKES))
    }

    /// Creates a chain whose wake-ups hold up other calls for this time.
    pub fn with_stall(stall_ns: u64) -> Self {
        Self {
            state: CachePadded::new(AtomicU64::new(0)),
            woken_ns: AtomicU64::new(0),
            stall_ns,
            members: CachePadded::new(AtomicU64::new(0)),
            parkers: [const { OnceLock::new() }; MAX_MEMBERS],
            owner: OwnerProcess::current(),
        }
    }

    /// Creates the parker of a new channel. In a forked child, and behind the last place, it belongs to
    /// no chain.
    pub fn join(self: &Arc<Self>) -> ChainedParker {
        let Some(place) = self.next_place() else { return ChainedParker::alone() };
        let parker = self.parkers[place].get_or_init(Arc::default).clone();
        let place = ChainPlace { chain: self.clone(), bit: 1 << place };
        ChainedParker { parker, place: Some(place) }
    }

    /// Takes a free place, if there is one for this process.
    fn next_place(&self) -> Option<usize> {
        let mut members = self.members.load(Ordering::Relaxed);
        while self.owner.is_current() && members != UNDERWAY - 1 {
            let place = (!members).trailing_zeros() as usize;
            members = self.members.fetch_or(1 << place, Ordering::AcqRel);
            if members & (1 << place) == 0 {
                return Some(place);
            }
        }
        None
    }

    /// Whether there is more than one channel to wake.
    fn has_several(&self) -> bool {
        self.members.load(Ordering::Relaxed).count_ones() > 1
    }

    /// Has a member woken: by this thread, unless a wake-up is under way.
    fn call(&self, bit: u64) {
        let before = self.state.fetch_or(bit | UNDERWAY, Ordering::AcqRel);
        if before & UNDERWAY == 0 || self.is_stalled() {
            self.wake_some(1);
        }
    }

    fn is_stalled(&self) -> bool {
        let woken_ns = self.woken_ns.load(Ordering::Relaxed);
        clock::now_ns().saturating_sub(woken_ns) >= self.stall_ns
    }

    /// Takes up the duty, if there is any.
    #[inline]
    fn pass_on(&self) {
        if self.state.load(Ordering::Acquire) & UNDERWAY != 0 {
            self.wake_some(PASSED_ON);
        }
    }

    /// Wakes up to `count` members that were called, which have the duty then, or ends the duty.
    #[cold]
    fn wake_some(&self, count: usize) {
        let (mut woken, mut state) = (0, self.state.load(Ordering::Acquire));
        while state & UNDERWAY != 0 && woken < count {
            let called = state & !UNDERWAY;
            if called == 0 {
                if woken > 0 {
                    return;
                }
                let ended =
                    self.state.compare_exchange(UNDERWAY, 0, Ordering::AcqRel, Ordering::Acquire);
                match ended {
                    Ok(_) => return,
                    Err(now) => state = now,
                }
                continue;
            }
            let place = called.trailing_zeros() as usize;
            let before = self.state.fetch_and(!(1 << place), Ordering::AcqRel);
            if before & (1 << place) != 0 && self.wake(place) {
                woken += 1;
            }
            state = before & !(1 << place);
        }
    }

    /// Wakes a member; returns whether it was between its decision to sleep and the end of that sleep.
    fn wake(&self, place: usize) -> bool {
        // Stored before: whoever is woken by this is not late yet.
        self.woken_ns.store(clock::now_ns(), Ordering::Relaxed);
        self.parkers[place].get().is_some_and(|parker| parker.wake())
    }
}

impl ChainedParker {
    /// The parker of a channel without others.
    pub fn alone() -> Self {
        Self { parker: Arc::default(), place: None }
    }

    /// As [`Parker::park`]. Wakes other channels before the thread sleeps and after that, if any were
    /// called.
    pub fn park(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> bool {
        self.pass_on();
        let sleeps = self.parker.park(timeout, ready);
        self.pass_on();
        sleeps
    }

    fn pass_on(&self) {
        if let Some(place) = &self.place {
            place.chain.pass_on();
        }
    }

    /// Whether the thread sleeps or is about to sleep, and nobody has called it.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.parker.is_asleep()
    }

    /// Has the sleeper woken, if there is one that nobody has called; returns whether there was. The
    /// caller must publish the work first.
    #[inline]
    pub fn call(&self) -> bool {
        self.parker.must_be_called() && self.call_sleeper()
    }

    #[cold]
    fn call_sleeper(&self) -> bool {
        match &self.place {
            // A channel is on its way through work that it passes on itself, to two at a time.
            Some(ChainPlace { chain, bit }) if chain.has_several() && !is_engine_thread() => {
                let is_called = self.parker.claim();
                if is_called {
                    chain.call(*bit);
                }
                is_called
            }
            _ => self.parker.wake(),
        }
    }

    /// Wakes the sleeper at once, if there is one. The caller must publish the work first.
    pub fn unpark(&self) {
        self.parker.unpark();
    }

    /// Wakes the sleeper at once, if somebody has called it.
    pub fn wake_called(&self) {
        if self.parker.is_called() {
            self.parker.wake();
        }
    }
}

impl Drop for ChainPlace {
    fn drop(&mut self) {
        self.chain.members.fetch_and(!self.bit, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread;

    use memferry_testing::until;

    use super::*;
    use crate::runtime::as_engine_thread;

    /// Members of a chain whose threads are called and sleep again, until they are to end.
    struct Fixture {
        parkers: Vec<ChainedParker>,
        /// The first one is at the end of its decision to sleep: it was woken, but does not run.
        is_held: AtomicBool,
        woken: AtomicUsize,
    }

    impl Fixture {
        fn new(members: usize, stall_ns: u64) -> Self {
            let chain = Arc::new(WakeChain::with_stall(stall_ns));
            let parkers = (0..members).map(|_| chain.join()).collect();
            Self { parkers, is_held: AtomicBool::new(true), woken: AtomicUsize::new(0) }
        }

        /// Runs `calls` while all threads sleep and the first one is held up.
        fn with_sleepers(&self, calls: impl FnOnce()) {
            let started = Barrier::new(self.parkers.len() + 1);
            thread::scope(|scope| {
                for (index, parker) in self.parkers.iter().enumerate() {
                    let started = &started;
                    let is_ready = move || {
                        while index == 0 && self.is_held.load(Ordering::Acquire) {
                            thread::yield_now();
                        }
                        false
                    };
                    scope.spawn(move || {
                        started.wait();
                        parker.park(None, is_ready);
                        self.woken.fetch_add(1, Ordering::AcqRel);
                    });
                }
                started.wait();
                until("all sleep", || self.parkers.iter().all(ChainedParker::is_asleep));
                calls();
                self.is_held.store(false, Ordering::Release);
            });
        }

        fn woken(&self) -> usize {
            self.woken.load(Ordering::Acquire)
        }
    }

    #[test]
    fn a_caller_wakes_one_channel_and_that_one_the_others() {
        let fixture = Fixture::new(6, u64::MAX);
        fixture.with_sleepers(|| {
            assert!(fixture.parkers.iter().all(ChainedParker::call));
            assert!(fixture.parkers[1..].iter().all(|parker| parker.parker.is_called()));
            assert!(!fixture.parkers.iter().any(ChainedParker::call), "each is called once");
            assert_eq!(fixture.woken(), 0);
        });
        assert_eq!(fixture.woken(), 6);
        let chain = &fixture.parkers[0].place.as_ref().unwrap().chain;
        assert_eq!(chain.state.load(Ordering::Acquire), 0, "nothing is under way any more");
    }

    #[test]
    fn one_who_waits_for_a_channel_wakes_it_and_that_one_the_others() {
        let fixture = Fixture::new(3, u64::MAX);
        fixture.with_sleepers(|| {
            assert!(fixture.parkers.iter().all(ChainedParker::call));
            fixture.parkers[2].wake_called();
            until("both are woken", || fixture.woken() == 2);
        });
    }

    #[test]
    fn a_channel_that_does_not_run_holds_up_others_for_a_while_only() {
        let fixture = Fixture::new(3, 0);
        fixture.with_sleepers(|| {
            assert!(fixture.parkers.iter().all(ChainedParker::call));
            until("both are woken", || fixture.woken() == 2);
        });
    }

    #[test]
    fn a_channel_that_goes_to_sleep_wakes_those_that_were_called_before() {
        let fixture = Fixture::new(3, u64::MAX);
        let awake = fixture.parkers[0].place.as_ref().unwrap().chain.join();
        fixture.with_sleepers(|| {
            assert!(fixture.parkers.iter().all(ChainedParker::call));
            assert!(!awake.park(None, || true));
            until("both are woken", || fixture.woken() == 2);
        });
    }

    #[test]
    fn channels_and_explicit_calls_wake_at_once() {
        let fixture = Fixture::new(3, u64::MAX);
        fixture.with_sleepers(|| {
            assert!(fixture.parkers[0].call());
            assert!(as_engine_thread(|| fixture.parkers[1].call()));
            fixture.parkers[2].unpark();
            until("both are woken", || fixture.woken() == 2);
        });
    }

    #[test]
    fn a_channel_by_itself_is_woken_by_its_caller() {
        let chain = Arc::new(WakeChain::with_stall(u64::MAX));
        let parker = chain.join();
        thread::scope(|scope| {
            scope.spawn(|| parker.park(None, || false));
            until("it sleeps", || parker.is_asleep());
            assert!(parker.call());
        });
        assert_eq!(chain.state.load(Ordering::Acquire), 0, "nothing was under way");
    }

    #[test]
    fn places_are_used_again_and_what_finds_none_is_by_itself() {
        let chain = Arc::new(WakeChain::with_stall(u64::MAX));
        let first = chain.join();
        let others: Vec<_> = (1..MAX_MEMBERS).map(|_| chain.join()).collect();
        assert!(others.iter().all(|parker| parker.place.is_some()));
        assert!(chain.join().place.is_none());
        let bit = first.place.as_ref().unwrap().bit;
        drop(first);
        assert_eq!(chain.join().place.as_ref().unwrap().bit, bit);
    }

    #[test]
    fn a_channel_of_a_forked_child_is_by_itself() {
        let chain = Arc::new(WakeChain::with_stall(u64::MAX));
        // SAFETY: the child allocates nothing and exits by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let has_place = chain.next_place().is_some();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(has_place)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just forked.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child has a place");
        assert_eq!(chain.next_place(), Some(0));
    }
}
