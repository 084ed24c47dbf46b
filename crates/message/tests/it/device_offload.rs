//! Large messages between mapped memory that a GPU copies: a model of a GPU, so that the test runs
//! everywhere.

use std::sync::Arc;

use memferry_copy::Ferry;
use memferry_engine::Engine;
use memferry_engine::contract::{PinCacheLimits, RegistrationCache};
use memferry_engine::cpu::ProfileSource;
use memferry_engine::cuda::{CudaEngine, CudaProfile};
use memferry_engine::testing::cuda_model::CudaModel;
use memferry_message::{EndpointBuilder, ShareableBuffer, TAG_ALL, set_offload_ferry};
use memferry_testing::in_own_process;
use memferry_testing::message::pair;
use memferry_testing::pattern::{fill, first_wrong};

#[test]
fn a_device_copies_what_comes_again_and_every_byte_is_right() {
    // The ferry for offloads is one for the process.
    if !in_own_process() {
        return;
    }
    let device = CudaModel::new();
    let limits = PinCacheLimits { max_bytes: 1 << 30, max_entries: 1024 };
    let engine = CudaEngine::with_driver(device.clone(), CudaProfile::default(), limits).unwrap();
    // No other library uses it: memory that is reused is registered.
    let engine = Arc::new(engine.sole_user());
    let keeps = engine.registrations().is_some_and(RegistrationCache::caches_by_default);
    let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).engine(engine, 2);
    let ferry = ferry.build().unwrap();
    let again = ferry.clone();
    set_offload_ferry(ferry.clone()).unwrap();
    assert!(set_offload_ferry(again).is_err(), "there is one already");

    let sides = pair(&EndpointBuilder::new());
    let length = 18_000_011;
    let mut source = ShareableBuffer::new(length).unwrap();
    let mut target = ShareableBuffer::new(length).unwrap();
    for seed in 0..5 {
        fill(&mut source, seed);
        target.fill(3);
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        // SAFETY: both buffers live until the operations complete, and are not used before.
        let (mut send, mut receive) = unsafe {
            (
                sides.here.isend_raw(sides.to_there, 1, from, length).unwrap(),
                sides.there.irecv_raw(sides.to_here, 1, TAG_ALL, to, length).unwrap(),
            )
        };
        sides.finish(&mut [&mut send, &mut receive]);
        send.wait().unwrap();
        receive.wait().unwrap();
        assert_eq!(first_wrong(&target, seed), None, "message {seed}");
    }
    let seen = device.stats();
    assert_eq!((seen.unregistered_in_flight, seen.outside_registration), (0, 0));
    assert!(ferry.statistics().engine("cuda").bytes > 0);
    let kept = ferry.statistics().pinning("cuda").unwrap().cache;
    assert!(!keeps || kept.bytes_cached > 30_000_000, "both sides stay registered: {kept:?}");
}
