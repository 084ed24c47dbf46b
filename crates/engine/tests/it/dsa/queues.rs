//! Queues of the kernel's driver: the device uses the addresses of the process, and nothing is
//! pinned.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use memferry_engine::contract::RegistrationMode;
use memferry_engine::dsa::{DsaEngine, IdxdQueueChoice};
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::{ChannelOptions, Engine, ExecutionError, Opcode};
use memferry_sys::idxd::IdxdFiles;
use memferry_sys::pages::{ReservedRange, page_bytes};

use super::rig::{BYTES, DsaRig};

fn rig(options: IdxdModelOptions) -> (Arc<IdxdModel>, DsaRig) {
    let model = IdxdModel::new(options).unwrap();
    let engine = DsaEngine::over_idxd_model(model.clone()).unwrap();
    (model, DsaRig::new(Arc::new(engine)))
}

/// Asserts that every file is closed and that the driver violated nothing.
fn assert_clean(model: &IdxdModel, rig: DsaRig) {
    drop(rig);
    assert_eq!(model.device().protocol_violations(), Vec::<String>::new());
    assert_eq!(model.open_queues(), 0);
}

#[test]
fn nothing_is_pinned_and_pages_that_are_not_there_are_touched() {
    let (model, rig) = rig(IdxdModelOptions::default());
    assert_eq!(rig.engine.capabilities().registration, RegistrationMode::NotRequired);
    assert!(rig.engine.pinner().is_none() && rig.engine.pages().is_none());
    // The target was never touched: each of its pages is a fault.
    rig.copy_all([(0, BYTES)]);
    assert!(rig.is_copied(0, BYTES));
    let faults = rig.engine.counters().resumed_faults;
    assert!(faults > 0, "the device met pages that were not there");
    assert_eq!(rig.channel.statistics().failed, 0, "the device finished all of it");
    rig.copy_all([(0, BYTES)]);
    assert_eq!(rig.engine.counters().resumed_faults, faults, "now they are there");
    assert_clean(&model, rig);
}

#[test]
fn faults_in_the_middle_of_a_batch_are_resumed_one_by_one() {
    let (model, rig) = rig(IdxdModelOptions::default());
    rig.copy_all([(0, BYTES)]);
    model
        .device()
        .set_faults(DsaFaults { page_faults: FaultSchedule::Every(3), ..DsaFaults::default() });
    rig.copy_all((0..100).map(|number| (8192 * number, 5000)));
    assert!((0..100).all(|number| rig.is_copied(8192 * number, 5000)));
    assert!(rig.engine.counters().resumed_faults > 30);
    assert_eq!(rig.channel.statistics().failed, 0);
    assert_clean(&model, rig);
}

#[test]
fn a_compare_that_faulted_counts_from_its_start() {
    let (model, rig) = rig(IdxdModelOptions::default());
    rig.copy_all([(0, BYTES)]);
    // SAFETY: nothing is in flight, and the memory belongs to the rig.
    unsafe { rig.target.as_ptr().add(700_000).write(0) };
    model
        .device()
        .set_faults(DsaFaults { page_faults: FaultSchedule::At(1), ..DsaFaults::default() });
    let (source, target) = (rig.source.as_ptr() as u64, rig.target.as_ptr() as u64);
    let before = rig.engine.counters().resumed_faults;
    let output = rig.run(rig.operation(Opcode::Compare, source, target, BYTES)).unwrap();
    assert_eq!(output.difference, Some(700_000));
    assert_eq!(rig.engine.counters().resumed_faults, before + 1);
    assert_clean(&model, rig);
}

