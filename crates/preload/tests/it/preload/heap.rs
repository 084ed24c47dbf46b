//! The shared heap: the `malloc` family, children, and what goes back to the system.

use std::process::Command;

use crate::preload::support::{Programs, preloaded, succeed, text};
use memferry_testing::{Requirement, skip};

const ON: (&str, &str) = ("MEMFERRY_SHARED_HEAP", "65536");

fn heap(programs: &Programs, part: &str) -> Command {
    let mut command = programs.preloaded("heap");
    command.arg(part).env(ON.0, ON.1);
    command
}

fn is_right(part: &str) {
    let programs = Programs::compile(&["heap"]);
    assert_eq!(succeed(&mut heap(&programs, part)), "all right\n");
}

#[test]
fn every_function_that_allocates_is_right_in_many_threads() {
    is_right("family");
}

#[test]
fn children_see_a_snapshot_and_their_writes_do_not_come_back() {
    is_right("fork");
}

#[test]
fn a_program_with_threads_that_allocate_can_fork() {
    is_right("busy");
}

#[test]
fn freed_memory_goes_back_to_the_system() {
    is_right("return");
}

#[test]
fn a_program_may_use_or_close_the_number_of_the_descriptor_of_the_heap() {
    is_right("descriptor");
}

#[test]
fn alignments_above_those_of_huge_pages_are_kept() {
    is_right("alignment");
}

#[test]
fn advice_that_pages_are_not_needed_leaves_zeros() {
    is_right("advice");
}

#[test]
fn a_program_with_pages_that_nothing_may_access_can_fork() {
    is_right("guard");
}

/// The second shell must not get the lock that the first one holds.
#[test]
fn a_lock_of_a_shell_script_has_one_holder() {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let script = "exec 200>\"$0\"; flock -n 200 && echo first; \
                  bash -c 'exec 200>\"$0\"; flock -n 200 && echo second' \"$0\"; true";
    let mut command = preloaded("bash");
    command.args(["-c", script]).arg(folder.path().join("lock")).env(ON.0, ON.1);
    if Command::new("flock").arg("--version").output().is_err() {
        return skip(Requirement::Programs, "flock is not installed");
    }
    assert_eq!(succeed(&mut command), "first\n");
}

#[test]
fn everything_together_is_right() {
    let programs = Programs::compile(&["calls"]);
    let mut command = programs.preloaded("calls");
    command.env(ON.0, ON.1).env("MEMFERRY_COPIES", "131072,65536,524288,1,sse2");
    assert_eq!(succeed(&mut command), "all right\n");
}

#[test]
fn a_program_with_its_own_malloc_keeps_it_and_is_told() {
    let programs = Programs::compile(&["own_malloc"]);
    let output = programs.preloaded("own_malloc").env(ON.0, ON.1).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(output.stdout, b"its own\n");
    assert!(
        text(&output).contains("memferry: the program brings its own malloc"),
        "{}",
        text(&output)
    );
}

#[test]
fn without_room_for_addresses_or_with_a_wrong_value_the_heap_is_ordinary() {
    let programs = Programs::compile(&["heap"]);
    assert_eq!(succeed(&mut heap(&programs, "where")), "shared\n");
    let program = programs.path("heap");
    let library = crate::preload::support::library();
    let limited = |limit: &str| {
        let script =
            format!("{limit}; LD_PRELOAD={} exec {}", library.display(), program.display());
        Command::new("bash").args(["-c", &script]).env(ON.0, ON.1).output().unwrap()
    };
    for (limit, reason) in [("ulimit -v 4000000", "ulimit -v"), ("ulimit -f 1000", "ulimit -f")] {
        let output = limited(limit);
        assert_eq!(output.stdout, b"ordinary\n", "{}", text(&output));
        assert!(text(&output).contains(reason), "{}", text(&output));
    }
    let mut command = programs.preloaded("heap");
    let output = command.env(ON.0, "much").output().unwrap();
    assert_eq!(output.stdout, b"ordinary\n", "{}", text(&output));
    assert!(text(&output).contains("MEMFERRY_SHARED_HEAP is not a number"), "{}", text(&output));
}
