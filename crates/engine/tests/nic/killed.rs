//! A killed program leaves its card usable for the next.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::card;
use crate::rig::{NicRig, TestCopy};

/// Marks the child process.
const CHILD: &str = "MEMFERRY_NIC_CHILD";

/// Not a test by itself: the work of the child until it is killed.
#[test]
fn a_child_copies_until_it_is_killed() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut rig = NicRig::new(card::engine(), 1 << 20);
    for round in 0.. {
        rig.copy(&[TestCopy { from: round % 7, to: 2 * (round % 9), length: 900_000 }]);
        if round == 2 {
            // The test harness captures standard output.
            eprintln!("copying");
        }
    }
}

#[test]
fn a_card_whose_program_was_killed_can_be_used_again() {
    if card::address().is_none() {
        let why = "no card is bound to vfio-pci; `cargo xtask qemu` has one";
        return memferry_testing::skip(memferry_testing::Requirement::Nic, why);
    }
    for _ in 0..3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed::a_child_copies_until_it_is_killed", "--nocapture"])
            .env(CHILD, "1")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line == "copying")), "it never started");
        child.kill().unwrap();
        child.wait().unwrap();
        let mut rig = NicRig::new(card::engine(), 1 << 18);
        rig.copy(&[TestCopy { from: 1, to: 2, length: 200_000 }]);
        assert_eq!(rig.engine.counters().cpu_fallbacks, 0);
    }
}
