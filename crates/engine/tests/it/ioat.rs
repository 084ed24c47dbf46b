//! The driver of I/OAT over devices that stall, halt, or have state of an earlier user.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memferry_engine::completion::Completion;
use memferry_engine::contract::{Channel, DescriptorLeases};
use memferry_engine::ioat::IoatEngine;
use memferry_engine::ioat::registers as r;
use memferry_engine::testing::ioat_model::{FaultSchedule, IoatFaults, IoatModel};
use memferry_engine::{ChannelOptions, Descriptor, Engine, Opcode};
use memferry_memory::pin_cache::{InvalidationMode, PinCache, PinCacheLimits};
use memferry_memory::pinning::Access;
use memferry_sys::Pages;
use memferry_sys::device::{DmaDevice, DmaDirection, Width};

const WAIT_TIMEOUT: Duration = Duration::from_secs(200);
const COPY_BYTES: u64 = 64;

/// A channel, and memory that is pinned for it.
struct IoatRig {
    // Before the memory: the drop of the channel ends everything in flight.
    channel: Arc<dyn Channel>,
    engine: Arc<IoatEngine>,
    leases: Arc<DescriptorLeases>,
    _cache: PinCache,
    source: Pages,
    target: Pages,
}

impl IoatRig {
    fn new(device: Arc<dyn DmaDevice>, capacity: Option<usize>) -> Self {
        // SAFETY: a model, or a device that forwards to one; no other code writes its registers.
        let engine = unsafe { IoatEngine::over(&[device]) }.unwrap();
        Self::over(Arc::new(engine), capacity)
    }

    /// One more channel of an engine.
    fn over(engine: Arc<IoatEngine>, capacity: Option<usize>) -> Self {
        let options = ChannelOptions { capacity, ..ChannelOptions::default() };
        let channel = engine.open_channel(&options).unwrap();
        let pinner = engine.pinner().unwrap();
        let cache =
            PinCache::new(pinner, PinCacheLimits::default(), InvalidationMode::Explicit).unwrap();
        let (mut source, target) = (Pages::new(4096).unwrap(), Pages::new(4096).unwrap());
        source.as_mut_slice().fill(9);
        let lease = |pages: &Pages, access| {
            Some(Arc::new(cache.acquire(pages.as_ptr() as usize, 4096, access).unwrap()))
        };
        let pins = Arc::new(DescriptorLeases {
            source: lease(&source, Access::Read),
            target: lease(&target, Access::Write),
            second: None,
            variable: None,
        });
        Self { channel, engine, leases: pins, _cache: cache, source, target }
    }

    /// Starts the copy of a chunk.
    fn begin(&self, number: u64) -> Arc<Completion> {
        let source = self.source.as_ptr() as u64 + COPY_BYTES * number;
        let target = self.target.as_ptr() as u64 + COPY_BYTES * number;
        let completion = Arc::new(Completion::whole());
        // SAFETY: inside memory that outlives the channel, each chunk once; nothing else reports to
        // the completion.
        let copy = unsafe {
            Descriptor::new(Opcode::Copy, source, target, COPY_BYTES).completes(completion.clone())
        };
        let copy = copy.pinned_by(self.leases.clone());
        assert_eq!(self.channel.submit(&mut [Some(copy)]).unwrap().count, 1);
        completion
    }

    /// Waits for all copies.
    fn finish(&self) {
        assert!(
            self.channel.park(self.channel.statistics().submitted, WAIT_TIMEOUT),
            "timeout waiting for the copies"
        );
    }

    fn is_copied(&self, number: u64) -> bool {
        let at = (COPY_BYTES * number) as usize;
        self.target.as_slice()[at..at + COPY_BYTES as usize] == [9; COPY_BYTES as usize]
    }
}

#[test]
fn a_channel_that_stands_still_for_good_is_given_up() {
    let model = IoatModel::new();
    let rig = IoatRig::new(model.clone(), None);
    model.set_faults(IoatFaults { stalls: FaultSchedule::Always, ..IoatFaults::default() });
    let completions: Vec<_> = (0..8).map(|number| rig.begin(number)).collect();
    rig.finish();
    assert!(completions.iter().all(|completion| matches!(completion.outcome(), Some(Ok(_)))));
    assert!((0..8).all(|number| rig.is_copied(number)), "the processor finishes it");
    // Once per stall, not once per descriptor.
    assert_eq!(rig.engine.counters().recoveries, 2);
    drop(rig);
    assert_eq!((model.mapped_pages(), model.protocol_violations()), (0, Vec::<String>::new()));
}

#[test]
fn a_reset_of_the_device_for_one_channel_is_no_stall_of_another() {
    let model = IoatModel::builder().channels(2).build();
    let first = IoatRig::new(model.clone(), None);
    let second = IoatRig::over(first.engine.clone(), None);
    model.set_faults(IoatFaults { stalls: FaultSchedule::At(1), ..IoatFaults::default() });
    first.begin(0);
    while model.all_counters().stalls == 0 {
        std::thread::yield_now();
    }
    // The reset of the stalled channel does not end, so the whole device is reset, while the other
    // channel has a descriptor.
    let delay = Duration::from_secs(3600);
    model.set_faults(IoatFaults { refused_resets: 1, delay, ..IoatFaults::default() });
    let other = second.begin(1);
    first.finish();
    model.set_faults(IoatFaults::default());
    second.finish();
    assert!(matches!(other.outcome(), Some(Ok(_))) && second.is_copied(1) && first.is_copied(0));
    assert_eq!(second.channel.statistics().failed, 0, "the channel did it after its restart");
    assert_eq!(first.engine.counters().recoveries, 2);
    drop((first, second));
    assert_eq!((model.mapped_pages(), model.protocol_violations()), (0, Vec::<String>::new()));
}

