//! A device that is lost for good: processors copy host memory, everything else is an error, and
//! nothing hangs.

use std::sync::Arc;
use std::time::Duration;

use memferry_engine::DeviceBuffer;
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_engine::{ChannelOptions, Completion, Engine, ExecutionError, Opcode};
use memferry_sys::Pages;

use crate::cuda::common::{
    CudaOperation, CudaUnderTest, KIB, MIB, OK, check, device, host, outcome, pattern, patterned,
    untouched, wait_until,
};

const SIZE: usize = 4 * MIB + 77;

/// Transfers of all kinds, in flight at once.
struct Traffic {
    source: Pages,
    targets: [Pages; 4],
    filled: Pages,
    ordinary: Vec<Arc<Completion>>,
    of_device: Vec<Arc<Completion>>,
    _inside: [DeviceBuffer; 2],
}

impl Traffic {
    fn begin(subject: &CudaUnderTest) -> Self {
        let inside = [(); 2].map(|()| subject.engine.allocate(SIZE).unwrap());
        let source = patterned(1, SIZE);
        let (targets, filled) = ([(); 4].map(|()| untouched(SIZE)), untouched(SIZE));
        let [first, second] = &inside;
        let through = |index: usize, cut, is_passing| {
            let job = CudaOperation::copy(host(&source, 0), host(&targets[index], 0), SIZE);
            subject.start(job.cut(cut).transient(is_passing))
        };
        let inward = CudaOperation::copy(host(&source, 0), device(first, 0), SIZE);
        let within = CudaOperation::copy(device(first, 0), device(second, 0), SIZE);
        let ordinary = vec![through(0, None, false), through(1, Some(300_001), false)];
        let of_device = vec![
            subject.start(inward),
            subject.start(inward.transient(true).cut(Some(256 * KIB))),
            subject.start(CudaOperation::fill(device(second, 0), SIZE, 3)),
        ];
        let mut traffic = Self { source, targets, filled, ordinary, of_device, _inside: inside };
        let fill = CudaOperation::fill(host(&traffic.filled, 0), SIZE, 8);
        traffic.ordinary.push(subject.start(fill));
        for (index, cut, is_passing) in [(2, Some(MIB), true), (3, Some(64 * KIB), false)] {
            let job = CudaOperation::copy(
                host(&traffic.source, 0),
                host(&traffic.targets[index], 0),
                SIZE,
            );
            traffic.ordinary.push(subject.start(job.cut(cut).transient(is_passing)));
        }
        traffic.of_device.push(subject.start(within));
        let [first, second] = &traffic._inside;
        let job = CudaOperation::copy(device(first, 0), device(second, 0), SIZE);
        traffic.of_device.push(subject.start(job.operation(Opcode::Compare)));
        traffic
    }

    /// Checks that everything is complete, host memory is right, and the last transfers of device
    /// memory failed.
    fn check(&self) {
        for completion in &self.ordinary {
            assert_eq!(outcome(completion), OK, "processors finish host memory");
        }
        for target in &self.targets {
            check(target.as_slice(), 0, self.source.as_slice(), "ordinary memory");
        }
        check(self.filled.as_slice(), 0, &vec![8; SIZE], "a fill");
        let outcomes: Vec<_> = self.of_device.iter().map(|each| outcome(each)).collect();
        assert!(outcomes.iter().flat_map(|found| found.as_ref().err()).all(is_engine));
        assert!(outcomes.last().is_some_and(Result::is_err), "{outcomes:?}");
    }
}

fn is_engine(error: &ExecutionError) -> bool {
    matches!(error, ExecutionError::Engine { .. })
}

/// Checks that transfers after a loss end too, with success or an error.
fn check_afterwards(subject: &CudaUnderTest, inside: &DeviceBuffer) {
    let (source, target, same) = (patterned(5, SIZE), untouched(SIZE), patterned(5, SIZE));
    let through = CudaOperation::copy(host(&source, 0), host(&target, 0), SIZE);
    for job in [through, through.cut(Some(100_001)), through.transient(true)] {
        assert_eq!(subject.execute(job), OK);
    }
    check(target.as_slice(), 0, source.as_slice(), "after the loss");
    let compare = CudaOperation::copy(host(&source, 0), host(&same, 0), SIZE);
    assert_eq!(subject.execute(compare.operation(Opcode::Compare)), OK);
    let of_device = [
        CudaOperation::copy(host(&source, 0), device(inside, 0), MIB),
        CudaOperation::copy(host(&source, 0), device(inside, 0), MIB).transient(true),
        CudaOperation::copy(device(inside, 0), host(&target, 0), MIB).cut(Some(64 * KIB)),
        CudaOperation::fill(device(inside, 0), MIB, 1),
    ];
    for job in of_device {
        let error = subject.execute(job).unwrap_err();
        assert!(is_engine(&error) && subject.engine.is_lost(), "{error}");
    }
    check(target.as_slice(), 0, source.as_slice(), "a failed copy does not change its target");
    assert!(subject.engine.open_channel(&ChannelOptions::default()).is_err());
    assert!(subject.engine.allocate(MIB).is_err());
}

#[test]
fn a_device_lost_at_any_copy_leaves_ordinary_memory_right_and_fails_the_rest() {
    for number in (1..=20).chain([25, 30, 40]) {
        let faults = CudaFaults {
            lost_at_copy: Some(number),
            delay: Duration::from_micros(100),
            ..CudaFaults::default()
        };
        let subject = CudaUnderTest::modelled(faults).with_channels(1 + number as usize % 3);
        let inside = subject.engine.allocate(MIB).unwrap();
        let traffic = Traffic::begin(&subject);
        traffic.check();
        assert!(subject.engine.is_lost());
        check_afterwards(&subject, &inside);
    }
}

#[test]
fn a_device_that_is_taken_away_leaves_ordinary_memory_right_and_fails_the_rest() {
    for copies in [0, 1, 2, 5, 10] {
        let subject = CudaUnderTest::modelled(CudaFaults::default()).with_channels(2);
        let inside = subject.engine.allocate(MIB).unwrap();
        // Later copies wait for the loss, however late this thread is.
        subject.model().hold_after(Some(subject.stats().copies + copies));
        let traffic = Traffic::begin(&subject);
        wait_until("some copies", || subject.stats().copies >= copies);
        subject.model().lose();
        traffic.check();
        assert!(subject.engine.is_lost());
        check_afterwards(&subject, &inside);
    }
}

#[test]
fn a_device_that_is_taken_away_while_idle_is_noticed_by_the_next_transfer() {
    let subject = CudaUnderTest::modelled(CudaFaults::default());
    let inside = subject.upload(&pattern(1, MIB));
    subject.model().lose();
    let (source, target) = (patterned(2, SIZE), untouched(SIZE));
    assert_eq!(subject.execute(CudaOperation::copy(host(&source, 0), host(&target, 0), SIZE)), OK);
    check(target.as_slice(), 0, source.as_slice(), "the first after the loss");
    check_afterwards(&subject, &inside);
}

#[test]
fn a_channel_dropped_after_the_loss_of_its_device_ends_all_it_has() {
    let mut subject = CudaUnderTest::modelled(CudaFaults::default());
    subject.model().hold_after(Some(subject.stats().copies));
    let traffic = Traffic::begin(&subject);
    subject.model().lose();
    subject.channels.clear();
    assert!(traffic.ordinary.iter().chain(&traffic.of_device).all(|each| each.is_done()));
    traffic.check();
}
