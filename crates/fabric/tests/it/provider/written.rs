//! Writes with completion data, which the target hears of, and the order of accesses and messages.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use memferry_fi::abi::*;

use crate::provider::atomics::register;
use crate::provider::world::*;

const KEY: u64 = 0xa70;
const AGAIN: isize = -(FI_EAGAIN as isize);

impl Side {
    fn rma(&self) -> &OpsRma {
        // SAFETY: the endpoint is open.
        unsafe { &*(*self.ep).rma }
    }

    fn writedata(&self, bytes: &[u8], address: u64, data: u64, number: usize) -> isize {
        let (at, length, context) = (bytes.as_ptr().cast(), bytes.len(), context(number));
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe {
            (self.rma().writedata)(self.ep, at, length, null_mut(), data, 0, address, KEY, context)
        }
    }

    fn inject_writedata(&self, bytes: &[u8], data: u64) -> isize {
        let (at, length) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the endpoint is open.
        unsafe { (self.rma().injectdata)(self.ep, at, length, data, 0, 0, KEY) }
    }

    fn writemsg(&self, bytes: &mut [u8], data: u64, flags: u64) -> isize {
        let iov = vector(bytes);
        let remote = RmaIov { addr: 0, len: bytes.len(), key: KEY };
        let message = MsgRma {
            msg_iov: &raw const iov,
            desc: null_mut(),
            iov_count: 1,
            addr: 0,
            rma_iov: &raw const remote,
            rma_iov_count: 1,
            context: context(6),
            data,
        };
        // SAFETY: the endpoint is open; the test keeps the memory.
        unsafe { (self.rma().writemsg)(self.ep, &raw const message, flags) }
    }

    /// Expects the entry of a peer's write.
    fn expect_written(&self, length: usize, data: u64) {
        let entry = self.read();
        assert_eq!(entry.flags, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA);
        assert_eq!((entry.len, entry.data, entry.op_context), (length, data, null_mut()));
    }
}

/// Retries a call while it is not accepted.
fn accepted(mut start: impl FnMut() -> isize) {
    let end = Instant::now() + Duration::from_secs(200);
    loop {
        match start() {
            0 => return,
            code => assert_eq!(code, AGAIN),
        }
        assert!(Instant::now() < end, "it is never accepted");
        move_all_on();
    }
}

fn offers_accesses(world: &World) -> bool {
    let offers = world.offer.see(|parts| parts.info.caps & FI_RMA != 0);
    if !offers {
        let why = "the provider offers no accesses to memory: `memferry doctor` says why";
        memferry_testing::skip(memferry_testing::Requirement::CrossMemory, why);
    }
    offers
}

