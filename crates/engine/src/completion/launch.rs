//! Handing descriptors to channels: at once, or when the transfers they are ordered after are over.
//!
//! What a full or closed channel does not take is carried out by the thread that tried, so a
//! launch never waits for another transfer and never loses one.

use std::sync::Arc;

use memferry_sys::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use memferry_sys::sync::{Mutex, lock};

use super::Completion;
use crate::contract::{Channel, Descriptor, ExecutionError, Scope};

/// Descriptors for one channel.
#[derive(Debug)]
pub struct Order {
    /// Where they go.
    pub channel: Arc<dyn Channel>,
    /// What goes there, in order.
    pub descriptors: Vec<Option<Descriptor>>,
    /// Whether the channel moves on by itself; if not, a full one is polled for room.
    pub self_driving: bool,
}

/// A transfer that waits for others.
#[derive(Debug)]
pub struct Launch {
    completion: Arc<Completion>,
    orders: Mutex<Vec<Order>>,
    waiting_for: AtomicU32,
    predecessor_failed: AtomicBool,
}

impl Launch {
    /// Hands over the orders of a transfer now. Without orders there is nothing to do, and the
    /// transfer is over.
    pub fn now(completion: &Completion, orders: Vec<Order>) {
        if orders.is_empty() && completion.work().is_none() {
            return completion.finish_whole(Ok(None));
        }
        let mut invited = false;
        for mut order in orders {
            invited |= order.hand_over();
        }
        // Invitations that nobody took leave chunks that nobody would claim: claim them here.
        if !invited && completion.work().is_some() {
            completion.run_from_front();
        }
    }

    /// Hands over the orders of a transfer when all its predecessors are over. If one of them did
    /// not end well, the transfer ends with [`ExecutionError::Predecessor`] instead.
    pub fn after(
        predecessors: &[Arc<Completion>],
        completion: Arc<Completion>,
        orders: Vec<Order>,
    ) {
        let launch = Arc::new(Self {
            completion,
            orders: Mutex::new(orders),
            // One more than there are, so that nothing starts while they are being registered.
            waiting_for: AtomicU32::new(predecessors.len() as u32 + 1),
            predecessor_failed: AtomicBool::new(false),
        });
        for predecessor in predecessors {
            if let Some(succeeded) = predecessor.follow(&launch) {
                launch.one_ended(!succeeded);
            }
        }
        if launch.one_ended(false) {
            launch.go();
        }
    }

    /// A predecessor of these is over. Following launches may end transfers on the spot, which
    /// have followers in turn; the queue keeps a long chain from becoming a deep recursion.
    pub(crate) fn predecessor_ended(followers: Vec<Arc<Self>>, failed: bool) {
        use std::cell::RefCell;
        thread_local! {
            static QUEUE: RefCell<Option<Vec<Arc<Launch>>>> = const { RefCell::new(None) };
        }
        let ready: Vec<_> = followers
            .into_iter()
            .filter(|launch| launch.one_ended(failed))
            .collect();
        if ready.is_empty() {
            return;
        }
        let outermost = QUEUE.with_borrow_mut(|queue| {
            let outermost = queue.is_none();
            queue.get_or_insert_default().extend(ready);
            outermost
        });
        if !outermost {
            return;
        }
        while let Some(launch) = QUEUE.with_borrow_mut(|queue| queue.as_mut().and_then(Vec::pop)) {
            launch.go();
        }
        QUEUE.set(None);
    }

    /// Counts a predecessor as over; `true` for the last.
    fn one_ended(&self, failed: bool) -> bool {
        if failed {
            self.predecessor_failed.store(true, Ordering::Relaxed);
        }
        self.waiting_for.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn go(&self) {
        let orders = std::mem::take(&mut *lock(&self.orders));
        if self.predecessor_failed.load(Ordering::Relaxed) {
            self.refuse(orders, &ExecutionError::Predecessor);
        } else if self.completion.is_cancelled() {
            self.refuse(orders, &ExecutionError::Cancelled { done_bytes: 0 });
        } else {
            Self::now(&self.completion, orders);
        }
    }

    /// Ends a transfer that was not begun.
    fn refuse(&self, orders: Vec<Order>, error: &ExecutionError) {
        let fixed = orders
            .into_iter()
            .flat_map(|order| order.descriptors)
            .flatten();
        for descriptor in fixed.filter(|descriptor| descriptor.scope() != Scope::Chunks) {
            descriptor.finish(Err(error.clone()));
        }
        if !self.completion.is_done() {
            self.completion.refuse(error.clone());
        }
    }
}

impl Order {
    /// Submits everything; what is not taken is run here. Returns whether an invitation or any
    /// other descriptor reached the channel or was run.
    fn hand_over(&mut self) -> bool {
        const IDLE_POLLS: u32 = 1000;
        let mut idle = 0;
        let mut handed = 0;
        while handed < self.descriptors.len() {
            let Ok(taken) = self.channel.submit(&mut self.descriptors[handed..]) else {
                break;
            };
            handed += taken.count;
            if handed == self.descriptors.len() {
                break;
            }
            if self.self_driving || idle == IDLE_POLLS {
                break;
            }
            idle = if taken.count > 0 || self.channel.poll() {
                0
            } else {
                idle + 1
            };
        }
        let mut reached = handed > 0;
        for descriptor in self.descriptors.iter_mut().filter_map(Option::take) {
            if descriptor.scope() == Scope::Chunks {
                continue;
            }
            reached = true;
            if descriptor.is_host_only() {
                descriptor.run();
            } else {
                let reason = "the channel is full or closed, and no processor reaches this memory";
                descriptor.finish(Err(ExecutionError::Engine {
                    done_bytes: 0,
                    reason,
                }));
            }
        }
        reached
    }
}
