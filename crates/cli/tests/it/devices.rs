//! Tests of the bench `devices` without QEMU. With QEMU, CI runs the bench itself.

use assert_cmd::Command;
use serde_json::Value;

fn bench() -> Command {
    let mut command = Command::cargo_bin("memferry").expect("the program is built");
    command.args(["bench", "devices", "--quick", "--json"]);
    // A device of the machine is not measured here.
    command.env_remove("MEMFERRY_DSA").env_remove("MEMFERRY_IOAT");
    command
}

fn json(command: &mut Command) -> Value {
    let output = command.assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).expect("the output is one JSON object")
}

fn has_row(outcome: &Value, figure: &str) -> bool {
    let rows = outcome["rows"].as_array().expect("rows are a list");
    rows.iter().any(|row| row["figure"].as_str().is_some_and(|name| name.starts_with(figure)))
}

#[test]
fn without_qemu_the_models_are_tried_and_the_cure_is_told() {
    let outcome = json(bench().env("PATH", ""));
    let summary = outcome["summary"].as_object().unwrap();
    assert_eq!(summary["ioat_conformance_passed"], 1.0);
    assert_eq!(summary["ioat_descriptors_aligned_4m"], 1024.0);
    assert_eq!(summary["ioat_descriptors_misaligned_4m"], 2048.0);
    assert!(!summary.contains_key("nic_conformance_passed"), "{summary:?}");
    assert!(!summary.contains_key("nic_bytes_by_device_share"), "{summary:?}");
    let missing = outcome["missing"].as_array().unwrap().iter().filter_map(Value::as_str);
    let missing: Vec<_> = missing.collect();
    assert_eq!(missing[0], "a network card in a virtual machine");
    assert!(missing[1].starts_with("DSA against memcpy ("), "{missing:?}");
    assert!(missing[2].starts_with("I/OAT against memcpy ("), "{missing:?}");
    assert_eq!(missing.len(), 3, "{missing:?}");
    assert!(!summary.contains_key("dsa_4m_vs_memcpy"), "{summary:?}");
    let notes = outcome["notes"].as_array().unwrap().iter().filter_map(Value::as_str);
    let notes: Vec<_> = notes.collect();
    assert!(notes[0].contains("says nothing about hardware"), "{notes:?}");
    assert!(
        notes.iter().any(|note| note.contains("sudo apt install qemu-system-x86")),
        "{notes:?}"
    );
    assert!(has_row(&outcome, "model of a card: ") && !has_row(&outcome, "emulated card: "));
}
