//! Which message matches which receive, in which order, and who waits for whom.

use std::sync::Barrier;
use std::thread;

use memferry_message::{
    Endpoint, EndpointBuilder, Link, Listener, OwnedOperation, Source, TAG_ALL, TAG_ANY,
};
use memferry_testing::message::{Random, pair, say, unique, until};
use memferry_testing::pattern::{first_wrong, pattern};

/// On both sides of every limit between paths.
const SIZES: [usize; 12] =
    [0, 1, 48, 49, 3000, 8192, 8193, 40_000, 100_000, 300_001, 1 << 20, (3 << 20) + 5];

/// Two ends of a link, in this process.
fn link_pair(builder: &EndpointBuilder) -> (Link, Link) {
    let name = unique("link");
    let listener = builder.listen(&name).unwrap();
    thread::scope(|scope| {
        let connecting = scope.spawn(|| builder.connect_link(&name).unwrap());
        let accepted = listener.accept().unwrap();
        (connecting.join().unwrap(), accepted)
    })
}

fn builders() -> [EndpointBuilder; 3] {
    [
        EndpointBuilder::new(),
        EndpointBuilder::new().cross_memory(false),
        EndpointBuilder::new().background(true),
    ]
}

#[test]
fn a_write_can_come_before_its_read() {
    for builder in builders() {
        let (here, there) = link_pair(&builder);
        for (number, size) in SIZES.into_iter().enumerate() {
            let mut write = here.iwrite(pattern(size, number as u64)).unwrap();
            // As far as possible without the peer.
            while here.progress() {}
            let read = there.iread(vec![0; size + 3]).unwrap();
            let received = thread::scope(|scope| {
                let reading = scope.spawn(|| read.wait().unwrap());
                write.operation().wait().unwrap();
                reading.join().unwrap()
            });
            assert_eq!(received.0.length, size as u64);
            assert_eq!(first_wrong(&received.1[..size], number as u64), None, "{size}");
        }
    }
}

#[test]
fn a_read_can_come_before_its_write() {
    for builder in builders() {
        let (here, there) = link_pair(&builder);
        for (number, size) in SIZES.into_iter().enumerate() {
            let mut read = there.iread(vec![0; size]).unwrap();
            while there.progress() {}
            assert!(!read.is_done());
            let bytes = thread::scope(|scope| {
                let reading = scope.spawn(|| read.wait().unwrap().1);
                here.write(&pattern(size, number as u64)).unwrap();
                reading.join().unwrap()
            });
            assert_eq!(first_wrong(&bytes, number as u64), None, "{size}");
        }
    }
}

#[test]
fn both_can_be_posted_before_either_side_waits() {
    for builder in builders() {
        let (here, there) = link_pair(&builder);
        let barrier = Barrier::new(2);
        // Both sides write and read, so that neither can wait for the other to finish first.
        let run = |link: &Link, own: u64, other: u64| {
            for (number, size) in SIZES.into_iter().enumerate() {
                let write = link.iwrite(pattern(size, own + number as u64)).unwrap();
                let read = link.iread(vec![0; size]).unwrap();
                barrier.wait();
                write.wait().unwrap();
                let (_, bytes) = read.wait().unwrap();
                assert_eq!(first_wrong(&bytes, other + number as u64), None, "{size}");
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| run(&here, 0, 1000));
            scope.spawn(|| run(&there, 1000, 0));
        });
    }
}

#[test]
fn the_nth_write_meets_the_nth_read() {
    const MESSAGES: u64 = 4000;
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let (here, there) = link_pair(&EndpointBuilder::new());
    let length = |number: u64| {
        let mut random = Random::new(seed ^ number);
        match random.below(20) {
            0 => random.below(1 << 20) as usize,
            1..=8 => random.below(60_000) as usize,
            _ => random.below(100) as usize,
        }
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut random, mut writes) = (Random::new(seed), std::collections::VecDeque::new());
            for number in 0..MESSAGES {
                let bytes = pattern(length(number), number);
                if random.chance(2) {
                    writes.push_back(here.iwrite(bytes).unwrap());
                } else {
                    here.write(&bytes).unwrap();
                }
                if writes.len() > 30 {
                    writes.pop_front().map(|write| write.wait().unwrap());
                }
            }
            writes.into_iter().for_each(|write| drop(write.wait().unwrap()));
        });
        let (mut random, mut reads) = (Random::new(seed + 1), std::collections::VecDeque::new());
        let mut posted = 0;
        for number in 0..MESSAGES {
            // Some reads are posted long before their messages.
            let ahead = number + 1 + random.below(20);
            while posted < ahead.min(MESSAGES) {
                reads.push_back(there.iread(vec![0; length(posted)]).unwrap());
                posted += 1;
            }
            let (received, bytes) = reads.pop_front().unwrap().wait().unwrap();
            assert_eq!(received.length as usize, length(number), "message {number}");
            assert_eq!(first_wrong(&bytes, number), None, "message {number}");
        }
    });
}

