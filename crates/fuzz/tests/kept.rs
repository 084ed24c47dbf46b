//! The stored inputs: those that once made a target fail, and some of high coverage.

use std::path::Path;

use memferry_fuzz::TARGETS;
use memferry_testing::HangGuard;

#[test]
#[allow(clippy::print_stdout, reason = "names the input that fails")]
fn every_kept_input_passes() {
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kept").join(target.name);
        let mut inputs: Vec<_> = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.unwrap().path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{} has no inputs", folder.display());
        for input in inputs {
            println!("{}", input.display());
            let _guard = HangGuard::new(&input.display().to_string());
            (target.run)(&std::fs::read(input).unwrap());
        }
    }
}

#[test]
fn an_attacker_begins_here() {
    memferry_fuzz::run_if_attacker();
}
