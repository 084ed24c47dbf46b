//! Processes that are killed while they connect, or while they use a link.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::{Endpoint, EndpointBuilder, Error, Link, Listener};
use memferry_testing::message::memory::GuardedBuffer;
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::traces::{Folder, ResourceUsage, named_memory, resource_usage};
use memferry_testing::message::{Random, say, unique, until};
use memferry_testing::pattern::{fill, first_wrong};
use memferry_testing::{HangGuard, in_own_process};

fn spawn(role: &str, name: &str, other: &str) -> Child {
    let mut command = process::command(role);
    Child::spawn(command.env("MEMFERRY_TEST_NAME", name).env("MEMFERRY_TEST_OTHER", other))
}

/// A process takes a few milliseconds to start and to connect: the kill is at any time in that.
fn random_sleep(random: &mut Random) {
    // The random delay hides nothing: the time of the kill is the random input of the test.
    std::thread::sleep(Duration::from_micros(random.below(9000)));
}

/// Endpoints and listeners have a few descriptors of their own once they have slept. An endpoint
/// releases what dead peers held when it is called.
fn wait_for_cleanup(before: ResourceUsage, survivor: Option<&Endpoint>) {
    until("nothing of the killed process is left", || {
        survivor.map(Endpoint::peers);
        let now = resource_usage();
        now.mappings == before.mappings && now.descriptors <= before.descriptors + 3
    });
}

/// A process that connects, once or repeatedly.
fn connects() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    endpoint.connect(&setting("MEMFERRY_TEST_OTHER")).unwrap();
    loop {
        endpoint.progress_timeout(Duration::from_secs(1));
    }
}

#[test]
fn those_who_die_while_they_connect_leave_nothing() {
    if !in_own_process() {
        return;
    }
    let folder = Folder::new("connecting");
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    for background in [false, true] {
        let survivor =
            EndpointBuilder::new().background(background).open(&unique("survivor")).unwrap();
        let (before, mut met) = (resource_usage(), 0);
        for round in 0..40 {
            let name = if round % 2 == 0 { unique("caller") } else { folder.file(&unique("f")) };
            let mut child = spawn("connects", &name, survivor.name());
            let moment = Instant::now() + Duration::from_micros(random.below(9000));
            while Instant::now() < moment {
                survivor.progress();
            }
            met += survivor.peers().len();
            child.kill();
            until("it is known to be dead", || survivor.peers().is_empty());
            wait_for_cleanup(before, Some(&survivor));
            // A process that never sent its name cannot be cleaned up after: the next process with
            // the name does it.
            if std::path::Path::new(&name).exists() {
                drop(Endpoint::open(&name).unwrap());
            }
            assert_eq!(folder.contents(), [] as [String; 0]);
        }
        say(format_args!("{met} of 40 had connected before they died"));
    }
    assert_eq!(named_memory(), [] as [String; 0]);
}

#[test]
fn connecting_to_one_who_dies_ends_in_a_connection_or_an_error() {
    if !in_own_process() {
        return;
    }
    let folder = Folder::new("listening");
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    let survivor = Endpoint::open(&unique("survivor")).unwrap();
    let _guard = HangGuard::new("connecting to one who dies ends");
    let (before, mut met, mut slowest) = (resource_usage(), 0, Duration::ZERO);
    for round in 0..40 {
        let name = if round % 2 == 0 { unique("listener") } else { folder.file(&unique("f")) };
        let mut child = spawn("answers", &name, "");
        let over = AtomicBool::new(false);
        let took = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                // Before it listens, while it listens, and after.
                while !over.load(Ordering::Relaxed) {
                    match survivor.connect(&name) {
                        Ok(_) => return (1, Instant::now()),
                        Err(Error::Connect(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                (0, Instant::now())
            });
            random_sleep(&mut random);
            child.kill();
            let killed = Instant::now();
            over.store(true, Ordering::Relaxed);
            let (answered, ended) = connecting.join().unwrap();
            met += answered;
            ended.saturating_duration_since(killed)
        });
        slowest = slowest.max(took);
        until("it is known to be dead", || survivor.peers().is_empty());
        wait_for_cleanup(before, Some(&survivor));
        if std::path::Path::new(&name).exists() {
            drop(Endpoint::open(&name).unwrap());
        }
        assert_eq!(folder.contents(), [] as [String; 0]);
    }
    say(format_args!("{met} of 40 had answered; the last answer came {slowest:?} after the end"));
}

