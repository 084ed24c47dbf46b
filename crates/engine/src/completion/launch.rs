//! Handing descriptors to channels: at once, or when the transfers they are ordered after are over.
//!
//! What a full or closed channel does not take is carried out by the thread that tried, so a
//! launch never waits for another transfer and never loses one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry_sys::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use memferry_sys::sync::{Mutex, lock, thread_local};

use super::Completion;
use crate::contract::{Channel, Descriptor, ExecutionError, Scope, is_engine_thread};

/// Descriptors that go to one place.
#[derive(Debug)]
pub struct Order {
    place: Place,
    descriptors: Batch,
}

/// Where descriptors go.
#[derive(Debug)]
enum Place {
    /// To a channel. `self_driving`: it moves on by itself; if not, a full one is polled for room.
    Channel { channel: Arc<dyn Channel>, self_driving: bool },
    /// Nowhere: the launching thread carries them out.
    Here,
    /// Nowhere: they failed before they were begun.
    Failed(ExecutionError),
}

/// Most orders are a single descriptor, for which no list is allocated.
#[derive(Debug)]
enum Batch {
    One([Option<Descriptor>; 1]),
    Many(Vec<Option<Descriptor>>),
}

impl Batch {
    fn as_mut_slice(&mut self) -> &mut [Option<Descriptor>] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }

    fn take_all(&mut self) -> impl Iterator<Item = Descriptor> {
        self.as_mut_slice().iter_mut().filter_map(Option::take)
    }
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
    ///
    /// # Safety
    /// Nothing but the descriptors of these orders may report to the completion, apart from those who
    /// claim its chunks: it is ended here if none of them is begun.
    pub unsafe fn now(completion: &Completion, orders: impl IntoIterator<Item = Order>) {
        Self::hand_over(completion, orders);
    }

    fn hand_over(completion: &Completion, orders: impl IntoIterator<Item = Order>) {
        let mut reached = false;
        for mut order in orders {
            reached |= order.hand_over();
        }
        if reached {
            return;
        }
        match completion.work() {
            // Invitations that nobody took leave chunks that nobody would claim: claim them here.
            Some(work) if work.is_host_only() => {
                completion.run_from_front();
            }
            Some(_) => {
                let reason =
                    "the channels are full or closed, and no processor reaches this memory";
                completion.refuse(ExecutionError::Engine { done_bytes: 0, reason });
            }
            None => completion.finish_whole(Ok(None)),
        }
    }

    /// Hands over the orders of a transfer when all its predecessors are over. If one of them did
    /// not end well, the transfer ends with [`ExecutionError::Predecessor`] instead.
    ///
    /// # Safety
    /// As for [`Launch::now`].
    pub unsafe fn after(
        predecessors: &[Arc<Completion>],
        completion: Arc<Completion>,
        orders: Vec<Order>,
    ) {
        // A caller that waits for this transfer must not help before its turn has come.
        if let Some(work) = completion.work() {
            work.hold();
        }
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
            // Not `const`: loom's twin of this macro does not know that.
            #[allow(clippy::missing_const_for_thread_local)]
            static QUEUE: RefCell<Option<Vec<Arc<Launch>>>> = RefCell::new(None);
        }
        let ready: Vec<_> =
            followers.into_iter().filter(|launch| launch.one_ended(failed)).collect();
        if ready.is_empty() {
            return;
        }
        let outermost = QUEUE.with(|queue| {
            let mut queue = queue.borrow_mut();
            let outermost = queue.is_none();
            queue.get_or_insert_default().extend(ready);
            outermost
        });
        if !outermost {
            return;
        }
        /// Empties the queue whatever happens, or nothing would be launched from here again.
        struct Emptied;
        impl Drop for Emptied {
            fn drop(&mut self) {
                QUEUE.with(|queue| queue.replace(None));
            }
        }
        let _emptied = Emptied;
        let next = || QUEUE.with(|queue| queue.borrow_mut().as_mut().and_then(Vec::pop));
        while let Some(launch) = next() {
            launch.go();
        }
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
            if let Some(work) = self.completion.work() {
                work.release();
            }
            Self::hand_over(&self.completion, orders);
        }
    }

    /// Ends a transfer that was not begun.
    fn refuse(&self, orders: Vec<Order>, error: &ExecutionError) {
        for mut order in orders {
            let descriptors = order.descriptors.take_all();
            for fixed in descriptors.filter(|descriptor| descriptor.scope() != Scope::Chunks) {
                fixed.finish(Err(error.clone()));
            }
        }
        if !self.completion.is_done() {
            self.completion.refuse(error.clone());
        }
    }
}

impl Order {
    /// One descriptor for a channel. `self_driving`: the channel moves on without being polled.
    pub fn one(channel: Arc<dyn Channel>, self_driving: bool, descriptor: Descriptor) -> Self {
        let place = Place::Channel { channel, self_driving };
        Self { place, descriptors: Batch::One([Some(descriptor)]) }
    }

    /// Several descriptors for a channel, in order.
    pub fn many(
        channel: Arc<dyn Channel>,
        self_driving: bool,
        descriptors: impl IntoIterator<Item = Descriptor>,
    ) -> Self {
        let descriptors = Batch::Many(descriptors.into_iter().map(Some).collect());
        Self { place: Place::Channel { channel, self_driving }, descriptors }
    }

