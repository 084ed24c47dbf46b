//! Waiting by futures, event descriptors, event loops and sleeping calls, and the cost of each.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memferry_message::{Endpoint, EndpointBuilder, Link, Listener, Source, TAG_ALL, TAG_ANY};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{TIMEOUT, is_readable, pair, say, unique, until};
use memferry_testing::pattern::{first_wrong, pattern};

const SIZES: [usize; 6] = [10, 3000, 40_000, 300_000, 1 << 20, 4 << 20];

/// Waits by `poll` until a descriptor is readable.
fn poll(descriptor: impl AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    let mut watched = [PollFd::new(&descriptor, PollFlags::IN)];
    rustix::event::poll(&mut watched, Some(&timeout)).unwrap() == 1
}

#[test]
fn messages_can_be_awaited() {
    let sides = pair(&EndpointBuilder::new());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        for size in SIZES {
            let send = sides.here.isend(sides.to_there, 1, pattern(size, 1)).unwrap();
            let receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0; size]).unwrap();
            let sending = tokio::spawn(send);
            let (received, bytes) = receive.await.unwrap();
            assert_eq!(received.length as usize, size);
            assert_eq!(first_wrong(&bytes, 1), None);
            sending.await.unwrap().unwrap();
        }
        // Many at a time, of which most wait for a while.
        let receives: Vec<_> = (0..200)
            .map(|tag| {
                tokio::spawn(sides.there.irecv(sides.to_here, tag, TAG_ALL, vec![0; 9000]).unwrap())
            })
            .collect();
        let sends: Vec<_> = (0..200)
            .rev()
            .map(|tag| {
                tokio::spawn(sides.here.isend(sides.to_there, tag, pattern(9000, tag)).unwrap())
            })
            .collect();
        for (tag, receive) in receives.into_iter().enumerate() {
            let (_, bytes) = receive.await.unwrap().unwrap();
            assert_eq!(first_wrong(&bytes, tag as u64), None);
        }
        for send in sends {
            send.await.unwrap().unwrap();
        }
    });
}

#[test]
fn a_future_of_a_closed_endpoint_ends() {
    let sides = pair(&EndpointBuilder::new());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0u8; 8]).unwrap();
    let waiting = runtime.spawn(receive);
    until("a thread waits for it", || runtime.metrics().num_alive_tasks() == 1);
    sides.there.clone().close();
    let outcome = runtime.block_on(waiting).unwrap();
    assert_eq!(outcome.unwrap_err().error, memferry_message::Error::Closed);
}

#[test]
fn the_end_of_an_operation_makes_its_event_readable() {
    let sides = pair(&EndpointBuilder::new());
    for size in SIZES {
        let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0; size]).unwrap();
        let mut send = sides.here.isend(sides.to_there, 1, pattern(size, 2)).unwrap();
        let events = [receive.operation().event().unwrap(), send.operation().event().unwrap()];
        // No thread calls anything: the endpoints have automatic progress from now on.
        assert!(events.iter().all(|event| poll(event.as_fd())));
        assert!(send.operation().test().is_some() && receive.operation().test().is_some());
        assert_eq!(first_wrong(&receive.wait().unwrap().1, 2), None);
    }
}

#[test]
fn an_event_loop_needs_nothing_but_the_descriptor() {
    let sides = pair(&EndpointBuilder::new());
    std::thread::scope(|scope| {
        let (there, to_here) = (&sides.there, sides.to_here);
        scope.spawn(move || {
            for (number, size) in SIZES.into_iter().cycle().take(60).enumerate() {
                let mut bytes = vec![0; size];
                there.recv(to_here, 0, TAG_ANY, &mut bytes).unwrap();
                assert_eq!(first_wrong(&bytes, number as u64), None);
                there.send(to_here, 0, &bytes).unwrap();
            }
        });
        let watch = sides.here.ready_fd().unwrap();
        for (number, size) in SIZES.into_iter().cycle().take(60).enumerate() {
            let mut send =
                sides.here.isend(sides.to_there, 0, pattern(size, number as u64)).unwrap();
            let mut receive = sides.here.irecv(sides.to_there, 0, TAG_ANY, vec![0; size]).unwrap();
            let deadline = Instant::now() + TIMEOUT;
            while !(send.is_done() && receive.is_done()) {
                assert!(poll(&watch) && Instant::now() < deadline, "message {number}");
                sides.here.progress();
            }
            assert_eq!(first_wrong(&receive.wait().unwrap().1, number as u64), None);
        }
        until("nothing is left to do", || {
            sides.here.progress();
            !is_readable(&watch)
        });
    });
}

#[test]
fn an_event_loop_hears_of_callers_and_of_the_dead() {
    let endpoint = Endpoint::open(&unique("loop")).unwrap();
    let watch = endpoint.ready_fd().unwrap();
    let other = EndpointBuilder::new().background(true).open(&unique("caller")).unwrap();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| other.connect(endpoint.name()).unwrap());
        while endpoint.peers().is_empty() {
            assert!(poll(&watch));
            endpoint.progress();
        }
        connecting.join().unwrap();
    });
    let peer = endpoint.peers()[0];
    let mut receive = endpoint.irecv(peer, 0, TAG_ANY, vec![0u8; 8]).unwrap();
    other.close();
    let deadline = Instant::now() + TIMEOUT;
    while !receive.is_done() {
        assert!(poll(&watch) && Instant::now() < deadline);
        endpoint.progress();
    }
    assert!(receive.wait().is_err());
}

