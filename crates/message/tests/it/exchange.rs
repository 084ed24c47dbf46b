//! Messages between two endpoints, over every path, with every byte checked.

use std::thread;

use memferry_message::plan::PathKind;
use memferry_message::{
    Endpoint, EndpointBuilder, Error, Link, Listener, Operation, Rights, Source, TAG_ALL, TAG_ANY,
};
use memferry_testing::message::unique;
use memferry_testing::pattern::pattern;

/// Runs `here` and `there` on two connected endpoints, each in a thread.
fn pair(
    builder: EndpointBuilder,
    name: &str,
    here: impl FnOnce(&Endpoint, memferry_message::Peer) + Send,
    there: impl FnOnce(&Endpoint, memferry_message::Peer) + Send,
) {
    let (a, b) = (unique(&format!("{name}-a")), unique(&format!("{name}-b")));
    let first = builder.open(&a).unwrap();
    let second = builder.open(&b).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let peer = first.connect(&b).unwrap();
            here(&first, peer);
        });
        scope.spawn(move || {
            let peer = second.connect(&a).unwrap();
            there(&second, peer);
        });
    });
}

#[test]
fn slices_of_plain_types_are_sent_written_and_put_as_their_bytes() {
    let endpoint = Endpoint::open(&unique("slices")).unwrap();
    let own = endpoint.self_peer().unwrap();
    endpoint.send_slice(own, 1, &[1u16, 2, 0x0304]).unwrap();
    let mut bytes = [0u8; 6];
    endpoint.recv(own, 1, TAG_ALL, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 0, 2, 0, 4, 3]);
    // A message that ends within an element.
    endpoint.send(own, 1, &[9, 9, 9]).unwrap();
    let mut values = [0u16, 0xFFFF, 7];
    assert_eq!(endpoint.recv_slice(own, 1, TAG_ALL, &mut values).unwrap().length, 3);
    assert_eq!(values, [0x0909, 0xFF09, 7]);
    // Elements without a size.
    endpoint.send_slice(own, 1, &[[0u64; 0]; 3]).unwrap();
    assert_eq!(endpoint.recv_slice::<f32>(own, 1, TAG_ALL, &mut []).unwrap().length, 0);

    let name = unique("slices-link");
    let listener = Listener::bind(&name).unwrap();
    let writer = Link::connect(&name).unwrap();
    writer.write_slice(&[1.5f32, -2.0]).unwrap();
    let mut values = [0f32; 2];
    assert_eq!(listener.accept().unwrap().read_slice(&mut values).unwrap(), 8);
    assert_eq!(values, [1.5, -2.0]);

    let window = endpoint.expose(vec![0u8; 64], Rights::READ_WRITE).unwrap();
    let remote = endpoint.attach(own, window.handle()).unwrap();
    remote.put_slice(8, &[3u64, 4]).unwrap();
    assert_eq!((window.load(8), window.load(16)), (3, 4));
    let mut values = [0u32; 2];
    remote.get_slice(16, &mut values).unwrap();
    assert_eq!(values, [4, 0]);
}

const SIZES: [usize; 14] =
    [0, 1, 47, 48, 49, 4096, 8192, 8193, 20_000, 65_536, 300_001, 1 << 20, (4 << 20) + 7, 9 << 20];

fn ping_pong(builder: EndpointBuilder, name: &str) {
    pair(
        builder,
        name,
        |endpoint, peer| {
            for (round, size) in SIZES.into_iter().enumerate() {
                let message = pattern(size, round as u64);
                endpoint.send(peer, round as u64, &message).unwrap();
                let mut back = vec![0; size];
                let received = endpoint.recv(peer, round as u64, TAG_ALL, &mut back).unwrap();
                assert_eq!(received.length, size as u64);
                assert!(back == message, "{size}");
            }
        },
        |endpoint, peer| {
            for (round, size) in SIZES.into_iter().enumerate() {
                let mut buffer = vec![0; size + 10];
                let received =
                    endpoint.recv(Source::Any, round as u64, TAG_ALL, &mut buffer).unwrap();
                assert_eq!((received.source, received.length), (peer, size as u64));
                assert!(buffer[..size] == pattern(size, round as u64), "{size}");
                endpoint.send(peer, round as u64, &buffer[..size]).unwrap();
            }
        },
    );
}