    /// A descriptor for whichever thread launches it.
    pub fn here(descriptor: Descriptor) -> Self {
        Self { place: Place::Here, descriptors: Batch::One([Some(descriptor)]) }
    }

    /// A descriptor that failed before it was begun. It is reported when its turn has come, and
    /// finished by the launching thread if the error is one from which that recovers.
    pub fn failed(descriptor: Descriptor, error: ExecutionError) -> Self {
        Self { place: Place::Failed(error), descriptors: Batch::One([Some(descriptor)]) }
    }

    /// Submits everything; what is not taken is run here, except invitations. Returns whether
    /// anything reached the channel or was run.
    fn hand_over(&mut self) -> bool {
        let batch = self.descriptors.as_mut_slice();
        let invites = batch.iter().flatten().any(|one| one.scope() == Scope::Chunks);
        let handed = self.submit();
        // A channel whose submit panicked says that it took nothing, but what it took is gone, and is
        // reported by whoever drops it. An invitation that is gone was only declined.
        let mut is_gone = || self.descriptors.as_mut_slice().iter().any(Option::is_none);
        let mut reached = handed > 0 || !invites && is_gone();
        for descriptor in self.descriptors.take_all() {
            if descriptor.scope() == Scope::Chunks {
                continue;
            }
            reached = true;
            if let Place::Failed(error) = &self.place {
                descriptor.finish(Err(error.clone()));
            } else if descriptor.is_host_only() {
                descriptor.run();
            } else {
                let reason = "the channel is full or closed, and no processor reaches this memory";
                descriptor.finish(Err(ExecutionError::Engine { done_bytes: 0, reason }));
            }
        }
        reached
    }

    /// Returns how many the channel took. One that moves on by itself is tried once: if it is full
    /// there is a thread here that can work, and where that cannot, it waits for room, unless it is
    /// the thread of a channel, for which others may be waiting. One that must be polled is polled
    /// for room: for a while, or a few times by the thread of a channel, which may be the one that
    /// would have to make the room.
    fn submit(&mut self) -> usize {
        const IDLE_POLLS: u32 = 1000;
        const PATIENCE: Duration = Duration::from_millis(50);
        const NAP: Duration = Duration::from_micros(50);
        const ROOM: Duration = Duration::from_millis(10);
        let Place::Channel { channel, self_driving } = &self.place else {
            return 0;
        };
        let batch = self.descriptors.as_mut_slice();
        let (mut handed, mut idle, mut since) = (0, 0, None);
        while let Ok(taken) = channel.submit(&mut batch[handed..]) {
            handed += taken.count;
            if handed == batch.len() {
                break;
            }
            if *self_driving {
                let must_wait = batch.iter().flatten().any(|left| !left.is_host_only());
                if !must_wait || is_engine_thread() {
                    break;
                }
                channel.park(channel.completed() + 1, ROOM);
                continue;
            }
            if taken.count > 0 || channel.poll() {
                (idle, since) = (0, None);
                continue;
            }
            idle += 1;
            if idle < IDLE_POLLS {
                continue;
            }
            if is_engine_thread() || since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                break;
            }
            std::thread::sleep(NAP);
        }
        handed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::contract::{ChannelStatistics, Operation, Sequence, SubmitError, Taken};

    /// As a channel whose submit panicked looks from outside: closed, and it has what it was given.
    #[derive(Debug, Default)]
    struct Panicked(Mutex<Vec<Descriptor>>);

    // SAFETY: it carries out nothing, and counts nothing as done.
    unsafe impl Channel for Panicked {
        fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Taken, SubmitError> {
            lock(&self.0).extend(batch.iter_mut().filter_map(Option::take));
            Err(SubmitError::Closed)
        }

        fn completed(&self) -> Sequence {
            0
        }

        fn error_of(&self, _sequence: Sequence) -> Option<ExecutionError> {
            None
        }

        fn poll(&self) -> bool {
            false
        }

        fn park(&self, _sequence: Sequence, _timeout: Duration) -> bool {
            false
        }

        fn wake(&self) {}

        fn close(&self) {}

        fn outstanding_bytes(&self) -> u64 {
            0
        }

        fn statistics(&self) -> ChannelStatistics {
            ChannelStatistics::default()
        }
    }

    #[test]
    fn a_transfer_is_not_over_while_a_channel_whose_submit_panicked_has_its_descriptor() {
        let (channel, completion) = (Arc::new(Panicked::default()), Arc::new(Completion::whole()));
        let mut target = [0u8; 8];
        // SAFETY: nobody writes to the target, which outlives the descriptor.
        let fill = unsafe {
            let fill = Descriptor::new(Operation::Fill, 0, target.as_mut_ptr() as u64, 8);
            fill.completes(completion.clone())
        };
        // SAFETY: the completion has no other descriptor.
        unsafe { Launch::now(&completion, [Order::one(channel.clone(), true, fill)]) };
        assert!(!completion.is_done());
        drop(channel);
        assert!(completion.is_done());
        let error = completion.outcome().expect("it is over").unwrap_err();
        assert!(matches!(error, ExecutionError::Engine { .. }), "{error}");
    }
}
