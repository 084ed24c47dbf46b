//! Messages of every kind arrive, with their tags, data and senders.

use memferry_fi::abi::*;

use crate::provider::world::*;

/// Small lengths, the maximum that can be injected, and a length that is announced.
const LENGTHS: [usize; 5] = [0, 8, 1000, 16 << 10, 3 << 20];

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    memferry_testing::pattern::pattern(length, seed as u64)
}

#[test]
fn tagged_messages_of_all_lengths_arrive() {
    let world = World::new();
    let (one, two) = world.pair();
    for (seed, length) in LENGTHS.into_iter().enumerate() {
        let (sent, mut received) = (pattern(length, seed), vec![0; length]);
        assert_eq!(two.trecv(&mut received, 42, 0, 7), 0);
        assert_eq!(one.tsend(&sent, 0, 42, 8), 0);
        let (entry, source) = two.read_from();
        assert_eq!((entry.op_context, entry.len, entry.tag), (context(7), length, 42));
        assert_eq!((entry.flags, source), (FI_TAGGED | FI_RECV, 0));
        assert_eq!(received, sent);
        let entry = one.read();
        assert_eq!((entry.op_context, entry.flags), (context(8), FI_TAGGED | FI_SEND));
    }
}

#[test]
fn messages_that_nobody_expects_are_kept() {
    let world = World::new();
    let (one, two) = world.pair();
    let sent: Vec<_> = LENGTHS.into_iter().map(|length| pattern(length, length)).collect();
    for (tag, bytes) in sent.iter().enumerate() {
        assert_eq!(one.tsend(bytes, 0, tag as u64, tag), 0);
    }
    two.expect_nothing();
    for (tag, bytes) in sent.iter().enumerate().rev() {
        let mut received = vec![0; bytes.len()];
        assert_eq!(two.trecv(&mut received, tag as u64, 0, 1), 0);
        assert_eq!((two.read().len, &received), (bytes.len(), bytes));
    }
    sent.iter().for_each(|_| assert_eq!(one.read().flags, FI_TAGGED | FI_SEND));
}

#[test]
fn data_comes_with_its_message_and_only_then() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut buffer = [0; 8];
    let calls: [&dyn Fn() -> isize; 4] = [
        &|| one.tsenddata(b"tsenddat", 11, 5, 1),
        &|| one.tinjectdata(b"tinjectd", 12, 5),
        &|| one.senddata(b"senddata", 13, 1),
        &|| one.injectdata(b"injectda", 14),
    ];
    for (index, call) in calls.into_iter().enumerate() {
        let is_tagged = index < 2;
        let posted =
            if is_tagged { two.trecv(&mut buffer, 5, 0, 9) } else { two.recv(&mut buffer, 9) };
        assert_eq!((posted, call()), (0, 0));
        let entry = two.read();
        let lane = if is_tagged { FI_TAGGED } else { FI_MSG };
        assert_eq!(entry.flags, lane | FI_RECV | FI_REMOTE_CQ_DATA);
        assert_eq!((entry.data, entry.len), (11 + index as u64, 8));
    }
    assert_eq!((one.read().flags, one.read().flags), (FI_TAGGED | FI_SEND, FI_MSG | FI_SEND));
    assert_eq!((two.recv(&mut buffer, 9), one.send(b"no data!", 1)), (0, 0));
    let entry = two.read();
    assert_eq!((entry.flags, entry.data), (FI_MSG | FI_RECV, 0));
}

#[test]
fn plain_and_tagged_messages_do_not_meet() {
    let world = World::new();
    let (one, two) = world.pair();
    let (mut plain, mut tagged) = ([0; 6], [0; 6]);
    assert_eq!(two.trecv(&mut tagged, 0, u64::MAX, 1), 0);
    assert_eq!(one.inject(b"plain!"), 0);
    two.expect_nothing();
    assert_eq!(two.recv(&mut plain, 2), 0);
    assert_eq!((two.read().op_context, &plain), (context(2), b"plain!"));
    assert_eq!(one.tinject(b"tagged", 3), 0);
    assert_eq!((two.read().tag, &tagged), (3, b"tagged"));
}

#[test]
fn messages_may_have_several_pieces() {
    let world = World::new();
    let (one, two) = world.pair();
    let (mut a, mut b, mut c, mut d) = (*b"gather", *b" this", [0; 4], [0; 7]);
    let (sent, received) = ([vector(&mut a), vector(&mut b)], [vector(&mut c), vector(&mut d)]);
    assert_eq!((two.trecvv(&received, 1, 1), one.tsendv(&sent, 1, 2)), (0, 0));
    assert_eq!((two.read().len, &c, &d), (11, b"gath", b"er this"));
    one.read();
    (c, d) = ([0; 4], [0; 7]);
    assert_eq!((two.recvv(&received, 1), one.sendv(&sent, 2)), (0, 0));
    assert_eq!((two.read().len, &c, &d), (11, b"gath", b"er this"));
    one.read();
    let many = [vector(&mut a); 17];
    assert_eq!(one.sendv(&many, 2), -(FI_EINVAL as isize));
}