#[test]
fn the_target_hears_of_a_write_when_its_bytes_are_there() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    let (one, two) = world.pair();
    let mut memory = vec![0u8; 1 << 20];
    let mr = register(&world, memory.as_mut_ptr(), memory.len(), FI_REMOTE_WRITE);
    for (round, length) in [1, 8, 5000, 40_000, 1 << 20].into_iter().enumerate() {
        let bytes = vec![round as u8 + 1; length];
        accepted(|| one.writedata(&bytes, 0, round as u64, round));
        two.expect_written(length, round as u64);
        assert!(memory[..length] == bytes, "{length} bytes");
        let entry = one.read();
        assert_eq!((entry.op_context, entry.flags), (context(round), FI_RMA | FI_WRITE));
    }
    accepted(|| one.writedata(&[], 0, 50, 5));
    two.expect_written(0, 50);
    one.read();
    accepted(|| one.inject_writedata(b"inject", 51));
    two.expect_written(6, 51);
    accepted(|| one.writemsg(&mut b"message".to_vec(), 52, FI_REMOTE_CQ_DATA | FI_INJECT));
    two.expect_written(7, 52);
    assert_eq!((one.read().op_context, &memory[..7]), (context(6), &b"message"[..]));
    one.expect_nothing();
    two.expect_nothing();
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn a_write_that_fails_is_not_told() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    let (one, two) = world.pair();
    let mut memory = [0u8; 64];
    let mr = register(&world, memory.as_mut_ptr(), 64, FI_REMOTE_WRITE);
    accepted(|| one.writedata(b"x", 0, 1, 1));
    two.expect_written(1, 1);
    one.read();
    // More often than there is credit for.
    for _ in 0..300 {
        let code = one.writedata(b"outside", 60, 2, 2);
        assert!(code == -(FI_EINVAL as isize) || one.read_error().err == FI_EINVAL);
    }
    two.expect_nothing();
    accepted(|| one.writedata(b"y", 0, 3, 3));
    two.expect_written(1, 3);
    one.read();
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn a_target_that_reads_nothing_stops_the_writers() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    let (one, two) = world.pair();
    let mut memory = [0u8; 64];
    let mr = register(&world, memory.as_mut_ptr(), 64, FI_REMOTE_WRITE);
    accepted(|| one.writedata(b"x", 0, 0, 1));
    two.expect_written(1, 0);
    let mut sent = 1;
    while one.inject_writedata(b"y", sent) == 0 {
        sent += 1;
        assert!(sent < 100_000, "it is accepted without an end");
    }
    assert!(sent >= 200, "{sent} were accepted");
    (1..sent).for_each(|data| two.expect_written(1, data));
    // The credit comes back with the reading.
    for data in 0..1000 {
        accepted(|| one.inject_writedata(b"z", data));
        two.expect_written(1, data);
    }
    one.read();
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn a_notification_of_nothing_does_not_overtake_a_write() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    let (one, two) = world.pair();
    let mut memory = vec![0u8; 8 << 20];
    let mr = register(&world, memory.as_mut_ptr(), memory.len(), FI_REMOTE_WRITE);
    for round in 1..20u8 {
        let bytes = vec![round; memory.len()];
        accepted(|| {
            let (at, length) = (bytes.as_ptr().cast(), bytes.len());
            // SAFETY: the endpoint is open; the memory is kept.
            unsafe { (one.rma().write)(one.ep, at, length, null_mut(), 0, 0, KEY, context(1)) }
        });
        accepted(|| one.writedata(&[], 0, u64::from(round), 2));
        two.expect_written(0, u64::from(round));
        // SAFETY: the byte is valid; a peer has written it.
        let last = unsafe { memory.as_ptr().add(memory.len() - 1).read_volatile() };
        assert_eq!(last, round);
        one.read();
        one.read();
    }
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn a_program_that_only_retries_gets_its_credit_back() {
    let world = World::new();
    if !offers_accesses(&world) {
        return;
    }
    let (one, two) = world.pair();
    let mut memory = [0u8; 64];
    let mr = register(&world, memory.as_mut_ptr(), 64, FI_REMOTE_WRITE);
    accepted(|| one.inject_writedata(b"x", 0));
    two.expect_written(1, 0);
    let end = Instant::now() + Duration::from_secs(200);
    let mut heard = 0;
    for data in 0..1000 {
        while one.inject_writedata(b"y", data) == AGAIN {
            assert!(Instant::now() < end, "it is never accepted");
            while two.try_read().is_ok() {
                heard += 1;
            }
        }
    }
    (heard..1000).for_each(|data| two.expect_written(1, data));
    two.expect_nothing();
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn a_send_does_not_overtake_a_write_if_the_program_asks_for_that() {
    let hints = Offer::nothing().with(|parts| {
        parts.tx.msg_order = FI_ORDER_SAS | FI_ORDER_SAW | FI_ORDER_WAW;
    });
    let world = World::of(Offer::for_hints(Some(&hints)).unwrap());
    if !offers_accesses(&world) {
        return;
    }
    let (one, two) = world.pair();
    let mut memory = vec![0u8; 8 << 20];
    let mr = register(&world, memory.as_mut_ptr(), memory.len(), FI_REMOTE_WRITE);
    for round in 1..20u8 {
        let bytes = vec![round; memory.len()];
        accepted(|| {
            let (at, length) = (bytes.as_ptr().cast(), bytes.len());
            // SAFETY: the endpoint is open; the memory is kept.
            unsafe { (one.rma().write)(one.ep, at, length, null_mut(), 0, 0, KEY, context(1)) }
        });
        accepted(|| one.tinject(b"done", 4));
        let mut buffer = [0; 4];
        assert_eq!(two.trecv(&mut buffer, 4, 0, 2), 0);
        two.read();
        // SAFETY: the byte is valid; a peer has written it.
        let last = unsafe { memory.as_ptr().add(memory.len() - 1).read_volatile() };
        assert_eq!(last, round);
        one.read();
    }
    assert_eq!(close(mr.cast()), 0);
}

#[test]
fn a_fence_waits_for_what_was_started_before() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut first = vec![1u8; 4 << 20];
    let mut second = *b"fenced";
    let iov = vector(&mut first);
    assert_eq!(one.tsendmsg(&tagged_message(Some(&iov), 1, 1), FI_COMPLETION), 0);
    let iov = vector(&mut second);
    let fenced = tagged_message(Some(&iov), 2, 2);
    for _ in 0..100 {
        assert_eq!(one.tsendmsg(&fenced, FI_FENCE | FI_COMPLETION), AGAIN);
        move_all_on();
    }
    let mut buffer = vec![0u8; 4 << 20];
    assert_eq!(two.trecv(&mut buffer, 1, 0, 3), 0);
    two.read();
    one.read();
    accepted(|| one.tsendmsg(&fenced, FI_FENCE | FI_COMPLETION));
    assert_eq!(two.trecv(&mut buffer, 2, 0, 4), 0);
    assert_eq!(two.read().len, 6);
    one.read();
    // An endpoint without the capability has no fences.
    let hints = Offer::nothing().with(|parts| parts.info.caps = FI_TAGGED);
    let world = World::of(Offer::for_hints(Some(&hints)).unwrap());
    let (one, _two) = world.pair();
    assert_eq!(one.tsendmsg(&fenced, FI_FENCE), -(FI_EINVAL as isize));
}
