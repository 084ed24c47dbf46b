//! Processes that are killed at any point, a thousand of them: their peers detect it soon, keep
//! their memory intact, and keep nothing of the dead process.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use memferry_message::{Endpoint, EndpointBuilder, Error};
use memferry_testing::message::memory::GuardedBuffer;
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::talk::{KINDS, Kind, Traffic};
use memferry_testing::message::traces::{Folder, named_memory, resource_usage};
use memferry_testing::message::{Random, TIMEOUT, say, unique, until};
use memferry_testing::pattern::{fill, first_wrong};
use memferry_testing::{HangGuard, in_own_process};

/// Processes killed for each kind of message, and at a time.
const BATCHES: usize = 9;
const VICTIMS_PER_BATCH: usize = 6;
/// The pattern of memory that no process writes any more.
const MARKER: u64 = 77;

/// A process that exchanges messages until it is killed.
struct Victim {
    name: String,
    child: Child,
    seed: u64,
    traffic: Option<Traffic>,
    kill_at: Option<Instant>,
}

/// The completion of the operations with one killed process.
struct DeathStatistics {
    slowest: Duration,
    late: usize,
    killed: usize,
    messages: u64,
}

/// Which of the two sends: decided by the seed, on both sides.
fn roles(seed: u64) -> (usize, usize) {
    [(0, 2), (2, 0), (2, 2)][seed as usize % 3]
}

fn spawn(kind: usize, number: usize, survivor: &str, folder: &Folder, seed: u64) -> Victim {
    let name = unique("victim");
    // Every other one has a name in the file system.
    let name = if number.is_multiple_of(2) { name } else { folder.file(&name) };
    let mut command = process::command("traffic");
    command
        .env("TMPDIR", folder.path())
        .env("MEMFERRY_TEST_KIND", kind.to_string())
        .env("MEMFERRY_TEST_NAME", &name)
        .env("MEMFERRY_TEST_SURVIVOR", survivor)
        .env("MEMFERRY_TEST_SEED", seed.to_string());
    let child = Child::spawn(&mut command);
    Victim { name, child, seed, traffic: None, kill_at: None }
}

/// The victim: connects, and exchanges messages until it is killed.
fn traffic() {
    let kind = KINDS[setting("MEMFERRY_TEST_KIND").parse::<usize>().unwrap()];
    let seed: u64 = setting("MEMFERRY_TEST_SEED").parse().unwrap();
    let endpoint = kind.builder().open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_SURVIVOR")).unwrap();
    let (sends, receives) = roles(seed);
    let mut talk = Traffic::begin((&endpoint, peer), kind, seed, sends, receives).unwrap();
    loop {
        talk.step().unwrap();
        talk.pause(Duration::from_micros(200));
    }
}

impl Victim {
    /// Exchanges messages with the victim, and kills it. Returns the memory of all messages when
    /// they are complete.
    fn step(
        &mut self,
        endpoint: &Endpoint,
        kind: Kind,
        random: &mut Random,
        account: &mut DeathStatistics,
    ) -> Option<Vec<GuardedBuffer>> {
        let Some(talk) = &mut self.traffic else {
            self.connect(endpoint, kind, random);
            return None;
        };
        talk.step().unwrap();
        if self.kill_at.is_none_or(|moment| Instant::now() < moment) {
            return None;
        }
        let status = self.child.kill();
        let killed_at = Instant::now();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "it failed without a kill: {status}");
        until("all operations with a dead peer end", || talk.pending() == 0);
        let took = killed_at.elapsed();
        account.slowest = account.slowest.max(took);
        account.late += usize::from(took > Duration::from_millis(100));
        account.killed += 1;
        let talk = self.traffic.take().unwrap();
        account.messages += talk.done;
        let check = |(outcome, memory): (Result<_, Error>, GuardedBuffer)| {
            let fine = matches!(outcome, Ok(_) | Err(Error::PeerDisconnected(_)));
            assert!(fine, "another error: {outcome:?}");
            memory.check_guards();
            memory
        };
        Some(talk.end().into_iter().map(check).collect())
    }

    /// Starts as soon as the victim has connected, and chooses the time of the kill.
    fn connect(&mut self, endpoint: &Endpoint, kind: Kind, random: &mut Random) {
        let is_it = |peer: &_| endpoint.name_of(*peer).is_ok_and(|name| name == self.name);
        let Some(peer) = endpoint.peers().into_iter().find(is_it) else {
            let ended = self.child.ended();
            assert!(ended.is_none(), "it failed without a kill: {ended:?}");
            return;
        };
        let (receives, sends) = roles(self.seed);
        self.traffic =
            Traffic::begin((endpoint, peer), kind, random.next_u64(), sends, receives).ok();
        self.kill_at = Some(Instant::now() + Duration::from_micros(random.below(5000)));
    }
}

