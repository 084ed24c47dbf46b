//! Tests of the program from outside: its output, and its exit status.

use assert_cmd::Command;

/// The program with built-in values, so that it measures and saves nothing.
fn memferry(words: &[&str]) -> Command {
    let mut command = Command::cargo_bin("memferry").expect("the program is built");
    command.args(words).env("MEMFERRY_PROFILE", "off");
    command
}

fn stdout(words: &[&str]) -> String {
    let output = memferry(words).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("the output is text")
}

fn usage_error(words: &[&str]) -> String {
    let assert = memferry(words).assert().code(2);
    assert!(assert.get_output().stdout.is_empty());
    String::from_utf8(assert.get_output().stderr.clone()).expect("the complaint is text")
}

#[test]
fn the_help_names_every_command() {
    let help = stdout(&["--help"]);
    for command in ["bench", "report", "doctor", "explain", "completions"] {
        assert!(help.contains(command), "{command}");
    }
}

#[test]
#[cfg(feature = "bench")]
fn the_help_of_bench_names_its_options() {
    let help = stdout(&["bench", "--help"]);
    for option in
        ["[NAME]", "--quick", "--all", "--bars", "--json", "--report <FILE.html>", "Benches:"]
    {
        assert!(help.contains(option), "{option}");
    }
}

/// The path of a file or folder in the repository.
fn in_repository(path: &str) -> String {
    format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_file_is_loaded_to_memory_and_a_bad_one_is_refused() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let plain = file("data.bin", &vec![7; 5 << 20]);
    assert!(stdout(&["load", &plain]).contains("5 MiB to memory"));
    let said = stdout(&["load", &plain, "--threads", "1", "--json"]);
    let outcome: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(outcome["bytes"], 5 << 20);

    let bad = file("bad.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\xff{}");
    let assert = memferry(&["load", &bad]).assert().code(1);
    let complaint = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(complaint.contains("its header claims"), "{complaint}");
}

#[test]
fn a_recorded_run_becomes_a_report_and_the_figure_of_the_readme() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (page, figure) = (file("report.html"), file("headline.svg"));
    let run = in_repository("bench/runs/xeon-2-cores-full");
    stdout(&["report", "--out", &page, "--headline", &figure, &run]);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("4 MiB copy: 34.1 GB/s, 2.44× memcpy"));
    assert!(!page.contains("✗"), "targets are not shown unless they are asked for");
    let committed = in_repository("docs/figures/headline.svg");
    let is_same =
        std::fs::read_to_string(figure).unwrap() == std::fs::read_to_string(committed).unwrap();
    assert!(is_same, "make docs/figures/headline.svg again with `memferry report --headline`");
}

#[test]
fn a_run_that_is_not_there_is_named() {
    let assert = memferry(&["report", "nowhere.json"]).assert().code(1);
    let complaint = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(complaint.contains("cannot read nowhere.json"), "{complaint}");
}

#[test]
#[cfg(feature = "bench")]
fn the_targets_of_nothing_are_a_usage_error() {
    usage_error(&["bench", "--bars"]);
}

#[test]
fn a_bad_size_is_a_usage_error_that_says_what_is_wrong() {
    let complaint = usage_error(&["explain", "4apples"]);
    assert!(complaint.contains("`apples` is not a unit"), "{complaint}");
}

#[test]
#[cfg(feature = "bench")]
fn an_unknown_bench_is_a_usage_error_that_lists_the_known() {
    let complaint = usage_error(&["bench", "copy-latencies"]);
    assert!(complaint.contains("there is no bench `copy-latencies`; available:"), "{complaint}");
}

#[test]
fn hot_and_cold_together_are_a_usage_error() {
    usage_error(&["explain", "4k", "--hot", "--cold"]);
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
    for device in json["dsa"].as_array().unwrap() {
        assert!(device["address"].is_string() && device["queues"].is_array(), "{device}");
    }
    assert!(stdout(&["doctor", "--verbose"]).contains("copy devices\n"));
    assert!(stdout(&["doctor"]).contains(" device copies "));
}