#[test]
fn bits_of_the_tag_can_be_ignored() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut buffer = [0; 1];
    assert_eq!(two.trecv(&mut buffer, 0xab00, 0xff, 1), 0);
    assert_eq!((one.tinject(b"n", 0xac42), one.tinject(b"y", 0xab42)), (0, 0));
    assert_eq!((two.read().tag, &buffer), (0xab42, b"y"));
    assert_eq!(two.trecv(&mut buffer, 0, u64::MAX, 1), 0);
    assert_eq!((two.read().tag, &buffer), (0xac42, b"n"));
}

#[test]
fn an_endpoint_sends_to_itself() {
    let world = World::new();
    let side = world.side();
    let me = side.insert(&side.name());
    for length in LENGTHS {
        let (sent, mut received) = (pattern(length, 3), vec![0; length]);
        assert_eq!(side.tsend(&sent, me, 1, 1), 0);
        assert_eq!(side.trecv_from(&mut received, me, 1, 0, 2), 0);
        let (one, two) = (side.read_from(), side.read_from());
        let (_, from) = if one.0.flags & FI_RECV != 0 { one } else { two };
        assert_eq!((one.0.flags | two.0.flags, from), (FI_TAGGED | FI_SEND | FI_RECV, me));
        assert_eq!(received, sent);
    }
}

#[test]
fn a_directed_receive_waits_for_its_peer() {
    let world = World::new();
    let (one, two) = world.pair();
    let three = world.side();
    assert_eq!((three.insert(&one.name()), one.insert(&three.name())), (0, 1));
    let mut buffer = [0; 5];
    assert_eq!(one.trecv_from(&mut buffer, 1, 9, 0, 1), 0);
    assert_eq!(two.tinject(b"two  ", 9), 0);
    one.expect_nothing();
    assert_eq!(three.tinject(b"three", 9), 0);
    let (_, source) = one.read_from();
    assert_eq!((source, &buffer), (1, b"three"));
    assert_eq!(one.trecv_from(&mut buffer, FI_ADDR_UNSPEC, 9, 0, 1), 0);
    let (_, source) = one.read_from();
    assert_eq!((source, &buffer), (0, b"two  "));
}

#[test]
fn a_message_that_is_too_long_is_an_error_with_the_excess() {
    let world = World::new();
    let (one, two) = world.pair();
    for (length, room) in [(10, 4), (16 << 10, 1000), (3 << 20, 1 << 20)] {
        let (sent, mut received) = (pattern(length, 1), vec![0; room]);
        assert_eq!(two.trecv(&mut received, 6, 0, 5), 0);
        assert_eq!(one.tsend(&sent, 0, 6, 1), 0);
        let error = two.read_error();
        assert_eq!((error.err, error.op_context), (FI_ETRUNC, context(5)));
        assert_eq!((error.len, error.olen, error.tag), (room, length - room, 6));
        assert_eq!(received, sent[..room]);
        one.read();
    }
}

#[test]
fn memory_for_several_messages_is_filled_and_given_back() {
    let world = World::new();
    let (one, two) = world.pair();
    let least = 16usize;
    // SAFETY: the endpoint is open, and the option is a size.
    let code = unsafe {
        let (name, value) = (FI_OPT_MIN_MULTI_RECV, (&raw const least).cast());
        ((*(*two.ep).ops).setopt)(two.ep.cast(), FI_OPT_ENDPOINT, name, value, size_of::<usize>())
    };
    assert_eq!(code, 0);
    let mut memory = [0u8; 64];
    let iov = vector(&mut memory);
    assert_eq!(two.recvmsg(&plain_message(&iov, 3), FI_MULTI_RECV), 0);
    let mut at = 0;
    for length in [20, 20, 12] {
        assert_eq!(one.inject(&pattern(length, length)), 0);
        let entry = two.read();
        assert_eq!((entry.op_context, entry.len), (context(3), length));
        assert_eq!(entry.buf, iov.iov_base.wrapping_byte_add(at));
        at += length;
        assert_eq!(entry.flags & FI_MULTI_RECV != 0, at == 52, "after {at} bytes");
    }
    assert_eq!(memory[..20], pattern(20, 20));
    assert_eq!(memory[40..52], pattern(12, 12));
}

