//! A ferry with a GPU among its engines: a model of one, so that this runs everywhere.

use crate::common::gpu_fixture;

use gpu_fixture::{GpuFixture, machine, sole_machine};
use memferry_copy::plan::{CopyQuery, CopyReason, CopyStrategy};
use memferry_copy::{Error, Ferry, Options, Request, ValidationError};
use memferry_engine::contract::{RegistrationCache, ReuseHint};
use memferry_engine::cpu::ProfileSource;
use memferry_engine::cuda::CudaEngine;
use memferry_engine::testing::cuda_model::CudaFaults;
use memferry_engine::{Engine, ExecutionError, MemoryKind};
use memferry_sys::Pages;
use memferry_testing::pattern::fill;

fn pattern(length: usize, seed: u64) -> Pages {
    let mut pages = Pages::new(length).unwrap();
    fill(pages.as_mut_slice(), seed);
    pages
}

/// No copy accessed memory that was not registered for it.
fn assert_clean(machine: &GpuFixture) {
    let seen = machine.device.stats();
    assert_eq!((seen.unregistered_in_flight, seen.outside_registration), (0, 0));
}

#[test]
fn bytes_go_to_the_device_and_come_back() {
    for machine in [machine(CudaFaults::default()), sole_machine(CudaFaults::default())] {
        let ferry = &machine.ferry;
        for length in [1, 4096, 100_001, 3 << 20, 40 << 20] {
            let source = pattern(length, length as u64);
            let mut device = machine.engine.allocate(length + 7).unwrap();
            let mut back = vec![0; length];
            // First use; the sole user registers it from the second use on.
            for _ in 0..3 {
                ferry.copy_to_device(source.as_slice(), &mut device, 7).unwrap();
                back.fill(0);
                ferry.copy_from_device(&device, 7, &mut back).unwrap();
                assert!(back == source.as_slice(), "{length} bytes");
            }
        }
        assert_clean(&machine);
    }
}

#[test]
fn memory_that_comes_again_is_registered_and_found_by_the_sole_user() {
    let machine = sole_machine(CudaFaults::default());
    let source = pattern(8 << 20, 1);
    let mut device = machine.engine.allocate(8 << 20).unwrap();
    let mut copy = || machine.ferry.copy_to_device(source.as_slice(), &mut device, 0).unwrap();
    copy();
    let pinning = || machine.ferry.statistics().pinning("cuda").cloned().unwrap();
    if !machine.engine.registrations().is_some_and(RegistrationCache::caches_by_default) {
        return memferry_testing::skip(
            memferry_testing::Requirement::Userfaultfd,
            "nothing stays registered",
        );
    }
    assert_eq!(machine.device.stats().registrations, 0, "new memory passes through rings");
    copy();
    let registered = machine.device.stats().registrations;
    assert!(registered > 0 && pinning().cache.bytes_pinned >= 8 << 20);
    copy();
    assert_eq!(machine.device.stats().registrations, registered);
    machine.ferry.invalidate(source.as_slice().as_ptr(), 8 << 20);
    assert_eq!(pinning().cache.bytes_pinned, 0);
}

#[test]
fn a_registered_region_is_used_from_the_first_copy_on() {
    let machine = machine(CudaFaults::default());
    let (source, mut target) = (pattern(4 << 20, 1), pattern(4 << 20, 2));
    // SAFETY: the pages outlive the regions.
    let region =
        |pages: &Pages| unsafe { machine.ferry.register(pages.as_ptr(), pages.len()) }.unwrap();
    let regions = [region(&source), region(&target)];
    let options = Options::new().no_caller_assist();
    machine.ferry.copy_with(source.as_slice(), target.as_mut_slice(), options).unwrap();
    assert!(source.as_slice() == target.as_slice());
    assert_eq!(machine.ferry.statistics().engine("cuda").bytes, 4 << 20);
    assert_eq!(machine.device.stats().registrations, 2);
    drop(regions);
    assert_clean(&machine);
}

/// Copies between ordinary memory, and returns the number of bytes that the device moved.
fn moved_by_device(machine: &GpuFixture, source: &[u8], target: &mut [u8]) -> u64 {
    let before = machine.ferry.statistics().engine("cuda").bytes;
    target.fill(0);
    machine.ferry.copy_with(source, target, Options::new().no_caller_assist()).unwrap();
    assert!(source == target);
    machine.ferry.statistics().engine("cuda").bytes - before
}

