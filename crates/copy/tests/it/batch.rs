//! Batches: many copies and fills that one call starts, as one transfer or each with its own.

use crate::common::models;

use std::sync::Arc;

use crate::common::{builder, ferry, pattern};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{BatchItem, Error, Ferry, Notification, Options, Transfer, ValidationError};
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{Engine, ExecutionError};
use memferry_testing::until;
use models::{card, dsa, ioat};

/// Rows of one buffer, copied to rows of another in reverse order, with a gap behind each.
struct Rows {
    source: Vec<u8>,
    target: Vec<u8>,
    lengths: Vec<usize>,
    stride: usize,
}

const GAP: u8 = 0xEE;

impl Rows {
    fn new(lengths: Vec<usize>) -> Self {
        let stride = lengths.iter().max().unwrap_or(&0) + 3;
        let source = pattern(lengths.len() * stride, lengths.len() as u64);
        Self { target: vec![GAP; source.len()], source, lengths, stride }
    }

    fn items(&mut self) -> Vec<BatchItem> {
        let (from, to, count) =
            (self.source.as_ptr(), self.target.as_mut_ptr(), self.lengths.len());
        let item = |(index, &length): (usize, &usize)| {
            let (source, target) = (index * self.stride, (count - 1 - index) * self.stride);
            BatchItem::copy(from.wrapping_add(source), to.wrapping_add(target), length)
        };
        self.lengths.iter().enumerate().map(item).collect()
    }

    fn check(&self) {
        let count = self.lengths.len();
        for (index, &length) in self.lengths.iter().enumerate() {
            let from = &self.source[index * self.stride..][..self.stride];
            let to = &self.target[(count - 1 - index) * self.stride..][..self.stride];
            assert!(to[..length] == from[..length], "row {index} of {length} bytes");
            assert!(to[length..].iter().all(|&byte| byte == GAP), "behind row {index}");
        }
    }
}

/// Ferries over engines of every kind.
fn ferries() -> Vec<Ferry> {
    let over = |engine: Arc<dyn Engine>| {
        builder().engine(engine, 1).capacity(16).inline_bytes(0).split_bytes(0).build().unwrap()
    };
    let alone = builder().channels(1).policy(PolicyKind::Dedicated).inline_bytes(0);
    vec![
        ferry(),
        builder().inline_bytes(0).capacity(8).build().unwrap(),
        alone.build().unwrap(),
        over(Arc::new(PolledEngine::new())),
        over(ioat(2).1),
        over(card().1),
        over(dsa().1),
    ]
}

/// Lengths of rows, on all sides of the limits of [`builder`].
fn lengths() -> Vec<Vec<usize>> {
    let mixed = (0..700).map(|index| index * 131 % 2500).collect();
    vec![vec![], vec![0], vec![1], vec![0, 8, 0], vec![64; 64], mixed, vec![1 << 20, 5, 300_000]]
}

/// Starts a batch over memory that lives until the transfer is complete, as in all tests here.
fn start_many(ferry: &Ferry, items: &[BatchItem], options: Options<'_>) -> Transfer {
    // SAFETY: the tests keep the memory until they have waited.
    unsafe { ferry.start_many_raw(items, options) }.unwrap()
}

fn start_each(ferry: &Ferry, items: &[BatchItem]) -> Vec<Transfer> {
    // SAFETY: as above.
    unsafe { ferry.start_each_raw(items) }.unwrap()
}

#[test]
fn one_transfer_is_complete_when_every_copy_is() {
    for ferry in ferries() {
        for lengths in lengths() {
            for options in [Options::new(), Options::new().no_caller_assist()] {
                let total: usize = lengths.iter().sum();
                let mut rows = Rows::new(lengths.clone());
                let items = rows.items();
                let transfer = start_many(&ferry, &items, options);
                drop(items);
                transfer.wait().unwrap();
                assert_eq!((transfer.len(), transfer.ready_bytes()), (total as u64, total as u64));
                rows.check();
            }
        }
    }
}

