//! Threads that sleep until the interrupt of a device, over models that raise it by an eventfd: as they
//! should, never, early, for no reason, or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_engine::completion::Completion;
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::dsa::DsaEngine;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::nic::{NicConfig, NicEngine};
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel};
use memferry_engine::testing::interrupts::{InterruptFaults, ModelInterrupts};
use memferry_engine::testing::ioat_model::{FaultSchedule, IoatFaults, IoatModel};
use memferry_engine::testing::nic_model::{NicFaults, NicModel};
use memferry_engine::{ChannelOptions, Descriptor, Engine, InterruptSleep, Opcode};
use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;

/// A timeout that only a hang reaches.
const LONG: Duration = Duration::from_secs(60);
/// A descriptor for which a waiter sleeps, and one for which it polls.
const LONG_BYTES: usize = 2 << 20;
const SHORT_BYTES: usize = 4096;

/// A copy engine that takes long copies in one descriptor.
fn ioat_model() -> Arc<IoatModel> {
    IoatModel::builder().contiguous(true).transfer_power(21).build()
}

/// The model behind an engine.
#[derive(Clone)]
enum Model {
    Ioat(Arc<IoatModel>),
    Dsa(Arc<DsaModel>),
    Nic(Arc<NicModel>),
}

impl Model {
    fn all() -> [Self; 3] {
        [Self::Ioat(ioat_model()), Self::Dsa(DsaModel::new()), Self::Nic(NicModel::new())]
    }

    fn engine(&self) -> Arc<dyn Engine> {
        match self.clone() {
            Self::Ioat(model) => Arc::new(IoatEngine::over_model(model).unwrap()),
            Self::Dsa(model) => Arc::new(DsaEngine::over_model(model).unwrap()),
            Self::Nic(model) => {
                Arc::new(NicEngine::over_model(model, NicConfig::default()).unwrap())
            }
        }
    }

    fn interrupts(&self) -> &ModelInterrupts {
        match self {
            Self::Ioat(model) => model.interrupts(),
            Self::Dsa(model) => model.interrupts(),
            Self::Nic(model) => model.interrupts(),
        }
    }

    fn violations(&self) -> Vec<String> {
        match self {
            Self::Ioat(model) => model.protocol_violations(),
            Self::Dsa(model) => model.protocol_violations(),
            Self::Nic(model) => model.stats().protocol_violations,
        }
    }
}

/// A channel, and memory that is pinned for it.
struct Rig {
    // Before the memory: the drop of the channel ends everything in flight.
    channel: Arc<dyn Channel>,
    leases: Arc<DescriptorLeases>,
    _cache: PinCache,
    source: Pages,
    target: Pages,
}

impl Rig {
    fn new(model: &Model) -> Self {
        Self::over(model.engine())
    }

    fn over(engine: Arc<dyn Engine>) -> Self {
        let channel = engine.open_channel(&ChannelOptions::default()).unwrap();
        let (limits, mode) = (PinCacheLimits::default(), InvalidationMode::Explicit);
        let cache = PinCache::new(engine.pinner().unwrap(), limits, mode).unwrap();
        let (mut source, target) =
            (Pages::new(LONG_BYTES).unwrap(), Pages::new(LONG_BYTES).unwrap());
        source.as_mut_slice().fill(9);
        let lease = |pages: &Pages, access| {
            Some(Arc::new(cache.acquire(pages.as_ptr() as usize, LONG_BYTES, access).unwrap()))
        };
        let leases = Arc::new(DescriptorLeases {
            source: lease(&source, Access::Read),
            target: lease(&target, Access::Write),
            second: None,
            variable: None,
        });
        Self { channel, leases, _cache: cache, source, target }
    }

    /// Starts a copy, as one transfer.
    fn begin(&self, bytes: usize) -> Arc<Completion> {
        self.begin_at(0, bytes)
    }

    fn begin_at(&self, offset: usize, bytes: usize) -> Arc<Completion> {
        self.begin_of(Arc::new(Completion::whole()), offset, bytes)
    }

    /// Submits a copy that is cancelled.
    fn begin_cancelled(&self, bytes: usize) -> Arc<Completion> {
        let completion = Arc::new(Completion::whole());
        completion.cancel();
        self.begin_of(completion, 0, bytes)
    }

    fn begin_of(
        &self,
        completion: Arc<Completion>,
        offset: usize,
        bytes: usize,
    ) -> Arc<Completion> {
        assert!(offset + bytes <= LONG_BYTES);
        let start = |pages: &Pages| (pages.as_ptr() as usize + offset) as u64;
        let (source, target) = (start(&self.source), start(&self.target));
        // SAFETY: inside memory that outlives the channel, and nothing else uses it.
        let copy = unsafe {
            Descriptor::new(Opcode::Copy, source, target, bytes as u64)
                .completes(completion.clone())
        };
        let copy = copy.pinned_by(self.leases.clone());
        assert_eq!(self.channel.submit(&mut [Some(copy)]).unwrap().count, 1);
        completion
    }

