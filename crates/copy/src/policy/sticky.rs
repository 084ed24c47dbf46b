//! Policy: the channel used last, until its backlog is too large.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use memferry_engine::Channel;
use memferry_engine::cpu::SiblingUse;
use memferry_sys::topology::Topology;

use super::{Choice, Nearness};

/// The maximum number of channels of which the policy reads the backlog at once.
pub(crate) const MAX_LOOKS: usize = 16;

/// Stays with one channel, which therefore stays awake, until its backlog is too large. Then it looks at
/// all of them: the least loaded one that is awake is next, or one that sleeps if all others have too
/// much. Once the channels are idle again it starts over with the first: the same few stay awake. Where
/// cores are at different distances, the one nearest to the calling thread is the first, and it is
/// preferred to others with the same load.
///
/// The backlog of a channel is in a cache line that its thread writes. So the policy adds up what was
/// submitted, and fetches the lines only when that could be too much.
#[derive(Debug)]
pub(crate) struct Sticky {
    current: AtomicUsize,
    /// The backlog of the current channel at the last look, if that left it the current one, and what was
    /// submitted since, in bytes. Threads that submit at the same time may lose a part of it.
    bound: AtomicU64,
    /// The bytes that were submitted since a channel first had too much; 0 if the current one had room at
    /// the last look.
    window: AtomicU64,
    /// How many of them were in flight at the last look at all channels.
    in_flight: AtomicU64,
    /// The maximum backlog in bytes of the current channel.
    max_backlog_bytes: u64,
    topology: &'static Topology,
    /// All cores are equally near: no channel is asked for its core.
    is_uniform: bool,
    /// What channels on the other hardware thread of the caller's core are used for.
    sibling: SiblingUse,
}

impl Sticky {
    /// `max_backlog_bytes` is what a core copies in the time of waking another one.
    pub(super) fn new(max_backlog_bytes: u64, sibling: SiblingUse) -> Self {
        let (current, bound, window, in_flight) = Default::default();
        let topology = Topology::of_machine();
        let is_uniform = topology.is_uniform();
        Self { current, bound, window, in_flight, max_backlog_bytes, topology, is_uniform, sibling }
    }

