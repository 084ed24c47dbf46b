//! Tests of the worker processes of benches: two processes of this program execute commands
//! together.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use memferry_sys::affinity;

fn member(kind: &str, rank: usize, name: &str, folder: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memferry"));
    let cores = affinity::allowed_cores();
    let core = cores[rank % cores.len()].to_string();
    command.args(["worker", kind, "--size", "2", "--core", &core, "--name", name]);
    command.args(["--rank", &rank.to_string()]).env("TMPDIR", folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program is built")
}

fn broadcast(members: &mut [Child], line: &str) {
    for member in members {
        writeln!(member.stdin.as_mut().expect("it has ears"), "{line}").expect("it listens");
    }
}

const PINGPONG: [&str; 4] = ["pingpong 0 3", "pingpong 8 3", "pingpong 8 3", "pingpong 300000 2"];

/// Makes two members execute commands, and returns the replies of the leader.
fn run_members(kind: &str, name: &str, orders: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let mut members = [0, 1].map(|rank| member(kind, rank, name, folder.path()));
    let mut answers = BufReader::new(members[0].stdout.take().expect("it has a mouth"));
    let mut answer = || {
        let mut line = String::new();
        answers.read_line(&mut line).expect("it speaks");
        line.trim().to_owned()
    };
    let mut heard = vec![answer()];
    for order in orders {
        broadcast(&mut members, order);
        heard.push(answer());
    }
    broadcast(&mut members, "quit");
    for mut member in members {
        assert!(member.wait().expect("it ends").success());
        let mut rest = String::new();
        if let Some(mut output) = member.stdout.take() {
            output.read_to_string(&mut rest).expect("it is silent");
        }
        assert_eq!(rest, "", "only the leader answers");
    }
    heard
}

/// Removes the shared memory that is named after a group: iceoryx2 leaves a segment for nodes that
/// never start.
fn remove_leftovers(name: &str) {
    for file in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        if file.file_name().to_string_lossy().starts_with(name) {
            let _ = std::fs::remove_file(file.path());
        }
    }
}

fn expect_success(kind: &str, orders: &[&str]) {
    let name = format!("memferry-test-{}-{kind}", std::process::id());
    let heard = run_members(kind, &name, orders);
    remove_leftovers(&name);
    assert_eq!(heard[0], "ready", "{kind}");
    for (answer, order) in heard[1..].iter().zip(orders) {
        let total_ns = answer.split(' ').next().and_then(|word| word.parse::<f64>().ok());
        assert!(total_ns.is_some_and(|ns| ns > 0.0), "{kind}, {order}: {answer}");
    }
}

#[test]
fn two_members_of_ours_carry_out_every_order() {
    let others = ["alltoall 1000 3", "alltoall 200000 2", "is 16 2", "ft 16 2", "ft 16 1"];
    for kind in ["memferry", "shareable"] {
        expect_success(kind, &[&PINGPONG[..], &others[..]].concat());
    }
}

#[test]
fn two_members_carry_messages_in_every_way() {
    let streams = ["stream 1000 3", "stream 300000 2"];
    for kind in ["link", "cross-memory", "two-copies", "loopback-tcp", "unix-socket", "pipe"] {
        expect_success(kind, &[&PINGPONG[1..], &streams[..]].concat());
    }
}

#[test]
fn a_receiver_of_tasks_works_through_them_in_every_form() {
    let orders = ["receive-hot 4096 3", "receive-hot 300000 2", "receive-cold 70000 2"];
    for form in ["naive", "two-phase", "three-phase", "background"] {
        expect_success(&format!("receive-{form}"), &orders);
    }
}

#[test]
fn two_members_of_other_libraries_play_pingpong() {
    for kind in ["iceoryx", "ipc-channel"] {
        expect_success(kind, &PINGPONG);
    }
}

#[test]
fn a_member_that_does_not_understand_says_so_and_ends() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let name = format!("memferry-test-{}", std::process::id());
    let mut members = [0, 1].map(|rank| member("memferry", rank, &name, folder.path()));
    // A valid command first, so that both members have joined.
    broadcast(&mut members, "pingpong 8 1");
    broadcast(&mut members, "dance 8 1");
    for mut member in members {
        assert!(!member.wait().expect("it ends").success());
    }
}
