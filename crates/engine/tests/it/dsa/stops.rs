//! Queues of the kernel that stop, fill up or refuse descriptors, while others of the same channel
//! wait for a page or name memory that does not exist.

use std::sync::Arc;

use memferry_engine::dsa::DsaEngine;
use memferry_engine::testing::dsa_model::{DsaFaults, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::{ExecutionError, Opcode};
use memferry_sys::idxd::code;
use memferry_sys::pages::{ReservedRange, page_bytes};

use super::rig::{BYTES, DsaRig};

/// The number of entries of a queue of the model.
const ENTRIES: usize = 16;

/// A rig whose descriptors are submitted by themselves. All its memory is resident.
fn rig_without_batches() -> (Arc<IdxdModel>, DsaRig) {
    let options = IdxdModelOptions { may_map: false, ..IdxdModelOptions::default() };
    let (model, rig) = rig(options);
    rig.copy_all([(0, BYTES)]);
    (model, rig)
}

fn rig(options: IdxdModelOptions) -> (Arc<IdxdModel>, DsaRig) {
    let model = IdxdModel::new(options).unwrap();
    let engine = DsaEngine::over_idxd_model(model.clone()).unwrap();
    (model, DsaRig::new(Arc::new(engine)))
}

/// Asserts that every queue is closed and that the driver violated nothing.
fn assert_clean(model: &IdxdModel, rig: DsaRig) {
    drop(rig);
    assert_eq!(model.device().protocol_violations(), Vec::<String>::new());
    assert_eq!((model.open_queues(), model.open_descriptors()), (0, 0));
}

/// Takes the first page of the target away, so that the device meets a page fault there.
fn drop_first_page(rig: &DsaRig) {
    // SAFETY: nothing is in flight, and nobody needs the contents of the page.
    let done =
        unsafe { libc::madvise(rig.target.as_ptr().cast(), page_bytes(), libc::MADV_DONTNEED) };
    assert_eq!(done, 0);
}

#[test]
fn what_has_ended_and_is_not_reported_leaves_its_space_to_a_resumed_descriptor() {
    let (model, rig) = rig_without_batches();
    drop_first_page(&rig);
    let before = rig.engine.counters();
    // The first descriptor faults. The queue has no space for the rest of it at first, but then for
    // the descriptor behind those that are in flight.
    let refuses_submissions = FaultSchedule::At(ENTRIES as u64 + 1);
    model.device().set_faults(DsaFaults { refuses_submissions, ..DsaFaults::default() });
    rig.copy_all((0..2 * ENTRIES).map(|number| (8192 * number, 4096)));
    assert!((0..2 * ENTRIES).all(|number| rig.is_copied(8192 * number, 4096)));
    let after = rig.engine.counters();
    assert_eq!(after.resumed_faults, before.resumed_faults + 1);
    assert_eq!((after.recoveries, rig.channel.statistics().failed), (0, 0), "nothing stalled");
    assert_clean(&model, rig);
}

#[test]
fn a_queue_that_others_fill_behind_a_page_fault_has_not_stalled() {
    let (model, rig) = rig_without_batches();
    for round in 1..4 {
        drop_first_page(&rig);
        let delay = std::time::Duration::from_millis(20);
        model.device().set_faults(DsaFaults { delay, ..DsaFaults::default() });
        let copies: Vec<_> = (0..4).map(|number| rig.copy(8192 * number, 4096)).collect();
        let (descriptors, completions): (Vec<_>, Vec<_>) = copies.into_iter().unzip();
        rig.submit(descriptors);
        // All are in the queue. From now on others fill it.
        let refuses_submissions = FaultSchedule::Always;
        model.device().set_faults(DsaFaults { refuses_submissions, ..DsaFaults::default() });
        rig.finish();
        assert!(completions.iter().all(|one| matches!(one.outcome(), Some(Ok(_)))));
        assert!((0..4).all(|number| rig.is_copied(8192 * number, 4096)));
        // The processor did what the queue had no space for, and the queue was neither closed nor
        // given up.
        assert_eq!((model.opens(), rig.channel.statistics().failed), (1, round));
    }
    model.device().set_faults(DsaFaults::default());
    rig.copy_all((0..4).map(|number| (8192 * number, 8192)));
    assert_eq!(rig.channel.statistics().failed, 3, "the queue is used again");
    assert_clean(&model, rig);
}

#[test]
fn a_queue_whose_kernel_refuses_every_descriptor_is_given_up() {
    for write_error in [code::EPERM, code::EINVAL] {
        let (model, rig) = rig_without_batches();
        model.device().set_faults(DsaFaults { write_error, ..DsaFaults::default() });
        rig.copy_all((0..40).map(|number| (8192 * number, 5000)));
        assert!((0..40).all(|number| rig.is_copied(8192 * number, 5000)));
        assert_eq!(rig.channel.statistics().failed, 40, "the processor did it");
        let opens = model.opens();
        assert!(opens < 10, "{opens}");
        rig.copy_all([(0, 8192)]);
        assert_eq!(model.opens(), opens, "it is out of service");
        // A channel with descriptors that were refused can be dropped.
        let (descriptor, completion) = rig.copy(0, 64);
        rig.submit(vec![descriptor]);
        assert_clean(&model, rig);
        assert!(matches!(completion.outcome(), Some(Ok(_))));
    }
}

#[test]
fn bad_memory_is_an_error_also_if_the_queue_stalls() {
    let (model, rig) = rig_without_batches();
    let nowhere = ReservedRange::new(page_bytes()).unwrap();
    let address = nowhere.address() as u64;
    model.device().set_faults(DsaFaults { stalls: FaultSchedule::At(1), ..DsaFaults::default() });
    let (good, copied) = rig.copy(0, 4096);
    let source = rig.source.as_ptr() as u64;
    let (bad, failed) = rig.operation(Opcode::Copy, source, address, 64);
    let (unreadable, unread) = rig.operation(Opcode::Copy, address, rig.target.as_ptr() as u64, 64);
    rig.submit(vec![good, bad, unreadable]);
    rig.finish();
    // Whichever of them stalled, the processor touches none that it cannot touch.
    assert!(matches!(copied.outcome(), Some(Ok(_))));
    let error = ExecutionError::BadMemory { address, done_bytes: 0 };
    assert_eq!(failed.outcome(), Some(Err(error.clone())));
    assert_eq!(unread.outcome(), Some(Err(error)));
    assert_clean(&model, rig);
}

#[test]
fn bad_memory_behind_a_part_that_failed_is_still_bad_memory() {
    let (model, rig) = rig(IdxdModelOptions::default());
    // The target begins in the middle of a line, so that its first bytes are a part of their own;
    // the part behind them leaves the page.
    let nowhere = ReservedRange::new(4 * page_bytes()).unwrap();
    let page = nowhere.address();
    // SAFETY: a new mapping in a range that this test has reserved.
    let mapped = unsafe {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED);
        let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        libc::mmap(page as *mut libc::c_void, page_bytes(), rights, flags, -1, 0)
    };
    assert_eq!(mapped as usize, page);
    let target = (page + page_bytes()) as u64 - 1000;
    let address = (page + page_bytes()) as u64;
    for (errors, done_bytes) in [(FaultSchedule::At(1), 0), (FaultSchedule::Never, 1000)] {
        model.device().set_faults(DsaFaults { errors, ..DsaFaults::default() });
        let copy = rig.operation(Opcode::Copy, rig.source.as_ptr() as u64, target, 4000);
        let error = rig.run(copy).unwrap_err();
        assert_eq!(error, ExecutionError::BadMemory { address, done_bytes });
    }
    assert_clean(&model, rig);
}

#[test]
fn a_queue_whose_portal_is_mapped_has_no_file_that_a_child_could_keep_open() {
    for is_dedicated in [false, true] {
        let options = IdxdModelOptions { is_dedicated, ..IdxdModelOptions::default() };
        let (model, rig) = rig(options);
        rig.copy_all([(0, BYTES)]);
        assert_eq!((model.open_queues(), model.open_descriptors()), (1, 0));
        model
            .device()
            .set_faults(DsaFaults { stalls: FaultSchedule::At(1), ..DsaFaults::default() });
        rig.copy_all([(0, 8192)]);
        assert_eq!((model.opens(), model.open_descriptors()), (2, 0), "and after a restart");
        assert_clean(&model, rig);
    }
    let (model, rig) = rig_without_batches();
    assert_eq!((model.open_queues(), model.open_descriptors()), (1, 1), "`write` needs it");
    assert_clean(&model, rig);
}
