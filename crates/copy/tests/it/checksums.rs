//! CRCs, copies with one, and dualcasts: through every call, by processors and by devices.

use crate::common::pinned;

use std::sync::Arc;

use crate::common::{SIZES, builder, ferry, pattern};
use memferry_copy::plan::{CopyQuery, CopyStrategy};
use memferry_copy::{Error, Ferry, Notification, Options, Request, ValidationError};
use memferry_engine::dsa::DsaEngine;
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::fault::{Fault, FaultEngine, FaultScript};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};
use memferry_engine::{Engine, ExecutionError, Opcode};
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;
use proptest::prelude::*;

/// The definition, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 != 0 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 }
        })
    })
}

/// Every call of a ferry, with one source.
fn check(ferry: &Ferry, source: &[u8]) {
    let (expected, length) = (crc32c(source), source.len());
    assert_eq!(ferry.crc(source), Ok(expected), "{length}");
    let (mut target, mut second) = (vec![0u8; length], vec![0u8; length]);
    assert_eq!(ferry.copy_crc(source, &mut target), Ok(expected), "{length}");
    assert!(source == target, "{length}");
    target.fill(0);
    ferry.dualcast(source, &mut target, &mut second).unwrap();
    assert!(source == target && source == second, "{length}");

    let transfer = ferry.icopy_crc(source.to_vec(), vec![0u8; length]).unwrap();
    let (from, to, crc) = transfer.wait().unwrap();
    assert!(from == source && to == source && crc == expected, "{length}");
    let (from, (), crc) = ferry.icrc(from).unwrap().wait().unwrap();
    assert_eq!(crc, expected, "{length}");
    let transfer = ferry.idualcast(from, vec![0u8; length], vec![1u8; length]).unwrap();
    let (_, (first, second)) = transfer.wait().unwrap();
    assert!(first == source && second == source, "{length}");

    target.fill(0);
    let (mut first, mut second) = (vec![0u8; length], vec![0u8; length]);
    ferry.scope(|scope| {
        let copy = scope.icopy_crc(source, &mut target).unwrap();
        let crc = scope.icrc(source).unwrap();
        let dualcast = scope.idualcast(source, &mut first, &mut second).unwrap();
        assert_eq!((copy.wait(), crc.wait()), (Ok(expected), Ok(expected)), "{length}");
        assert!(copy.ready() == source);
        dualcast.wait().unwrap();
    });
    assert!(target == source && first == source && second == source, "{length}");
}

#[test]
fn every_call_is_right_for_all_sizes() {
    let ferry = ferry();
    for length in SIZES {
        check(&ferry, &pattern(length + 3, 1)[3..]);
    }
    assert_eq!(ferry.crc(b"123456789"), Ok(0xE306_9283));
}

#[test]
fn every_call_is_right_where_each_is_submitted_and_cut_into_small_chunks() {
    let builder = builder().inline_bytes(0).split_bytes(1).stream_bytes(10_000);
    let ferry = builder.chunk_bytes(4096).build().unwrap();
    for length in SIZES {
        check(&ferry, &pattern(length + 1, 2)[1..]);
    }
}

#[test]
fn every_call_is_right_over_an_engine_that_has_none_of_the_operations() {
    let builder = builder().engine(Arc::new(PolledEngine::new()), 1);
    let ferry = builder.split_bytes(0).inline_bytes(0).build().unwrap();
    for length in SIZES {
        check(&ferry, &pattern(length, 3));
    }
}

#[test]
fn every_call_is_right_over_an_engine_that_needs_pinned_memory() {
    let (ferry, ledger) = pinned::over(AuditingPinner::new());
    for length in SIZES {
        check(&ferry, &pattern(length + 3, 4)[3..]);
    }
    assert_eq!(ferry.statistics().engine(pinned::ENGINE).failed, 0);
    pinned::end(ferry, &ledger);
}

#[test]
fn memory_that_cannot_be_pinned_is_left_to_the_processor() {
    let (ferry, ledger) = pinned::over(AuditingPinner::new().failing_every(3));
    for length in SIZES {
        check(&ferry, &pattern(length, 5));
    }
    pinned::end(ferry, &ledger);
}

fn over(engine: Arc<dyn Engine>) -> Ferry {
    builder().engine(engine, 1).split_bytes(0).inline_bytes(0).build().unwrap()
}

