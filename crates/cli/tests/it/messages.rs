//! Tests of the commands about messages: the checks of `doctor`, which need a second process, and
//! the explanation of a path.

use assert_cmd::Command;
use serde_json::Value;

/// The program with built-in costs, so that it measures and saves nothing.
fn memferry(words: &[&str]) -> Command {
    let mut command = Command::cargo_bin("memferry").expect("the program is built");
    command.args(words).env("MEMFERRY_PROFILE", "off");
    command
}

fn json(command: &mut Command) -> Value {
    let output = command.assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).expect("the output is one JSON object")
}

fn check<'a>(diagnosis: &'a Value, name: &str) -> &'a Value {
    let checks = diagnosis["messages"].as_array().expect("messages are a list");
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no check {name}"))
}

#[test]
fn doctor_exchanges_messages_with_a_second_process() {
    let diagnosis = json(&mut memferry(&["doctor", "--json"]));
    for name in ["a message", "a large message"] {
        assert_eq!(check(&diagnosis, name)["status"], "ok", "{diagnosis:#}");
    }
    let detail = check(&diagnosis, "a message")["detail"].as_str().unwrap();
    assert!(detail.contains("and back in"), "{detail}");
    assert_eq!(check(&diagnosis, "settings")["detail"], "no variable of messages is set");
    assert!(check(&diagnosis, "costs")["detail"].as_str().unwrap().contains("built-in"));
}

#[test]
fn doctor_names_the_gate_that_keeps_processes_apart() {
    let diagnosis = json(memferry(&["doctor", "--json"]).env("MEMFERRY_CMA", "off"));
    let access = check(&diagnosis, "cross-memory access");
    assert_eq!(access["status"], "warn");
    assert!(access["fix"].as_str().unwrap().contains("MEMFERRY_CMA=off"), "{access}");
    let large = check(&diagnosis, "a large message");
    assert_eq!(large["status"], "ok", "{large}");
    assert!(large["detail"].as_str().unwrap().contains("pipeline"), "{large}");
    assert_eq!(check(&diagnosis, "settings")["detail"], "MEMFERRY_CMA=off");
}

#[test]
fn doctor_fails_if_no_message_arrives() {
    let assert = memferry(&["doctor"]).env("MEMFERRY_PATH", "elsewhere").assert().code(1);
    let complaint = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(complaint.contains("not working: a message"), "{complaint}");
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    assert!(text.contains("MEMFERRY_PATH=\"elsewhere\" is not valid"), "{text}");
}

#[test]
fn a_partner_ends_with_its_standard_input() {
    let name = format!("partner-test-{}", std::process::id());
    let output = memferry(&["partner", "--name", &name]).write_stdin("").assert().success();
    // The process may exit before it prints that it is ready.
    let said = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(["", "ready\n"].contains(&said.as_str()), "{said}");
}

#[test]
fn explain_tells_the_path_of_a_message_in_every_situation() {
    let explanation = json(&mut memferry(&["explain", "--message", "1MiB", "--json"]));
    assert_eq!(explanation["bytes"], 1 << 20);
    let cases = explanation["cases"].as_array().unwrap();
    let path = |memory: &str, permitted: bool| {
        let case =
            cases.iter().find(|case| case["memory"] == memory && case["permitted"] == permitted);
        case.expect("it is explained")["path"].as_str().unwrap().to_owned()
    };
    assert_eq!(path("ordinary", true), "cooperative");
    assert_eq!(path("ordinary", false), "pipeline");
    assert!(cases.iter().all(|case| case["reason"].as_str().is_some_and(|why| !why.is_empty())));
    let eager = &explanation["lines"][1];
    assert!(eager["path"] == "eager" && eager["startup_ns"].as_f64().unwrap() > 0.0, "{eager}");
}

#[test]
fn explain_says_which_limits_were_set_by_hand() {
    let mut command = memferry(&["explain", "--message", "100k"]);
    let output = command.env("MEMFERRY_EAGER_BYTES", "1000000").assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    assert!(text.contains("path      eager"), "{text}");
    assert!(text.contains("set by MEMFERRY_EAGER_BYTES"), "{text}");
}

#[test]
fn explain_needs_a_copy_or_a_message_and_not_both() {
    memferry(&["explain"]).assert().code(2);
    memferry(&["explain", "4k", "--message", "4k"]).assert().code(2);
    let complaint = memferry(&["explain", "--message", "4apples"]).assert().code(2);
    let complaint = String::from_utf8(complaint.get_output().stderr.clone()).unwrap();
    assert!(complaint.contains("`apples` is not a unit"), "{complaint}");
}

#[test]
fn costs_are_measured_once_and_kept_beside_the_profile_of_copies() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("profile");
    let mut command = memferry(&["explain", "--message", "4k", "--json"]);
    let first = json(command.env("MEMFERRY_PROFILE", &path));
    let mut command = memferry(&["explain", "--message", "4k", "--json"]);
    let second = json(command.env("MEMFERRY_PROFILE", &path));
    let file = folder.path().join("profile.messages");
    // A process with one core measures and saves nothing.
    let Ok(kept) = std::fs::read_to_string(&file) else { return };
    if kept.contains("not_kept") {
        assert!(first["profile"].as_str().unwrap().contains("not kept, because"), "{first}");
    } else {
        assert_eq!(second["profile"], format!("from {}", file.display()));
        assert_eq!(first["costs"], second["costs"], "measured once");
    }
}
