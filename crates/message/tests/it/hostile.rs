//! Peers that write arbitrary bytes into all shared memory. The attacked process neither crashes
//! nor hangs, writes only into its own buffers, and continues to communicate with its honest peers.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use memferry_message::Endpoint;
use memferry_message::ring::cells::CellWords;
use memferry_message::ring::claims::SenderProgress;
use memferry_sys::shared_memory::SealedMemory;
use memferry_testing::message::prey::{self, VictimEndpoint};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::raw_peer::{RawPeer, first, kind};
use memferry_testing::message::talk::{KINDS, Traffic};
use memferry_testing::message::{Random, TIMEOUT, say, unique};

/// How long each attack lasts, unless `MEMFERRY_HOSTILE_SECONDS` sets it.
const DEFAULT_DURATION: Duration = Duration::from_millis(1500);

fn attack_duration() -> Duration {
    let seconds = std::env::var("MEMFERRY_HOSTILE_SECONDS").ok();
    seconds.and_then(|text| text.parse().ok()).map_or(DEFAULT_DURATION, Duration::from_secs)
}

const ATTACKERS: u64 = 2;

fn attack(role: &str) {
    let seed = Random::fresh_seed();
    let endpoint = Endpoint::open(&unique("prey")).unwrap();
    let name = endpoint.name().to_owned();
    let spawn = |role: &str, seed: u64| {
        let mut command = process::command(role);
        command.env("MEMFERRY_TEST_NAME", unique("other")).env("MEMFERRY_TEST_PREY", &name);
        Child::spawn(command.env("MEMFERRY_TEST_SEED", seed.to_string()))
    };
    let mut honest = spawn("honest", 0);
    let mut prey = VictimEndpoint::new(endpoint, seed);
    let mut attackers: Vec<_> = (0..ATTACKERS).map(|n| spawn(role, seed + n)).collect();
    let (began, long) = (Instant::now(), attack_duration());
    // On a busy machine it takes a while until the attackers connect.
    let is_attacked = |prey: &VictimEndpoint| prey.completed + prey.failed > 0;
    while began.elapsed() < long || (!is_attacked(&prey) && began.elapsed() < TIMEOUT) {
        prey.exchange();
        for attacker in &mut attackers {
            assert!(attacker.ended().is_none(), "the attacker itself has failed");
        }
    }
    let met = prey.completed + prey.failed;
    drop(attackers);
    prey.settle();
    prey.exchange();
    assert!(honest.ended().is_none());
    say(format_args!(
        "{role}, seed {seed}: {} messages with the honest peer, the slowest took {:?}; with the \
         attackers {} operations ended well, {} did not",
        prey.exchanged, prey.slowest, prey.completed, prey.failed
    ));
    // A row of the table of `cargo xtask faults`.
    say(format_args!(
        "row\trounds with a peer that lies\t{met}\t{role}, {} s, {} messages with an honest one",
        began.elapsed().as_secs(),
        prey.exchanged
    ));
    assert!(met > 0, "no attacker was ever connected");
    prey.endpoint.close();
}

#[test]
fn random_bytes_all_over_the_shared_memory() {
    attack("scribbles");
}

#[test]
fn random_bytes_all_over_the_shared_memory_amid_real_messages() {
    attack("scribbles and talks");
}

#[test]
fn random_cells_through_the_real_rings() {
    attack("random cells");
}

/// Connects repeatedly, and attacks until it is disconnected.
fn repeat_attack(mut worst: impl FnMut(&mut RawPeer, &mut Random)) {
    let mut random = Random::new(setting("MEMFERRY_TEST_SEED").parse().unwrap());
    let prey = setting("MEMFERRY_TEST_PREY");
    loop {
        if let Some(mut peer) = RawPeer::connect(&prey) {
            for _ in 0..random.below(1000) {
                worst(&mut peer, &mut random);
                if peer.is_lost() {
                    break;
                }
            }
        }
    }
}

fn scribbles() {
    repeat_attack(|peer, random| {
        for _ in 0..random.below(10) {
            scribble(peer.bytes.as_ptr(), peer.bytes.len(), random);
        }
        peer.wake();
    });
}

/// Writes random words over a random range, short ones more often than long ones.
fn scribble(start: *mut u8, length: usize, random: &mut Random) {
    let words = length / 8;
    let count = 1 << random.below(15);
    let first = random.below(words as u64) as usize;
    let value = random.next_u64();
    for index in first..(first + count).min(words) {
        let value = match value % 5 {
            0 => value >> 32,
            1 => value.wrapping_add(index as u64),
            2 => random.next_u64(),
            // The start of a cell: a kind and a stamp.
            3 => random.below(14) << 32 | (index as u64 / 8 % 256 + 1 + 256 * random.below(3)),
            _ => 0,
        };
        // SAFETY: inside the mapping; that other processes read and write it too is the subject of
        // the test.
        unsafe { start.cast::<u64>().add(index).write_volatile(value) };
    }
}

