//! Finding messages without receiving them (peek, claim, discard), and cancelling.

use memferry_fi::abi::*;

use crate::provider::world::*;

fn peek(side: &Side, tag: u64, number: usize, flags: u64) {
    assert_eq!(side.trecvmsg(&tagged_message(None, tag, number), flags), 0);
}

/// Peeks repeatedly until the message has arrived.
fn find(side: &Side, tag: u64, number: usize, flags: u64) -> CqTaggedEntry {
    loop {
        peek(side, tag, number, flags);
        match side.try_read() {
            Ok((entry, _)) => return entry,
            Err(code) => assert_eq!(code, -FI_EAVAIL),
        }
        assert_eq!(take_error(side.queue).unwrap().err, FI_ENOMSG);
    }
}

#[test]
fn a_look_that_finds_nothing_is_an_error_in_the_queue() {
    let world = World::new();
    let (_one, two) = world.pair();
    for flags in [FI_PEEK, FI_PEEK | FI_CLAIM, FI_PEEK | FI_DISCARD] {
        peek(&two, 5, 3, flags);
        let error = two.read_error();
        assert_eq!((error.err, error.op_context, error.tag), (FI_ENOMSG, context(3), 5));
        assert_eq!(error.flags, FI_TAGGED | FI_RECV);
    }
    assert_eq!(take_error(two.queue).err(), Some(-FI_EAGAIN));
}

#[test]
fn a_message_that_was_looked_at_is_still_there() {
    let world = World::new();
    let (one, two) = world.pair();
    for bytes in [vec![1; 100], vec![2; 1 << 20]] {
        assert_eq!(one.tsenddata(&bytes, 77, 5, 1), 0);
        let entry = find(&two, 5, 3, FI_PEEK);
        assert_eq!((entry.op_context, entry.len, entry.tag), (context(3), bytes.len(), 5));
        assert_eq!(entry.flags, FI_TAGGED | FI_RECV | FI_REMOTE_CQ_DATA);
        assert_eq!(entry.data, 77);
        let mut received = vec![0; bytes.len()];
        assert_eq!(two.trecv(&mut received, 5, 0, 4), 0);
        assert_eq!((two.read().op_context, &received), (context(4), &bytes));
        one.read();
    }
}

#[test]
fn a_claimed_message_waits_for_its_context() {
    let world = World::new();
    let (one, two) = world.pair();
    for bytes in [vec![1; 100], vec![2; 1 << 20]] {
        assert_eq!(one.tsend(&bytes, 0, 5, 1), 0);
        find(&two, 5, 3, FI_PEEK | FI_CLAIM);
        peek(&two, 5, 9, FI_PEEK);
        assert_eq!(two.read_error().err, FI_ENOMSG, "it is set aside");
        let mut received = vec![0; bytes.len()];
        let iov = vector(&mut received);
        // As Open MPI does: the address and the tag are not used.
        assert_eq!(two.trecvmsg(&tagged_message(Some(&iov), 0, 3), FI_CLAIM), 0);
        let entry = two.read();
        assert_eq!((entry.op_context, entry.len, entry.tag), (context(3), bytes.len(), 5));
        assert_eq!(received, bytes);
        one.read();
    }
}

#[test]
fn discarded_messages_are_gone_and_their_senders_do_not_notice() {
    let world = World::new();
    let (one, two) = world.pair();
    let bytes = vec![1; 1 << 20];
    assert_eq!((one.tsend(&bytes, 0, 5, 1), one.tsend(&bytes, 0, 6, 1)), (0, 0));
    assert_eq!(find(&two, 5, 3, FI_PEEK | FI_DISCARD).len, bytes.len());
    find(&two, 6, 3, FI_PEEK | FI_CLAIM);
    peek(&two, 6, 3, FI_CLAIM | FI_DISCARD);
    assert_eq!(two.read().op_context, context(3));
    for tag in [5, 6] {
        peek(&two, tag, 3, FI_PEEK);
        assert_eq!(two.read_error().err, FI_ENOMSG);
    }
    assert_eq!((one.read().op_context, one.read().op_context), (context(1), context(1)));
    assert_eq!(two.trecvmsg(&tagged_message(None, 0, 3), FI_DISCARD), -(FI_EINVAL as isize));
}

#[test]
fn a_cancelled_receive_ends_as_an_error() {
    let world = World::new();
    let (one, two) = world.pair();
    let (mut first, mut second) = ([0; 3], [0; 3]);
    assert_eq!((two.trecv(&mut first, 1, 0, 11), two.trecv(&mut second, 1, 0, 12)), (0, 0));
    assert_eq!(two.cancel(11), 0);
    let error = two.read_error();
    assert_eq!((error.err, error.op_context), (FI_ECANCELED, context(11)));
    assert_eq!(error.flags, FI_TAGGED | FI_RECV);
    assert_eq!(one.tinject(b"yes", 1), 0);
    assert_eq!((two.read().op_context, &second), (context(12), b"yes"));
    // Cancelling an operation that is complete is not an error.
    assert_eq!(two.cancel(12), 0);
    two.expect_nothing();
}