/// The operations of the device do the work, whether its pages are contiguous or not.
#[test]
fn every_call_is_right_over_dsa() {
    for is_contiguous in [true, false] {
        let model = DsaModel::builder().contiguous(is_contiguous).build();
        let ferry = over(Arc::new(DsaEngine::over_model(model.clone()).unwrap()));
        for length in SIZES {
            check(&ferry, &pattern(length + 3, 6)[3..]);
        }
        assert_eq!(ferry.statistics().engine("dsa").failed, 0);
        drop(ferry);
        assert_eq!(model.protocol_violations(), Vec::<String>::new());
    }
}

#[test]
fn every_call_is_right_over_a_device_with_page_faults_and_errors() {
    let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
    let ferry = over(Arc::new(DsaEngine::over_idxd_model(model.clone()).unwrap()));
    model.device().set_faults(DsaFaults {
        errors: FaultSchedule::Every(5),
        page_faults: FaultSchedule::Every(3),
        ..DsaFaults::default()
    });
    for length in SIZES {
        check(&ferry, &pattern(length + 9, 7)[9..]);
    }
    assert!(ferry.statistics().engine("dsa").failed > 0, "the processor finished some");
}

#[test]
fn a_processor_engine_that_fails_half_way_changes_no_result() {
    let cpu = ferry().plan_context().profile.clone();
    let engine = memferry_engine::cpu::CpuEngine::new(Arc::new(cpu));
    let script = FaultScript::of([
        Fault::Partial { done_bytes: 5000 },
        Fault::None,
        Fault::EngineFault { done_bytes: 1 },
    ]);
    let ferry = over(Arc::new(FaultEngine::new(Arc::new(engine), script.repeating())));
    for length in SIZES {
        check(&ferry, &pattern(length, 8));
    }
}

#[test]
fn ranges_that_overlap_are_refused_and_nothing_is_started() {
    let ferry = ferry();
    let mut memory = pattern(300, 9);
    let before = memory.clone();
    let at = |offset: usize| memory.as_mut_ptr().wrapping_add(offset);
    let [a, b, c] = [0, 99, 150].map(at);
    let refused = |request, side, other| {
        // SAFETY: the ranges lie in the buffer, and a refused request accesses none of it.
        let outcome = unsafe { ferry.run_raw(request) };
        let expected = ValidationError::RangesOverlap { side, other };
        assert_eq!(outcome, Err(Error::Validation(expected)));
    };
    refused(Request::copy_crc(a, b, 100), "source", "target");
    refused(Request::dualcast(a, b, c.wrapping_add(100), 100), "source", "target");
    refused(Request::dualcast(b, c.wrapping_add(50), a, 100), "source", "second target");
    refused(Request::dualcast(a, b.wrapping_add(1), c, 100), "target", "second target");
    assert_eq!(memory, before);
}

#[test]
fn lengths_that_differ_are_refused_and_the_buffers_come_back() {
    let ferry = ferry();
    let failed = ferry.icopy_crc(vec![1u8; 3], vec![0u8; 4]).unwrap_err();
    assert!(matches!(failed.error, Error::Validation(ValidationError::LengthMismatch { .. })));
    let failed = ferry.idualcast(vec![1u8; 3], vec![0u8; 3], vec![0u8; 4]).unwrap_err();
    assert_eq!((failed.source.len(), failed.target.0.len(), failed.target.1.len()), (3, 3, 4));
    assert!(ferry.dualcast(&[1u8; 3], &mut [0; 4], &mut [0; 3]).is_err());
}

#[test]
fn the_crc_is_in_its_variable_before_the_notification_and_the_cookie() {
    let ferry = ferry();
    for length in SIZES {
        let (source, mut target, mut crc) = (pattern(length, 10), vec![0u8; length], 7u32);
        let arrived = Notification::new(0);
        let request = Request::copy_crc(source.as_ptr(), target.as_mut_ptr(), length)
            .crc_to(&raw mut crc)
            .with(Options::new().notify(&arrived, 1));
        // SAFETY: buffers and variables outlive the wait.
        let cookie = unsafe { ferry.start_cookie_raw(request) }.unwrap();
        ferry.wait(cookie).unwrap();
        assert_eq!((arrived.load(), crc), (1, crc32c(&source)), "{length}");
        let mut crc = 7u32;
        let request = Request::crc(source.as_ptr(), length).crc_to(&raw mut crc);
        // SAFETY: as above.
        let cookie = unsafe { ferry.start_cookie_raw(request) }.unwrap();
        ferry.wait(cookie).unwrap();
        assert_eq!(crc, crc32c(&source), "{length}");
    }
}