    /// About how many bytes are in flight, if a channel had too much of them.
    #[inline]
    pub(super) fn in_flight_bytes(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn choose(&self, channels: &[Arc<dyn Channel>], bytes: u64) -> Choice {
        let mut index = 0;
        if channels.len() > 1 {
            index = self.current.load(Ordering::Relaxed) % channels.len();
            let bound = self.bound.load(Ordering::Relaxed).saturating_add(bytes);
            self.bound.store(bound, Ordering::Relaxed);
            if bound > self.max_backlog_bytes {
                index = self.look(channels, index, bytes, bound);
            }
        }
        Choice::Channel { index, first_channel: 0 }
    }

    /// Looks at the backlog of the current channel, of all of them if it has too much, and chooses again.
    /// `bound` is what was submitted since the last look, and `bytes` the last of it.
    #[inline(never)]
    fn look(&self, channels: &[Arc<dyn Channel>], current: usize, bytes: u64, bound: u64) -> usize {
        let near = (!self.is_uniform).then(|| Nearness::of_caller(self.topology, self.sibling));
        self.look_from(near, channels, current, bytes, bound)
    }

    fn look_from(
        &self,
        near: Option<Nearness<'_>>,
        channels: &[Arc<dyn Channel>],
        current: usize,
        bytes: u64,
        bound: u64,
    ) -> usize {
        let backlog = |index: usize| channels[index].outstanding_bytes();
        let is_full = |bytes: u64| bytes > self.max_backlog_bytes;
        let now = backlog(current);
        let (mut window, mut in_flight) = (0, 0);
        let (index, known) = if is_full(now) {
            let (index, outstanding) = self.least_loaded(near, channels, current);
            window = self.window.load(Ordering::Relaxed).saturating_add(bound);
            // A large copy that channels share is outstanding in each of them.
            in_flight = outstanding.min(window);
            // The next look is when this one may have got as much as it may have: else each transfer of
            // a long window would look at all channels.
            (index, 0)
        } else if now == 0 {
            let first = match near {
                Some(near) => near.nearest(channels, MAX_LOOKS, current),
                None => 0,
            };
            (if is_full(backlog(first)) { current } else { first }, 0)
        } else {
            (current, now)
        };
        self.window.store(window, Ordering::Relaxed);
        self.in_flight.store(in_flight, Ordering::Relaxed);
        self.current.store(index, Ordering::Relaxed);
        self.bound.store(known.saturating_add(bytes), Ordering::Relaxed);
        index
    }

    /// The least loaded channel that is awake, unless it has too much: then the first that sleeps, if
    /// there is any. And what is outstanding in all of them. Of very many channels it looks at some, those
    /// behind the current one.
    fn least_loaded(
        &self,
        near: Option<Nearness<'_>>,
        channels: &[Arc<dyn Channel>],
        current: usize,
    ) -> (usize, u64) {
        let start = if channels.len() > MAX_LOOKS { current + 1 } else { 0 };
        let (mut least, mut chosen, mut outstanding) = ((u64::MAX, None), 0, 0_u64);
        for turn in 0..channels.len().min(MAX_LOOKS) {
            let index = (start + turn) % channels.len();
            let backlog = channels[index].outstanding_bytes();
            outstanding = outstanding.saturating_add(backlog);
            let sleeps = backlog == 0 && channels[index].is_asleep();
            // A sleeping channel is as good as one with the largest backlog that is not too large.
            let load = if sleeps { self.max_backlog_bytes } else { backlog };
            let load = (load, near.map(|near| near.distance(&*channels[index])));
            if load < least || turn == 0 {
                (least, chosen) = (load, index);
            }
        }
        (chosen, outstanding)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use memferry_engine::contract::{ChannelStatistics, SubmitError, Submitted};
    use memferry_engine::{Descriptor, ExecutionError, Sequence};

    /// A channel with a backlog that the test sets; nothing is submitted to it.
    #[derive(Debug, Default)]
    pub(crate) struct LoadedChannel {
        pub(crate) backlog: AtomicU64,
        pub(crate) sleeps: bool,
        pub(crate) core: Option<usize>,
    }

    // SAFETY: it accepts no descriptor.
    unsafe impl Channel for LoadedChannel {
        fn submit(&self, _: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
            Err(SubmitError::Closed)
        }

        fn completed(&self) -> Sequence {
            0
        }

        fn error_of(&self, _: Sequence) -> Option<ExecutionError> {
            None
        }

        fn is_asleep(&self) -> bool {
            self.sleeps && self.outstanding_bytes() == 0
        }

        fn core(&self) -> Option<usize> {
            self.core
        }

        fn close(&self) {}

        fn outstanding_bytes(&self) -> u64 {
            self.backlog.load(Ordering::Relaxed)
        }

        fn statistics(&self) -> ChannelStatistics {
            ChannelStatistics::default()
        }
    }

    /// A policy over channels of which the last ones sleep while they have nothing to do.
    struct Fixture {
        policy: Sticky,
        loads: Vec<Arc<LoadedChannel>>,
        channels: Vec<Arc<dyn Channel>>,
    }

    impl Fixture {
        fn new(max_backlog_bytes: u64, awake: usize, asleep: usize) -> Self {
            let channel = |index| LoadedChannel { sleeps: index >= awake, ..Default::default() };
            let loads: Vec<_> = (0..awake + asleep).map(|index| Arc::new(channel(index))).collect();
            let channels = loads.iter().map(|load| load.clone() as Arc<dyn Channel>).collect();
            Self { policy: Sticky::new(max_backlog_bytes, SiblingUse::Last), loads, channels }
        }

        /// Chooses channels for transfers, each of which stays in flight.
        fn choose(&self, transfers: usize, bytes: u64) -> Vec<usize> {
            let choose = |_| {
                let choice = self.policy.choose(&self.channels, bytes);
                let Choice::Channel { index, .. } = choice else { unreachable!() };
                self.loads[index].backlog.fetch_add(bytes, Ordering::Relaxed);
                index
            };
            (0..transfers).map(choose).collect()
        }

        fn set_backlog(&self, index: usize, bytes: u64) {
            self.loads[index].backlog.store(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_full_channel_is_followed_by_an_idle_one_and_idle_ones_by_the_first() {
        let fixture = Fixture::new(900, 3, 0);
        assert_eq!(fixture.choose(4, 1000), [0, 1, 2, 0]);
        assert_eq!(fixture.choose(1, 1000), [1]);
        (0..3).for_each(|index| fixture.set_backlog(index, 0));
        assert_eq!(fixture.choose(2, 1000), [0, 1]);
    }

    #[test]
    fn channels_are_looked_at_when_one_may_be_full() {
        assert_eq!(Fixture::new(2000, 3, 0).choose(7, 1000), [0, 0, 0, 1, 1, 1, 2]);
    }

    #[test]
    fn a_full_channel_is_followed_by_the_least_loaded_one() {
        let fixture = Fixture::new(900, 4, 0);
        for (index, backlog) in [2000, 800, 300, 700].into_iter().enumerate() {
            fixture.set_backlog(index, backlog);
        }
        assert_eq!(fixture.choose(1, 1000), [2]);
    }

    /// A machine of cores, each with the list of its siblings, on nodes, each with the list of its cores.
    pub(crate) fn machine(siblings: &[&str], nodes: &[&str]) -> &'static Topology {
        let folder = tempfile::tempdir().unwrap();
        for (core, siblings) in siblings.iter().enumerate() {
            let path = folder.path().join(format!("cpu/cpu{core}/topology"));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("thread_siblings_list"), siblings).unwrap();
        }
        for (node, cores) in nodes.iter().enumerate() {
            let path = folder.path().join(format!("node/node{node}"));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("cpulist"), cores).unwrap();
        }
        Box::leak(Box::new(Topology::read(folder.path())))
    }

    #[test]
    fn of_channels_with_the_same_load_the_nearest_is_next_and_idle_ones_start_over_with_it() {
        let topology = machine(&["0", "1", "2", "3"], &["0-1", "2-3"]);
        let policy = Sticky::new(900, SiblingUse::Last);
        let loads: Vec<_> = (0..4)
            .map(|core| Arc::new(LoadedChannel { core: Some(core), ..Default::default() }))
            .collect();
        let channels: Vec<_> = loads.iter().map(|load| load.clone() as Arc<dyn Channel>).collect();
        let look = |here, current| {
            let near = Nearness::at(topology, here, SiblingUse::Last);
            policy.look_from(Some(near), &channels, current, 1000, 1000)
        };
        // All are idle: the one on the same node, not the one on the same core.
        assert_eq!([look(0, 3), look(1, 3), look(2, 0), look(3, 0)], [1, 0, 3, 2]);
        // The nearest one has too much, and the others have nothing.
        loads[3].backlog.store(2000, Ordering::Relaxed);
        assert_eq!(look(2, 3), 0, "a core of the other node comes before the own one");
        // A smaller load counts more than a shorter way.
        loads[0].backlog.store(500, Ordering::Relaxed);
        assert_eq!(look(1, 3), 2);
    }

    #[test]
    fn a_channel_is_woken_only_when_all_others_have_too_much() {
        let fixture = Fixture::new(900, 2, 2);
        fixture.set_backlog(0, 2000);
        fixture.set_backlog(1, 800);
        assert_eq!(fixture.choose(1, 1000), [1]);
        assert_eq!(fixture.choose(2, 1000), [2, 3]);
        // All have too much: the least loaded.
        assert_eq!(fixture.choose(1, 1000), [2]);
    }

    #[test]
    fn what_is_in_flight_is_what_was_submitted_and_is_outstanding() {
        let fixture = Fixture::new(900, 4, 0);
        fixture.choose(5, 1000);
        assert_eq!(fixture.policy.in_flight_bytes(), 4000);
        // A large copy is outstanding in each channel that shares it.
        let fixture = Fixture::new(900, 4, 0);
        (0..4).for_each(|index| fixture.set_backlog(index, 1 << 20));
        fixture.choose(3, 1000);
        assert!(fixture.policy.in_flight_bytes() < 10_000);
    }

    #[test]
    fn of_very_many_channels_all_are_used_in_turn() {
        let fixture = Fixture::new(900, 100, 0);
        let mut chosen = fixture.choose(100, 1000);
        chosen.sort_unstable();
        assert!(chosen.into_iter().eq(0..100));
    }

    #[test]
    fn nothing_is_known_in_flight_once_a_channel_has_room_again() {
        let fixture = Fixture::new(900, 2, 0);
        fixture.choose(4, 1000);
        assert!(fixture.policy.in_flight_bytes() > 0);
        (0..2).for_each(|index| fixture.set_backlog(index, 0));
        fixture.choose(1, 1000);
        assert_eq!(fixture.policy.in_flight_bytes(), 0);
    }

    #[test]
    fn one_channel_is_always_chosen() {
        assert_eq!(Fixture::new(0, 1, 0).choose(5, 10), [0; 5]);
    }
}
