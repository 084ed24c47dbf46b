//! Who is told that a transfer is complete: tasks, eventfds, dependent transfers, and values that it
//! keeps alive.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::Waker;

use memferry_sys::EventFd;
use memferry_sys::sync::atomic::Ordering;
use memferry_sys::sync::lock;

use super::{Completion, DONE, Dispatch, LISTENER, catch_user_panic};

/// The listeners of a completion, apart from sleepers on the state word.
#[derive(Debug, Default)]
pub(super) struct CompletionListeners {
    wakers: WakerSlots,
    events: Vec<Arc<EventFd>>,
    dependents: Vec<Arc<Dispatch>>,
    keep_alive: Vec<Box<dyn KeepAlive>>,
}

/// Names the waker of one future in its completion.
pub type WakerKey = NonZeroU32;

/// The wakers of futures: one for each that is awaited, however often it is polled.
#[derive(Debug, Default)]
struct WakerSlots {
    slots: Vec<Option<Waker>>,
    /// The keys of empty slots.
    free: Vec<WakerKey>,
}

impl WakerSlots {
    fn slot(&mut self, key: WakerKey) -> Option<&mut Option<Waker>> {
        self.slots.get_mut(key.get() as usize - 1)
    }

    /// Puts `new` into the slot of a future, and leaves in it what the caller must drop.
    fn set(&mut self, key: Option<WakerKey>, new: &mut Option<Waker>) -> Option<WakerKey> {
        let key = match key.or_else(|| self.free.pop()) {
            Some(key) => key,
            None => {
                let key = WakerKey::new(u32::try_from(self.slots.len()).ok()?.checked_add(1)?)?;
                self.slots.push(None);
                key
            }
        };
        std::mem::swap(self.slot(key)?, new);
        Some(key)
    }

    fn take(&mut self, key: WakerKey) -> Option<Waker> {
        let waker = self.slot(key)?.take()?;
        self.free.push(key);
        Some(waker)
    }
}

/// A value that must stay alive until a transfer is complete.
pub trait KeepAlive: Send + std::fmt::Debug {}
impl<T: Send + std::fmt::Debug> KeepAlive for T {}

impl Completion {
    /// Notifies all listeners of a transfer that is complete.
    pub(super) fn notify_listeners(&self, failed: bool) {
        let Some(listeners) = lock(&self.listeners).take() else {
            return;
        };
        let CompletionListeners { wakers, events, dependents, keep_alive } = *listeners;
        events.iter().for_each(|event| event.signal());
        let wakers = wakers.slots.into_iter().flatten();
        wakers.for_each(|waker| catch_user_panic(|| waker.wake()));
        Dispatch::run_dependents(dependents, failed);
        keep_alive.into_iter().for_each(|value| catch_user_panic(|| drop(value)));
    }

    /// Adds a listener; returns `false` if the transfer is complete or runs in the parent process.
    fn add_listener(&self, add: impl FnOnce(&mut CompletionListeners)) -> bool {
        if self.is_forked() {
            return false;
        }
        let mut listeners = lock(&self.listeners);
        // The flag is set under the lock: an engine that sees it waits for the lock and then finds
        // the listener.
        let previous = self.state.word().fetch_or(LISTENER, Ordering::AcqRel);
        if previous & DONE != 0 {
            return false;
        }
        add(listeners.get_or_insert_default());
        true
    }

    /// Wakes a future on completion, in place of the waker that it passed before, whose key it has. It must pass the
    /// new key to [`Completion::forget_waker`] when it is dropped. `None` if the transfer is already complete.
    pub fn wake_on_completion(&self, key: Option<WakerKey>, waker: &Waker) -> Option<WakerKey> {
        // Cloned and dropped outside the lock: a waker runs user code.
        let (mut waker, mut added) = (Some(waker.clone()), None);
        self.add_listener(|listeners| added = listeners.wakers.set(key, &mut waker));
        self.request_polls();
        added
    }

    /// Drops the waker of a future that is awaited no more.
    pub fn forget_waker(&self, key: WakerKey) {
        if !self.is_done() && !self.is_forked() {
            let waker = lock(&self.listeners).as_mut().and_then(|all| all.wakers.take(key));
            // Outside the lock.
            drop(waker);
        }
    }

    /// Signals an eventfd on completion, or now if the transfer is already complete.
    pub fn signal_on_completion(&self, event: &Arc<EventFd>) {
        if !self.add_listener(|listeners| listeners.events.push(event.clone())) {
            event.signal();
        }
        self.request_polls();
    }

    /// Keeps a value alive until completion. `Err` returns it if the transfer is already complete.
    pub fn keep_alive<T: Send + std::fmt::Debug + 'static>(&self, value: T) -> Result<(), T> {
        let mut value = Some(value);
        self.add_listener(|listeners| listeners.keep_alive.push(Box::new(value.take())));
        value.map_or(Ok(()), Err)
    }

    /// Adds a dispatch that waits for this transfer. If the transfer is already complete, returns
    /// whether it succeeded.
    pub(crate) fn add_dependent(&self, dispatch: &Arc<Dispatch>) -> Option<bool> {
        let added = self.add_listener(|listeners| listeners.dependents.push(dispatch.clone()));
        self.request_polls();
        (!added).then(|| matches!(self.outcome(), Some(Ok(_))))
    }
}
