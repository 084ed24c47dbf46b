//! Large messages between mapped memory that a GPU copies: a model of one, so that this runs
//! everywhere.

mod support;

use std::sync::Arc;

use memferry_copy::Ferry;
use memferry_engine::Engine;
use memferry_engine::contract::{Limits, Registry};
use memferry_engine::cpu::ProfileSource;
use memferry_engine::cuda::model::ModelDevice;
use memferry_engine::cuda::{CudaEngine, Rates};
use memferry_message::{Builder, ShareableBuffer, TAG_ALL, offload_by};
use support::memory::{fill, first_wrong};
use support::pair;

#[test]
fn a_device_copies_what_comes_again_and_every_byte_is_right() {
    let device = ModelDevice::new();
    let limits = Limits { most_bytes: 1 << 30, most_entries: 1024 };
    let engine = CudaEngine::with_driver(device.clone(), Rates::default(), limits).unwrap();
    // Nobody else uses it: what comes again is registered.
    let engine = Arc::new(engine.sole_user());
    let keeps = engine.registry().is_some_and(Registry::keeps_anything);
    let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).engine(engine, 2);
    let ferry = ferry.build().unwrap();
    let again = ferry.clone();
    offload_by(ferry.clone()).unwrap();
    assert!(offload_by(again).is_err(), "there is one already");

    let sides = pair(&Builder::new());
    let length = 18_000_011;
    let mut source = ShareableBuffer::new(length).unwrap();
    let mut target = ShareableBuffer::new(length).unwrap();
    for seed in 0..5 {
        fill(&mut source, seed);
        target.fill(3);
        let (from, to) = (source.as_ptr(), target.as_mut_ptr());
        // SAFETY: both buffers live until the operations are over, and are not used meanwhile.
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
    let seen = device.sightings();
    assert_eq!((seen.torn_copies, seen.stray_copies), (0, 0));
    assert!(ferry.statistics().engine("cuda").bytes > 0);
    let kept = ferry.statistics().pinning("cuda").unwrap().cache;
    assert!(!keeps || kept.bytes_kept > 30_000_000, "both sides stay registered: {kept:?}");
}