#[test]
fn memory_that_does_not_exist_is_bad_memory() {
    let (model, rig) = rig(IdxdModelOptions::default());
    let nowhere = ReservedRange::new(4 * page_bytes()).unwrap();
    let address = nowhere.address() as u64;
    let (source, target) = (rig.source.as_ptr() as u64, rig.target.as_ptr() as u64);
    for (from, to) in [(source, address), (address, target)] {
        let error = rig.run(rig.operation(Opcode::Copy, from, to, 8192)).unwrap_err();
        assert_eq!(error, ExecutionError::BadMemory { address, done_bytes: 0 });
    }
    // The first two pages of this copy exist.
    let end = target + (BYTES - 2 * page_bytes()) as u64;
    let fill = rig.operation(Opcode::Fill, 0, end, 2 * page_bytes());
    rig.run(fill).unwrap();
    rig.copy_all([(0, 4096)]);
    assert!(rig.is_copied(0, 4096), "the channel still works");
    assert_clean(&model, rig);
}

#[test]
fn where_the_portal_may_not_be_mapped_descriptors_are_written() {
    for is_dedicated in [false, true] {
        let options =
            IdxdModelOptions { is_dedicated, may_map: false, ..IdxdModelOptions::default() };
        let (model, rig) = rig(options);
        rig.copy_all((0..100).map(|number| (8192 * number, 3000)));
        assert!((0..100).all(|number| rig.is_copied(8192 * number, 3000)));
        assert_eq!(model.device().counters().batches, 0, "the kernel refuses batches");
        assert_clean(&model, rig);
    }
    let device = DsaModel::builder().version(0x200);
    let (model, rig) =
        rig(IdxdModelOptions { may_map: false, device, ..IdxdModelOptions::default() });
    rig.copy_all((0..100).map(|number| (8192 * number, 3000)));
    assert!(model.device().counters().batches > 0, "it takes batches of later devices");
    assert_clean(&model, rig);
}

#[test]
fn a_shared_queue_that_has_no_space_is_tried_again() {
    let (model, rig) = rig(IdxdModelOptions::default());
    model.device().set_faults(DsaFaults {
        refuses_submissions: FaultSchedule::Every(2),
        ..DsaFaults::default()
    });
    for round in 0..10 {
        rig.copy_all([(8192 * round, 8192)]);
    }
    assert!(rig.is_copied(0, 10 * 8192));
    assert!(rig.engine.counters().full > 0);
    assert_eq!((rig.channel.statistics().failed, rig.engine.counters().recoveries), (0, 0));
    assert_clean(&model, rig);
}

#[test]
fn a_shared_queue_that_never_has_space_is_left_to_the_processor() {
    let (model, rig) = rig(IdxdModelOptions::default());
    model.device().set_faults(DsaFaults {
        refuses_submissions: FaultSchedule::Always,
        ..DsaFaults::default()
    });
    rig.copy_all((0..4).map(|number| (8192 * number, 8192)));
    assert!(rig.is_copied(0, 4 * 8192));
    assert_eq!((model.opens(), rig.channel.statistics().failed), (1, 4));
    // When the others are gone, the queue is used again.
    model.device().set_faults(DsaFaults::default());
    rig.copy_all((0..4).map(|number| (8192 * number, 8192)));
    assert_eq!(rig.channel.statistics().failed, 4);
    assert_clean(&model, rig);
}

#[test]
fn a_silent_device_is_left_to_the_processor_after_its_queue_was_closed() {
    let (model, rig) = rig(IdxdModelOptions { is_dedicated: true, ..IdxdModelOptions::default() });
    model.device().set_faults(DsaFaults { stalls: FaultSchedule::Always, ..DsaFaults::default() });
    rig.copy_all((0..4).map(|number| (8192 * number, 8192)));
    assert!(rig.is_copied(0, 4 * 8192));
    assert_eq!(model.opens(), 2, "closed before the memory was handed back, and opened again");
    rig.copy_all([(0, 100)]);
    assert_clean(&model, rig);
}

