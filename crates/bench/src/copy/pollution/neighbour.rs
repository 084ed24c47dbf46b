//! A thread on another core that copies when it is told to, without a ferry: what a copy on another core
//! alone does to the caller's caches.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use memferry::sys::affinity;
use memferry::sys::copy::stream::Streaming;

use crate::group::cores::MemberCores;
use crate::harness::{BufferPair, memcpy};

/// Nothing to do: the thread sleeps.
const IDLE: u32 = 0;
/// The thread is to be awake, and polls for the next order.
const AWAKE: u32 = 1;
const STREAM: u32 = 2;
const CACHED: u32 = 3;
const QUIT: u32 = 4;

/// How the neighbour stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stores {
    /// Past the caches.
    Streaming,
    /// Through the caches, as memcpy of this length.
    Memcpy,
}

/// The thread; it ends when the value is dropped.
#[derive(Debug)]
pub(super) struct Neighbour {
    order: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    /// Starts the thread with buffers of its own. `None` on a machine with one core.
    pub(super) fn start(bytes: usize, streaming: Streaming) -> anyhow::Result<Option<Self>> {
        let cores = MemberCores::of_this_machine();
        let Some(core) = cores.away_from(affinity::current_core()) else { return Ok(None) };
        let mut pair = BufferPair::new(bytes)?;
        let order = Arc::new(AtomicU32::new(IDLE));
        let orders = order.clone();
        let thread = thread::Builder::new().name("neighbour".into()).spawn(move || {
            // Where it runs else if this fails, the system decides.
            let _ = affinity::bind_to_core(core);
            serve(&orders, &mut pair, streaming);
        })?;
        Ok(Some(Self { order, thread: Some(thread) }))
    }

    /// Wakes the thread, so that the next order needs no system call.
    pub(super) fn wake(&self) {
        self.tell(AWAKE);
    }

    /// Lets the thread copy, and polls for the end.
    pub(super) fn copy(&self, stores: Stores) {
        self.order.store(
            match stores {
                Stores::Streaming => STREAM,
                Stores::Memcpy => CACHED,
            },
            Ordering::Release,
        );
        while self.order.load(Ordering::Acquire) != IDLE {
            spin_loop();
        }
    }

    fn tell(&self, order: u32) {
        self.order.store(order, Ordering::Release);
        self.thread.iter().for_each(|thread| thread.thread().unpark());
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.tell(QUIT);
        // It runs nothing that panics.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn serve(orders: &AtomicU32, pair: &mut BufferPair, streaming: Streaming) {
    loop {
        let (source, target) = (pair.source.as_slice(), pair.target.as_mut_slice());
        match orders.load(Ordering::Acquire) {
            IDLE => {
                thread::park();
                continue;
            }
            AWAKE => {
                spin_loop();
                continue;
            }
            STREAM => {
                let length = source.len().min(target.len());
                // SAFETY: two buffers, each of at least this length, that this thread owns; the ferry
                // found that the processor supports the variant.
                unsafe {
                    streaming.copy(target.as_mut_ptr(), source.as_ptr(), length);
                }
            }
            CACHED => memcpy(target, source),
            _ => return,
        }
        orders.store(IDLE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_ends_each_copy_and_then_itself() {
        let Some(neighbour) =
            Neighbour::start(1 << 20, Streaming::supported().next().unwrap()).unwrap()
        else {
            return;
        };
        for stores in [Stores::Streaming, Stores::Memcpy, Stores::Streaming] {
            neighbour.wake();
            neighbour.copy(stores);
            assert_eq!(neighbour.order.load(Ordering::Relaxed), IDLE);
        }
    }
}