#[test]
fn a_cancelled_copy_has_no_crc_or_the_right_one() {
    let ferry = ferry();
    let source: Arc<[u8]> = pattern(2 << 20, 11).into();
    let expected = crc32c(&source);
    for _ in 0..20 {
        let transfer = ferry.icopy_crc(source.clone(), vec![0u8; 2 << 20]).unwrap();
        transfer.cancel();
        match transfer.wait() {
            Ok((_, target, crc)) => assert!(crc == expected && target[..] == source[..]),
            Err(failed) => assert!(
                matches!(failed.error, Error::Execution(ExecutionError::Cancelled { .. })),
                "{failed}"
            ),
        }
    }
}

#[test]
fn a_transfer_can_be_ordered_after_one_with_a_crc() {
    let ferry = ferry();
    let first = ferry.icopy_crc(pattern(1 << 20, 12), vec![0u8; 1 << 20]).unwrap();
    let options = Options::new().after(&first);
    let second = ferry.icrc_with(pattern(100_000, 13), options).unwrap();
    let (_, (), crc) = second.wait().unwrap();
    assert!(first.is_done());
    assert_eq!(crc, crc32c(&pattern(100_000, 13)));
    assert_eq!(first.check(), Some(Ok(crc32c(&pattern(1 << 20, 12)))));
}

#[tokio::test]
async fn a_transfer_with_a_crc_can_be_awaited() {
    let ferry = ferry();
    for length in SIZES {
        let source = pattern(length, 15);
        let expected = crc32c(&source);
        let transfer = ferry.icopy_crc(source, vec![0u8; length]).unwrap();
        let (source, target, crc) = transfer.await.unwrap();
        assert!(source == target && crc == expected, "{length}");
        let (_, (), crc) = ferry.icrc(source).unwrap().await.unwrap();
        assert_eq!(crc, expected, "{length}");
        let transfer = ferry.idualcast(target, vec![0u8; length], vec![0u8; length]).unwrap();
        let (source, (first, second)) = transfer.await.unwrap();
        assert!(first == source && second == source, "{length}");
    }
}

#[test]
fn memory_that_may_only_be_read_has_a_crc_too() {
    let (ferry, ledger) = pinned::over(AuditingPinner::new());
    let mut pages = Pages::new(8 * page_bytes()).unwrap();
    let bytes = pages.len();
    pages.as_mut_slice().copy_from_slice(&pattern(bytes, 14));
    // SAFETY: the pages belong to this test, which does not write to them any more.
    let code = unsafe { libc::mprotect(pages.as_ptr().cast(), bytes, libc::PROT_READ) };
    assert_eq!(code, 0);
    assert_eq!(ferry.crc(pages.as_slice()), Ok(crc32c(&pattern(bytes, 14))));
    pinned::end(ferry, &ledger);
}

#[test]
fn the_plan_of_a_large_crc_shares_it_and_that_of_an_unknown_operation_is_inline() {
    let query = |operation| CopyQuery { operation, ..CopyQuery::copy(8 << 20, true) };
    let shared = ferry().explain(&query(Opcode::Crc)).unwrap();
    assert!(matches!(shared.strategy, CopyStrategy::WorkSharing { .. }), "{shared:?}");
    assert_eq!(shared.kernel.name(), "cached");
    let ferry = over(Arc::new(PolledEngine::new()));
    let plan = ferry.explain(&query(Opcode::Dualcast)).unwrap();
    assert_eq!(plan.strategy, CopyStrategy::Inline);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_crc_is_the_one_of_the_definition_however_it_is_cut(
        bytes in prop::collection::vec(any::<u8>(), 0..200_000),
        chunk_kib in 1usize..64,
        is_split in any::<bool>(),
    ) {
        let split_bytes = if is_split { 1 } else { usize::MAX };
        let builder = builder().inline_bytes(0).split_bytes(split_bytes);
        let ferry = builder.chunk_bytes(chunk_kib << 10).build().unwrap();
        let mut target = vec![0; bytes.len()];
        let expected = crc32c(&bytes);
        prop_assert_eq!(ferry.crc(&bytes), Ok(expected));
        prop_assert_eq!(ferry.copy_crc(&bytes, &mut target), Ok(expected));
        prop_assert_eq!(&bytes, &target);
    }
}