#[test]
fn each_copy_has_a_transfer_of_its_own() {
    for ferry in ferries() {
        for lengths in lengths() {
            let mut rows = Rows::new(lengths.clone());
            let transfers = start_each(&ferry, &rows.items());
            assert_eq!(transfers.len(), lengths.len());
            for (transfer, length) in transfers.iter().zip(lengths).rev() {
                assert_eq!(transfer.len(), length as u64);
                transfer.wait().unwrap();
            }
            rows.check();
        }
    }
}

#[test]
fn a_batch_that_is_alone_in_a_channel_takes_one_slot_of_it() {
    let ferry = builder().channels(1).inline_bytes(0).build().unwrap();
    let mut rows = Rows::new(vec![8; 64]);
    start_many(&ferry, &rows.items(), Options::new()).wait().unwrap();
    rows.check();
    assert!(ferry.statistics().engine("cpu").submitted <= 1);
    let transfers = start_each(&ferry, &rows.items());
    transfers.iter().for_each(|transfer| _ = transfer.wait().unwrap());
    assert_eq!(ferry.statistics().engine("cpu").full, 0);
}

#[test]
fn a_batch_beyond_the_ring_is_offered_again_while_the_caller_executes_some() {
    // The ring has space for 8.
    let ferry = builder().channels(1).capacity(8).inline_bytes(0).build().unwrap();
    let mut rows = Rows::new(vec![40_000; 400]);
    let transfers = start_each(&ferry, &rows.items());
    assert_eq!(transfers.len(), 400);
    transfers.iter().for_each(|transfer| _ = transfer.wait().unwrap());
    rows.check();
    // Rows are executed either by the channel or by the caller, and each once. A channel counts what
    // it or a waiting caller executed after the transfer is complete.
    let cpu = || ferry.statistics().engine("cpu");
    assert!((8..=400).contains(&cpu().submitted), "{:?}", cpu());
    until("the channel counted all it was given", || cpu().completed == cpu().submitted);
}

#[test]
fn copies_and_fills_share_a_batch() {
    for ferry in ferries() {
        let (source, mut copied, mut filled) = (pattern(5000, 3), vec![0; 5000], vec![0; 9000]);
        let items = [
            BatchItem::fill(filled.as_mut_ptr(), 7, 9000),
            BatchItem::copy(source.as_ptr(), copied.as_mut_ptr(), 5000),
        ];
        start_many(&ferry, &items, Options::new()).wait().unwrap();
        assert!(copied == source && filled == [7; 9000]);
        filled.fill(0);
        copied.fill(0);
        start_each(&ferry, &items).iter().for_each(|transfer| _ = transfer.wait().unwrap());
        assert!(copied == source && filled == [7; 9000]);
    }
}

#[test]
fn a_copy_whose_ranges_overlap_is_a_move() {
    for ferry in ferries() {
        for (length, by) in [(100, 1), (5000, 64), (300_000, 4096)] {
            let original = pattern(length + 2 * by, 9);
            let mut both = [original.clone(), original.clone()];
            let [up, down] = &mut both;
            let (up, down) = (up.as_mut_ptr(), down.as_mut_ptr());
            let items = [
                BatchItem::copy(up, up.wrapping_add(by), length),
                BatchItem::copy(down.wrapping_add(by), down, length),
            ];
            start_many(&ferry, &items, Options::new()).wait().unwrap();
            assert!(both[0][by..by + length] == original[..length]);
            assert!(both[1][..length] == original[by..by + length]);
        }
    }
}