#[test]
fn messages_of_all_sizes_come_back_as_they_went() {
    ping_pong(EndpointBuilder::new(), "all");
}

#[test]
fn every_path_delivers_every_byte() {
    for path in [PathKind::Single, PathKind::Cooperative, PathKind::Pipeline] {
        ping_pong(EndpointBuilder::new().path(path).eager_bytes(0), path.name());
    }
}

#[test]
fn without_cross_memory_access_messages_arrive_through_the_pipeline() {
    ping_pong(EndpointBuilder::new().cross_memory(false), "off");
}

#[test]
fn messages_move_in_the_background() {
    ping_pong(EndpointBuilder::new().background(true), "background");
}

#[test]
fn a_message_that_nobody_waits_for_is_kept_until_it_is_received() {
    pair(
        EndpointBuilder::new().eager_bytes(8192),
        "unexpected",
        |endpoint, peer| {
            for tag in 0..50 {
                endpoint.send(peer, tag, &pattern(100 * tag as usize, 1)).unwrap();
            }
        },
        |endpoint, peer| {
            for tag in (0..50).rev() {
                let mut buffer = vec![0; 100 * tag as usize];
                endpoint.recv(peer, tag, TAG_ALL, &mut buffer).unwrap();
                assert_eq!(buffer, pattern(100 * tag as usize, 1));
            }
        },
    );
}

#[test]
fn an_endpoint_can_send_to_itself() {
    let endpoint = Endpoint::open(&unique("self")).unwrap();
    let myself = endpoint.self_peer().unwrap();
    for size in SIZES {
        let message = pattern(size, 9);
        let mut buffer = vec![0; size];
        endpoint.scope(|scope| {
            let mut receive = scope.irecv(myself, 1, TAG_ANY, &mut buffer).unwrap();
            let mut send = scope.isend(myself, 1, &message).unwrap();
            send.wait().unwrap();
            receive.wait().unwrap();
        });
        assert!(buffer == message);
    }
}

#[test]
fn a_buffer_that_is_too_short_gets_what_fits_and_both_lengths() {
    for size in [40, 5000, 100_000, 3 << 20] {
        for builder in [EndpointBuilder::new(), EndpointBuilder::new().cross_memory(false)] {
            pair(
                builder,
                "short",
                |endpoint, peer| endpoint.send(peer, 0, &pattern(size, 2)).unwrap(),
                |endpoint, peer| {
                    let mut buffer = vec![0; size / 2];
                    let error = endpoint.recv(peer, 0, 0, &mut buffer).unwrap_err();
                    let (message_bytes, buffer_bytes) = (size as u64, size as u64 / 2);
                    assert_eq!(error, Error::Truncated { message_bytes, buffer_bytes });
                    assert!(buffer == pattern(size, 2)[..size / 2]);
                },
            );
        }
    }
}

#[test]
fn owned_buffers_come_back_and_any_of_several_can_be_waited_for() {
    pair(
        EndpointBuilder::new(),
        "owned",
        |endpoint, peer| {
            let sends: Vec<_> = (0..4u64)
                .map(|seed| endpoint.isend(peer, seed, pattern(100_000, seed)).unwrap())
                .collect();
            for send in sends {
                send.wait().unwrap();
            }
        },
        |endpoint, peer| {
            let mut receives: Vec<_> = (0..4)
                .map(|tag| endpoint.irecv(peer, tag, TAG_ALL, vec![0; 100_000]).unwrap())
                .collect();
            while !receives.is_empty() {
                let mut operations: Vec<_> =
                    receives.iter_mut().map(memferry_message::OwnedOperation::operation).collect();
                let done = Operation::wait_any(&mut operations);
                let (received, buffer) = receives.remove(done).wait().unwrap();
                assert!(buffer == pattern(100_000, received.tag));
            }
        },
    );
}
