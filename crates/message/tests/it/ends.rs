//! Processes that close in order or are killed: messages that they sent before are delivered in
//! order, no message overtakes one that was lost, every sleeper is woken, and sends fail soon.

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::{
    CompletionEntry, Endpoint, EndpointBuilder, Envelope, Error, FailedOperation, Link, Listener,
    MatchSpec, MessageStatus, Segment, Source, TAG_ALL, TAG_ANY,
};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{Random, TIMEOUT, pair, say, unique, until};

/// Long enough to be announced.
const LONG: usize = 1 << 20;
const TAG: u64 = 3;

/// Starts another process that waits for its input to close before it starts.
fn spawn(role: &str, name: &str, end: &str) -> Child {
    let mut command = process::command(role);
    command
        .env("MEMFERRY_TEST_NAME", name)
        .env("MEMFERRY_TEST_OWN_NAME", own_name(name))
        .env("MEMFERRY_TEST_END", end)
        .stdin(Stdio::piped());
    Child::spawn(&mut command)
}

fn own_name(name: &str) -> String {
    format!("{name}-other")
}

/// In the other process: waits for the signal to start.
fn wait_for_input() {
    let _ = std::io::read_to_string(std::io::stdin());
}

/// Lets the other process start, and waits for its exit.
fn close_and_wait(mut child: Child) {
    drop(child.take_input());
    let deadline = Instant::now() + TIMEOUT;
    while child.ended().is_none() {
        assert!(Instant::now() < deadline, "the process does not exit");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends this process as requested. `false`: by returning, in order.
fn killed() -> bool {
    if setting("MEMFERRY_TEST_END") == "killed" {
        // SAFETY: sends a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    false
}

/// Writes a short message, announces a long one, writes another short one, and ends.
fn write_and_end() {
    let link = Link::connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    wait_for_input();
    link.write(b"complete").unwrap();
    let announced = link.iwrite(vec![1u8; LONG]).unwrap();
    link.write(b"behind..").unwrap();
    killed();
    link.close();
    drop(announced);
}

/// The same with tags.
fn send_and_end() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_OWN_NAME")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    wait_for_input();
    endpoint.send(peer, 1, b"complete").unwrap();
    let announced = endpoint.isend(peer, 2, vec![1u8; LONG]).unwrap();
    endpoint.send(peer, 3, b"behind..").unwrap();
    killed();
    endpoint.close();
    drop(announced);
}

fn assert_disconnected<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    assert!(matches!(outcome, Err(Error::PeerDisconnected(_))), "{outcome:?}");
}

#[test]
fn a_disconnect_names_the_peer_its_process_and_the_cause() {
    let pid = std::process::id();
    let sides = pair(&EndpointBuilder::new());
    let name = sides.there.name().to_owned();
    sides.there.close();
    let error = sides.here.send(sides.to_there, 0, b"x").unwrap_err();
    let start = format!("peer {name} (process {pid}) disconnected: it closed the connection");
    assert!(error.to_string().starts_with(&start), "{error}");

    let name = unique("names");
    let listener = Listener::bind(&name).unwrap();
    let (there, here) = (Link::connect(&name).unwrap(), listener.accept().unwrap());
    there.close();
    let error = here.read(&mut [0; 1][..]).unwrap_err();
    let start = format!("the peer in process {pid} disconnected: it closed the connection");
    assert!(error.to_string().starts_with(&start), "{error}");
}

#[test]
fn a_read_never_gets_the_message_behind_a_lost_one() {
    for end in ["killed", "closes"] {
        for posted in 0..4 {
            let name = unique("lost");
            let listener = Listener::bind(&name).unwrap();
            let child = spawn("write and end", &name, end);
            let link = listener.accept().unwrap();
            // This many reads are posted before anything is written, the others after the end.
            let reads: Vec<_> = (0..posted).map(|_| link.iread(vec![0; LONG]).unwrap()).collect();
            close_and_wait(child);
            let mut outcomes: Vec<_> =
                reads.into_iter().map(|read| first_bytes(read.wait())).collect();
            while outcomes.len() < 4 {
                outcomes.push(
                    link.iread(vec![0; LONG])
                        .map_or_else(|failed| Err(failed.error), |read| first_bytes(read.wait())),
                );
            }
            let case = format!("{posted} posted, the writer {end}: {outcomes:?}");
            assert_eq!(outcomes[0], Ok(*b"complete"), "{case}");
            let is_gone =
                |outcome: &Result<_, Error>| matches!(outcome, Err(Error::PeerDisconnected(_)));
            assert!(is_gone(&outcomes[1]) && is_gone(&outcomes[3]), "{case}");
            // A read that was posted in time may get its own message before the end is detected.
            let is_own = posted > 2 && outcomes[2] == Ok(*b"behind..");
            assert!(is_own || is_gone(&outcomes[2]), "{case}");
        }
    }
}

/// The first bytes of a message.
fn first_bytes(
    outcome: Result<(MessageStatus, Vec<u8>), FailedOperation<Vec<u8>>>,
) -> Result<[u8; 8], Error> {
    let (_, buffer) = outcome.map_err(|failed| failed.error)?;
    Ok(buffer[..8].try_into().unwrap())
}

#[test]
fn a_receive_never_gets_the_message_behind_a_lost_one_whatever_its_tag() {
    for end in ["killed", "closes"] {
        let endpoint = Endpoint::open(&unique("lost")).unwrap();
        let child = spawn("send and end", endpoint.name(), end);
        until("it has connected", || endpoint.peers().len() == 1);
        let peer = endpoint.peers()[0];
        close_and_wait(child);
        // Nothing was received so far; a probe receives everything.
        until("the exit is detected", || endpoint.peers().is_empty());
        assert_eq!(endpoint.iprobe(Source::Any, 3, TAG_ALL), Ok(None));
        assert_disconnected(endpoint.iprobe(peer, 3, TAG_ALL));
        assert_disconnected(endpoint.iprobe(peer, 2, TAG_ALL));
        let mut buffer = vec![0; LONG];
        assert_disconnected(endpoint.recv(peer, 3, TAG_ALL, &mut buffer));
        endpoint.recv(Source::Any, 1, TAG_ALL, &mut buffer).unwrap();
        assert_eq!(&buffer[..8], b"complete");
        assert_disconnected(endpoint.recv(peer, 0, TAG_ANY, &mut buffer));
    }
}

/// Injects fifty messages, or the requested number, and closes.
fn inject_and_leave() {
    let own = setting("MEMFERRY_TEST_OWN_NAME");
    let endpoint = Endpoint::open(&own).unwrap();
    let peer = endpoint.add_peer(&setting("MEMFERRY_TEST_NAME")).unwrap();
    for number in 0..50u64 {
        endpoint.inject(peer, Envelope::tagged(TAG), &number.to_le_bytes()).unwrap();
    }
    assert!(endpoint.flush(TIMEOUT), "the messages are not received");
    endpoint.close();
}

/// Receives fifty messages from a peer by name, one after the other, as completion entries.
fn receive_fifty(endpoint: &Endpoint, name: &str) {
    let peer = endpoint.add_peer(name).unwrap();
    let wanted = MatchSpec::tagged(peer, TAG, TAG_ALL);
    let mut reports: Vec<CompletionEntry> = Vec::new();
    for number in 0..50u64 {
        let mut buffer = [0u8; 8];
        let segment = Segment::target(buffer.as_mut_ptr(), 8);
        // SAFETY: the buffer lives until the completion.
        unsafe { endpoint.post_receive(&wanted, &[segment], number) }.unwrap();
        until("a message arrives", || endpoint.poll_completions(&mut reports));
        let report = reports.pop().unwrap();
        report.outcome.unwrap();
        assert_eq!((report.context, u64::from_le_bytes(buffer)), (number, number));
        assert!(reports.is_empty());
    }
}

#[test]
fn fifty_messages_of_each_of_four_that_have_left_are_received() {
    for round in 0..12 {
        let endpoint = Endpoint::open(&unique("receiver")).unwrap();
        let names: Vec<_> = (0..4).map(|_| unique("sender")).collect();
        let mut children: Vec<_> = names
            .iter()
            .map(|name| {
                let mut command = process::command("inject and leave");
                command
                    .env("MEMFERRY_TEST_NAME", endpoint.name())
                    .env("MEMFERRY_TEST_OWN_NAME", name);
                Child::spawn(&mut command)
            })
            .collect();
        // A connect to a name that does not exist yet fails for good. Those that have left connected
        // to this side before.
        let mut has_come =
            |(name, child): (&String, &mut Child)| is_listening(name) || child.ended().is_some();
        until("all of them listen or have left", || {
            names.iter().zip(&mut children).all(&mut has_come)
        });
        // The random delay hides nothing: they connect before, while and after this side connects
        // to them.
        std::thread::sleep(Duration::from_millis(round * 5));
        names.iter().for_each(|name| receive_fifty(&endpoint, name));
        children.into_iter().for_each(Child::finish);
    }
}

/// Returns whether a socket listens on an abstract name: one that is only bound refuses connections.
fn is_listening(name: &str) -> bool {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    sockets.lines().any(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        columns.get(3) == Some(&ACCEPTS_CONNECTIONS)
            && columns.get(7).is_some_and(|path| path.ends_with(&format!("/{name}")))
    })
}