#[test]
fn a_notification_comes_behind_the_last_copy_and_after_what_it_is_ordered_after() {
    for ferry in ferries() {
        let variable = Notification::new(0);
        for round in 1..=20 {
            let mut rows = Rows::new(vec![700; 200]);
            let items = rows.items();
            let mut fills = Rows::new(vec![700; 200]);
            // The rows are filled first, so copies that come too early are overwritten.
            let fill = |item: usize| {
                BatchItem::fill(rows.target.as_mut_ptr().wrapping_add(item * 703), GAP, 703)
            };
            let first: Vec<_> = (0..200).map(fill).collect();
            let first = start_many(&ferry, &first, Options::new());
            let options = Options::new().after(&first).notify(&variable, round);
            let second = start_many(&ferry, &items, options);
            while variable.load() != round {
                std::thread::yield_now();
            }
            rows.check();
            second.wait().unwrap();
            start_many(&ferry, &fills.items(), Options::new().after(&second)).wait().unwrap();
            fills.check();
        }
    }
}

#[test]
fn a_batch_after_a_failed_transfer_is_not_begun() {
    let ferry = ferry();
    let (zeros, mut big) = (vec![0u8; 64 << 20], vec![1u8; 64 << 20]);
    // SAFETY: both live until the end.
    let first = unsafe { ferry.icopy_raw(zeros.as_ptr(), big.as_mut_ptr(), big.len()) }.unwrap();
    first.cancel();
    let mut rows = Rows::new(vec![700; 20]);
    let options = Options::new().after(&first);
    let outcome = start_many(&ferry, &rows.items(), options).wait();
    match first.wait() {
        Err(_) => {
            assert_eq!(outcome, Err(Error::Execution(ExecutionError::Predecessor)));
            assert!(rows.target.iter().all(|&byte| byte == GAP));
        }
        // The whole copy had started before the cancellation.
        Ok(_) => rows.check(),
    }
}

#[test]
fn a_bad_item_refuses_the_whole_batch() {
    let ferry = ferry();
    let (source, mut target) = ([1u8; 64], [0u8; 64]);
    let good = BatchItem::copy(source.as_ptr(), target.as_mut_ptr(), 64);
    let high = std::ptr::without_provenance_mut(usize::MAX - 7);
    for (bad, expected) in [
        (BatchItem::fill(std::ptr::null_mut(), 1, 8), ValidationError::Null { side: "target" }),
        (
            BatchItem::copy(source.as_ptr(), high, 64),
            ValidationError::Wraps { side: "target", address: u64::MAX - 7, length: 64 },
        ),
    ] {
        // SAFETY: nothing is started.
        let outcome = unsafe { ferry.start_many_raw(&[good, bad], Options::new()) };
        assert_eq!(outcome.unwrap_err(), Error::Validation(expected.clone()));
        // SAFETY: nothing is started.
        let outcome = unsafe { ferry.start_each_raw(&[good, bad]) };
        assert_eq!(outcome.unwrap_err(), Error::Validation(expected));
    }
    assert_eq!(target, [0; 64]);
}

#[test]
fn a_scope_waits_for_its_batches() {
    let (source, mut target) = (pattern(100_000, 5), vec![0u8; 100_000]);
    let mut zeros = vec![1u8; 10_000];
    ferry().scope(|scope| {
        let pairs = source.chunks(1000).zip(target.chunks_mut(1000));
        let copies = scope.icopy_many(pairs).unwrap();
        drop(scope.ifill_many(zeros.chunks_mut(100), 0).unwrap());
        drop(copies);
    });
    assert!(target == source && zeros == [0; 10_000]);
    let mismatch = ferry().scope(|scope| {
        let pairs = [(&source[..5], &mut target[..6])];
        scope.icopy_many(pairs).map(drop)
    });
    let expected = ValidationError::LengthMismatch { source_bytes: 5, target_bytes: 6 };
    assert_eq!(mismatch, Err(Error::Validation(expected)));
}

