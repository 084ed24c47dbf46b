//! Eight processes that start at the same time, one of which is killed at every step of its start.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use memferry_message::{Endpoint, Peer, Source, TAG_ALL};
use memferry_sys::fault::{self, FaultPlan};
use memferry_testing::HangGuard;

use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::{alone, say, unique};
use memferry_testing::pattern::{first_wrong, pattern};

const PROCESSES: usize = 8;
/// The rank that is killed.
const DYING_RANK: usize = PROCESSES - 1;
const BYTES: usize = 50_000;

/// Connects to a process that may not listen yet.
fn connect(endpoint: &Endpoint, name: &str) -> Peer {
    loop {
        match endpoint.connect(name) {
            Ok(peer) => return peer,
            Err(_) => _ = endpoint.progress_timeout(Duration::from_millis(1)),
        }
    }
}

/// One of the eight: connects to the others, sends to each, and receives from each that is alive.
pub(crate) fn start_up() {
    let names: Vec<String> =
        setting("MEMFERRY_TEST_NAMES").split(',').map(ToOwned::to_owned).collect();
    let index: usize = setting("MEMFERRY_TEST_INDEX").parse().unwrap();
    if index == DYING_RANK {
        fault::arm(FaultPlan::Kill { nth: setting("MEMFERRY_TEST_STEP").parse().unwrap() });
    }
    let endpoint = Endpoint::open(&names[index]).unwrap();
    let others: Vec<usize> = (0..DYING_RANK).filter(|&other| other != index).collect();
    let peers: Vec<Peer> = others.iter().map(|&other| connect(&endpoint, &names[other])).collect();
    if index != DYING_RANK {
        // It may have been killed, or not started: an error is returned, and nothing else happens.
        let _ = endpoint.connect(&names[DYING_RANK]);
    }
    // All at the same time: a process that only sends waits for one that receives.
    let receive = |&from: &usize| endpoint.irecv(Source::Any, from as u64, TAG_ALL, vec![0; BYTES]);
    let receives = others.iter().map(|from| receive(from).unwrap()).collect::<Vec<_>>();
    let data = pattern(BYTES, index as u64);
    let send = |peer: Peer| endpoint.isend(peer, index as u64, data.clone()).unwrap();
    let sends: Vec<_> = peers.into_iter().map(send).collect();
    if index == DYING_RANK {
        return;
    }
    for (receive, from) in receives.into_iter().zip(others) {
        let (received, memory) = receive.wait().unwrap();
        assert_eq!(received.length, BYTES as u64);
        assert_eq!(first_wrong(&memory, from as u64), None);
    }
    sends.into_iter().for_each(|send| _ = send.wait().unwrap());
    // Until all have finished, or were killed.
    let over = std::thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    while !over.is_finished() {
        endpoint.progress_timeout(Duration::from_millis(1));
    }
}

#[test]
fn eight_processes_start_beside_one_that_dies_at_any_step() {
    let _alone = alone();
    let (mut deaths, mut passed) = (0, 0);
    for step in 1.. {
        let _guard = HangGuard::new(&format!("eight processes, death at step {step}"));
        let names: Vec<String> = (0..PROCESSES).map(|_| unique("crowd")).collect();
        let start = |index: usize| {
            let mut command = process::command("starter");
            command
                .env("MEMFERRY_TEST_NAMES", names.join(","))
                .env("MEMFERRY_TEST_INDEX", index.to_string())
                .env("MEMFERRY_TEST_STEP", step.to_string());
            let input = if index == DYING_RANK { Stdio::null() } else { Stdio::piped() };
            Child::spawn(command.stdin(input))
        };
        let mut children: Vec<Child> = (0..PROCESSES).map(start).collect();
        let status = children.pop().unwrap().end();
        for mut child in children {
            drop(child.take_input());
            child.finish();
        }
        if status.success() {
            passed += 1;
            if passed == 3 {
                break;
            }
            continue;
        }
        passed = 0;
        assert_eq!(status.signal(), Some(libc::SIGKILL), "it failed without a kill: {status}");
        deaths += 1;
    }
    assert!(deaths > 0);
    say(format_args!("row\tdeaths beside seven starting processes\t{deaths}\tall seven went on"));
}
