//! Processes that are killed while they connect, or while they talk over a link.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memferry_message::{Builder, Endpoint, Error, Link, Listener};
use memferry_testing::HangGuard;
use support::memory::{Guarded, fill, first_wrong};
use support::process::{self, Child, setting};
use support::traces::{Folder, Holdings, holdings, named_memory};
use support::{Random, alone, say, unique, until};

fn spawn(role: &str, name: &str, other: &str) -> Child {
    let mut command = process::command(role);
    Child::spawn(command.env("MEMFERRY_TEST_NAME", name).env("MEMFERRY_TEST_OTHER", other))
}

/// A process takes a few milliseconds to start and to connect: any moment of that.
fn nap(random: &mut Random) {
    // Not to hide anything: the moment of the kill is what is random here.
    std::thread::sleep(Duration::from_micros(random.below(9000)));
}

/// Endpoints and listeners have a few descriptors of their own once they have slept. An endpoint releases
/// what the dead held when it is called.
fn until_as_before(before: Holdings, survivor: Option<&Endpoint>) {
    until("nothing is left of the dead", || {
        survivor.map(Endpoint::peers);
        let now = holdings();
        now.mappings == before.mappings && now.descriptors <= before.descriptors + 3
    });
}

/// A process that connects, once or again and again.
fn connects() {
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    endpoint.connect(&setting("MEMFERRY_TEST_OTHER")).unwrap();
    loop {
        endpoint.progress_timeout(Duration::from_secs(1));
    }
}

#[test]
fn those_who_die_while_they_connect_leave_nothing() {
    let (_alone, folder) = (alone(), Folder::new("connecting"));
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    for background in [false, true] {
        let survivor = Builder::new().background(background).open(&unique("survivor")).unwrap();
        let (before, mut met) = (holdings(), 0);
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
            until_as_before(before, Some(&survivor));
            // One that never said its name could not be cleaned up after: whoever is next does.
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
    let (_alone, folder) = (alone(), Folder::new("listening"));
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    let survivor = Endpoint::open(&unique("survivor")).unwrap();
    let _guard = HangGuard::new("connecting to one who dies ends");
    let (before, mut met, mut slowest) = (holdings(), 0, Duration::ZERO);
    for round in 0..40 {
        let name = if round % 2 == 0 { unique("listener") } else { folder.file(&unique("f")) };
        let mut child = spawn("answers", &name, "");
        let over = AtomicBool::new(false);
        let took = std::thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                // Not there yet, then there, then not there any more.
                while !over.load(Ordering::Relaxed) {
                    match survivor.connect(&name) {
                        Ok(_) => return (1, Instant::now()),
                        Err(Error::Connect(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                (0, Instant::now())
            });
            nap(&mut random);
            child.kill();
            let killed = Instant::now();
            over.store(true, Ordering::Relaxed);
            let (answered, ended) = connecting.join().unwrap();
            met += answered;
            ended.saturating_duration_since(killed)
        });
        slowest = slowest.max(took);
        until("it is known to be dead", || survivor.peers().is_empty());
        until_as_before(before, Some(&survivor));
        if std::path::Path::new(&name).exists() {
            drop(Endpoint::open(&name).unwrap());
        }
        assert_eq!(folder.contents(), [] as [String; 0]);
    }
    say(format_args!("{met} of 40 had answered; the last answer came {slowest:?} after the end"));
}

/// A link to somebody who may not listen yet.
fn dial(name: &str) -> Link {
    let mut link = None;
    until("somebody listens", || {
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

/// Writes messages for ever, or until it fails.
fn write_all(link: &Link) -> Error {
    let mut memory = Guarded::plain(800_000);
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

/// Reads messages for ever, or until it fails.
fn read_all(link: &Link) -> Error {
    let mut memory = Guarded::plain(800_000);
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
                assert_eq!(first_wrong(memory.bytes(), 5), None, "somebody still writes");
                return error;
            }
        }
    }
    unreachable!("it reads for ever")
}

#[test]
fn links_end_with_the_process_at_the_other_end() {
    let _alone = alone();
    let _guard = HangGuard::new("links end with the process at the other end");
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    let mut slowest = Duration::ZERO;
    let listens = unique("links");
    let listener = Listener::bind(&listens).unwrap();
    // The listener's own descriptor is made when it is first waited on.
    listener.watch().unwrap();
    let name = unique("dialed");
    let before = holdings();
    for round in 0..60 {
        let (writes, dials) = (round % 2 == 0, round % 3 == 0);
        let role = if writes { "link reads" } else { "link writes" };
        // Half of them are connected to, the others connect.
        let mut child = if dials {
            spawn(&format!("{role}, listens"), &name, "")
        } else {
            spawn(role, &listens, "")
        };
        let link = if dials { dial(&name) } else { listener.accept().unwrap() };
        let ended = std::thread::scope(|scope| {
            let talking = scope.spawn(|| {
                let error = if writes { write_all(&link) } else { read_all(&link) };
                assert!(matches!(error, Error::PeerGone(_)), "{error}");
                Instant::now()
            });
            nap(&mut random);
            child.kill();
            let killed = Instant::now();
            talking.join().unwrap().saturating_duration_since(killed)
        });
        slowest = slowest.max(ended);
        drop(link);
        until_as_before(before, None);
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
            // Looks for callers without waiting for them.
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