/// A real endpoint, whose shared memory changes under it and its peer.
fn scribbles_and_talks() {
    let mut random = Random::new(setting("MEMFERRY_TEST_SEED").parse().unwrap());
    loop {
        let kind = random.pick(&KINDS);
        let endpoint = kind.builder().open(&unique("scribbler")).unwrap();
        let Ok(peer) = endpoint.connect(&setting("MEMFERRY_TEST_PREY")) else { continue };
        let Ok(mut talk) = Traffic::begin((&endpoint, peer), kind, random.next_u64(), 2, 2) else {
            continue;
        };
        let last = random.below(300);
        for turn in 0..last {
            if talk.try_step().is_err() {
                break;
            }
            if turn > last / 2 {
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                let ours = maps.lines().find(|line| line.contains("memfd:memferry-connection"));
                let Some((from, to)) =
                    ours.and_then(|line| line.split_once(' ')?.0.split_once('-'))
                else {
                    break;
                };
                let number = |text| usize::from_str_radix(text, 16).unwrap();
                let (from, to) = (number(from), number(to));
                scribble(from as *mut u8, to - from, &mut random);
            }
        }
        endpoint.close();
        talk.abandon();
    }
}

/// A number that is valid, nearly valid, or invalid.
fn number(random: &mut Random, seen: &[CellWords]) -> u64 {
    match random.below(6) {
        0 => random.next_u64(),
        1 => random.below(8),
        2 => u64::MAX - random.below(3),
        3 => 1 << random.below(64),
        _ if seen.is_empty() => random.below(1 << 21),
        _ => random.pick(seen)[random.below(7) as usize + 1],
    }
}

/// A span inside the bounce ring, or outside.
fn span(random: &mut Random) -> u64 {
    let length = random.pick(&[1, 24, 48, 4096, 24 * 1024, 100_000, 512 << 10]);
    let offset = random.below(600 << 10);
    if random.chance(10) { random.next_u64() } else { offset << 32 | length }
}

fn random_cell(random: &mut Random, seen: &[CellWords], own: u64) -> CellWords {
    let kinds = [kind::INLINE, kind::EAGER, kind::FRAGMENT, kind::REQUEST, kind::ACCEPT];
    let kind = if random.chance(3) { random.below(14) as u8 } else { random.pick(&kinds) };
    if kind == 12 && !random.chance(50) {
        return random_cell(random, seen, own);
    }
    let mut words = [0; 8].map(|_: u64| number(random, seen));
    let (small, large) = (random.pick(&[0, 1, 48, 49, 255]), random.next_u64() as u16);
    words[0] = first(kind, small, large);
    match kind {
        kind::EAGER => words[3] = span(random),
        kind::FRAGMENT => words[2] = span(random),
        kind::REQUEST | kind::ACCEPT => {
            words[4] =
                random.pick(&[own, own + 5000, 8, random.clone().next_u64(), u64::MAX - 4096]);
            // One segment, or a list of some length.
            let count = if random.chance(3) { random.below(1100) } else { 0 };
            words[5] = count << 32 | random.below(4);
            if count > 0 {
                words[4] = random.below(512 << 10) << 32 | (count * 24);
            }
            let generation = random.below(3) << 48;
            words[6] =
                generation | random.below(33) << 32 | random.pick(&[1, 4096, 65536, 1 << 20]);
            if kind == kind::ACCEPT && !random.chance(4) {
                // A reply to a real request.
                let request = seen.iter().rev().find(|w| (w[0] >> 32) as u8 == kind::REQUEST);
                words[1] = request.map_or(0, |request| request[3]);
                words[3] = request.map_or(0, |request| request[2]);
            }
        }
        _ => {}
    }
    words
}

fn random_cells() {
    let memory = vec![7u8; 4 << 20];
    let own = memory.as_ptr() as u64;
    let mut seen: Vec<CellWords> = Vec::new();
    repeat_attack(move |peer, random| {
        while let Some(words) = peer.peek() {
            seen.push(words);
            peer.consumer.advance();
        }
        if seen.len() > 50 {
            seen.drain(..25);
        }
        if !random.chance(5) {
            peer.consumer.publish();
        }
        for _ in 0..random.below(4) {
            let words = random_cell(random, &seen, own);
            if !peer.write(&words) {
                std::thread::yield_now();
            }
        }
        play_with_records(peer, random);
        if random.chance(100) {
            let memory = SealedMemory::new("region", 1 << 20).unwrap();
            peer.send_region(random.below(4) as u32, memory.as_fd());
        }
        if random.chance(300) {
            let _ = peer.socket.send(&[1; 9][..random.below(9) as usize + 1], &[]);
        }
    });
    drop(memory);
}

/// Opens, claims and finishes chunks that may or may not exist.
fn play_with_records(peer: &RawPeer, random: &mut Random) {
    let record = peer.memory.claims(random.chance(2), random.below(32) as usize);
    let (generation, chunks) = (random.below(4) as u16, random.below(20));
    match random.below(5) {
        0 => record.open(generation),
        1 => drop(record.close(generation, chunks)),
        2 => drop(record.claim_back(generation, chunks)),
        3 => {
            let returned = random.chance(3).then_some(random.below(20));
            record.publish(generation, SenderProgress { chunks, returned });
        }
        _ => {}
    }
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("honest") => {
            prey::honest_peer(&setting("MEMFERRY_TEST_NAME"), &setting("MEMFERRY_TEST_PREY"));
        }
        Some("scribbles") => scribbles(),
        Some("scribbles and talks") => scribbles_and_talks(),
        Some(_) => random_cells(),
        None => {}
    }
}
