//! The program as a user meets it: what it prints, where it prints it, and how it ends.

use assert_cmd::Command;

/// With built-in values, so that nothing is measured and nothing is saved.
fn memferry(words: &[&str]) -> Command {
    let mut command = Command::cargo_bin("memferry").expect("the program is built");
    command.args(words).env("MEMFERRY_PROFILE", "off");
    command
}

fn stdout(words: &[&str]) -> String {
    let output = memferry(words).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("the output is text")
}

fn usage_complaint(words: &[&str]) -> String {
    let assert = memferry(words).assert().code(2);
    assert!(assert.get_output().stdout.is_empty());
    String::from_utf8(assert.get_output().stderr.clone()).expect("the complaint is text")
}

#[test]
fn the_help_names_every_command() {
    let help = stdout(&["--help"]);
    for command in ["bench", "doctor", "explain", "completions"] {
        assert!(help.contains(command), "{command}");
    }
}

#[test]
fn the_help_of_bench_names_its_options() {
    let help = stdout(&["bench", "--help"]);
    for option in ["[NAME]", "--quick", "--all", "--json", "--report <FILE.html>", "Benches:"] {
        assert!(help.contains(option), "{option}");
    }
}

#[test]
fn a_bad_size_is_a_usage_error_that_says_what_is_wrong() {
    let complaint = usage_complaint(&["explain", "4apples"]);
    assert!(complaint.contains("`apples` is not a unit"), "{complaint}");
}

#[test]
fn an_unknown_bench_is_a_usage_error_that_lists_the_known() {
    let complaint = usage_complaint(&["bench", "copy-latencies"]);
    assert!(complaint.contains("there is no bench `copy-latencies`; available:"), "{complaint}");
}

#[test]
fn hot_and_cold_together_are_a_usage_error() {
    usage_complaint(&["explain", "4k", "--hot", "--cold"]);
}

#[test]
fn no_command_at_all_is_a_usage_error() {
    memferry(&[]).assert().code(2);
}

#[test]
fn a_completion_script_knows_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&["completions", shell]);
        assert!(script.contains("doctor") && script.contains("explain"), "{shell}");
    }
}

#[test]
fn the_json_of_doctor_is_one_object_with_checks() {
    let json: serde_json::Value = serde_json::from_str(&stdout(&["doctor", "--json"])).unwrap();
    let checks = json["checks"].as_array().unwrap();
    assert!(checks.iter().any(|check| check["name"] == "huge pages"));
    assert!(json["machine"]["cores"].as_u64().unwrap() >= 1);
}

#[test]
fn doctor_tells_of_copy_devices_whether_there_are_any_or_not() {
    let json: serde_json::Value = serde_json::from_str(&stdout(&["doctor", "--json"])).unwrap();
    let devices = json["devices"].as_array().unwrap();
    for name in ["IOMMU", "VFIO", "device memory", "QEMU"] {
        assert!(devices.iter().any(|check| check["name"] == name), "{name}");
    }
    assert!(stdout(&["doctor"]).contains("copy devices\n"));
}

#[test]
fn doctor_tells_of_gpus_whether_there_are_any_or_not() {
    let json: serde_json::Value = serde_json::from_str(&stdout(&["doctor", "--json"])).unwrap();
    let gpus = json["gpus"].as_array().unwrap();
    for name in ["GPU driver", "MEMFERRY_GPU"] {
        let check = gpus.iter().find(|check| check["name"] == name).unwrap();
        assert!(check["detail"].is_string() && check["status"].is_string(), "{check}");
    }
}

#[test]
fn the_json_of_explain_is_one_object_about_the_size() {
    let text = stdout(&["explain", "64k", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["bytes"], 64 << 10);
}

#[test]
fn explain_with_a_gpu_tells_of_it_or_what_is_missing() {
    let words = ["explain", "64MiB", "--gpu", "--to", "device", "--json"];
    let output = memferry(&words).output().expect("the program runs");
    if output.status.success() {
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["gpu"]["to"], "device");
        assert!(json["blocking"]["estimate_us"].as_f64().unwrap() > 0.0);
    } else {
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{complaint}");
        assert!(complaint.contains("GPU") && complaint.contains("memferry doctor"), "{complaint}");
    }
}

#[test]
fn text_for_a_pipe_has_no_colour() {
    assert!(!stdout(&["doctor"]).contains('\x1b'));
}

#[test]
fn the_bench_of_gpus_says_why_it_measured_nothing_and_ends_well() {
    let mut command = memferry(&["bench", "gpu", "--quick", "--json"]);
    let assert = command.env("CUDA_VISIBLE_DEVICES", "").assert().success();
    let json: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(json["missing"], serde_json::json!(["a GPU"]));
    assert!(json["rows"].as_array().unwrap().is_empty());
    assert!(json["summary"].as_object().unwrap().is_empty());
    assert!(json["notes"][0].as_str().unwrap().starts_with("Nothing was measured: "));
}