#[test]
fn an_event_loop_hears_of_links() {
    let name = unique("linked");
    let listener = Listener::bind(&name).unwrap();
    let ear = listener.ready_fd().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| Link::connect(&name).unwrap().write(&pattern(500_000, 4)).unwrap());
        let link = loop {
            assert!(poll(&ear));
            if let Some(link) = listener.poll_accept().unwrap() {
                break link;
            }
        };
        let watch = link.ready_fd().unwrap();
        let mut read = link.iread(vec![0; 500_000]).unwrap();
        while !read.is_done() {
            assert!(poll(&watch));
            link.progress();
        }
        assert_eq!(first_wrong(&read.wait().unwrap().1, 4), None);
    });
}

#[test]
fn an_endpoint_that_sleeps_answers_those_who_call() {
    // The call sleeps longer with time, and so does the progress thread.
    for background in [false, true] {
        let sleeper =
            EndpointBuilder::new().background(background).open(&unique("sleeper")).unwrap();
        let name = sleeper.name().to_owned();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                sleeper.recv(Source::Any, 99, TAG_ALL, &mut [0; 1]).unwrap();
            });
            for nap in [0, 1, 30, 120, 1, 120] {
                // The random delay hides nothing: how it sleeps depends on how long it has slept.
                std::thread::sleep(Duration::from_millis(nap));
                let caller = Endpoint::open(&unique("caller")).unwrap();
                let peer = caller.connect(&name).unwrap();
                caller.send(peer, 1, b"x").unwrap();
            }
            let caller = Endpoint::open(&unique("caller")).unwrap();
            let peer = caller.connect(&name).unwrap();
            caller.send(peer, 99, b"x").unwrap();
            waiting.join().unwrap();
        });
    }
}

/// Processor time of the calling thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_sleeping_call_costs_nothing_even_after_it_was_woken() {
    /// Long enough for the longest sleep, from which a message of another kind wakes it.
    const NAP: Duration = Duration::from_millis(200);
    const NAPS: u32 = 5;
    let sides = pair(&EndpointBuilder::new());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let before = thread_time();
            sides.there.recv(sides.to_here, 99, TAG_ALL, &mut [0; 1]).unwrap();
            thread_time() - before
        });
        for _ in 1..NAPS {
            std::thread::sleep(NAP);
            sides.here.send(sides.to_there, 1, b"not this").unwrap();
        }
        std::thread::sleep(NAP);
        sides.here.send(sides.to_there, 99, b"x").unwrap();
        // The call may have begun late, and then it had less time to work.
        let (waited, worked) = (NAP * NAPS, waiting.join().unwrap());
        say(format_args!("waited {waited:?}, of which {worked:?} on a core"));
        assert!(worked < waited / 4, "it was busy for {worked:?} of {waited:?}");
    });
}

#[test]
fn progress_with_a_time_limit_returns_when_something_moves() {
    let sides = pair(&EndpointBuilder::new());
    let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0u8; 1]).unwrap();
    // What has come already counts as much as what comes later.
    sides.here.send(sides.to_there, 1, b"x").unwrap();
    assert!(sides.there.progress_timeout(TIMEOUT));
    assert!(receive.is_done());
    let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0u8; 1]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| sides.here.send(sides.to_there, 1, b"x").unwrap());
        while !receive.is_done() {
            assert!(sides.there.progress_timeout(TIMEOUT) || receive.is_done());
        }
    });
    assert!(
        !sides.there.progress_timeout(Duration::from_millis(1)),
        "there is no further progress"
    );
}

#[test]
fn a_name_that_a_new_process_has_taken_over_leads_to_that_one() {
    let (name, endpoint) = (unique("restarted"), Endpoint::open(&unique("client")).unwrap());
    for round in 0..10u64 {
        let mut command = process::command("server");
        let mut child = Child::spawn(command.env("MEMFERRY_TEST_NAME", &name));
        let mut peer = None;
        until("the new one listens", || {
            peer = endpoint.connect(&name).ok();
            peer.is_some()
        });
        // A message that waits for a reply, so that it cannot get lost in the ring of a dead peer.
        endpoint.send(peer.unwrap(), round, &pattern(100, round)).unwrap();
        let mut answer = vec![0; 100];
        endpoint.recv(peer.unwrap(), round, TAG_ALL, &mut answer).unwrap();
        assert_eq!(first_wrong(&answer, round), None);
        child.kill();
    }
}

#[test]
fn other_processes_begin_here() {
    if process::role().is_some() {
        let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
        let mut buffer = vec![0; 100];
        loop {
            let received = endpoint.recv(Source::Any, 0, TAG_ANY, &mut buffer).unwrap();
            endpoint.send(received.source, received.tag, &buffer).unwrap();
        }
    }
}

#[test]
fn a_message_whose_handle_was_dropped_moves_on_with_any_other_call() {
    let sides = pair(&EndpointBuilder::new().cross_memory(false));
    drop(sides.here.isend(sides.to_there, 1, pattern(1 << 20, 1)).unwrap());
    let mut receive = sides.there.irecv(sides.to_here, 1, TAG_ALL, vec![0; 1 << 20]).unwrap();
    until("it has arrived", || {
        drop(sides.here.isend(sides.to_there, 2, vec![0u8; 8]).unwrap());
        receive.is_done()
    });
    assert_eq!(first_wrong(&receive.wait().unwrap().1, 1), None);
}

#[test]
fn an_owned_receive_can_be_waited_for_again_and_again() {
    let sides = pair(&EndpointBuilder::new());
    let receive = sides.here.irecv(sides.to_there, 1, TAG_ALL, vec![0u8; 8]).unwrap();
    let receive = receive.wait_timeout(std::time::Duration::from_millis(5)).unwrap_err();
    sides.there.send(sides.to_here, 1, &[7; 8]).unwrap();
    let (received, bytes) = receive.wait_timeout(TIMEOUT).unwrap().unwrap();
    assert_eq!((received.length, bytes), (8, vec![7; 8]));
}