/// Kills a few at a time, and checks afterwards whether anything is left of them.
fn batch(
    kind: usize,
    endpoint: &Endpoint,
    folder: &Folder,
    random: &mut Random,
    account: &mut DeathStatistics,
) {
    let mut victims: Vec<_> = (0..VICTIMS_PER_BATCH)
        .map(|number| spawn(kind, number, endpoint.name(), folder, random.next_u64() >> 8))
        .collect();
    let mut left_alone: Vec<GuardedBuffer> = Vec::new();
    let deadline = Instant::now() + TIMEOUT;
    while !victims.is_empty() {
        assert!(Instant::now() < deadline, "a victim neither communicates nor exits");
        endpoint.progress();
        victims.retain_mut(|victim| {
            let Some(memory) = victim.step(endpoint, KINDS[kind], random, account) else {
                return true;
            };
            for mut memory in memory {
                fill(memory.bytes_mut(), MARKER);
                left_alone.push(memory);
            }
            false
        });
    }
    assert!(endpoint.peers().is_empty());
    for memory in &left_alone {
        memory.check_guards();
        assert_eq!(first_wrong(memory.bytes(), MARKER), None, "a process still writes");
    }
}

#[test]
fn killed_processes_end_their_messages_and_leave_nothing() {
    if !in_own_process() {
        return;
    }
    let folder = Folder::new("death");
    let seed = Random::fresh_seed();
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    for (number, kind) in KINDS.iter().enumerate() {
        let mut account =
            DeathStatistics { slowest: Duration::ZERO, late: 0, killed: 0, messages: 0 };
        let name = if number % 2 == 0 { unique("survivor") } else { folder.file("survivor") };
        let endpoint = kind.builder().background(number % 3 == 1).open(&name).unwrap();
        let before = resource_usage();
        for _ in 0..BATCHES {
            batch(number, &endpoint, &folder, &mut random, &mut account);
            // A thread that is just waking up may hold descriptors briefly, and an endpoint has
            // three descriptors of its own after it has first blocked on descriptors.
            until("nothing of the killed process is left", || {
                let now = resource_usage();
                now.mappings == before.mappings && now.descriptors <= before.descriptors + 3
            });
        }
        drop(endpoint);
        // A thread that copied for a dead peer may be the one that removes its file.
        until("no file is left of the dead", || folder.contents().is_empty());
        let DeathStatistics { slowest, late, killed, messages } = account;
        say(format_args!(
            "{}: {killed} killed after {messages} messages, the last operation ended {slowest:?} \
             later at worst, {late} times after more than 100 ms",
            kind.name
        ));
        assert!(messages > 0);
    }
    assert_eq!(named_memory(), [] as [String; 0]);
}

#[test]
fn a_call_that_sleeps_returns_when_the_peer_is_killed() {
    if !in_own_process() {
        return;
    }
    let _guard = HangGuard::new("a call that sleeps returns when the peer is killed");
    let mut slowest = Duration::ZERO;
    let naps = [0, 1, 5, 30, 150].map(Duration::from_millis);
    for (round, nap) in naps.into_iter().cycle().take(15).enumerate() {
        let survivor =
            EndpointBuilder::new().background(round % 2 == 1).open(&unique("sleeper")).unwrap();
        let (name, message) = (unique("idle"), vec![1; 1 << 20]);
        let mut command = process::command("idle");
        let mut child = Child::spawn(
            command.env("MEMFERRY_TEST_NAME", &name).env("MEMFERRY_TEST_SURVIVOR", survivor.name()),
        );
        until("it has connected", || survivor.peers().len() == 1);
        let peer = survivor.peers()[0];
        let ended = std::thread::scope(|scope| {
            let (survivor, message) = (&survivor, &message);
            let waiting = scope.spawn(move || {
                let outcome = match round % 3 {
                    0 => survivor.recv(peer, 0, 0, &mut [0; 8]).map(drop),
                    1 => survivor.send(peer, 0, message),
                    _ => survivor.probe(peer, 0, 0).map(drop),
                };
                assert!(matches!(outcome, Err(Error::PeerDisconnected(_))), "{outcome:?}");
                Instant::now()
            });
            // The random delay hides nothing: how a call sleeps depends on how long it has slept.
            std::thread::sleep(nap);
            child.kill();
            let killed = Instant::now();
            waiting.join().unwrap().saturating_duration_since(killed)
        });
        slowest = slowest.max(ended);
    }
    say(format_args!("a sleeping call returned {slowest:?} after the end of its peer at worst"));
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("traffic") => traffic(),
        Some(_) => {
            let endpoint = EndpointBuilder::new().open(&setting("MEMFERRY_TEST_NAME")).unwrap();
            endpoint.connect(&setting("MEMFERRY_TEST_SURVIVOR")).unwrap();
            loop {
                std::thread::park();
            }
        }
        None => {}
    }
}
