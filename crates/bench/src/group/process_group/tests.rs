//! Groups made of shell scripts that work, hang, exit, or violate the protocol.

use super::*;
use crate::group::command::GroupTask;

fn script(text: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", text]);
    command
}

fn start(scripts: &[&str]) -> Result<ProcessGroup, String> {
    start_within(REPLY_TIMEOUT, scripts)
}

fn start_within(patience: Duration, scripts: &[&str]) -> Result<ProcessGroup, String> {
    let commands = scripts.iter().map(|text| script(text)).collect();
    ProcessGroup::start(commands, patience)
}

/// Timeout for replies that never come.
const SHORT: Duration = Duration::from_millis(200);

fn command() -> WorkerCommand {
    WorkerCommand { task: GroupTask::Pingpong { bytes: 8 }, iterations: 3 }
}

/// Script that replies to every command with its number of iterations.
const ECHO: &str = "echo ready; while read word size times; do \
                    if [ $word = quit ]; then exit; fi; echo ${times}00; done";

#[test]
fn a_group_answers_order_after_order() {
    let mut group = start(&[ECHO, "cat >/dev/null"]).unwrap();
    for iterations in [1, 20, 300] {
        let timing = group.run(WorkerCommand { iterations, ..command() }).unwrap();
        assert_eq!(timing.total_ns, 100.0 * iterations as f64);
    }
}

#[test]
fn a_group_that_hangs_is_reported_and_ended() {
    let mut group = start(&["echo ready; trap '' TERM; sleep 1000"]).unwrap();
    let leader = group.members[0].id();
    group.timeout = SHORT;
    assert_eq!(group.run(command()), Err("gave no answer within 200ms".into()));
    assert!(!std::path::Path::new(&format!("/proc/{leader}")).exists());
}

#[test]
fn a_leader_that_dies_is_reported_with_its_last_words() {
    let mut group = start(&["echo ready; read line; echo 'out of luck' >&2; exit 3"]).unwrap();
    let reason = group.run(command()).unwrap_err();
    assert!(reason.ends_with("out of luck"), "{reason}");
}

#[test]
fn a_member_that_dies_is_noticed_though_the_leader_lives() {
    let patient = "echo ready; sleep 1000";
    let mut group = start(&[patient, "read line; echo 'no memory' >&2; exit 4"]).unwrap();
    let reason = group.run(command()).unwrap_err();
    assert_eq!(reason, "a member ended (exit status: 4): no memory");
}

#[test]
fn an_error_and_nonsense_are_errors() {
    let mut wrong = start(&["echo ready; read line; echo error a byte got lost; cat"]).unwrap();
    assert_eq!(wrong.run(command()), Err("a byte got lost".into()));
    let mut nonsense = start(&["echo ready; read line; echo fine; cat"]).unwrap();
    assert_eq!(nonsense.run(command()), Err("answered `fine`".into()));
}

#[test]
fn a_group_that_never_gets_ready_is_reported() {
    assert_eq!(start(&["echo hello; cat"]).unwrap_err(), "said `hello` instead of ready");
    let reason = start(&["echo 'bad option' >&2; exit 2"]).unwrap_err();
    assert!(reason.contains("bad option"), "{reason}");
    let silent = start_within(SHORT, &["sleep 1000"]).unwrap_err();
    assert_eq!(silent, "gave no answer within 200ms");
}

#[test]
fn a_program_that_does_not_exist_is_reported() {
    let commands = vec![Command::new("memferry-no-such-program")];
    let reason = ProcessGroup::start(commands, REPLY_TIMEOUT).unwrap_err();
    assert!(reason.starts_with("cannot be started"), "{reason}");
}

#[test]
fn a_dropped_group_leaves_no_process() {
    let group = start(&[ECHO, "sleep 1000"]).unwrap();
    let members: Vec<_> = group.members.iter().map(Child::id).collect();
    drop(group);
    for member in members {
        assert!(!std::path::Path::new(&format!("/proc/{member}")).exists());
    }
}