#[test]
fn memory_that_was_registered_twice_is_used_until_it_is_unregistered_twice() {
    let machine = machine(CudaFaults::default());
    let (source, mut target) = (pattern(4 << 20, 1), pattern(4 << 20, 2));
    // SAFETY: the pages outlive the regions.
    let region =
        |pages: &Pages| unsafe { machine.ferry.register(pages.as_ptr(), pages.len()) }.unwrap();
    let _target = region(&target);
    let (first, second) = (region(&source), region(&source));
    let mut moved = || moved_by_device(&machine, source.as_slice(), target.as_mut_slice());
    assert_eq!(moved(), 4 << 20);
    drop(first);
    assert_eq!(moved(), 4 << 20, "it is registered once more than it was unregistered");
    machine.ferry.invalidate(source.as_ptr(), source.len());
    assert_eq!(moved(), 4 << 20, "memory that is registered cannot be on its way out");
    assert_eq!(machine.device.stats().registrations, 2);
    drop(second);
    assert_eq!(moved(), 0, "it is registered no more");
    assert_clean(&machine);
}

#[test]
fn regions_that_share_a_page_do_not_undo_each_other() {
    let machine = machine(CudaFaults::default());
    let (memory, mut target) = (pattern(8 << 20, 1), pattern(4 << 20, 2));
    // Both ranges share the page in the middle.
    let middle = (4 << 20) + 100;
    let (left, right) = memory.as_slice().split_at(middle);
    // SAFETY: the pages outlive the regions.
    let region =
        |bytes: &[u8]| unsafe { machine.ferry.register(bytes.as_ptr(), bytes.len()) }.unwrap();
    let _target = region(target.as_slice());
    let regions = (region(left), region(right));
    let right = &right[..2 << 20];
    let mut moved = || moved_by_device(&machine, right, &mut target.as_mut_slice()[..2 << 20]);
    assert_eq!(moved(), 2 << 20);
    drop(regions.0);
    assert_eq!(moved(), 2 << 20, "the other region is left");
    drop(regions.1);
    assert_eq!(moved(), 0);
    let seen = machine.device.stats();
    assert_eq!(seen.registrations - seen.unregistrations, 1, "that of the target");
    assert_clean(&machine);
}

#[test]
fn owned_buffers_and_device_memory_are_handed_over_alike() {
    let machine = machine(CudaFaults::default());
    let source: Vec<u8> = pattern(2 << 20, 3).as_slice().to_vec();
    let device = machine.engine.allocate(2 << 20).unwrap();
    let (source, device) = machine.ferry.icopy(source, device).unwrap().wait().unwrap();
    let twin = machine.engine.allocate(2 << 20).unwrap();
    let (_, twin) = machine.ferry.icopy(device, twin).unwrap().wait().unwrap();
    let (_, back) = machine.ferry.icopy(twin, vec![0u8; 2 << 20]).unwrap().wait().unwrap();
    assert!(source == back);
    assert_clean(&machine);
}

#[test]
fn a_blocking_copy_is_split_over_the_device_and_processors() {
    let machine = machine(CudaFaults::default());
    let (source, mut target) = (pattern(48 << 20, 1), pattern(48 << 20, 2));
    // SAFETY: the pages outlive the regions.
    let region =
        |pages: &Pages| unsafe { machine.ferry.register(pages.as_ptr(), pages.len()) }.unwrap();
    let _regions = [region(&source), region(&target)];
    for _ in 0..3 {
        target.as_mut_slice().fill(0);
        machine.ferry.copy(source.as_slice(), target.as_mut_slice()).unwrap();
        assert!(source.as_slice() == target.as_slice());
    }
    // The faster one claims more; the amount is not deterministic.
    let statistics = machine.ferry.statistics();
    assert!(statistics.engine("cuda").submitted > 0, "{statistics:?}");
    assert!(statistics.engine("cpu").submitted > 0, "{statistics:?}");
    assert_clean(&machine);
}

#[test]
fn progress_is_seen_while_bytes_go_to_the_device() {
    let delay = std::time::Duration::from_millis(2);
    let machine = machine(CudaFaults { delay, ..CudaFaults::default() });
    let source = pattern(16 << 20, 1);
    let device = machine.engine.allocate(16 << 20).unwrap();
    let request = Request::copy(source.as_ptr(), device.as_ptr(), 16 << 20)
        .memory(MemoryKind::Host, MemoryKind::Device);
    // SAFETY: both live until the transfer is complete.
    let transfer = unsafe { machine.ferry.start_raw(request) }.unwrap();
    transfer.wait_bytes(0..1).unwrap();
    let first = transfer.ready_bytes();
    assert!(first > 0);
    transfer.wait().unwrap();
    assert_eq!(transfer.ready_bytes(), 16 << 20);
    assert_eq!(machine.device.read(device.address(), 16 << 20), source.as_slice());
}

