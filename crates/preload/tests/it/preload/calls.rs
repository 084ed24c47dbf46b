//! The functions of the library against plain loops, in the contexts in which programs call them.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::ExitStatusExt;

use crate::preload::support::{Programs, succeed, text};
use memferry_testing::{Requirement, skip};

use memferry_sys::call_profile::{CallProfileFile, Caller, OPERATIONS, VARIABLE, class_of};

/// A file for counters, with its path for other processes.
fn profile() -> (CallProfileFile, String) {
    let file = CallProfileFile::create().expect("there is memory");
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_fd().as_raw_fd());
    (file, path)
}

#[test]
fn every_function_is_right_with_nothing_switched_on() {
    let programs = Programs::compile(&["calls"]);
    assert_eq!(succeed(&mut programs.preloaded("calls")), "all right\n");
}

#[test]
fn every_function_is_right_while_it_is_counted() {
    let programs = Programs::compile(&["calls"]);
    let (file, path) = profile();
    assert_eq!(succeed(programs.preloaded("calls").env(VARIABLE, path)), "all right\n");
    let contents = file.contents();
    for (operation, name) in OPERATIONS.into_iter().enumerate() {
        let calls: u64 = (0..64).map(|class| contents.total(operation, class).0).sum();
        assert!(calls > 100, "{name}: {calls}");
    }
}

/// Copies from 128 KiB on are shared, by one and by three helpers, with ordinary and with other stores.
#[test]
fn every_function_is_right_while_large_copies_are_shared() {
    let programs = Programs::compile(&["calls"]);
    for value in [
        "131072,65536,524288,1,sse2",
        "131072,65536,18446744073709551615,3,plain",
        "131072,65536,0,7,sse2",
    ] {
        let mut command = programs.preloaded("calls");
        assert_eq!(succeed(command.env("MEMFERRY_COPIES", value)), "all right\n", "{value}");
    }
}

#[test]
fn large_copies_have_helpers_that_end_by_themselves() {
    let programs = Programs::compile(&["shared"]);
    let run = |word: &str| {
        let mut command = programs.preloaded("shared");
        succeed(command.arg(word).env("MEMFERRY_COPIES", "131072,65536,1048576,1,sse2"))
    };
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return skip(Requirement::Cores, "helpers need a second core");
    }
    assert_eq!(run("plain"), "helped, alone again\n");
    // A helper could not run a handler of the program.
    assert_eq!(run("handler"), "not helped\n");
    // A thread that is bound to one core has no spare one.
    assert_eq!(run("bound"), "not helped\n");
    // A child of `vfork` may not use its parent's helpers.
    assert_eq!(run("vfork"), "not helped\n");
}

#[test]
fn a_program_enters_namespaces_at_once_after_a_shared_copy() {
    let programs = Programs::compile(&["shared"]);
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return skip(Requirement::Cores, "helpers need a second core");
    }
    let mut command = programs.preloaded("shared");
    command.arg("namespaces").env("MEMFERRY_COPIES", "131072,65536,1048576,3,sse2");
    match &*succeed(&mut command) {
        "no namespaces\n" => skip(Requirement::Namespaces, "user namespaces cannot be made here"),
        said => assert_eq!(said, "entered\n"),
    }
}