#[test]
fn a_queue_that_stalled_once_is_opened_again_and_used() {
    let (model, rig) = rig(IdxdModelOptions::default());
    model.device().set_faults(DsaFaults { stalls: FaultSchedule::At(1), ..DsaFaults::default() });
    rig.copy_all([(0, 8192)]);
    assert_eq!((model.opens(), rig.channel.statistics().failed), (2, 1));
    let before = model.device().counters().descriptors;
    rig.copy_all((1..9).map(|number| (8192 * number, 8192)));
    assert!(rig.is_copied(0, 9 * 8192));
    assert_eq!(rig.channel.statistics().failed, 1, "the device executes the later ones");
    assert!(model.device().counters().descriptors >= before + 8);
    assert_clean(&model, rig);
}

#[test]
fn memory_that_only_the_processor_reaches_is_left_to_it() {
    // A page of the kernel that every process can read, and that no device reaches.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let Some(line) = maps.lines().find(|line| line.ends_with("[vvar]")) else { return };
    let page = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    let (model, rig) = rig(IdxdModelOptions::default());
    rig.copy_all([(0, BYTES)]);
    let target = rig.target.as_ptr() as u64;
    rig.run(rig.operation(Opcode::Copy, page, target, 64)).unwrap();
    assert_eq!(rig.channel.statistics().failed, 1, "the processor copied");
    assert_clean(&model, rig);
}

#[test]
fn memory_behind_the_end_of_its_file_is_bad_memory() {
    let (model, rig) = rig(IdxdModelOptions::default());
    let file = tempfile::tempfile().unwrap();
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping of an empty file, which nobody but the engine accesses.
    let mapping = unsafe {
        libc::mmap(std::ptr::null_mut(), page_bytes(), access, flags, file.as_raw_fd(), 0)
    };
    assert_ne!(mapping, libc::MAP_FAILED);
    let (address, target) = (mapping as u64, rig.target.as_ptr() as u64);
    // The processor would get a signal there.
    let error = rig.run(rig.operation(Opcode::Copy, address, target, 64)).unwrap_err();
    assert_eq!(error, ExecutionError::BadMemory { address, done_bytes: 0 });
    assert_clean(&model, rig);
    // SAFETY: the mapping is this test's, and nobody uses it any more.
    unsafe { libc::munmap(mapping, page_bytes()) };
}

#[test]
fn a_channel_that_is_dropped_waits_for_the_device() {
    let (model, rig) = rig(IdxdModelOptions::default());
    let delay = Duration::from_millis(5);
    model.device().set_faults(DsaFaults { delay, ..DsaFaults::default() });
    let (descriptors, completions): (Vec<_>, Vec<_>) =
        (0..20).map(|number| rig.copy(8192 * number, 8192)).unzip();
    rig.submit(descriptors);
    assert_clean(&model, rig);
    assert!(completions.iter().all(|completion| matches!(completion.outcome(), Some(Ok(_)))));
}

#[test]
fn a_dedicated_queue_of_another_program_is_named() {
    let options = IdxdModelOptions {
        is_dedicated: true,
        device: DsaModel::builder().queues(1),
        ..IdxdModelOptions::default()
    };
    let (model, _rig) = rig(options);
    let other = DsaEngine::over_idxd_model(model).unwrap();
    let error = other.open_channel(&ChannelOptions::default()).unwrap_err().to_string();
    assert!(error.contains("wq0.0") && error.contains("another program"), "{error}");
}

#[test]
fn a_dedicated_queue_of_another_program_is_left_out() {
    let options = IdxdModelOptions { is_dedicated: true, ..IdxdModelOptions::default() };
    let model = IdxdModel::new(options).unwrap();
    let queues = model.queue_choices();
    let other = model.open(queues[1].path()).unwrap();
    let free = IdxdQueueChoice::keep_free(&*model, queues.clone());
    assert_eq!(free, [&queues[..1], &queues[2..]].concat());
    // SAFETY: the model behaves as the kernel's driver.
    let engine = unsafe { DsaEngine::over_queues(model.clone(), free) }.unwrap();
    let open = || engine.open_channel(&ChannelOptions::default());
    let channels: Vec<_> = (0..engine.channels()).map(|_| open().unwrap()).collect();
    assert_eq!((channels.len(), model.open_queues()), (3, 4));
    drop(other);
}