#[test]
fn doctor_has_a_line_for_each_subject_and_ends_with_what_is_ready() {
    let text = stdout(&["doctor"]);
    for subject in ["copies", "messages", "windows", "MPI", "GPU copies", "device copies"] {
        let of_subject = |line: &&str| {
            let rest = line.trim_start().split_once(' ').map_or("", |(_sign, rest)| rest);
            rest.strip_prefix(subject).is_some_and(|rest| rest.starts_with("  "))
        };
        // Behind them is advice, whose names may be the same.
        let lines = text.lines().take_while(|line| !line.starts_with("ready:"));
        assert_eq!(lines.filter(of_subject).count(), 1, "{subject}: {text}");
    }
    assert!(text.contains("\nready: copies, messages, windows"), "{text}");
    assert!(!text.contains("fix: "), "{text}");
    assert!(stdout(&["doctor", "--verbose"]).contains("\nready: copies, messages, windows"));
}

#[test]
fn an_unknown_variable_is_named_once_with_the_right_name() {
    let line =
        "memferry: unknown variable MEMFERRY_EAGR_BYTES; did you mean MEMFERRY_EAGER_BYTES?\n";
    // These commands open ferries and endpoints, also in child processes.
    for words in [&["explain", "64k"][..], &["explain", "--message", "64k"], &["doctor"]] {
        let assert = memferry(words).env("MEMFERRY_EAGR_BYTES", "1").assert().success();
        let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert_eq!(said, line, "{words:?}");
    }
}

#[test]
fn sizes_and_switches_are_read_as_people_write_them() {
    let words = ["explain", "--message", "64k", "--json"];
    let assert = memferry(&words)
        .envs([("MEMFERRY_EAGER_BYTES", "3.5KiB"), ("MEMFERRY_CMA", "FALSE")])
        .assert()
        .success();
    let json: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(json["switched_off"], true, "{json}");
    assert!(json.to_string().contains("3584"), "{json}");
    assert!(stdout(&["explain", "1GB", "--json"]).contains("1000000000"));
}

#[test]
fn a_bad_value_is_an_error_with_the_variable_and_good_values() {
    for (name, value, good) in [
        ("MEMFERRY_EAGER_BYTES", "4 apples", "64k"),
        ("MEMFERRY_BACKGROUND", "perhaps", "on or off"),
        ("MEMFERRY_PINNING", "perhaps", "auto, off or on"),
        ("MEMFERRY_SHARED_HEAP_PEERS", "perhaps", "access or user"),
    ] {
        let assert = memferry(&["explain", "--message", "64k"]).env(name, value).assert().failure();
        let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert!(said.contains(name) && said.contains(value) && said.contains(good), "{said}");
    }
}

#[test]
fn a_profile_in_a_folder_that_does_not_exist_is_reported_once_and_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let assert =
        memferry(&["doctor"]).env("MEMFERRY_PROFILE", missing.join("profile")).assert().success();
    let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    let lines: Vec<_> = said.lines().filter(|line| line.contains("does not exist")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(lines[0].contains(&missing.display().to_string()), "{said}");
    assert!(!missing.exists());
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
    assert!(json["blocking"]["devices"].is_array() && json["unused_devices"].is_array(), "{json}");
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
#[cfg(feature = "bench")]
fn the_bench_of_gpus_says_why_it_measured_nothing_and_ends_well() {
    let mut command = memferry(&["bench", "gpu", "--quick", "--json"]);
    let assert = command.env("CUDA_VISIBLE_DEVICES", "").assert().success();
    let json: serde_json::Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(json["missing"], serde_json::json!(["a GPU"]));
    assert!(json["rows"].as_array().unwrap().is_empty());
    assert!(json["summary"].as_object().unwrap().is_empty());
    assert!(json["notes"][0].as_str().unwrap().starts_with("Nothing was measured: "));
}

#[test]
#[cfg(not(feature = "bench"))]
fn a_program_without_benches_says_how_to_get_them() {
    for words in [&["bench"][..], &["bench", "gpu", "--quick"]] {
        let output = memferry(words).output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(complaint.contains("built without benches"), "{complaint}");
        assert!(complaint.contains("cargo install --path crates/cli"), "{complaint}");
    }
}