#[test]
fn more_small_copies_than_a_channel_holds_wait_for_room() {
    let delay = std::time::Duration::from_micros(50);
    let machine = machine(CudaFaults { delay, ..CudaFaults::default() });
    let ferry = Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .capacity(4)
        .engine(machine.engine.clone(), 1)
        .build()
        .unwrap();
    let source = pattern(64 << 10, 1);
    let device = machine.engine.allocate(64 << 10).unwrap();
    let part = |at: usize| {
        let (from, to) = (source.as_ptr().wrapping_add(at), device.as_ptr().wrapping_add(at));
        let request = Request::copy(from, to, 256).memory(MemoryKind::Host, MemoryKind::Device);
        // SAFETY: both live until the transfers are complete.
        unsafe { ferry.start_raw(request) }.unwrap()
    };
    let transfers: Vec<_> = (0..64 << 10).step_by(256).map(part).collect();
    for transfer in transfers {
        transfer.wait().unwrap();
    }
    assert_eq!(machine.device.read(device.address(), 64 << 10), source.as_slice());
}

#[test]
fn a_lost_device_costs_ordinary_memory_nothing_and_fails_the_rest() {
    let machine = machine(CudaFaults { lost_at_copy: Some(5), ..CudaFaults::default() });
    let source = pattern(32 << 20, 1);
    let mut device = machine.engine.allocate(32 << 20).unwrap();
    let lost = machine.ferry.copy_to_device(source.as_slice(), &mut device, 0).unwrap_err();
    assert!(matches!(lost, Error::Execution(ExecutionError::Engine { .. })), "{lost}");
    assert!(machine.engine.is_lost());
    let again = machine.ferry.copy_to_device(source.as_slice(), &mut device, 0).unwrap_err();
    assert!(again.to_string().contains("lost"), "{again}");
    let mut target = pattern(32 << 20, 2);
    for _ in 0..3 {
        target.as_mut_slice().fill(0);
        let options = Options::new().no_caller_assist();
        machine.ferry.copy_with(source.as_slice(), target.as_mut_slice(), options).unwrap();
        assert!(source.as_slice() == target.as_slice());
    }
}

#[test]
fn without_a_device_engine_its_memory_is_out_of_reach() {
    let machine = machine(CudaFaults::default());
    let plain = Ferry::builder().profile(ProfileSource::BuiltIn).build().unwrap();
    let device = machine.engine.allocate(4096).unwrap();
    let request = Request::fill(device.as_ptr(), 1, 4096);
    let request = request.memory(MemoryKind::Device, MemoryKind::Device);
    // SAFETY: it is never started.
    let refused = unsafe { plain.run_raw(request) }.unwrap_err();
    let text = refused.to_string();
    assert!(
        text.starts_with(
            "no engine of this ferry (cpu) can do the operation fill, source in device memory"
        ),
        "{text}"
    );
    assert!(plain.engine_as::<CudaEngine>().is_none());
    assert_eq!(plain.memory_kind(device.as_ptr()), MemoryKind::Host);
    assert_eq!(machine.ferry.memory_kind(device.as_ptr()), MemoryKind::Device);
}

#[test]
fn memory_of_another_device_is_refused_before_anything_is_begun() {
    let (machine, other) = (machine(CudaFaults::default()), machine(CudaFaults::default()));
    let mut foreign = other.engine.allocate(1 << 20).unwrap();
    let mut own = machine.engine.allocate(1 << 20).unwrap();
    let mut host = vec![7u8; 1 << 20];
    let refused =
        |side, address| Err(Error::Validation(ValidationError::OtherDevice { side, address }));
    let address = foreign.address();
    let ferry = &machine.ferry;
    assert_eq!(ferry.copy_to_device(&host, &mut foreign, 0), refused("target", address));
    assert_eq!(ferry.copy_from_device(&foreign, 0, &mut host), refused("source", address));
    // SAFETY: both live until the copy is over, and it is never started.
    let within = unsafe {
        let request = Request::copy(foreign.as_ptr(), own.as_ptr(), 1 << 20);
        ferry.run_raw(request.memory(MemoryKind::Device, MemoryKind::Device))
    };
    assert_eq!(within.map(|_| ()), refused("source", address));
    let failed = ferry.icopy(host, foreign).unwrap_err();
    assert!(failed.error.to_string().contains("not memory of the GPU"), "{}", failed.error);
    let (host, foreign) = (failed.source, failed.target);
    assert_eq!(machine.device.stats().copies, 0);
    ferry.copy_to_device(&host, &mut own, 0).unwrap();
    drop(foreign);
}

#[test]
fn ranges_outside_device_memory_are_refused() {
    let machine = machine(CudaFaults::default());
    let mut device = machine.engine.allocate(4096).unwrap();
    let refused = machine.ferry.copy_to_device(&[0u8; 100], &mut device, 4000).unwrap_err();
    assert!(matches!(refused, Error::Validation(ValidationError::OutOfRange { .. })));
    let refused = machine.ferry.copy_from_device(&device, usize::MAX, &mut [0u8; 2]).unwrap_err();
    assert!(matches!(refused, Error::Validation(ValidationError::OutOfRange { .. })));
}

