//! The two threads behind a cache that hears of changes.
//!
//! The *reader* reads events and does nothing else. Threads that unmap watched memory wait for it,
//! among them such as hold the cache's lock or the allocator's; so it takes no lock that anybody
//! holds for long, allocates nothing, frees nothing, and takes no signals. The *reaper* unpins what
//! became stale when no request does so first. Where pins are of page frames, the reader has it look
//! for memory that is gone before it reads: a device must not know addresses any more when their
//! owner gets them back from the kernel for something else. It waits for that a bounded time only.
//!
//! A reader that panics lets everybody go who waits for it, by closing the descriptor, and the cache
//! keeps nothing from then on. A reaper that panics, in the code of a pinner, goes on with the next
//! request.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memferry_sys::sync::thread::{self, JoinHandle};
use memferry_sys::userfault::{Stop, Userfault, Wake, keep_signals_away};

use super::StartError;
use super::news::{Chore, News};
use super::shared::{Ears, Shared};

/// How long stale memory may wait for a request before the reaper is woken for it.
const REAP_AFTER_NS: u32 = 10_000_000;

/// How often a request looks whether mappings are still changing before it does without the cache.
const SETTLE_TRIES: usize = if cfg!(loom) { 2 } else { 64 };

/// The threads, and what they share with requests.
#[derive(Debug)]
pub(super) struct Watcher {
    ears: Ears,
    stop: Arc<Stop>,
    reader: JoinHandle<()>,
    reaper: JoinHandle<()>,
}

impl Watcher {
    /// Starts both threads; they are ready when this returns.
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Self, StartError> {
        let userfault = Arc::new(Userfault::open().map_err(StartError::NoEvents)?);
        let ears = Ears { userfault, news: Arc::new(News::new()) };
        let stop = Arc::new(Stop::new().map_err(StartError::NoThread)?);
        let reader = {
            let (ears, stop) = (ears.clone(), Arc::clone(&stop));
            let sweeps = !shared.pinner.follows_mapping();
            spawn("memferry-pin-events", move || read(ears, &stop, sweeps))?
        };
        ears.news.wait_for_start();
        let reaper = {
            let (ears, shared) = (ears.clone(), Arc::clone(shared));
            spawn("memferry-pin-reaper", move || {
                while let Some(chore) = ears.news.wait_for_call() {
                    let reap = || {
                        shared.with(Some(&ears), |index, cleared| {
                            if let Chore::Sweep(_) = chore {
                                index.invalidate_unmapped(cleared);
                            }
                        });
                    };
                    if catch_unwind(AssertUnwindSafe(reap)).is_err() {
                        tracing::error!("memory could not be unpinned: its pinner panicked");
                    }
                    if let Chore::Sweep(number) = chore {
                        ears.news.swept(number);
                    }
                }
            })
        };
        match reaper {
            Ok(reaper) => Ok(Self { ears, stop, reader, reaper }),
            Err(error) => {
                stop.signal();
                drop(ears);
                let _ = reader.join();
                Err(error)
            }
        }
    }

    /// What requests need.
    pub(super) fn ears(&self) -> &Ears {
        &self.ears
    }

    /// Waits a little until no mapping of watched memory is changing. When this returns true, the
    /// event of every earlier change has been read.
    pub(super) fn settle(&self) -> bool {
        for _ in 0..SETTLE_TRIES {
            if !self.ears.userfault.is_changing() {
                return true;
            }
            thread::yield_now();
        }
        false
    }

    /// Ends both threads. Nothing may be registered any more.
    pub(super) fn end(self) {
        self.ears.news.end();
        let _ = self.reaper.join();
        // The reader holds the last reference and closes the descriptor as its last deed. Were it
        // closed here, joining would free memory, a stack perhaps, with nobody left to read.
        drop(self.ears);
        self.stop.signal();
        let _ = self.reader.join();
    }

    /// Leaves everything as it is: in a forked child the threads do not exist, and even to detach
    /// them would touch memory that is not theirs any more.
    pub(super) fn abandon(self) {
        std::mem::forget(self);
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    let thread = memferry_sys::thread::spawn(name, work);
    thread.map_err(|error: io::Error| StartError::NoThread(error))
}

/// The reader. If it sweeps, memory is unpinned before the thread that unmapped it goes on: until the
/// event is read, that thread waits.
fn read(ears: Ears, stop: &Stop, sweeps: bool) {
    keep_signals_away();
    ears.news.start();
    if catch_unwind(AssertUnwindSafe(|| read_until_stopped(&ears, stop, sweeps))).is_err() {
        // In this order: a change is heard of, or the cache knows that it hears nothing.
        ears.news.become_deaf();
        ears.userfault.retire(stop);
        ears.news.ask_to_reap();
        tracing::error!(
            "the reader of changed mappings panicked: no memory is kept pinned from now on"
        );
    }
    // Closing ends all watching and wakes everybody who still waits; only then is anything freed.
    drop(ears.userfault);
}

fn read_until_stopped(ears: &Ears, stop: &Stop, sweeps: bool) {
    let Ears { userfault, news } = ears;
    loop {
        let timeout_ns = news.is_some().then_some(REAP_AFTER_NS);
        match userfault.wait(stop, timeout_ns) {
            Wake::Events => {
                #[cfg(test)]
                if news.panics.load(std::sync::atomic::Ordering::SeqCst) {
                    std::panic::resume_unwind(Box::new("a reader that panics, on purpose"));
                }
                if sweeps {
                    news.sweep();
                }
                news.read_from(userfault);
            }
            Wake::TimeOut => news.ask_to_reap(),
            Wake::Stopped => return,
        }
    }
}
