//! Sleeping until something comes, and being woken.
//!
//! One thread at a time sleeps on the words of the connections; others wait until it or whoever
//! else moved things tells them. After a while without anything, the sleeper changes to the
//! descriptors of sockets and processes, which cost nothing while nothing happens.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memferry_sys::EventFd;
use memferry_sys::readiness::Readiness;
use memferry_sys::wait_word::{MOST_WORDS, futex_wait_shared, futex_wake_shared};

use super::wait::Entered;
use super::{Port, State};
use crate::connect::listener::Listener;
use crate::ring::attention::{ASLEEP, AWAY};
use crate::ring::layout::Memory;

/// One sleep on the words; ends of peers are looked for in between.
const SLICE: Duration = Duration::from_millis(20);
/// One sleep while an engine copies.
const ENGINE_SLICE: Duration = Duration::from_micros(20);
/// One sleep while a hello or its answer is on its way.
const HELLO_SLICE: Duration = Duration::from_micros(500);

/// One sleep with a carrier, whose peers may end without a sign.
const CARRIER_SLICE: Duration = Duration::from_millis(250);

impl Port {
    /// Sleeps until something may have happened. Gives the lock up meanwhile. Returns at once if the
    /// epoch is no longer `seen`, that of the caller's last poll: what changed since may be what it
    /// waits for, and nothing would wake it for that any more.
    pub(super) fn sleep<'a>(
        &'a self,
        mut state: Entered<'a>,
        deadline: Option<Instant>,
        deeply: bool,
        seen: u64,
    ) -> Entered<'a> {
        if state.epoch() != seen {
            return state;
        }
        // Engines do not ring, nor does the hello of somebody who calls: looked at again soon.
        let longest = if state.is_offloading() {
            ENGINE_SLICE
        } else if state.is_hearing_soon() {
            HELLO_SLICE
        } else {
            SLICE
        };
        let deeply = deeply && longest == SLICE;
        let slice = deadline.map_or(longest, |deadline| {
            deadline.saturating_duration_since(Instant::now()).min(longest)
        });
        (state.pollers, state.polls) = (state.pollers - 1, false);
        if state.has_sleeper {
            let have_changed = state.have_variables_changed();
            if have_changed {
                // It may be what the sleeper waits for.
                self.wake_sleeper(&mut state);
            }
            let is_ready = have_changed || (state.pollers == 0 && state.rest_again());
            if is_ready || state.epoch() != seen {
                state.pollers += 1;
                state.awake();
                return state;
            }
            let told = self.local.word().load(Ordering::Acquire);
            self.local_waiters.fetch_add(1, Ordering::Relaxed);
            drop(state);
            self.local.wait(told, Some(slice));
            self.local_waiters.fetch_sub(1, Ordering::Relaxed);
            state = self.enter();
        } else {
            state.has_sleeper = true;
            let deeply = deeply || state.connected() > MOST_WORDS - 1 || state.carried.is_used();
            let readiness = if deeply { state.readiness().ok() } else { None };
            let way = if readiness.is_some() { AWAY } else { ASLEEP };
            state.sleeps_deeply = readiness.is_some();
            let before = state.resting;
            state.resting |= way;
            let words = state.rest();
            // Once more, now that whatever comes later rings: notes, room, and what peers have told
            // about messages that both copy.
            let is_idle = !state.have_variables_changed() && !state.is_anything_ready();
            // Copies are for a thread that polls, not for one that is taken to sleep.
            if is_idle && !state.step_all() && state.epoch() == seen {
                state.to_sleep = true;
                // Without a deadline, whatever rings ends the sleep; what does not is looked at again.
                let bound = match deadline {
                    None if state.is_watch_partial => Some(slice),
                    None if longest == SLICE && !state.carried.is_used() => None,
                    None if longest == SLICE => Some(CARRIER_SLICE),
                    _ => Some(slice),
                };
                drop(state);
                match &readiness {
                    Some(readiness) => {
                        // Peers may be lost meanwhile, and their memory should go with them.
                        drop(words);
                        let _ = readiness.wait(bound);
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
            // Not as it was before: an event loop may watch since then.
            state.resting &= !way | before;
            state.check_peers(true);
            self.tell_local();
        }
        state.pollers += 1;
        state.awake();
        state
    }

    /// Wakes the sleeper of this process, wherever it sleeps. It may not sleep yet: from now on its
    /// words must not say again that it does, or it would sleep through this.
    pub(crate) fn wake_sleeper(&self, state: &mut State) {
        state.resting &= !ASLEEP;
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
    /// Whether something is on its way that does not ring: a hello, the answer to one, a chunk of a
    /// message that was given up, or what the carrier has to do.
    pub(crate) fn is_hearing_soon(&mut self) -> bool {
        self.listener.as_ref().is_some_and(Listener::has_pending)
            || self.calls > 0
            || !self.held.is_empty()
            || (self.closed && self.is_any_underway())
            || !self.is_carrier_quiet()
    }

    /// Whether an engine copies for this port.
    pub(crate) fn is_offloading(&mut self) -> bool {
        let Self { peers, operations, .. } = self;
        let active = peers.iter().filter_map(|slot| slot.connection.as_ref());
        active.flat_map(|connection| &connection.active).any(|number| {
            operations.receiving(*number).is_some_and(|receiving| receiving.is_offloaded())
        })
    }

    fn connected(&self) -> usize {
        self.peers.iter().filter(|slot| slot.connection.is_some()).count()
    }

    /// The last thread that looked stops, and another sleeps: peers must ring again. What came
    /// before they knew is for whoever sleeps, and is done here instead. Returns whether there was
    /// anything.
    pub(super) fn rest_again(&mut self) -> bool {
        if self.resting & ASLEEP == 0 {
            return false;
        }
        self.rest();
        (self.is_anything_ready() || self.has_active()) && self.step_all()
    }

    pub(super) fn awake(&mut self) {
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
            let wants_room = !connection.outbox.is_empty()
                || connection.wire.is_holding()
                || connection.arrived > 0;
            connection.wire.consumer.is_ready()
                || (wants_room && connection.wire.has_news_of_room())
        }) || (self.closed && !self.is_any_underway())
    }

    /// Whether a variable that some thread waits for has changed since this was last asked. Whoever
    /// asks does not sleep then, but tells the others.
    pub(super) fn have_variables_changed(&mut self) -> bool {
        // All of them are looked at, and each change is told once.
        self.variables.iter_mut().fold(false, |any, variable| variable.take_change() | any)
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
        let others = self.call_sockets().chain(self.carried.descriptor());
        for descriptor in others {
            readiness.add(descriptor, false)?;
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
