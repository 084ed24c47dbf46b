//! Batches over owned buffers: the transfer keeps the buffers while it is in flight and returns them,
//! whether it succeeds, is refused, fails or is cancelled.

use crate::common::gated;
use crate::common::models;

use std::ptr::without_provenance_mut;
use std::sync::Arc;
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::time::Duration;

use crate::common::{builder, ferry, pattern};
use gated::GatedEngine;
use memferry_copy::{Buffer, Error, Ferry, OwnedTarget, ValidationError};
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{Engine, ExecutionError, MemoryKind};
use models::{card, dsa, ioat};

/// A ferry that submits everything to this engine.
fn over(engine: Arc<dyn Engine>) -> Ferry {
    builder().engine(engine, 1).capacity(16).inline_bytes(0).split_bytes(0).build().unwrap()
}

/// Ferries over engines of every kind.
fn ferries() -> Vec<Ferry> {
    vec![
        ferry(),
        builder().inline_bytes(0).capacity(8).build().unwrap(),
        over(Arc::new(PolledEngine::new())),
        over(ioat(2).1),
        over(card().1),
        over(dsa().1),
    ]
}

/// Lengths of buffers, on all sides of the limits of [`builder`].
fn lengths() -> Vec<Vec<usize>> {
    let mixed = (0..300).map(|index| index * 131 % 2500).collect();
    vec![vec![0], vec![1], vec![0, 8, 0], vec![64; 64], mixed, vec![1 << 20, 5, 300_000]]
}

/// Buffers of zeros.
fn zeros(lengths: &[usize]) -> Vec<Vec<u8>> {
    lengths.iter().map(|&length| vec![0; length]).collect()
}

/// Whether every byte of every buffer has the value.
fn are_filled(targets: &[Vec<u8>], value: u8) -> bool {
    targets.iter().flatten().all(|&byte| byte == value)
}

#[test]
fn a_batch_of_fills_returns_its_buffers_in_their_order_with_every_byte_set() {
    for ferry in ferries() {
        for lengths in lengths() {
            let targets = zeros(&lengths);
            let addresses: Vec<_> = targets.iter().map(Vec::as_ptr).collect();
            let transfer = ferry.ifill_many(targets, 7).unwrap();
            let total = lengths.iter().sum::<usize>() as u64;
            assert_eq!(transfer.transfer().len(), total);
            let ((), targets) = transfer.wait().unwrap();
            assert!(targets.iter().map(Vec::as_ptr).eq(addresses));
            assert!(targets.iter().map(Vec::len).eq(lengths));
            assert!(are_filled(&targets, 7));
        }
    }
}

#[test]
fn a_batch_of_copies_returns_its_buffers_in_their_order_with_every_byte_copied() {
    for ferry in ferries() {
        for lengths in lengths() {
            let sources: Vec<_> = (1..).zip(&lengths).map(|(n, &of)| pattern(of, n)).collect();
            let expected = sources.clone();
            let transfer = ferry.icopy_many(sources, zeros(&lengths)).unwrap();
            let (sources, targets) = transfer.wait().unwrap();
            assert!(sources == expected && targets == expected);
        }
    }
}

#[test]
fn buffers_of_every_owned_type_are_filled() {
    let ferry = ferry();
    let boxes = vec![vec![0u16; 5000].into_boxed_slice(); 3];
    let ((), boxes) = ferry.ifill_many(boxes, 1).unwrap().wait().unwrap();
    assert!(boxes.iter().all(|numbers| **numbers == [0x0101; 5000]));
    let pages = (0..3).map(|_| Buffer::new(10_000).unwrap()).collect();
    let ((), pages) = ferry.ifill_many(pages, 2).unwrap().wait().unwrap();
    assert!(pages.iter().all(|page| **page == [2; 10_000]));
}

#[test]
fn an_empty_batch_is_complete_at_once() {
    for ferry in ferries() {
        let fills = ferry.ifill_many(Vec::<Vec<u8>>::new(), 7).unwrap();
        assert!(fills.is_done() && fills.transfer().is_empty());
        assert!(fills.wait().unwrap().1.is_empty());
        let copies = ferry.icopy_many(Vec::<Vec<u8>>::new(), Vec::<Vec<u8>>::new()).unwrap();
        assert!(copies.is_done() && copies.wait().unwrap().1.is_empty());
    }
}

#[test]
fn a_batch_can_be_awaited_and_waited_for_with_a_timeout() {
    let ferry = ferry();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let lengths = [300_000, 1];
    let ((), targets) = runtime.block_on(ferry.ifill_many(zeros(&lengths), 3).unwrap()).unwrap();
    assert!(are_filled(&targets, 3));
    let mut transfer = ferry.ifill_many(targets, 4).unwrap();
    let ((), targets) = loop {
        match transfer.wait_timeout(Duration::ZERO) {
            Ok(outcome) => break outcome.unwrap(),
            Err(in_flight) => transfer = in_flight,
        }
    };
    assert!(are_filled(&targets, 4));
}

/// A target whose memory is a vector, is said to be a device's, or does not exist. It sends its
/// bytes when it is freed.
#[derive(Debug)]
struct Odd {
    bytes: Vec<u8>,
    memory: MemoryKind,
    address: Option<usize>,
    freed: Option<Sender<Vec<u8>>>,
}

impl Odd {
    fn host(length: usize) -> Self {
        Self { bytes: vec![0; length], memory: MemoryKind::Host, address: None, freed: None }
    }

    fn device(length: usize) -> Self {
        Self { bytes: vec![0; length], memory: MemoryKind::Device, address: None, freed: None }
    }

