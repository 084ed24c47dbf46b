//! Messages between processes with a shared heap: ordinary vectors are mapped by the peer.

#![cfg(all(target_arch = "x86_64", target_env = "gnu"))]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use memferry_message::TAG_ALL;
use memferry_testing::message::filter::refuse_in_process;
use memferry_testing::message::patient;

const RANK: &str = "MEMFERRY_TEST_RANK";
const NAME: &str = "MEMFERRY_TEST_NAME";
const PEERS: &str = "MEMFERRY_SHARED_HEAP_PEERS";
const BYTES: usize = 4 << 20;

fn byte(place: usize, turn: u8) -> u8 {
    (place / 3) as u8 ^ turn
}

/// Mappings of shared heaps in this process: its own, and those of peers.
fn mapped_heaps() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel has the list");
    maps.lines().filter(|line| line.contains("memferry-heap")).count()
}

/// Sends and receives a few times with new vectors, so that freed memory is used again.
fn exchange(rank: usize) {
    let name = std::env::var(NAME).expect("the test sets it");
    let job = patient().join(&name, rank, 2).expect("both ranks join");
    let peer = job.peer(1 - rank);
    for turn in 0..6u8 {
        let mut buffer = vec![0u8; BYTES + usize::from(turn) * 100_000];
        if usize::from(turn) % 2 == rank {
            buffer.iter_mut().enumerate().for_each(|(place, it)| *it = byte(place, turn));
            job.endpoint().send(peer, 7, &buffer).expect("a message leaves");
        } else {
            let received = job.endpoint().recv(peer, 7, TAG_ALL, &mut buffer);
            assert_eq!(received.expect("a message arrives").length, buffer.len() as u64);
            assert!(buffer.iter().enumerate().all(|(place, it)| *it == byte(place, turn)));
        }
    }
    let is_preloaded = std::env::var_os("LD_PRELOAD").is_some();
    let is_for_all = std::env::var(PEERS).is_ok_and(|value| value == "user");
    let access = job.endpoint().peer_access(peer).expect("the peer is connected");
    let has_other = is_preloaded && (is_for_all || access.write);
    assert_eq!(mapped_heaps(), usize::from(is_preloaded) + usize::from(has_other), "{access:?}");
}

/// Rank 1 sends from its heap, receives into it, and is killed. Rank 0 unmaps the heap of the dead.
fn outlive(rank: usize) {
    let name = std::env::var(NAME).expect("the test sets it");
    let job = patient().join(&name, rank, 2).expect("both ranks join");
    let peer = job.peer(1 - rank);
    let mut buffer = vec![rank as u8; BYTES];
    if rank == 1 {
        job.endpoint().send(peer, 7, &buffer).expect("a message leaves");
        job.endpoint().recv(peer, 7, TAG_ALL, &mut buffer).expect("a message arrives");
        // SAFETY: the process ends itself.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    job.endpoint().recv(peer, 7, TAG_ALL, &mut buffer).expect("a message arrives");
    assert!(buffer.iter().all(|byte| *byte == 1));
    assert_eq!(mapped_heaps(), 2);
    job.endpoint().send(peer, 7, &buffer).expect("a message leaves");
    job.endpoint().recv(peer, 7, TAG_ALL, &mut buffer).expect_err("the peer is dead");
    let deadline = Instant::now() + Duration::from_secs(60);
    while mapped_heaps() > 1 {
        assert!(Instant::now() < deadline, "the heap of the dead stays mapped");
        let _ = job.endpoint().recv(peer, 7, TAG_ALL, &mut buffer);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(buffer.iter().all(|byte| *byte == 1));
}

#[test]
fn the_heap_of_a_killed_peer_is_unmapped() {
    if let Ok(rank) = std::env::var(RANK) {
        return outlive(rank.parse().expect("a number"));
    }
    let variables = [ON[0], ON[1], (PEERS, "user")];
    let [survivor, dead] = start_ranks("the_heap_of_a_killed_peer_is_unmapped", &variables);
    assert!(survivor.status.success(), "{survivor:?}");
    assert_eq!(dead.status.signal(), Some(libc::SIGKILL), "{dead:?}");
}

/// Variables that put the library into a rank, with a heap.
const ON: [(&str, &str); 2] =
    [("LD_PRELOAD", "libmemferry_preload.so"), ("MEMFERRY_SHARED_HEAP", "65536")];

/// Starts two ranks of a test of this file that exchange messages, and expects both to succeed.
fn run_ranks(test: &str, variables: &[(&str, &str)]) {
    if let Ok(rank) = std::env::var(RANK) {
        return exchange(rank.parse().expect("a number"));
    }
    for output in start_ranks(test, variables) {
        assert!(output.status.success(), "{output:?}");
    }
}

/// Starts two ranks of a test of this file, and waits for their end.
fn start_ranks(test: &str, variables: &[(&str, &str)]) -> [Output; 2] {
    let program = std::env::current_exe().expect("a test knows where it is");
    let name = format!("preload-{}-{test}", std::process::id());
    let start = |rank: &str| {
        let mut command = Command::new(&program);
        command
            .args([&format!("messages::{test}"), "--exact", "--nocapture"])
            .envs([(RANK, rank), (NAME, &name)]);
        command.envs(variables.iter().map(|(variable, value)| match *variable {
            "LD_PRELOAD" => ("LD_PRELOAD", program.with_file_name(value).into_os_string()),
            variable => (variable, value.into()),
        }));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a rank starts")
    };
    ["0", "1"].map(start).map(|rank| rank.wait_with_output().expect("a rank ends"))
}

#[test]
fn vectors_of_a_program_with_a_shared_heap_are_mapped_by_its_peer() {
    run_ranks("vectors_of_a_program_with_a_shared_heap_are_mapped_by_its_peer", &ON);
}

#[test]
fn vectors_of_other_programs_are_not() {
    run_ranks("vectors_of_other_programs_are_not", &[]);
}

/// Makes rank 1 unable to access the memory of rank 0, as in a container.
fn confine() {
    if std::env::var(RANK).is_ok_and(|rank| rank == "1") {
        refuse_in_process(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev], libc::EPERM);
    }
}

#[test]
fn a_peer_that_cannot_access_the_memory_of_a_process_does_not_get_its_heap() {
    confine();
    run_ranks("a_peer_that_cannot_access_the_memory_of_a_process_does_not_get_its_heap", &ON);
}

#[test]
fn a_setting_gives_the_heap_to_every_peer_of_the_user() {
    confine();
    let variables = [ON[0], ON[1], (PEERS, "user")];
    run_ranks("a_setting_gives_the_heap_to_every_peer_of_the_user", &variables);
}