/// A link to a process that may not listen yet.
fn connect_retrying(name: &str) -> Link {
    let mut link = None;
    until("a process listens", || {
        link = Link::connect(name).ok();
        link.is_some()
    });
    link.unwrap()
}

/// The length and the seed of the n-th message of a link.
fn message(number: u64) -> (usize, u64) {
    let sizes = [10, 3000, 60_000, 700_000];
    (sizes[number as usize % sizes.len()] + number as usize % 7, number)
}

/// Writes messages until it fails.
fn write_all(link: &Link) -> Error {
    let mut memory = GuardedBuffer::plain(800_000);
    for number in 0.. {
        let (length, seed) = message(number);
        fill(&mut memory.bytes_mut()[..length], seed);
        if let Err(error) = link.write(&memory.bytes()[..length]) {
            memory.check_guards();
            assert_eq!(first_wrong(&memory.bytes()[..length], seed), None);
            return error;
        }
    }
    unreachable!("it writes for ever")
}

/// Reads messages until it fails.
fn read_all(link: &Link) -> Error {
    let mut memory = GuardedBuffer::plain(800_000);
    for number in 0.. {
        let outcome = link.read(memory.bytes_mut());
        memory.check_guards();
        match outcome {
            Ok(length) => {
                assert_eq!(length as usize, message(number).0);
                let bytes = &memory.bytes()[..length as usize];
                assert_eq!(first_wrong(bytes, number), None, "message {number}");
            }
            Err(error) => {
                fill(memory.bytes_mut(), 5);
                std::thread::yield_now();
                assert_eq!(first_wrong(memory.bytes(), 5), None, "a process still writes");
                return error;
            }
        }
    }
    unreachable!("it reads for ever")
}

#[test]
fn links_end_with_the_process_at_the_other_end() {
    if !in_own_process() {
        return;
    }
    let _guard = HangGuard::new("links end with the process at the other end");
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    let mut slowest = Duration::ZERO;
    let listens = unique("links");
    let listener = Listener::bind(&listens).unwrap();
    // The listener's own descriptor is created on the first wait.
    listener.ready_fd().unwrap();
    let name = unique("dialed");
    let before = resource_usage();
    for round in 0..60 {
        let (writes, dials) = (round % 2 == 0, round % 3 == 0);
        let role = if writes { "link reads" } else { "link writes" };
        // The test connects to half of them; the others connect.
        let mut child = if dials {
            spawn(&format!("{role}, listens"), &name, "")
        } else {
            spawn(role, &listens, "")
        };
        let link = if dials { connect_retrying(&name) } else { listener.accept().unwrap() };
        let ended = std::thread::scope(|scope| {
            let talking = scope.spawn(|| {
                let error = if writes { write_all(&link) } else { read_all(&link) };
                assert!(matches!(error, Error::PeerDisconnected(_)), "{error}");
                Instant::now()
            });
            random_sleep(&mut random);
            child.kill();
            let killed = Instant::now();
            talking.join().unwrap().saturating_duration_since(killed)
        });
        slowest = slowest.max(ended);
        drop(link);
        wait_for_cleanup(before, None);
    }
    say(format_args!("a link ended {slowest:?} after the process at the other end at worst"));
}

#[test]
fn other_processes_begin_here() {
    let Some(role) = process::role() else { return };
    let name = setting("MEMFERRY_TEST_NAME");
    match role.as_str() {
        "connects" => connects(),
        "answers" => {
            let endpoint = Endpoint::open(&name).unwrap();
            // Polls for connections without waiting.
            loop {
                endpoint.peers();
                std::thread::yield_now();
            }
        }
        _ => {}
    }
    let link = if role.contains("listens") {
        Listener::bind(&name).unwrap().accept().unwrap()
    } else {
        Link::connect(&name).unwrap()
    };
    let error = if role.contains("writes") { write_all(&link) } else { read_all(&link) };
    panic!("{error}");
}