#[test]
fn injected_messages_are_not_told_and_their_memory_is_free() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut bytes = pattern(16 << 10, 1);
    for tag in 0..200 {
        bytes[0] = tag as u8;
        assert_eq!(one.tinject(&bytes, tag), 0);
    }
    assert_eq!(one.tinject(&[0; (16 << 10) + 1], 0), -(FI_EINVAL as isize));
    bytes.fill(0);
    for tag in 0..200 {
        let mut received = vec![0; 16 << 10];
        assert_eq!(two.trecv(&mut received, tag, 0, 1), 0);
        while two.try_read().is_err() {
            assert!(one.try_read().is_err());
        }
        assert_eq!((received[0], received[1]), (tag as u8, pattern(2, 1)[1]));
    }
    one.expect_nothing();
}

#[test]
fn a_send_that_is_to_be_delivered_ends_after_its_receive() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut bytes = *b"deliver!";
    let iov = vector(&mut bytes);
    for flags in [FI_DELIVERY_COMPLETE, FI_DELIVERY_COMPLETE | FI_INJECT] {
        assert_eq!(one.tsendmsg(&tagged_message(Some(&iov), 1, 4), flags | FI_COMPLETION), 0);
        two.expect_nothing();
        one.expect_nothing();
        let mut received = [0; 8];
        assert_eq!(two.trecv(&mut received, 1, 0, 1), 0);
        assert_eq!((two.read().len, &received), (8, b"deliver!"));
        let entry = one.read();
        assert_eq!((entry.op_context, entry.flags), (context(4), FI_TAGGED | FI_SEND));
    }
}

#[test]
fn a_message_may_be_copied_and_told() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut bytes = *b"copied";
    let iov = vector(&mut bytes);
    assert_eq!(one.sendmsg(&plain_message(&iov, 4), FI_INJECT), 0);
    bytes.fill(b'?');
    let entry = one.read();
    assert_eq!((entry.op_context, entry.flags), (context(4), FI_MSG | FI_SEND));
    let mut received = [0; 6];
    assert_eq!((two.recv(&mut received, 1), two.read().len), (0, 6));
    assert_eq!(&received, b"copied");
}

#[test]
fn contexts_may_be_any_number() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut received = [0; 2];
    for number in [0, usize::MAX, 1 << 63] {
        assert_eq!(two.trecv(&mut received, 1, 0, number), 0);
        assert_eq!(one.tsend(b"ok", 0, 1, number), 0);
        assert_eq!(two.read().op_context, context(number));
        assert_eq!(one.read().op_context, context(number));
        assert_eq!((two.trecv(&mut received, 1, 0, number), two.cancel(number)), (0, 0));
        let error = two.read_error();
        assert_eq!((error.err, error.op_context), (FI_ECANCELED, context(number)));
    }
}

#[test]
fn messages_to_nobody_are_refused_or_fail() {
    let world = World::new();
    let (one, _two) = world.pair();
    assert_eq!(one.tsend(b"x", 99, 1, 1), -(FI_EINVAL as isize));
    let mut elsewhere = one.name();
    // Not a number that an endpoint of another test has.
    elsewhere[23] ^= 0x40;
    let number = one.insert(&elsewhere);
    assert_eq!(one.tsend(b"x", number, 1, 1), -(FI_EHOSTUNREACH as isize));
}

#[test]
fn injected_messages_arrive_although_their_endpoint_is_closed_at_once() {
    let world = World::new();
    let (one, two) = world.pair();
    for tag in 0..100 {
        assert_eq!(one.tinject(&[7; 4000], tag), 0);
    }
    let one = std::mem::ManuallyDrop::new(one);
    let ep = one.ep as usize;
    let closing = std::thread::spawn(move || close((ep as *mut FidEp).cast()));
    let mut buffer = [0; 4000];
    for tag in 0..100 {
        assert_eq!(two.trecv(&mut buffer, tag, 0, 3), 0);
        assert_eq!((two.read().len, buffer), (4000, [7; 4000]));
        buffer.fill(0);
    }
    assert_eq!(closing.join().unwrap(), 0);
    assert_eq!((close(one.queue.cast()), close(one.vector.cast())), (0, 0));
}

#[test]
fn the_sender_of_a_message_is_told_although_it_has_closed_since() {
    let world = World::new();
    let (one, two) = world.pair();
    let mut buffer = [0; 5];
    // The two are connected first; then a message arrives that no receive is posted for.
    assert_eq!((one.tinject(b"first", 1), two.trecv(&mut buffer, 1, 0, 1)), (0, 0));
    two.read();
    assert_eq!(one.tinject(b"last!", 2), 0);
    drop(one);
    two.expect_nothing();
    assert_eq!(two.trecv(&mut buffer, 2, 0, 2), 0);
    assert_eq!((two.read_from().1, &buffer), (0, b"last!"));
}
