//! Waiting: look for a while, then sleep, and never through something that came.
//!
//! One thread at a time sleeps on the words of the connections; others wait until it or whoever
//! else moved things tells them. After a while without anything, the sleeper changes to the
//! descriptors of sockets and processes, which cost nothing while nothing happens.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::readiness::Readiness;
use memferry_sys::sync::lock;
use memferry_sys::wait_word::{MOST_WORDS, futex_wait_shared, futex_wake_shared};

use super::operations::Leaving;
use super::{Port, State};
use crate::connect::listener::Listener;
use crate::ring::attention::{ASLEEP, AWAY};
use crate::ring::layout::Memory;

/// Looks in one go, before the lock is free for others for a moment.
const LOOKS: u32 = 200;
/// The same where processes share cores: then others must run before there is anything to see.
const CROWDED_LOOKS: u32 = 5;
/// A wait that takes longer lets others have the core between looks: one of them may be the peer.
const ALONE_NS: u64 = 5_000;
/// One sleep on the words; ends of peers are looked for in between.
const SLICE: Duration = Duration::from_millis(20);
/// One sleep while an engine copies.
const ENGINE_SLICE: Duration = Duration::from_micros(20);
/// One sleep while a hello is on its way.
const HELLO_SLICE: Duration = Duration::from_micros(500);
/// Sleeps on the words without anything before the sleeper goes deeper.
const SLICES: u32 = 3;

/// The lock, held. When it is let go, whoever waits for what was done is told.
pub(crate) struct Entered<'a> {
    port: &'a Port,
    /// Let go to sleep on the words: this thread is the sleeper.
    to_sleep: bool,
    state: ManuallyDrop<MutexGuard<'a, State>>,
}

impl Deref for Entered<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Entered<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.state.must_tell_somebody() {
            return self.leave_and_tell();
        }
        // SAFETY: dropped once, here, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.state) };
    }
}

impl Entered<'_> {
    fn leave_and_tell(&mut self) {
        let state = &mut **self.state;
        if state.pollers == 0 && state.resting != 0 {
            self.port.leave_to_others(state, self.to_sleep);
        }
        if state.operations.ended > 0 {
            state.operations.ended = 0;
            self.port.tell_local();
            // It may be what the sleeper sleeps for.
            if state.has_sleeper && !self.to_sleep && state.operations.has_untaken() {
                self.port.wake_sleeper(state);
            }
        }
        if state.has_news {
            state.has_news = false;
            self.port.tell_local();
            if state.has_sleeper && !self.to_sleep {
                self.port.wake_sleeper(state);
            }
        }
        let leavings = std::mem::take(&mut state.operations.leavings);
        // SAFETY: dropped once, here, and not used any more: the lock is free from now on.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        for leaving in leavings {
            match leaving {
                Leaving::Wake(waker) => waker.wake(),
                Leaving::Drop { .. } | Leaving::Kept(_) => {}
            }
        }
    }
}

