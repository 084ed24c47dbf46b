//! Teams whose ranks are threads, and teams whose ranks are processes.

#![allow(dead_code, reason = "every test program uses a part of it")]

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use memferry_collective::{Invitation, NoProgress, Team, Tuning};
use memferry_testing::message::process::{self, Child};

/// How long tests wait for ranks.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(200);

/// Sizes at which all paths are used with little data.
pub(crate) fn small_tuning(allow_cross_memory: bool) -> Tuning {
    let mut tuning = Tuning::default();
    tuning.staging_bytes = 4096;
    tuning.direct_reduce_bytes = 1024;
    tuning.reduce_cross_bytes = 8 << 10;
    tuning.broadcast_cross_bytes = 8 << 10;
    tuning.exchange_cross_bytes = 1024;
    tuning.chunk_bytes = 1024;
    tuning.allow_cross_memory = allow_cross_memory;
    tuning
}

/// Runs a function on each rank of a team of threads.
pub(crate) fn threads<R: Send>(
    size: usize,
    tuning: Tuning,
    run: impl Fn(&mut Team) -> R + Sync,
) -> Vec<R> {
    let invitation = Invitation::with_tuning(size, tuning).unwrap();
    let bytes = *invitation.bytes();
    std::thread::scope(|scope| {
        let run = &run;
        let others: Vec<_> = (1..size)
            .map(|rank| {
                scope.spawn(move || {
                    let joined = Team::join(&bytes, rank, &mut NoProgress, TIMEOUT);
                    run(&mut joined.unwrap())
                })
            })
            .collect();
        let mut results = vec![run(&mut invitation.accept(&mut NoProgress, TIMEOUT).unwrap())];
        results.extend(others.into_iter().map(|thread| thread.join().unwrap()));
        results
    })
}

/// Starts processes as the ranks from 1 on, and returns them with the team of rank 0.
#[track_caller]
pub(crate) fn processes(role: &str, size: usize, tuning: Tuning) -> (Vec<Child>, Team) {
    let invitation = Invitation::with_tuning(size, tuning).unwrap();
    let hex: String = invitation.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut children = Vec::new();
    for rank in 1..size {
        // Not in a closure: the caller's file names the entry.
        let mut command = process::command(role);
        command.env("MEMFERRY_TEST_RANK", rank.to_string()).env("MEMFERRY_TEST_TEAM", &hex);
        children.push(Child::spawn(command.stdin(Stdio::piped())));
    }
    (children, invitation.accept(&mut NoProgress, TIMEOUT).unwrap())
}

/// Joins the team of the process that started this one.
pub(crate) fn join() -> Team {
    let hex = process::setting("MEMFERRY_TEST_TEAM");
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    let invitation: Vec<_> = (0..hex.len() / 2).map(byte).collect();
    let rank = process::setting("MEMFERRY_TEST_RANK").parse().unwrap();
    Team::join(&invitation, rank, &mut NoProgress, TIMEOUT).unwrap()
}

/// Ends this process without any cleaning up, as a crash does.
pub(crate) fn crash() -> ! {
    let _ = std::io::stderr().flush();
    // SAFETY: a signal to this process itself, which it cannot handle.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("a killed process does not go on")
}