#[test]
fn what_brief_polls_find_out_about_a_device_is_not_forgotten() {
    let model = IoatModel::new();
    let rig = IoatRig::new(model.clone(), None);
    model.set_faults(IoatFaults { is_removed: true, ..IoatFaults::default() });
    let copy = rig.begin(0);
    // The registers are read once in a millisecond.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(20) {
        rig.channel.poll_briefly();
    }
    assert_eq!((rig.engine.counters().recoveries, copy.is_done()), (0, false));
    while !rig.channel.poll() {
        assert!(rig.engine.counters().recoveries > 0, "the first whole poll recovers");
    }
    rig.finish();
    assert!(rig.is_copied(0), "the processor does it");
}

#[test]
fn an_enormous_capacity_is_bounded_and_a_tiny_one_works() {
    for capacity in [1, 2, 3, usize::MAX] {
        let rig = IoatRig::new(IoatModel::new(), Some(capacity));
        for number in 0..10 {
            rig.begin(number);
            rig.finish();
            assert!(rig.is_copied(number), "{capacity}");
        }
    }
}

#[test]
fn the_count_that_a_channel_is_told_may_go_around() {
    let rig = IoatRig::new(IoatModel::new(), Some(64));
    for round in 0..70_000 {
        rig.begin(round % 64);
        if round % 60 == 59 {
            rig.finish();
        }
    }
    rig.finish();
    assert_eq!(rig.channel.statistics().failed, 0);
    assert_eq!(rig.engine.counters().recoveries, 0);
}

/// A device whose status register keeps the last finished address when its channel is reset.
#[derive(Debug)]
struct StaleStatusDevice {
    model: Arc<IoatModel>,
    last: AtomicU64,
}

impl DmaDevice for StaleStatusDevice {
    fn name(&self) -> &str {
        "remembering"
    }
    fn read(&self, at: usize, width: Width) -> u64 {
        let status = self.model.read(at, width);
        if at != r::channel_base(0) + r::CHANSTS || width != Width::Bits64 {
            return status;
        }
        if status & r::CHANSTS_COMPLETED != 0 {
            self.last.store(status & r::CHANSTS_COMPLETED, Ordering::SeqCst);
        }
        status & !r::CHANSTS_COMPLETED | self.last.load(Ordering::SeqCst)
    }
    unsafe fn write(&self, at: usize, width: Width, value: u64) {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.write(at, width, value) };
    }
    unsafe fn map(
        &self,
        start: usize,
        pages: &mut [u64],
        direction: DmaDirection,
    ) -> io::Result<()> {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.map(start, pages, direction) }
    }
    unsafe fn unmap(&self, pages: &[u64]) {
        // SAFETY: the caller's guarantee.
        unsafe { self.model.unmap(pages) };
    }
    fn is_contiguous(&self) -> bool {
        self.model.is_contiguous()
    }
    fn reset(&self) -> io::Result<()> {
        self.model.reset()
    }
}

#[test]
fn what_a_status_register_says_of_an_earlier_chain_is_not_believed() {
    let model = IoatModel::new();
    let device = StaleStatusDevice { model: model.clone(), last: AtomicU64::new(0) };
    // Two slots, so that every address is reused at once.
    let rig = IoatRig::new(Arc::new(device), Some(1));
    model.set_faults(IoatFaults { halts: FaultSchedule::At(1), ..IoatFaults::default() });
    rig.begin(0);
    rig.finish();
    // So slow that the driver reads the registers.
    model.set_faults(IoatFaults { delay: Duration::from_millis(100), ..IoatFaults::default() });
    for number in 1..4 {
        rig.begin(number);
        rig.finish();
        assert!(rig.is_copied(number), "completed before it was copied");
    }
}

#[test]
fn an_address_of_an_earlier_chain_is_believed_when_the_channel_comes_to_it_again() {
    let model = IoatModel::new();
    let device = StaleStatusDevice { model: model.clone(), last: AtomicU64::new(0) };
    // Two slots, so that the channel comes to the address in the register at once.
    let rig = IoatRig::new(Arc::new(device), Some(1));
    model.set_faults(IoatFaults { halts: FaultSchedule::At(1), ..IoatFaults::default() });
    rig.begin(0);
    rig.finish();
    model.set_faults(IoatFaults::default());
    for number in 1..3 {
        rig.begin(number);
        rig.finish();
    }
    // Now only the registers tell what is finished.
    let loses_write_backs = FaultSchedule::Always;
    model.set_faults(IoatFaults { loses_write_backs, ..IoatFaults::default() });
    for number in 3..7 {
        rig.begin(number);
        rig.finish();
        assert!(rig.is_copied(number));
    }
    assert_eq!((rig.channel.statistics().failed, rig.engine.counters().recoveries), (1, 1));
}