#[test]
fn messages_of_one_tag_do_not_overtake_each_other_on_different_paths() {
    for builder in builders() {
        let sides = pair(&builder);
        let sizes: Vec<usize> = SIZES.iter().rev().chain(&SIZES).copied().collect();
        let mut sends: Vec<_> = (0..sizes.len())
            .map(|n| sides.here.isend(sides.to_there, 5, pattern(sizes[n], n as u64)).unwrap())
            .collect();
        let mut receives: Vec<_> = (0..sizes.len())
            .map(|n| {
                let (from, mask): (Source, _) = match n % 3 {
                    0 => (Source::Any, TAG_ANY),
                    1 => (sides.to_here.into(), TAG_ALL),
                    _ => (Source::Any, 1),
                };
                sides.there.irecv(from, 5, mask, vec![0; 4 << 20]).unwrap()
            })
            .collect();
        let mut all: Vec<_> = sends.iter_mut().map(OwnedOperation::operation).collect();
        all.extend(receives.iter_mut().map(OwnedOperation::operation));
        sides.finish(&mut all);
        for (number, receive) in receives.into_iter().enumerate() {
            let (received, bytes) = receive.wait().unwrap();
            assert_eq!(received.length as usize, sizes[number], "message {number}");
            assert_eq!(first_wrong(&bytes[..sizes[number]], number as u64), None);
        }
    }
}

#[test]
fn a_probe_sees_the_message_that_a_receive_then_takes() {
    let sides = pair(&EndpointBuilder::new());
    for (number, size) in SIZES.into_iter().enumerate() {
        let tag = number as u64;
        let mut send = sides.here.isend(sides.to_there, tag, pattern(size, tag)).unwrap();
        let seen = sides.there.probe(Source::Any, tag, TAG_ALL).unwrap();
        assert_eq!((seen.source, seen.tag, seen.length), (sides.to_here, tag, size as u64));
        let mut receive = sides.there.irecv(seen.source, tag, TAG_ALL, vec![0u8; size]).unwrap();
        sides.finish(&mut [send.operation(), receive.operation()]);
        assert_eq!(receive.wait().unwrap().0, seen);
    }
}

#[test]
fn many_threads_share_an_endpoint() {
    for builder in builders() {
        let (first, second) = (
            builder.open(&unique("threads-a")).unwrap(),
            builder.open(&unique("threads-b")).unwrap(),
        );
        let run = |endpoint: &Endpoint, other: &str, thread: u64| {
            let peer = endpoint.connect(other).unwrap();
            for round in 0..60 {
                let size = SIZES[(round + thread as usize) % SIZES.len()];
                let send = endpoint.isend(peer, thread, pattern(size, thread)).unwrap();
                let mut bytes = vec![0; size];
                let received = endpoint.recv(peer, thread, TAG_ALL, &mut bytes).unwrap();
                assert_eq!(received.length as usize, size);
                assert_eq!(first_wrong(&bytes, thread), None);
                send.wait().unwrap();
            }
        };
        thread::scope(|scope| {
            for number in 0..4 {
                let (first, second) = (&first, &second);
                scope.spawn(move || run(first, second.name(), number));
                scope.spawn(move || run(second, first.name(), number));
            }
        });
    }
}

#[test]
fn a_link_with_nobody_at_the_other_end_says_so() {
    let (here, there) = link_pair(&EndpointBuilder::new());
    there.write(b"last words").unwrap();
    there.close();
    let mut buffer = [0; 10];
    assert_eq!(here.read(&mut buffer), Ok(10));
    assert_eq!(&buffer, b"last words");
    assert!(here.read(&mut buffer).is_err());
    until("writing fails too", || here.write(b"x").is_err());
    let listener = Listener::bind(&unique("nobody")).unwrap();
    assert!(listener.poll_accept().unwrap().is_none());
}