impl Port {
    /// Takes the lock.
    #[inline]
    pub(crate) fn enter(&self) -> Entered<'_> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(_) => self.enter_when_free(),
        };
        Entered { port: self, to_sleep: false, state: ManuallyDrop::new(state) }
    }

    #[cold]
    fn enter_when_free(&self) -> MutexGuard<'_, State> {
        self.contenders.fetch_add(1, Ordering::Relaxed);
        let state = lock(&self.state);
        self.contenders.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// At the end of a call, when others wait: the sleeper goes on with messages that this call
    /// has begun, and watchers are told of what waits to be taken.
    #[cold]
    fn leave_to_others(&self, state: &mut State, to_sleep: bool) {
        if state.resting & AWAY != 0 {
            // Whoever goes to sleep has looked, and must be woken by whatever comes after that.
            if !to_sleep {
                state.ask_again();
            }
            state.show_what_waits();
        }
        // Messages that only wait for their peers need nobody.
        if !to_sleep && state.has_sleeper && state.is_stepping() {
            self.wake_sleeper(state);
        }
    }

    /// Tells threads of this process that something ended or that the sleeper's place is free.
    fn tell_local(&self) {
        if self.local_waiters.load(Ordering::Relaxed) > 0 {
            self.local.word().fetch_add(1, Ordering::Release);
            self.local.wake_all();
        }
    }

    /// Moves everything on until `look` finds what it looks for, or until the deadline.
    pub(crate) fn block<T>(
        &self,
        spin: bool,
        deadline: Option<Instant>,
        look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        self.block_entered(self.enter(), spin, deadline, look)
    }

    /// As [`Port::block`], for a caller that holds the lock.
    #[inline]
    pub(crate) fn block_entered<'a, T>(
        &'a self,
        mut state: Entered<'a>,
        spin: bool,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        state.progress();
        if let Some(found) = look(&mut state) {
            return Some(found);
        }
        state.begin_polling();
        let looks = if state.is_crowded { CROWDED_LOOKS } else { LOOKS };
        let mut quiet = 0;
        let found = 'wait: loop {
            let mut moved_at: Option<Instant> = None;
            loop {
                let mut moved = false;
                for turn in 0..looks {
                    if state.progress() {
                        (moved_at, quiet, moved) = (None, 0, true);
                    }
                    if let Some(found) = look(&mut state) {
                        break 'wait Some(found);
                    }
                    if moved && self.contenders.load(Ordering::Relaxed) > 0 {
                        break;
                    }
                    // A pause takes longer than a look: now and then is enough for a core's twin.
                    if turn % 8 == 7 {
                        std::hint::spin_loop();
                    }
                }
                state.check_peers(false);
                let now = Instant::now();
                if deadline.is_some_and(|deadline| now >= deadline) {
                    break 'wait None;
                }
                let spun = now.duration_since(*moved_at.get_or_insert(now)).as_nanos() as u64;
                if !moved && (!spin || spun >= state.spin_ns()) {
                    break;
                }
                let alone = !state.is_crowded && spun < ALONE_NS;
                if !alone || self.contenders.load(Ordering::Relaxed) > 0 {
                    drop(state);
                    self.let_others_in();
                    state = self.enter();
                }
            }
            state = self.sleep(state, deadline, quiet >= SLICES);
            quiet += 1;
            if let Some(found) = look(&mut state) {
                break Some(found);
            }
        };
        state.end_polling();
        found
    }

    /// Lets those in who wait for the lock. Whoever has slept for it takes a while to wake up, and
    /// would never find it free if this thread took it again at once.
    fn let_others_in(&self) {
        const PATIENCE: u32 = 100;
        std::thread::yield_now();
        for _ in 0..PATIENCE {
            if self.contenders.load(Ordering::Relaxed) == 0 {
                break;
            }
            std::thread::yield_now();
        }
    }

    /// Sleeps until something may have happened. Gives the lock up meanwhile.
    fn sleep<'a>(
        &'a self,
        mut state: Entered<'a>,
        deadline: Option<Instant>,
        deeply: bool,
    ) -> Entered<'a> {
        // Engines do not ring, nor does the hello of somebody who calls: looked at again soon.
        let longest = if state.is_offloading() {
            ENGINE_SLICE
        } else if state.listener.as_ref().is_some_and(Listener::has_pending) {
            HELLO_SLICE
        } else {
            SLICE
        };
        let deeply = deeply && longest == SLICE;
        let slice = deadline.map_or(longest, |deadline| {
            deadline.saturating_duration_since(Instant::now()).min(longest)
        });
        state.pollers -= 1;
        if state.has_sleeper {
            if state.pollers == 0 && state.rest_again() {
                state.pollers += 1;
                state.awake();
                return state;
            }
            let seen = self.local.word().load(Ordering::Acquire);
            self.local_waiters.fetch_add(1, Ordering::Relaxed);
            drop(state);
            self.local.wait(seen, Some(slice));
            self.local_waiters.fetch_sub(1, Ordering::Relaxed);
            state = self.enter();
        } else {
            state.has_sleeper = true;
            let deeply = deeply || state.connected() > MOST_WORDS - 1;
            let readiness = if deeply { state.readiness().ok() } else { None };
            let way = if readiness.is_some() { AWAY } else { ASLEEP };
            state.sleeps_deeply = readiness.is_some();
            let before = state.resting;
            state.resting |= way;
            let words = state.rest();
            // Once more, now that whatever comes later rings: notes, room, and what peers have told
            // about messages that both copy.
            if !state.is_anything_ready() && !state.progress() {
                state.to_sleep = true;
                drop(state);
                match &readiness {
                    Some(readiness) => {
                        // Peers may be lost meanwhile, and their memory should go with them.
                        drop(words);
                        let _ = readiness.wait(deadline.map(|_| slice));
                    }
                    None if words.is_empty() => std::thread::sleep(slice),
                    None => {
                        let words: Vec<_> = words
                            .iter()
                            .map(|(memory, value)| (memory.own_attention().word(), *value))
                            .collect();
                        futex_wait_shared(&words, slice);
                    }
                }
                state = self.enter();
            }
            state.has_sleeper = false;
            state.sleeps_deeply = false;
            if readiness.is_some() {
                state.forget_wake_ups();
            }
            state.resting = before;
            state.check_peers(true);
            self.tell_local();
        }
        state.pollers += 1;
        state.awake();
        state
    }

    /// Wakes the sleeper of this process, wherever it sleeps.
    pub(crate) fn wake_sleeper(&self, state: &mut State) {
        for slot in &mut state.peers {
            if let Some(connection) = &mut slot.connection {
                connection.wire.awake();
                futex_wake_shared(connection.wire.memory.own_attention().word());
            }
        }
        // Signalled for nobody, it would be taken for news by those who watch.
        if let Some(event) = state.event.as_ref().filter(|_| state.sleeps_deeply) {
            event.signal();
        }
        self.local.word().fetch_add(1, Ordering::Release);
        self.local.wake_all();
    }
}