    fn nowhere(address: usize, length: usize) -> Self {
        let (bytes, memory) = (vec![0; length], MemoryKind::Host);
        Self { bytes, memory, address: Some(address), freed: None }
    }

    fn reporting(length: usize, freed: &Sender<Vec<u8>>) -> Self {
        let (bytes, memory) = (vec![0; length], MemoryKind::Host);
        Self { bytes, memory, address: None, freed: Some(freed.clone()) }
    }
}

impl Drop for Odd {
    fn drop(&mut self) {
        if let Some(freed) = &self.freed {
            let _ = freed.send(std::mem::take(&mut self.bytes));
        }
    }
}

// SAFETY: the bytes of a vector keep their address, and this value is their only owner. Memory of a
// device is refused, and no engine of the tests reaches an address at which nothing is mapped.
unsafe impl OwnedTarget for Odd {
    fn target(&mut self) -> (*mut u8, usize) {
        let own = self.bytes.as_mut_ptr();
        (self.address.map_or(own, without_provenance_mut), self.bytes.len())
    }

    fn target_memory(&self) -> MemoryKind {
        self.memory
    }
}

#[test]
fn a_batch_that_is_refused_returns_its_buffers_untouched() {
    let ferry = ferry();
    let targets = vec![Odd::host(100), Odd::device(200)];
    let failed = ferry.ifill_many(targets, 7).unwrap_err();
    let expected = ValidationError::BatchMemory { side: "target", item: 1 };
    assert_eq!(failed.error, Error::Validation(expected));
    assert!(failed.error.to_string().starts_with("the target of item 1 is device memory"));
    let lengths: Vec<_> = failed.target.iter().map(|target| target.bytes.len()).collect();
    assert_eq!(lengths, [100, 200]);
    assert!(failed.target.iter().all(|target| target.bytes.iter().all(|&byte| byte == 0)));
    for (targets, expected) in [
        (zeros(&[3]), ValidationError::CountMismatch { sources: 2, targets: 1 }),
        (zeros(&[3, 1]), ValidationError::LengthMismatch { source_bytes: 2, target_bytes: 1 }),
    ] {
        let (sources, before) = (vec![vec![1u8; 3], vec![2; 2]], targets.clone());
        let failed = ferry.icopy_many(sources, targets).unwrap_err();
        assert_eq!(failed.error, Error::Validation(expected));
        assert_eq!((failed.source, failed.target), (vec![vec![1; 3], vec![2; 2]], before));
    }
}

#[test]
fn a_fill_whose_memory_does_not_exist_fails_alone() {
    /// The first page of a process is never mapped.
    const NOWHERE: usize = 1 << 10;
    let ferry = over(ioat(1).1);
    let before = ferry.ifill_many(zeros(&[4096; 8]), 6).unwrap();
    let targets = vec![Odd::host(4096), Odd::nowhere(NOWHERE, 4096), Odd::host(70_000)];
    let bad = ferry.ifill_many(targets, 7).unwrap();
    let after = ferry.ifill_many(zeros(&[4096; 8]), 8).unwrap();
    let failed = bad.wait().unwrap_err();
    let Error::Execution(ExecutionError::BadMemory { address, done_bytes }) = failed.error else {
        panic!("{}", failed.error);
    };
    // Bytes are counted in steps of 4096.
    assert_eq!((address, done_bytes), (NOWHERE as u64, 4096 + 70_000));
    // The fills beside it are made, and all buffers come back.
    let values: Vec<_> = failed.target.iter().map(|target| target.bytes[0]).collect();
    assert_eq!(values, [7, 0, 7]);
    let is_whole = |target: &Odd| target.bytes.iter().all(|byte| *byte == target.bytes[0]);
    assert!(failed.target.iter().all(is_whole));
    assert!(are_filled(&before.wait().unwrap().1, 6));
    assert!(are_filled(&after.wait().unwrap().1, 8));
}

#[test]
fn a_dropped_batch_frees_its_buffers_when_all_are_filled() {
    let engine = Arc::new(GatedEngine::new(Arc::default(), false));
    let ferry = over(engine.clone());
    let (sender, freed) = channel();
    let targets: Vec<_> =
        [100, 70_000, 1].map(|length| Odd::reporting(length, &sender)).into_iter().collect();
    drop(sender);
    let transfer = ferry.ifill_many(targets, 7).unwrap();
    let watched = transfer.transfer().clone();
    drop(transfer);
    assert!(!watched.is_done(), "the engine stands still");
    assert_eq!(freed.try_recv(), Err(TryRecvError::Empty));
    engine.open();
    watched.wait().unwrap();
    // Ends when the last one is freed.
    let freed: Vec<_> = freed.into_iter().collect();
    assert!(freed.iter().map(Vec::len).eq([100, 70_000, 1]));
    assert!(are_filled(&freed, 7));
}

#[test]
fn a_cancelled_batch_returns_its_buffers_and_says_how_much_is_filled() {
    let (model, engine) = ioat(2);
    for ferry in [ferry(), builder().channels(1).capacity(2).build().unwrap(), over(engine)] {
        for _ in 0..10 {
            let transfer = ferry.ifill_many(zeros(&[1 << 20; 8]), 7).unwrap();
            transfer.cancel();
            match transfer.wait() {
                Ok(((), targets)) => assert!(are_filled(&targets, 7)),
                Err(failed) => {
                    let filled = failed.target.iter().flatten().filter(|byte| **byte == 7).count();
                    let Error::Execution(ExecutionError::Cancelled { done_bytes }) = failed.error
                    else {
                        panic!("{}", failed.error);
                    };
                    assert_eq!((failed.target.len(), filled as u64), (8, done_bytes));
                }
            }
        }
    }
    assert_eq!(model.protocol_violations(), Vec::<String>::new());
}