/// Closes after all of its messages were received, some of them only announced.
fn send_all_and_leave() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_OWN_NAME")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let waits = setting("MEMFERRY_TEST_END") == "waits";
    let mut sends = Vec::new();
    for number in 0..50u64 {
        sends.push(endpoint.isend(peer, TAG, number.to_le_bytes().to_vec()).unwrap());
    }
    if waits {
        sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    }
    endpoint.close();
}

#[test]
fn messages_announced_to_a_full_receiver_are_received_or_lost_in_order() {
    for (end, most) in [("waits", 50), ("waits", 10), ("abandons", 50), ("abandons", 10)] {
        let builder =
            EndpointBuilder::new().max_unexpected_messages(if most == 50 { 1000 } else { most });
        let endpoint = builder.open(&unique("full")).unwrap();
        let name = unique("sender");
        let mut command = process::command("send all and leave");
        let child = Child::spawn(
            command
                .env("MEMFERRY_TEST_NAME", endpoint.name())
                .env("MEMFERRY_TEST_OWN_NAME", &name)
                .env("MEMFERRY_TEST_END", end),
        );
        // Sleeps in a wait for another message while all of it arrives.
        let mut buffer = [0; 8];
        let mut other = endpoint.irecv(Source::Any, 99, TAG_ALL, vec![0u8; 8]).unwrap();
        let peer = endpoint.probe(Source::Any, TAG, TAG_ALL).unwrap().source;
        let _ = other.operation().wait_timeout(Duration::from_millis(30));
        let mut received = 0u64;
        let lost = loop {
            match endpoint.recv(peer, TAG, TAG_ALL, &mut buffer) {
                Ok(_) => assert_eq!(u64::from_le_bytes(buffer), received),
                Err(error) => break error,
            }
            received += 1;
        };
        assert!(matches!(lost, Error::PeerDisconnected(_)), "{lost}");
        say(format_args!("{end}, capacity {most}: {received} received"));
        // A process that waits for its sends leaves nothing behind.
        assert!(received == 50 || (end == "abandons" && received <= 50), "{received}");
        child.finish();
    }
}