#[test]
fn the_plan_of_the_sole_user_says_which_way_memory_takes() {
    let machine = sole_machine(CudaFaults::default());
    let to_device = |acquaintance| CopyQuery {
        target_memory: MemoryKind::Device,
        reuse: acquaintance,
        ..CopyQuery::copy(256 << 20, true)
    };
    let new = machine.ferry.explain(&to_device(ReuseHint::FirstUse)).unwrap();
    assert!(
        new.transient
            && matches!(new.strategy, CopyStrategy::WorkSharing { engine: 1, channels: 3, .. })
    );
    let known = machine.ferry.explain(&to_device(ReuseHint::Reused)).unwrap();
    assert!(
        !known.transient
            && matches!(known.strategy, CopyStrategy::WorkSharing { engine: 1, channels: 1, .. })
    );
    let huge = machine.ferry.explain(&to_device(ReuseHint::FirstUseHugePages)).unwrap();
    assert!(!huge.transient, "three rings of 7 GB/s are slower than registering at 30");
    let host = |acquaintance| CopyQuery { reuse: acquaintance, ..CopyQuery::copy(256 << 20, true) };
    let new = machine.ferry.explain(&host(ReuseHint::FirstUse)).unwrap();
    assert!(matches!(new.strategy, CopyStrategy::WorkSharing { engine: 0, .. }), "{new:?}");
    let known = machine.ferry.explain(&host(ReuseHint::Reused)).unwrap();
    assert!(
        matches!(known.strategy, CopyStrategy::HybridWorkSharing { engine: 1, processors: 0, .. }),
        "{known:?}"
    );
    let spare = CopyQuery { no_caller_assist: true, ..host(ReuseHint::Reused) };
    let spare = machine.ferry.explain(&spare).unwrap();
    assert!(matches!(spare.strategy, CopyStrategy::WorkSharing { engine: 1, .. }), "{spare:?}");
}

#[test]
fn a_short_blocking_copy_between_host_and_device_is_planned_for_the_caller() {
    let machine = machine(CudaFaults::default());
    let ask = |bytes, blocking, no_caller_assist| {
        let copy = CopyQuery::copy(bytes, blocking);
        let query = CopyQuery { target_memory: MemoryKind::Device, no_caller_assist, ..copy };
        machine.ferry.explain(&query).unwrap()
    };
    let short = ask(1 << 20, true, false);
    assert_eq!(short.strategy, CopyStrategy::Inline);
    assert!(short.reason.to_string().contains("made by the caller up to 4194304 bytes"));
    for other in [ask(1 << 20, false, false), ask(1 << 20, true, true), ask(5 << 20, true, false)] {
        assert_eq!(other.strategy.engine(), Some(1), "{other:?}");
    }
}

#[test]
fn the_plan_beside_others_registers_nothing_and_says_so() {
    let machine = machine(CudaFaults::default());
    let ask = |question: CopyQuery| machine.ferry.explain(&question).unwrap();
    let to_device = |acquaintance| CopyQuery {
        target_memory: MemoryKind::Device,
        reuse: acquaintance,
        ..CopyQuery::copy(256 << 20, true)
    };
    for acquaintance in [ReuseHint::FirstUse, ReuseHint::FirstUseHugePages] {
        let new = ask(to_device(acquaintance));
        assert!(
            new.transient
                && matches!(new.strategy, CopyStrategy::WorkSharing { engine: 1, channels: 3, .. })
        );
        assert!(new.reason.to_string().contains("not registered"), "{}", new.reason);
    }
    let known = ask(to_device(ReuseHint::Reused));
    assert!(
        !known.transient
            && matches!(known.strategy, CopyStrategy::WorkSharing { engine: 1, channels: 1, .. })
    );
    assert_eq!(known.reason, CopyReason::RegisteredByOwner);
    let host = |acquaintance| CopyQuery { reuse: acquaintance, ..CopyQuery::copy(256 << 20, true) };
    let new = ask(host(ReuseHint::FirstUse));
    assert!(
        matches!(new.strategy, CopyStrategy::WorkSharing { engine: 0, .. }),
        "processors do it: {new:?}"
    );
    let known = ask(host(ReuseHint::Reused));
    assert!(
        matches!(known.strategy, CopyStrategy::HybridWorkSharing { engine: 1, processors: 0, .. }),
        "{known:?}"
    );
    // A GPU without a CPU engine reports what it supports.
    let alone = Ferry::builder().engine(machine.engine.clone(), 1);
    let alone = alone.profile(ProfileSource::BuiltIn).build().unwrap();
    let new = alone.explain(&host(ReuseHint::FirstUse)).unwrap();
    assert_eq!((new.transient, new.reason), (true, CopyReason::NotRegistered));
}