/// A library in place of `libadma.so`, with a model of a device.
#[test]
fn large_copies_are_handed_to_a_device_and_are_right_if_it_fails() {
    let programs = Programs::compile(&["devices"]);
    programs.compile_with("engine", &["-shared", "-fPIC"]);
    let run = |number: u32, variables: &[(&str, &str)]| {
        let file = programs.path(&format!("copied-{number}"));
        let mut command = programs.preloaded("devices");
        command.env("MEMFERRY_COPIES", "131072,65536,1048576,1,sse2").env("ENGINE_FILE", file);
        command.env("MEMFERRY_COPY_LIBRARY", programs.path("engine"));
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let output = run(0, &[]);
    assert_eq!(output.stdout, b"by a device\n", "{}", text(&output));
    // What it has written is written again.
    let output = run(1, &[("ENGINE_FAILS", "1")]);
    assert_eq!(output.stdout, b"by a device\n", "{}", text(&output));
    for (variable, value, complaint) in [
        ("ENGINE_CLOSED", "1", "the ferry cannot be opened"),
        ("MEMFERRY_COPY_LIBRARY", "/nowhere.so", "/nowhere.so cannot be loaded"),
    ] {
        let output = run(2, &[(variable, value)]);
        assert_eq!(output.stdout, b"by the processor\n", "{}", text(&output));
        assert!(text(&output).contains(complaint), "{}", text(&output));
    }
}

#[test]
fn a_value_that_is_not_of_memferry_run_is_reported_and_nothing_is_shared() {
    let programs = Programs::compile(&["shared"]);
    let mut command = programs.preloaded("shared");
    let output = command.arg("plain").env("MEMFERRY_COPIES", "4k").output().unwrap();
    assert!(text(&output).contains("memferry: MEMFERRY_COPIES is for"), "{}", text(&output));
    assert!(text(&output).contains("not helped"), "{}", text(&output));
}

/// Eight threads and children make 50 copies and 100000 fills each.
#[test]
fn calls_of_all_threads_and_children_are_counted_however_they_end() {
    let programs = Programs::compile(&["counted"]);
    let (file, path) = profile();
    let output = programs.preloaded("counted").arg("3").env(VARIABLE, path).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    let contents = file.contents();
    assert_eq!(contents.total(0, class_of(700_000)), (8 * 50, 8 * 50 * 700_000));
    let (fills, bytes) = contents.total(2, class_of(20));
    assert!((800_000..801_000).contains(&fills) && bytes >= 20 * 800_000, "{fills} of {bytes}");
    // The shared library of C makes a child, too: the program, and three children.
    assert_eq!(contents.processes.load(std::sync::atomic::Ordering::Relaxed), 4);
}

/// The length decides how a call is counted, and whether it is one of some thousand that are sampled.
#[test]
fn calls_of_every_length_are_counted_exactly() {
    const TIMES: u64 = 20_000;
    let programs = Programs::compile(&["exact"]);
    // The C library calls them too before `main`, always as often.
    let totals = [0, TIMES].map(|times| {
        let (file, path) = profile();
        succeed(programs.preloaded("exact").arg(times.to_string()).env(VARIABLE, path));
        let of = |operation| (0..10).map(|class| file.contents().total(operation, class)).collect();
        [0, 1, 2, 3].map(|operation| -> Vec<(u64, u64)> { of(operation) })
    });
    for (operation, name) in OPERATIONS.into_iter().enumerate() {
        // `mempcpy` counts as `memcpy`.
        let times = if operation == 0 { 2 * TIMES } else { TIMES };
        for class in 0..10 {
            let lengths = (0..=600).filter(|bytes| class_of(*bytes as usize) == class);
            let (calls, bytes) =
                lengths.fold((0, 0), |(calls, bytes), more| (calls + times, bytes + times * more));
            let [before, after] = &totals.each_ref().map(|totals| totals[operation][class]);
            assert_eq!((after.0 - before.0, after.1 - before.1), (calls, bytes), "{name} {class}");
        }
    }
}

#[test]
fn estimates_by_caller_agree_with_the_counts() {
    let programs = Programs::compile(&["counted"]);
    let (file, path) = profile();
    succeed(programs.preloaded("counted").env(VARIABLE, path));
    let contents = file.contents();
    let load =
        |number: &std::sync::atomic::AtomicU64| number.load(std::sync::atomic::Ordering::Relaxed);
    let program = programs.path("counted").canonicalize().unwrap();
    let program = program.to_str().unwrap();
    let of_program = |operation: usize| {
        let callers = contents.callers.iter().filter(move |caller| {
            let key = load(&caller.key);
            let (module, found, _) = Caller::parts(key);
            key != 0
                && found == operation
                && contents.module_path(module).is_some_and(|path| path == program)
        });
        callers.fold((0, 0, 0), |(samples, calls, bytes), caller| {
            (
                samples + load(&caller.samples),
                calls + load(&caller.calls),
                bytes + load(&caller.bytes),
            )
        })
    };
    // Every copy is heavier than the weight between samples; the first of a thread has no caller.
    let (samples, calls, bytes) = of_program(0);
    assert!((390..=400).contains(&samples) && calls == samples, "{samples} {calls}");
    assert_eq!(bytes, samples * 700_000);
    // 800000 fills of 84 are about 256 samples, whose estimate is within a quarter.
    let (samples, calls, _) = of_program(2);
    assert!((150..400).contains(&samples), "{samples}");
    assert!((600_000..1_000_000).contains(&calls), "{calls}");
}

#[test]
fn a_call_beyond_its_target_ends_the_program_as_in_the_c_library() {
    let programs = Programs::compile(&["overflow"]);
    let output = programs.preloaded("overflow").output().unwrap();
    assert_eq!(output.status.signal(), Some(6), "{}", text(&output));
    assert!(text(&output).contains("buffer overflow detected"), "{}", text(&output));
}

#[test]
fn a_profile_that_cannot_be_opened_is_reported_and_the_program_runs() {
    let programs = Programs::compile(&["counted"]);
    let mut command = programs.preloaded("counted");
    let output = command.env(VARIABLE, "/nowhere/at/all").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("memferry: the profile"), "{}", text(&output));
}
