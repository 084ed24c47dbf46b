//! Batches whose items are ordered after the items before them.

use crate::common::models;

use std::sync::Arc;
use std::time::Duration;

use crate::common::{builder, ferry, pattern};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{BatchItem, Error, Ferry, Options, PinLimits, Transfer, ValidationError};
use memferry_engine::dsa::DsaEngine;
use memferry_engine::testing::dsa_model::{DsaFaults, DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::ioat_model::FaultSchedule;
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{Engine, ExecutionError};
use models::{card, dsa, ioat};

/// A row of equal slots.
struct Slots {
    bytes: Vec<u8>,
    length: usize,
}

impl Slots {
    /// Slots with bytes that differ from slot to slot and from seed to seed.
    fn new(count: usize, length: usize, seed: u64) -> Self {
        Self { bytes: pattern(count * length, seed), length }
    }

    /// A copy of one slot to another.
    fn copy(&mut self, from: usize, to: usize) -> BatchItem {
        let start = self.bytes.as_mut_ptr();
        let [source, target] = [from, to].map(|slot| start.wrapping_add(slot * self.length));
        BatchItem::copy(source, target, self.length)
    }

    /// A chain: each slot is copied to the next.
    fn chain(&mut self, links: usize) -> Vec<BatchItem> {
        (0..links).map(|link| self.copy(link, link + 1).ordered()).collect()
    }

    fn slot(&self, number: usize) -> &[u8] {
        &self.bytes[number * self.length..][..self.length]
    }

    fn are_all(&self, bytes: &[u8]) -> bool {
        self.bytes.chunks(self.length.max(1)).all(|slot| slot == bytes)
    }
}

/// A ferry whose only engine is a device.
fn over(engine: Arc<dyn Engine>, channels: usize) -> Ferry {
    let builder = builder().engine(engine, channels).inline_bytes(0).split_bytes(0);
    builder.policy(PolicyKind::RoundRobin).build().unwrap()
}

/// A ferry over queues of the kernel, whose memory is not pinned.
fn over_idxd(channels: usize) -> (Arc<IdxdModel>, Ferry) {
    let model = IdxdModel::new(IdxdModelOptions::default()).unwrap();
    let engine = DsaEngine::over_idxd_model(model.clone()).unwrap();
    (model, over(Arc::new(engine), channels))
}

/// Ferries over engines of every kind.
fn ferries() -> Vec<Ferry> {
    let tiny = builder().engine(dsa().1, 1).capacity(4).inline_bytes(0).split_bytes(0);
    let beside = Ferry::builder().engine(dsa().1, 1).inline_bytes(0);
    let unpinned = PinLimits { max_bytes: 0, max_entries: 0 };
    let unpinned = builder().engine(dsa().1, 2).inline_bytes(0).pin_limits(unpinned);
    vec![
        ferry(),
        builder().inline_bytes(0).capacity(8).build().unwrap(),
        over(Arc::new(PolledEngine::new()), 1),
        over(ioat(2).1, 2),
        over(card().1, 1),
        over(dsa().1, 1),
        over(dsa().1, 3),
        over_idxd(2).1,
        tiny.build().unwrap(),
        beside.build().unwrap(),
        unpinned.build().unwrap(),
    ]
}

fn start_each(ferry: &Ferry, items: &[BatchItem]) -> Vec<Transfer> {
    // SAFETY: the tests keep the memory until they have waited.
    unsafe { ferry.start_each_raw(items) }.unwrap()
}

/// Starts a batch, and waits for all of it.
fn run(ferry: &Ferry, items: &[BatchItem]) {
    start_each(ferry, items).iter().for_each(|transfer| _ = transfer.wait().unwrap());
}

fn violations(model: &DsaModel) -> Vec<String> {
    model.protocol_violations()
}

#[test]
fn a_chain_is_executed_link_by_link_by_every_engine() {
    for (number, ferry) in ferries().into_iter().enumerate() {
        for (links, length) in [(1, 100), (3, 4096), (40, 700), (300, 4096), (9, 300_000), (5, 0)] {
            let mut slots = Slots::new(links + 1, length, links as u64);
            let first = slots.slot(0).to_vec();
            let transfers = start_each(&ferry, &slots.chain(links));
            assert_eq!(transfers.len(), links);
            // What the last link waits for has ended when it has.
            transfers[links - 1].wait().unwrap();
            assert!(transfers.iter().all(Transfer::is_done));
            assert!(slots.are_all(&first), "ferry {number}, {links} links of {length}");
        }
    }
}

#[test]
fn ordered_items_wait_for_all_before_them_and_may_reuse_their_memory() {
    for (number, ferry) in ferries().into_iter().enumerate() {
        for length in [64, 4096, 20_000] {
            let (mut slots, mut fill) = (Slots::new(40, length, 5), vec![0; length]);
            let original = Slots::new(40, length, 5);
            // Twenty copies, one that overwrites the source of the first and copies the target of the
            // last, twenty that need that one, one that is not ordered.
            let mut items: Vec<_> = (0..10).map(|slot| slots.copy(slot, 10 + slot)).collect();
            items.push(slots.copy(19, 0).ordered());
            items.push(slots.copy(0, 20).ordered());
            items.extend((21..40).map(|slot| slots.copy(20, slot).ordered()));
            items.push(BatchItem::fill(fill.as_mut_ptr(), 9, length));
            items.push(slots.copy(15, 9).ordered());
            run(&ferry, &items);
            for slot in 10..20 {
                assert!(slots.slot(slot) == original.slot(slot - 10), "ferry {number}");
            }
            for slot in (20..40).chain([0]) {
                assert!(slots.slot(slot) == original.slot(9), "ferry {number}, slot {slot}");
            }
            assert!(slots.slot(9) == original.slot(5) && fill == vec![9; length]);
        }
    }
}

#[test]
fn a_chain_for_a_device_with_fences_takes_one_doorbell() {
    let (model, engine) = dsa();
    let ferry = over(engine, 1);
    for round in 0..8 {
        let mut slots = Slots::new(9, 8192, round);
        let first = slots.slot(0).to_vec();
        let (items, before) = (slots.chain(8), model.counters());
        run(&ferry, &items);
        let after = model.counters();
        assert!(slots.are_all(&first), "round {round}");
        assert_eq!(after.doorbells - before.doorbells, 1);
        assert!(after.fences - before.fences >= 7);
    }
    // A target that an earlier copy reads or writes is written after the end of that.
    let (mut slots, before) = (Slots::new(3, 8192, 1), model.counters());
    let expected = slots.slot(2).to_vec();
    let items = [slots.copy(0, 1), slots.copy(2, 0).ordered()];
    run(&ferry, &items);
    assert!(slots.slot(0) == expected && model.counters().fences == before.fences);
    assert_eq!(violations(&model), Vec::<String>::new());
}

#[test]
fn a_chain_longer_than_a_run_continues_when_the_run_is_complete() {
    let (model, engine) = dsa();
    let ferry = over(engine, 3);
    let mut slots = Slots::new(1001, 512, 1);
    let (first, items) = (slots.slot(0).to_vec(), slots.chain(1000));
    let before = model.counters();
    run(&ferry, &items);
    assert!(slots.are_all(&first));
    let after = model.counters();
    let doorbells = after.doorbells - before.doorbells;
    assert!(doorbells < 100 && after.fences - before.fences > 900, "{doorbells}");
    assert_eq!(violations(&model), Vec::<String>::new());
}

#[test]
fn a_chain_survives_every_fault_of_the_device() {
    for number in 1..12 {
        let at = FaultSchedule::At(number);
        for faults in [
            DsaFaults { page_faults: at, ..DsaFaults::default() },
            DsaFaults { page_faults: FaultSchedule::Every(number), ..DsaFaults::default() },
            DsaFaults { errors: at, ..DsaFaults::default() },
            DsaFaults { halts: at, ..DsaFaults::default() },
            DsaFaults { loses_records: at, ..DsaFaults::default() },
            DsaFaults { list_faults: at, page_faults: at, ..DsaFaults::default() },
        ] {
            // A queue that stops twice in a row is not used any more.
            let (model, ferry) = over_idxd(1);
            model
                .device()
                .set_faults(DsaFaults { patience: Some(Duration::from_millis(30)), ..faults });
            // New memory, whose pages the device does not find.
            let mut slots = Slots::new(11, 9000, number);
            let first = slots.slot(0).to_vec();
            run(&ferry, &slots.chain(10));
            assert!(slots.are_all(&first), "{faults:?}");
            model.device().set_faults(DsaFaults::default());
            drop(ferry);
            assert_eq!(violations(model.device()), Vec::<String>::new());
        }
    }
}

#[test]
fn what_is_ordered_after_an_item_without_memory_is_not_begun() {
    // The first page is never mapped.
    const NOWHERE: usize = 1 << 10;
    for ferry in [over(ioat(1).1, 1), over(dsa().1, 2), over_idxd(1).1] {
        for bad in 0..4 {
            let mut slots = Slots::new(6, 4096, 3);
            let mut items = slots.chain(5);
            let target = slots.bytes.as_mut_ptr().wrapping_add((bad + 1) * 4096);
            items[bad] = BatchItem::copy(std::ptr::without_provenance(NOWHERE), target, 4096);
            items[bad] = items[bad].ordered();
            let untouched = slots.bytes[(bad + 1) * 4096..].to_vec();
            for (link, transfer) in start_each(&ferry, &items).iter().enumerate() {
                let outcome = transfer.wait().map(|_| ());
                let address = NOWHERE as u64;
                let bad_memory = ExecutionError::BadMemory { address, done_bytes: 0 };
                assert_eq!(
                    outcome,
                    match link.cmp(&bad) {
                        std::cmp::Ordering::Less => Ok(()),
                        std::cmp::Ordering::Equal => Err(Error::Execution(bad_memory)),
                        std::cmp::Ordering::Greater => {
                            Err(Error::Execution(ExecutionError::Predecessor))
                        }
                    }
                );
            }
            assert!(slots.bytes[(bad + 1) * 4096..] == untouched);
        }
    }
}

#[test]
fn a_batch_that_is_one_transfer_takes_no_ordered_items() {
    let mut slots = Slots::new(2, 64, 0);
    let items = slots.chain(1);
    // SAFETY: nothing is started.
    let refused = unsafe { ferry().start_many_raw(&items, Options::new()) };
    let refused = refused.unwrap_err();
    assert!(refused.to_string().ends_with(": use start_each_raw"), "{refused}");
    assert_eq!(refused, Error::Validation(ValidationError::OrderedItem));
}