    /// Waits as a waiter does: sleeps, and polls after each sleep; returns how the last sleep ended.
    fn wait(&self, completion: &Completion, timeout: Duration) -> InterruptSleep {
        let deadline = Instant::now() + LONG;
        loop {
            let slept = self.channel.sleep_until_interrupt(timeout, &|| completion.is_done());
            self.channel.poll();
            if completion.is_done() {
                assert!(matches!(completion.outcome(), Some(Ok(_))));
                return slept;
            }
            assert!(Instant::now() < deadline, "the copy does not end");
        }
    }

    fn is_copied(&self, bytes: usize) -> bool {
        self.target.as_slice()[..bytes].iter().all(|byte| *byte == 9)
    }
}

#[test]
fn a_long_copy_wakes_its_waiter_by_an_interrupt() {
    for model in Model::all() {
        let rig = Rig::new(&model);
        let before = model.interrupts().raised();
        while rig.channel.statistics().wakes == 0 {
            let copy = rig.begin(LONG_BYTES);
            assert_ne!(rig.wait(&copy, LONG), InterruptSleep::Unavailable);
        }
        assert!(model.interrupts().raised() > before);
        assert!(rig.is_copied(LONG_BYTES));
        drop(rig);
        assert_eq!(model.violations(), Vec::<String>::new());
    }
}

#[test]
fn short_copies_request_an_interrupt_only_for_as_much_work_as_a_waiter_polls_for() {
    for model in Model::all() {
        let rig = Rig::new(&model);
        // One tells the card to be armed; it is no frame's yet.
        let polled = rig.begin(SHORT_BYTES);
        rig.wait(&polled, Duration::from_millis(1));
        let before = model.interrupts().raised();
        for _ in 0..4 {
            let copy = rig.begin(128);
            assert!(rig.channel.park(rig.channel.statistics().submitted, LONG));
            assert!(copy.is_done());
        }
        assert_eq!(model.interrupts().raised(), before);
    }
}

#[test]
fn a_thread_that_sleeps_while_the_work_queue_is_full_learns_that_it_is_not() {
    // The work queue has space for two descriptors of many, and none of the first ones requests an
    // interrupt by itself.
    const PART_BYTES: usize = 64 << 10;
    let delay = Duration::from_millis(1);
    let faults = DsaFaults { delay, ..DsaFaults::default() };
    let model = DsaModel::builder().queues(1).total_size(2).batch_shift(0).faults(faults).build();
    let model = Model::Dsa(model);
    let rig = Rig::new(&model);
    let copies: Vec<_> = (0..LONG_BYTES)
        .step_by(PART_BYTES)
        .map(|offset| rig.begin_at(offset, PART_BYTES))
        .collect();
    let start = Instant::now();
    copies.iter().for_each(|copy| _ = rig.wait(copy, LONG));
    assert!(start.elapsed() < LONG, "a sleep has ended by its timeout");
    assert!(rig.channel.statistics().wakes > 1);
    assert!(rig.is_copied(LONG_BYTES));
    drop(rig);
    assert_eq!(model.violations(), Vec::<String>::new());
}

#[test]
fn a_lost_interrupt_is_made_good_by_the_timeout() {
    for model in Model::all() {
        model
            .interrupts()
            .set_faults(InterruptFaults { lost: FaultSchedule::Always, ..Default::default() });
        let rig = Rig::new(&model);
        for _ in 0..3 {
            let copy = rig.begin(LONG_BYTES);
            rig.wait(&copy, Duration::from_millis(5));
        }
        assert_eq!(model.interrupts().raised(), 0);
        assert!(rig.is_copied(LONG_BYTES));
    }
}

#[test]
fn an_early_interrupt_is_polled_after_and_the_rest_is_slept_through() {
    let delay = Duration::from_millis(20);
    for model in Model::all() {
        model.interrupts().set_faults(InterruptFaults { is_early: true, ..Default::default() });
        let rig = Rig::new(&model);
        match &model {
            Model::Ioat(model) => model.set_faults(IoatFaults { delay, ..IoatFaults::default() }),
            Model::Dsa(model) => model.set_faults(DsaFaults { delay, ..DsaFaults::default() }),
            Model::Nic(_) => (),
        }
        let copy = rig.begin(LONG_BYTES);
        rig.wait(&copy, Duration::from_millis(5));
        assert!(rig.is_copied(LONG_BYTES));
    }
}

