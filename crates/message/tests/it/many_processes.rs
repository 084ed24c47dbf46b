//! 256 processes on one machine: each sends small messages to each, and some of them are killed
//! meanwhile. The others get an error for the killed ones alone, every message of the others once,
//! and nothing is left behind.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use memferry_message::{
    EndpointBuilder, Error, FailedOperation, Job, MessageStatus, Source, TAG_ALL,
};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::traces::{Folder, named_memory, resource_usage};
use memferry_testing::message::{Random, say, unique, until};
use memferry_testing::{HangGuard, in_own_process};

const RANKS: usize = 256;
/// Messages from each rank to each rank.
const ROUNDS: u64 = 2;
const VICTIMS: usize = 8;
/// Tag of the messages of the rounds, and of the last message of those that are not killed.
const TAG: u64 = 1;
const LAST: u64 = 2;
/// Upper bound on the bytes of a message.
const MAX_BYTES: u64 = 200;
/// Nothing takes this long unless it hangs, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(240);

/// The message of a round from one rank to another.
fn message(from: usize, to: usize, round: u64) -> Vec<u8> {
    let seed = ((from as u64) << 40) | ((to as u64) << 20) | round;
    let mut random = Random::new(seed);
    let bytes = random.below(MAX_BYTES);
    (0..bytes).map(|_| random.next_u64() as u8).collect()
}

/// One rank, and what it knows of the others.
struct Rank<'a> {
    job: &'a Job,
    /// Ranks with which an operation has failed.
    lost: BTreeSet<usize>,
    /// Ranks from which a receive has failed: none of their messages is left.
    silent: BTreeSet<usize>,
}

impl Rank<'_> {
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, size) = (self.job.rank(), self.job.size());
        // Each rank starts with the next higher one, so that not all send to the same one.
        (1..size).map(move |step| (own + step) % size)
    }

    /// Returns what an operation with a rank has completed with, or `None` if that rank was lost.
    fn outcome<B>(
        &mut self,
        other: usize,
        outcome: Result<(MessageStatus, B), FailedOperation<B>>,
    ) -> Option<(MessageStatus, B)> {
        match outcome {
            Ok(received) => Some(received),
            Err(FailedOperation { error: Error::PeerDisconnected(_), .. }) => {
                self.lost.insert(other);
                None
            }
            Err(failed) => panic!("rank {} with {other}: {}", self.job.rank(), failed.error),
        }
    }

    /// Sends a message to every other rank and receives one from it.
    fn exchange(&mut self, tag: u64, round: u64) {
        let (own, job) = (self.job.rank(), self.job);
        let mut receives = Vec::new();
        for other in self.others() {
            let buffer = vec![0u8; MAX_BYTES as usize];
            match job.endpoint().irecv(job.peer(other), tag, TAG_ALL, buffer) {
                Ok(receive) => receives.push((other, receive)),
                Err(failed) => {
                    self.outcome(other, Err(failed));
                    self.silent.insert(other);
                }
            }
        }
        let mut sends = Vec::new();
        for other in self.others() {
            match job.endpoint().isend(job.peer(other), tag, message(own, other, round)) {
                Ok(send) => sends.push((other, send)),
                Err(failed) => drop(self.outcome(other, Err(failed))),
            }
        }
        for (other, receive) in receives {
            let outcome = receive.wait_timeout(PATIENCE);
            let outcome = outcome.unwrap_or_else(|_| {
                panic!("rank {own} hears nothing of {other}, tag {tag}, round {round}")
            });
            let Some((status, buffer)) = self.outcome(other, outcome) else {
                self.silent.insert(other);
                continue;
            };
            assert!(!self.silent.contains(&other), "rank {own}: {other} speaks after its end");
            let (expected, length) = (message(other, own, round), status.length as usize);
            assert_eq!(buffer[..length], expected, "rank {own}, from {other}, round {round}");
        }
        for (other, send) in sends {
            let outcome = send.wait_timeout(PATIENCE);
            let outcome = outcome
                .unwrap_or_else(|_| panic!("rank {own} cannot send to {other}, round {round}"));
            drop(self.outcome(other, outcome));
        }
    }
}

