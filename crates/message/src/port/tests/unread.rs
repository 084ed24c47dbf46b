//! Messages that stay in the ring while nobody receives them.

use super::*;

#[test]
fn receives_take_messages_out_of_the_ring_without_buffering_the_next_ones() {
    let pair = Pair::new("in-ring");
    let buffered = || pair.port().lock().protocol.matches.unexpected_len();
    for number in 0..20 {
        pair.send_here(0, &[number; 8]).unwrap();
    }
    for number in 0..10 {
        assert_eq!((pair.take(0), buffered()), (Ok(number), 0));
    }
    for number in 10..20 {
        let mut bytes = [0; 8];
        pair.here.recv(pair.peer, 0, u64::MAX, &mut bytes).unwrap();
        assert_eq!((bytes, buffered()), ([number; 8], 0));
    }
    // A probe looks at all messages, whatever is before them.
    for tag in 0..5 {
        pair.send_here(tag, &[0; 8]).unwrap();
    }
    assert!(pair.here.iprobe(pair.peer, 4, u64::MAX).unwrap().is_some());
}

#[test]
fn a_wait_reaches_what_is_behind_messages_that_nobody_receives() {
    run_with_timeout(|| {
        let pair = Pair::new("behind");
        let to_here = pair.there.peers()[0];
        let sent = pair.here.isend(pair.peer, 1, vec![7u8; 1 << 20]).unwrap();
        for number in 0..50 {
            pair.send_here(0, &[number; 8]).unwrap();
        }
        // The end of the long message is reported behind the short ones.
        let there = pair.there.clone();
        let taking = std::thread::spawn(move || {
            let (_, bytes) =
                there.irecv(to_here, 1, u64::MAX, vec![0u8; 1 << 20]).unwrap().wait()?;
            Ok::<_, crate::operation::FailedOperation<Vec<u8>>>(bytes)
        });
        sent.wait().unwrap();
        assert!(taking.join().unwrap().unwrap().iter().all(|&byte| byte == 7));
        for number in 0..50 {
            assert_eq!(pair.take(0), Ok(number));
        }
    });
}

#[test]
fn a_window_behind_messages_that_nobody_receives_is_attached_with_its_memory() {
    use crate::{Rights, ShareableBuffer};
    let pair = Pair::with("window-behind", &EndpointBuilder::new().cross_memory(false));
    for number in 0..5 {
        pair.send_here(0, &[number; 8]).unwrap();
    }
    let window =
        pair.there.expose(ShareableBuffer::new(1 << 16).unwrap(), Rights::READ_WRITE).unwrap();
    let remote = pair.here.attach(pair.peer, window.handle()).unwrap();
    remote.put(0, &[7; 100]).unwrap();
    let mut bytes = [0; 100];
    window.read(0, &mut bytes);
    assert_eq!(bytes, [7; 100]);
    for number in 0..5 {
        assert_eq!(pair.take(0), Ok(number));
    }
}

#[test]
fn a_wait_without_time_finds_what_is_behind_messages_that_nobody_receives() {
    let pair = Pair::new("no-time");
    let to_here = pair.there.peers()[0];
    let sent = pair.here.isend(pair.peer, 1, vec![7u8; 1 << 20]).unwrap();
    for number in 0..50 {
        pair.send_here(0, &[number; 8]).unwrap();
    }
    let received = pair.there.irecv(to_here, 1, u64::MAX, vec![0u8; 1 << 20]).unwrap();
    received.wait().unwrap();
    assert!(sent.wait_timeout(Duration::ZERO).is_ok());
}