/// Starts a batch over a device, as Rust and as C start it, and checks that it rings at most `max`
/// doorbells.
fn check_doorbells(ferry: &Ferry, doorbells: impl Fn() -> u64, lengths: Vec<usize>, max: u64) {
    for by_cookie in [false, true] {
        let mut rows = Rows::new(lengths.clone());
        let (items, before) = (rows.items(), doorbells());
        if by_cookie {
            // SAFETY: the rows live until the copies are complete.
            let cookies = unsafe { ferry.start_each_cookie_raw(&items) }.unwrap();
            cookies.into_iter().for_each(|cookie| ferry.wait(cookie).unwrap());
        } else {
            start_each(ferry, &items).iter().for_each(|transfer| _ = transfer.wait().unwrap());
        }
        rows.check();
        let rung = doorbells() - before;
        assert!((1..=max).contains(&rung), "{rung} doorbells");
    }
}

fn device_ferry(engine: Arc<dyn Engine>) -> Ferry {
    // A ring that has room for all parts.
    builder().engine(engine, 1).capacity(4096).inline_bytes(0).build().unwrap()
}

#[test]
fn a_device_gets_a_batch_of_small_copies_by_one_doorbell() {
    // Wherever the rows lie, each copy has three parts at most, and one run takes them all.
    let lengths = vec![4096; 40];
    let (model, engine) = ioat(1);
    let ferry = device_ferry(engine);
    check_doorbells(&ferry, || model.all_counters().doorbells, lengths.clone(), 1);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
    let (model, engine) = dsa();
    let ferry = device_ferry(engine);
    // A batch of the device has 64 descriptors.
    check_doorbells(&ferry, || model.counters().doorbells, lengths, 2);
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}

#[test]
fn a_large_copy_in_a_batch_leaves_the_small_ones_together() {
    let (model, engine) = ioat(1);
    let ferry = device_ferry(engine);
    let doorbells = || model.all_counters().doorbells;
    let mut lengths = vec![4096; 33];
    lengths[16] = 1 << 20;
    let (mut rows, before) = (Rows::new(lengths), doorbells());
    // The same memory: its page frames decide how many descriptors a copy takes.
    start_each(&ferry, &rows.items()[16..17])[0].wait().unwrap();
    let alone = doorbells() - before;
    let before = doorbells();
    start_each(&ferry, &rows.items()).iter().for_each(|transfer| _ = transfer.wait().unwrap());
    rows.check();
    assert!(doorbells() - before <= alone + 2, "{} and {alone}", doorbells() - before);
}

#[test]
fn a_long_batch_is_spread_over_channels_and_a_short_one_is_not() {
    let ferry = || {
        let builder = builder().channels(4).inline_bytes(0).policy(PolicyKind::RoundRobin);
        builder.build().unwrap()
    };
    for (lengths, expected) in [(vec![4096; 1024], 4), (vec![64; 64], 1)] {
        let (ferry, mut rows) = (ferry(), Rows::new(lengths));
        start_each(&ferry, &rows.items()).iter().for_each(|transfer| _ = transfer.wait().unwrap());
        rows.check();
        let statistics = ferry.statistics();
        let (_, channels) = &statistics.engines[0];
        let used = channels.iter().filter(|channel| channel.submitted > 0).count();
        assert_eq!(used, expected, "{channels:?}");
    }
}

#[test]
fn a_copy_of_a_batch_whose_memory_does_not_exist_fails_alone() {
    let (_, engine) = ioat(1);
    let ferry = device_ferry(engine);
    let mut rows = Rows::new(vec![4096; 8]);
    let mut items = rows.items();
    let mut target = vec![0u8; 4096];
    // The first page is never mapped.
    let nowhere = std::ptr::without_provenance(1 << 10);
    items.insert(3, BatchItem::copy(nowhere, target.as_mut_ptr(), 64));
    let transfers = start_each(&ferry, &items);
    for (index, transfer) in transfers.iter().enumerate() {
        match transfer.wait() {
            Ok(_) => assert_ne!(index, 3),
            Err(error) => {
                assert_eq!(index, 3, "{error}");
                let expected = ExecutionError::BadMemory { address: 1 << 10, done_bytes: 0 };
                assert_eq!(error, Error::Execution(expected));
            }
        }
    }
    rows.check();
}