/// Connects, and stays until it is killed or closed.
fn stay() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_OWN_NAME")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    endpoint.send(peer, 0, b"here").unwrap();
    wait_for_input();
    endpoint.close();
}

#[test]
fn sends_to_a_killed_peer_fail_while_the_ring_has_room() {
    for round in 0..6 {
        let endpoint = Endpoint::open(&unique("sender")).unwrap();
        let mut child = spawn("stay", endpoint.name(), "");
        let peer = endpoint.recv(Source::Any, 0, TAG_ANY, &mut [0; 8]).unwrap().source;
        endpoint.send(peer, TAG, b"first").unwrap();
        child.kill();
        let (mut sent, message) = (0, vec![1; [8, 1000][round % 2]]);
        let error = loop {
            let outcome = match round / 2 {
                0 => endpoint.send(peer, TAG, &message),
                1 => endpoint.inject(peer, Envelope::tagged(TAG), &message),
                _ => endpoint.isend(peer, TAG, message.clone()).map(drop).map_err(|f| f.error),
            };
            match outcome {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
            assert!(sent < 128, "a dead peer accepts messages");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(matches!(error, Error::PeerDisconnected(_)), "{error}");
        say(format_args!("{sent} sends after the end of the peer"));
    }
}

#[test]
fn the_first_send_to_a_peer_that_has_left_fails() {
    let endpoint = Endpoint::open(&unique("sender")).unwrap();
    let child = spawn("stay", endpoint.name(), "");
    let peer = endpoint.recv(Source::Any, 0, TAG_ANY, &mut [0; 8]).unwrap().source;
    close_and_wait(child);
    assert_disconnected(endpoint.send(peer, TAG, b"nobody"));
}

/// Many kills around the time when a reader changes from short sleeps to the long one, with all
/// cores busy.
#[test]
fn readers_on_a_busy_machine_wake_up_when_their_peers_are_killed() {
    let (seed, stop) = (Random::fresh_seed(), AtomicBool::new(false));
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        for _ in 0..12 {
            let readers: Vec<_> = (0..6)
                .map(|_| {
                    let endpoint = Endpoint::open(&unique("reader")).unwrap();
                    let child = spawn("stay", endpoint.name(), "");
                    let nap = Duration::from_micros(40_000 + random.below(80_000));
                    scope.spawn(move || read_until_killed(&endpoint, child, nap))
                })
                .collect();
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn read_until_killed(endpoint: &Endpoint, mut child: Child, nap: Duration) {
    let peer = endpoint.recv(Source::Any, 0, TAG_ANY, &mut [0; 8]).unwrap().source;
    let (done, wait) = std::sync::mpsc::channel();
    let reading = endpoint.clone();
    std::thread::spawn(move || done.send(reading.recv(peer, TAG, TAG_ALL, &mut [0; 8])));
    // The random delay hides nothing: how the call sleeps depends on how long it has slept.
    std::thread::sleep(nap);
    child.kill();
    let outcome = wait.recv_timeout(TIMEOUT).expect("the read returns");
    assert_disconnected(outcome);
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("write and end") => write_and_end(),
        Some("send and end") => send_and_end(),
        Some("inject and leave") => inject_and_leave(),
        Some("send all and leave") => send_all_and_leave(),
        Some("stay") => stay(),
        Some(role) => panic!("no such role: {role}"),
        None => {}
    }
}