impl State {
    /// Whether others wait for what was done.
    #[inline]
    fn must_tell_somebody(&self) -> bool {
        (self.pollers == 0 && self.resting != 0)
            || self.operations.ended > 0
            || self.has_news
            || !self.operations.leavings.is_empty()
    }

    /// How long to look before sleeping.
    fn spin_ns(&self) -> u64 {
        self.settings.spin_ns(self.is_crowded)
    }

    /// Finds out whether processes of this conversation share cores. One that is bound to a single
    /// core is taken to have it for itself: whoever bound it will have bound the others elsewhere.
    pub(super) fn count_processes(&mut self) {
        let processes = self.processes();
        let confined = self.allowed_cores > 1 && processes > self.allowed_cores;
        self.is_crowded = confined || processes > super::settings::online_cores();
    }

    /// Whether an engine copies for this port.
    pub(super) fn is_offloading(&mut self) -> bool {
        let Self { peers, operations, .. } = self;
        let active = peers.iter().filter_map(|slot| slot.connection.as_ref());
        active.flat_map(|connection| &connection.active).any(|number| {
            operations.receiving(*number).is_some_and(|receiving| receiving.is_offloaded())
        })
    }

    fn connected(&self) -> usize {
        self.peers.iter().filter(|slot| slot.connection.is_some()).count()
    }

    /// While a thread looks by itself, peers need not ring.
    fn begin_polling(&mut self) {
        self.pollers += 1;
        self.awake();
    }

    fn end_polling(&mut self) {
        self.pollers -= 1;
        if self.pollers == 0 {
            self.rest_again();
        }
    }

    /// The last thread that looked stops, and another sleeps: peers must ring again. What came
    /// before they knew is for whoever sleeps, and is done here instead. Returns whether there was
    /// anything.
    fn rest_again(&mut self) -> bool {
        if self.resting & ASLEEP == 0 {
            return false;
        }
        self.rest();
        (self.is_anything_ready() || self.has_active()) && self.progress()
    }

    fn awake(&mut self) {
        if self.resting != 0 {
            for slot in &mut self.peers {
                if let Some(connection) = &mut slot.connection {
                    connection.wire.awake();
                }
            }
        }
    }

    /// Says to all peers how this side wants to be told; returns the words to sleep on.
    pub(super) fn rest(&mut self) -> Vec<(Memory, u32)> {
        let flags = self.resting;
        let connections = self.peers.iter_mut().filter_map(|slot| slot.connection.as_mut());
        connections
            .map(|connection| {
                connection.wire.rest(flags);
                (connection.wire.memory.clone(), flags)
            })
            .collect()
    }

    /// Whether a ring has something, or room that was waited for.
    pub(super) fn is_anything_ready(&self) -> bool {
        self.peers.iter().filter_map(|slot| slot.connection.as_ref()).any(|connection| {
            let wants_room = !connection.outbox.is_empty() || connection.wire.is_holding();
            connection.wire.consumer.is_ready()
                || (wants_room && connection.wire.has_news_of_room())
        }) || self.closed
    }

    /// The descriptor that stands for all others, made when first asked for.
    pub(super) fn readiness(&mut self) -> std::io::Result<Arc<Readiness>> {
        use std::os::fd::AsFd;
        if let Some(readiness) = &self.readiness {
            return Ok(readiness.clone());
        }
        let readiness = Arc::new(Readiness::new()?);
        let event = EventFd::new()?;
        readiness.add(event.as_fd(), false)?;
        if let Some(listener) = &mut self.listener {
            readiness.add(listener.watch()?.as_fd(), false)?;
        }
        for connection in self.peers.iter().filter_map(|slot| slot.connection.as_ref()) {
            for descriptor in connection.wire.descriptors() {
                readiness.add(descriptor, false)?;
            }
        }
        self.event = Some(event);
        self.readiness = Some(readiness.clone());
        Ok(readiness)
    }

    /// Whether any message has steps to do on this side.
    fn has_active(&self) -> bool {
        let mut connections = self.peers.iter().filter_map(|slot| slot.connection.as_ref());
        connections.any(|connection| !connection.active.is_empty())
    }

    /// After a deep sleep: what woke the sleeper must not wake it again.
    fn forget_wake_ups(&mut self) {
        for peer in 0..self.peers.len() {
            let Some(connection) = &mut self.peers[peer].connection else { continue };
            if let Err(nonsense) = connection.wire.drain_socket() {
                self.lose(peer, crate::error::Gone::Misbehaved(nonsense.0));
            }
        }
        self.catch_up();
    }
}