/// Writes one line to the test.
fn report(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// One of the processes: joins, exchanges, and exits when the test closes its input.
fn rank() {
    let number = |name: &str| setting(name).parse::<usize>().unwrap();
    let rank = number("MEMFERRY_TEST_RANK");
    let before = resource_usage();
    let builder = EndpointBuilder::new().connect_timeout(PATIENCE);
    let job = builder.join(&setting("MEMFERRY_TEST_NAME"), rank, RANKS).unwrap();
    report(&format!("joined {rank}"));
    let mut state = Rank { job: &job, lost: BTreeSet::new(), silent: BTreeSet::new() };
    for round in 0..ROUNDS {
        state.exchange(TAG, round);
        report(&format!("round {rank}"));
    }
    if number("MEMFERRY_TEST_IS_VICTIM") == 1 {
        // No rank sends this: it waits until it is killed.
        let _ = job.endpoint().recv(job.peer(rank), LAST + 1, TAG_ALL, &mut [0u8; 1]);
        unreachable!("a victim is killed");
    }
    state.exchange(LAST, ROUNDS);
    let mut line = format!("done {rank}");
    for other in &state.lost {
        write!(line, " {other}").unwrap();
    }
    let extra = job.endpoint().iprobe(Source::Any, 0, 0).unwrap();
    assert!(extra.is_none(), "rank {rank}: a message that no receive has taken");
    report(&line);
    // Returns when the test closes the pipe: no rank closes while others still receive.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(job);
    until("the descriptors and mappings of the job are gone", || {
        let now = resource_usage();
        now.mappings <= before.mappings && now.descriptors <= before.descriptors
    });
}

/// Processes of the job, and what they report.
struct Crowd {
    name: String,
    children: Vec<Child>,
    victims: Vec<usize>,
    reports: BufReader<std::io::PipeReader>,
    /// Closed to release the processes.
    release: Option<std::io::PipeWriter>,
    /// Lines of each kind, in the order of arrival.
    lost: Vec<Option<BTreeSet<usize>>>,
}

impl Crowd {
    fn start(folder: &Folder, random: &mut Random) -> Self {
        let name = unique("many");
        let mut victims = Vec::new();
        while victims.len() < VICTIMS {
            let victim = random.below(RANKS as u64) as usize;
            if !victims.contains(&victim) {
                victims.push(victim);
            }
        }
        let (reports, to_test) = std::io::pipe().unwrap();
        let (from_test, release) = std::io::pipe().unwrap();
        let children = (0..RANKS)
            .map(|rank| {
                let mut command = process::command("rank");
                command
                    .env("TMPDIR", folder.path())
                    .env("MEMFERRY_TEST_NAME", &name)
                    .env("MEMFERRY_TEST_RANK", rank.to_string())
                    .env("MEMFERRY_TEST_IS_VICTIM", u8::from(victims.contains(&rank)).to_string())
                    .stdin(Stdio::from(from_test.try_clone().unwrap()))
                    .stderr(Stdio::from(to_test.try_clone().unwrap()));
                Child::spawn(&mut command)
            })
            .collect();
        let (reports, release, lost) = (BufReader::new(reports), Some(release), vec![None; RANKS]);
        Self { name, children, victims, reports, release, lost }
    }

    /// The next line: its first word and its numbers.
    fn next(&mut self) -> (String, Vec<usize>) {
        let mut line = String::new();
        self.reports.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace();
        let word = words.next().unwrap_or("nothing").to_owned();
        let numbers: Result<Vec<usize>, _> = words.map(str::parse).collect();
        match numbers {
            Ok(numbers) if !numbers.is_empty() => (word, numbers),
            _ => {
                // A panic. What follows may explain it.
                self.children.clear();
                let mut rest = String::new();
                let _ = self.reports.read_to_string(&mut rest);
                panic!("a process failed: {line}{rest}");
            }
        }
    }

    /// Kills each victim somewhere in its rounds, until all others are done.
    fn kill_and_wait(&mut self, random: &mut Random) {
        let rounds_before_death: Vec<_> =
            self.victims.iter().map(|_| random.below(ROUNDS + 1)).collect();
        let (mut rounds, mut joined, mut killed) = (vec![0; RANKS], 0, 0);
        let mut done = 0;
        while done < RANKS - VICTIMS {
            let (word, numbers) = self.next();
            match word.as_str() {
                "joined" => joined += 1,
                "round" => rounds[numbers[0]] += 1,
                "done" => {
                    done += 1;
                    self.lost[numbers[0]] = Some(numbers[1..].iter().copied().collect());
                }
                word => panic!("unknown: {word}"),
            }
            if joined < RANKS {
                continue;
            }
            for (victim, rounds_needed) in self.victims.iter().zip(&rounds_before_death) {
                let is_alive = self.children[*victim].ended().is_none();
                if is_alive && rounds[*victim] >= *rounds_needed {
                    std::thread::sleep(Duration::from_micros(random.below(20_000)));
                    let status = self.children[*victim].kill();
                    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
                    killed += 1;
                }
            }
        }
        assert_eq!(killed, VICTIMS);
    }
}

/// The sockets of a job that are open in this network namespace.
fn sockets_of(name: &str) -> usize {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    sockets.lines().filter(|line| line.contains(name)).count()
}

#[test]
fn of_256_processes_that_all_talk_some_are_killed_and_the_others_lose_nothing_else() {
    if !in_own_process() {
        return;
    }
    let _guard = HangGuard::new("256 processes that all talk");
    let (folder, seed) = (Folder::new("many"), Random::fresh_seed());
    say(format_args!("seed {seed}"));
    let mut random = Random::new(seed);
    let before = resource_usage();
    let began = Instant::now();
    let mut crowd = Crowd::start(&folder, &mut random);
    crowd.kill_and_wait(&mut random);
    let victims: BTreeSet<_> = crowd.victims.iter().copied().collect();
    for (rank, lost) in crowd.lost.iter().enumerate() {
        let expected = (!victims.contains(&rank)).then_some(&victims);
        assert_eq!(lost.as_ref(), expected, "what rank {rank} has lost");
    }
    drop(crowd.release.take());
    for (rank, child) in crowd.children.iter_mut().enumerate() {
        let status = child.end();
        assert!(status.success() || victims.contains(&rank), "rank {rank}: {status}");
    }
    assert_eq!(sockets_of(&crowd.name), 0);
    assert_eq!(folder.contents(), [] as [String; 0]);
    assert_eq!(named_memory(), [] as [String; 0]);
    drop(crowd);
    assert_eq!(resource_usage(), before);
    say(format_args!("{RANKS} processes, {VICTIMS} killed: {:?}", began.elapsed()));
}

#[test]
fn other_processes_begin_here() {
    if process::role().is_some() {
        rank();
    }
}