#[test]
fn interrupts_for_no_reason_end_no_copy() {
    for model in Model::all() {
        let rig = Rig::new(&model);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    model.interrupts().raise_spurious();
                    std::thread::yield_now();
                }
            });
            for _ in 0..8 {
                let copy = rig.begin(LONG_BYTES);
                rig.wait(&copy, LONG);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(rig.is_copied(LONG_BYTES));
    }
}

#[test]
fn without_an_eventfd_nobody_sleeps_in_it() {
    for model in Model::all() {
        model.interrupts().set_faults(InterruptFaults { is_refused: true, ..Default::default() });
        let rig = Rig::new(&model);
        let copy = rig.begin(LONG_BYTES);
        assert_eq!(rig.channel.sleep_until_interrupt(LONG, &|| false), InterruptSleep::Unavailable);
        assert!(rig.channel.park(1, LONG));
        assert!(copy.is_done());
        assert_eq!((model.interrupts().raised(), rig.channel.statistics().sleeps), (0, 0));
        assert_eq!(model.violations(), Vec::<String>::new());
    }
}

#[test]
fn one_thread_sleeps_in_the_interrupt_and_whoever_finishes_its_copy_wakes_it() {
    let delay = Duration::from_secs(3600);
    let model = ioat_model();
    let faults = InterruptFaults { lost: FaultSchedule::Always, ..Default::default() };
    model.interrupts().set_faults(faults);
    let rig = Rig::new(&Model::Ioat(model.clone()));
    model.set_faults(IoatFaults { delay, ..IoatFaults::default() });
    let copy = rig.begin(LONG_BYTES);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| rig.wait(&copy, LONG));
        while rig.channel.statistics().sleeps == 0 {
            std::thread::yield_now();
        }
        // The place is taken.
        let second = rig.channel.sleep_until_interrupt(LONG, &|| false);
        assert_eq!(second, InterruptSleep::Unavailable);
        // The channel is restarted by this thread, after which the processor copies.
        model.set_faults(IoatFaults { is_removed: true, ..IoatFaults::default() });
        while !copy.is_done() {
            rig.channel.poll();
        }
        // A thread that was woken before the copy was done does not sleep again in a stopped device.
        let slept = sleeper.join().unwrap();
        assert!(matches!(slept, InterruptSleep::Woken | InterruptSleep::NotArmed), "{slept:?}");
    });
    assert!(rig.is_copied(LONG_BYTES));
}

#[test]
fn a_thread_does_not_sleep_if_all_that_the_device_has_is_short() {
    let model = ioat_model();
    let rig = Rig::new(&Model::Ioat(model.clone()));
    let delay = Duration::from_secs(3600);
    model.set_faults(IoatFaults { delay, ..IoatFaults::default() });
    let copy = rig.begin(128);
    // It has ended, but is behind the short one, so its bytes are outstanding.
    let cancelled = rig.begin_cancelled(LONG_BYTES);
    assert_eq!(rig.channel.outstanding_bytes(), 128 + LONG_BYTES as u64);
    let timeout = Duration::from_millis(1);
    let slept = rig.channel.sleep_until_interrupt(timeout, &|| copy.is_done());
    assert_eq!(slept, InterruptSleep::NotArmed);
    model.set_faults(IoatFaults { is_removed: true, ..IoatFaults::default() });
    while !cancelled.is_done() {
        rig.channel.poll();
    }
    assert!(rig.is_copied(128));
}

#[test]
fn after_a_loss_a_thread_does_not_sleep_while_no_frame_in_the_rings_raises_an_interrupt() {
    let model = NicModel::new();
    let engine = Arc::new(NicEngine::over_model(model.clone(), NicConfig::default()).unwrap());
    let rig = Rig::over(engine.clone());
    model.set_faults(NicFaults { lose_every: Some(1), ..NicFaults::default() });
    let copy = rig.begin(LONG_BYTES);
    while engine.counters().retransmits == 0 {
        rig.channel.poll();
    }
    // One frame is in the rings. It is lost too, so nothing changes meanwhile.
    let timeout = Duration::from_millis(1);
    let slept = rig.channel.sleep_until_interrupt(timeout, &|| copy.is_done());
    assert_eq!(slept, InterruptSleep::NotArmed);
    model.set_faults(NicFaults::default());
    rig.wait(&copy, LONG);
    assert!(rig.is_copied(LONG_BYTES));
}

#[test]
fn a_channel_that_halts_wakes_its_waiter() {
    let model = ioat_model();
    let rig = Rig::new(&Model::Ioat(model.clone()));
    let faults = IoatFaults { halts: FaultSchedule::Always, ..IoatFaults::default() };
    model.set_faults(faults);
    let copy = rig.begin(LONG_BYTES);
    rig.wait(&copy, LONG);
    assert!(rig.is_copied(LONG_BYTES), "the processor copies");
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}
