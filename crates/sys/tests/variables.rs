//! The list of variables against the sources and the documentation, and the check for unknown ones in a
//! process of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use memferry_sys::settings::variables::{ALL, PREFIX, TEST_PREFIX, is_known};
use memferry_sys::settings::{
    check_variables, is_switched_off, read_variable, skip_variable_check, value_of,
};

/// Words of the sources that look like variables: the constant of a bench, and a name with a typing error.
const NOT_VARIABLES: [&str; 2] = ["MEMFERRY_KINDS", "MEMFERRY_EAGR_BYTES"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All words of a text that begin as a variable does. A word that is only such a beginning is none.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(move |c: char| !is_letter(c))
        .filter(|word| word.starts_with(PREFIX) && !word.ends_with('_'))
}

/// The words of all files below a folder, each with a file that it is in.
fn collect(folder: &Path, found: &mut BTreeMap<String, PathBuf>) {
    // The list itself, and examples of wrong names.
    if folder.ends_with("crates/sys/src/settings") {
        return;
    }
    for entry in fs::read_dir(folder).expect("a folder can be read").flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if entry.file_name() != "target" {
                collect(&path, found);
            }
            continue;
        }
        let is_header = path.extension().is_some_and(|extension| extension == "h");
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let is_guard = |word: &str| is_header && word.ends_with("_H");
        for word in words(&text).filter(|word| !is_guard(word) && !NOT_VARIABLES.contains(word)) {
            found.entry(word.to_owned()).or_insert_with(|| path.clone());
        }
    }
}

fn in_sources() -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for folder in ["crates", ".ci"] {
        collect(&root().join(folder), &mut found);
    }
    found
}

#[test]
fn every_variable_in_the_sources_is_in_the_list_and_in_the_documentation() {
    let document = fs::read_to_string(root().join("docs/reference/settings.md")).unwrap();
    let documented: Vec<&str> = words(&document).collect();
    assert!(document.contains(TEST_PREFIX));
    for (name, file) in in_sources() {
        let file = file.display();
        assert!(is_known(&name), "{name} ({file}) is not in settings/variables.rs");
        let is_documented = name.starts_with(TEST_PREFIX) || documented.contains(&name.as_str());
        assert!(is_documented, "{name} ({file}) is not in docs/reference/settings.md");
    }
    for name in documented {
        assert!(is_known(name), "{name} of docs/reference/settings.md is not in the list");
    }
}

#[test]
fn every_variable_of_the_list_is_in_the_sources() {
    let found = in_sources();
    for name in ALL {
        assert!(found.contains_key(*name), "{name} is in the list and nowhere else");
    }
}

/// Runs one test of this file in a child with an unknown variable. Returns the lines of the check.
fn run_child(test: &str, mark: &str) -> Vec<String> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .envs([(mark, "1"), ("MEMFERRY_EAGR_BYTES", "1")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.lines().filter(|line| line.contains("unknown variable")).map(str::to_owned).collect()
}

#[test]
fn a_process_names_an_unknown_variable_once() {
    const MARK: &str = "MEMFERRY_TEST_UNKNOWN";
    if std::env::var_os(MARK).is_some() {
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(check_variables))));
        return check_variables();
    }
    let said = run_child("a_process_names_an_unknown_variable_once", MARK);
    assert_eq!(
        said,
        ["memferry: unknown variable MEMFERRY_EAGR_BYTES; did you mean MEMFERRY_EAGER_BYTES?"]
    );
}

#[test]
fn a_process_whose_parent_has_checked_names_nothing() {
    const MARK: &str = "MEMFERRY_TEST_CHECKED";
    if std::env::var_os(MARK).is_some() {
        skip_variable_check();
        return check_variables();
    }
    let said = run_child("a_process_whose_parent_has_checked_names_nothing", MARK);
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn a_variable_without_a_value_counts_as_not_set() {
    const MARK: &str = "MEMFERRY_TEST_EMPTY";
    const SET: &str = "MEMFERRY_TEST_SET";
    if std::env::var_os(MARK).is_some() {
        let read = |name: &str| read_variable(name, |text| text.parse::<u32>().ok());
        let empty = ["MEMFERRY_SPIN_NS", "MEMFERRY_SPREAD", "MEMFERRY_POLICY"];
        for name in empty {
            assert_eq!((value_of(name), read(name)), (None, Ok(None)), "{name}");
        }
        assert!(!is_switched_off("MEMFERRY_STATS"));
        assert_eq!(value_of(SET), Some(" 5\n".into()));
        assert_eq!(read(SET), Ok(Some(5)));
        assert_eq!(read("MEMFERRY_CHANNELS"), Err(" many".into()));
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["a_variable_without_a_value_counts_as_not_set", "--exact"])
        .env_remove("MEMFERRY_SPREAD")
        .envs([(MARK, "1"), ("MEMFERRY_SPIN_NS", ""), ("MEMFERRY_POLICY", " \t\n")])
        .envs([("MEMFERRY_STATS", ""), (SET, " 5\n"), ("MEMFERRY_CHANNELS", " many")])
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
}
