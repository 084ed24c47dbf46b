//! Many processes that all send to all, at random, on few cores: every byte and the order of every
//! pair and tag is checked.

use std::time::{Duration, Instant};

use memferry_message::plan::PathKind;
use memferry_testing::in_own_process;
use memferry_testing::message::crowd::{LAST, Member};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{Random, patient, say, unique};

/// One of the processes. Its settings depend on its rank.
fn member() {
    let number = |name: &str| setting(name).parse::<u64>().unwrap();
    let (rank, size) = (number("MEMFERRY_TEST_RANK"), number("MEMFERRY_TEST_SIZE"));
    let mut builder = patient().background(rank % 3 == 1);
    builder = match rank % 4 {
        1 => builder.cross_memory(false),
        2 => builder.path(PathKind::Single).eager_bytes(500),
        3 => builder.path(PathKind::Cooperative),
        _ => builder,
    };
    let job = builder.join(&setting("MEMFERRY_TEST_NAME"), rank as usize, size as usize).unwrap();
    let mut member = Member::new(&job, number("MEMFERRY_TEST_SEED"));
    let began = Instant::now();
    let is_long = |began: Instant, member: &Member<'_>| {
        began.elapsed() > Duration::from_secs(4) && member.cancelled > 0
    };
    while !is_long(began, &member) && began.elapsed() < memferry_testing::message::TIMEOUT {
        for _ in 0..4 {
            member.send();
        }
        member.receive();
    }
    assert!(member.finish() > 0 && member.cancelled > 0);
    // No process closes before all have received everything.
    for other in 0..size as usize {
        job.endpoint().send(job.peer(other), LAST + 1, b"").unwrap();
    }
    for other in 0..size as usize {
        job.endpoint().recv(job.peer(other), LAST + 1, u64::MAX, &mut []).unwrap();
    }
}

fn run_processes(size: usize) {
    let (name, seed) = (unique("crowd"), Random::fresh_seed());
    say(format_args!("{size} processes, seed {seed}"));
    let children: Vec<_> = (0..size)
        .map(|rank| {
            let mut command = process::command("member");
            command
                .env("MEMFERRY_TEST_NAME", &name)
                .env("MEMFERRY_TEST_RANK", rank.to_string())
                .env("MEMFERRY_TEST_SIZE", size.to_string())
                .env("MEMFERRY_TEST_SEED", seed.to_string());
            Child::spawn(&mut command)
        })
        .collect();
    children.into_iter().for_each(Child::finish);
}

#[test]
fn four_processes_send_to_each_other_at_random() {
    if !in_own_process() {
        return;
    }
    run_processes(4);
}

#[test]
fn eight_processes_send_to_each_other_at_random() {
    if !in_own_process() {
        return;
    }
    run_processes(8);
}

#[test]
fn other_processes_begin_here() {
    if process::role().is_some() {
        member();
    }
}
