//! Segments that are not mapped, for engines with pinned memory. Alone in its process, so that no
//! other thread maps anything into the hole.

use crate::common::packets;

use std::sync::Arc;

use crate::common::builder;
use memferry_copy::{Error, Notification, Options};
use memferry_engine::ioat::IoatEngine;
use memferry_engine::nic::{self, NicEngine};
use memferry_engine::testing::ioat_model::IoatModel;
use memferry_engine::testing::nic_model::NicModel;
use memferry_engine::testing::polled::PolledEngine;
use memferry_engine::{Engine, ExecutionError};
use memferry_sys::Pages;
use memferry_sys::pages::page_bytes;
use memferry_testing::in_own_process;
use packets::{PACKET, packets, ring, start};

#[test]
fn a_piece_that_is_not_there_is_an_error_that_says_where() {
    if !in_own_process() {
        return;
    }
    let ring = ring(64);
    let hole = ring.as_ptr().wrapping_add(16 * page_bytes());
    let ioat = IoatModel::builder().channels(1).build();
    let card = NicModel::new();
    let engines: [Arc<dyn Engine>; 3] = [
        Arc::new(PolledEngine::pinned_by(Arc::default())),
        Arc::new(IoatEngine::over_model(ioat.clone()).unwrap()),
        Arc::new(NicEngine::over_model(card.clone(), nic::NicConfig::default()).unwrap()),
    ];
    let mut target = Pages::new(64 * PACKET).unwrap();
    let expected = packets(&ring).concat();
    // SAFETY: a page of this test's own, which is not accessed any more.
    assert_eq!(unsafe { libc::munmap(hole.cast(), page_bytes()) }, 0);
    for engine in engines {
        let ferry = builder().engine(engine, 1).inline_bytes(0).build().unwrap();
        target.as_mut_slice().fill(0);
        let variable = Notification::new(0);
        let options = Options::new().notify(&variable, 1);
        let outcome = start(&ferry, &packets(&ring), &mut target, options).wait();
        let Err(Error::Execution(ExecutionError::BadMemory { address, .. })) = outcome else {
            panic!("{outcome:?}");
        };
        assert!((hole as u64..hole as u64 + page_bytes() as u64).contains(&address));
        assert_eq!(variable.load(), 0);
        // Two packets lie in the hole. The others are copied all the same.
        let first = 16 * page_bytes() / 2048;
        for range in [0..first * PACKET, (first + 2) * PACKET..64 * PACKET] {
            assert!(target.as_slice()[range.clone()] == expected[range]);
        }
    }
    assert_eq!(ioat.protocol_violations(), Vec::<String>::new());
    assert_eq!(card.stats().protocol_violations, Vec::<String>::new());
}
