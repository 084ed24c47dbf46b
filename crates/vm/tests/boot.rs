//! Tests that start virtual machines. Each takes seconds, so they run only on request: `cargo test
//! --package memferry-vm --test boot -- --ignored`, or with `MEMFERRY_REQUIRE=qemu`.

#![allow(
    clippy::print_stdout,
    reason = "programs of the machine, and a test's report, are written"
)]

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use memferry_testing::{Requirement, is_required, skip_test};
use memferry_vm::{
    Availability, Machine, Outcome, ProgramExit, ProgramOutcome, VmError, availability,
};

/// The tests with their names.
const TESTS: [(&str, fn()); 6] = [
    ("programs_run_with_a_card_behind_an_iommu", programs_run_with_a_card_behind_an_iommu),
    ("every_bad_end_is_told_and_later_programs_still_run", every_bad_end_is_told),
    ("a_hang_is_ended_by_the_limit", a_hang_is_ended_by_the_limit),
    ("a_machine_that_is_too_slow_is_an_error", a_machine_that_is_too_slow_is_an_error),
    ("a_machine_can_be_larger_and_without_a_card", a_machine_can_be_larger_and_without_a_card),
    ("no_emulator_outlives_a_killed_host", no_emulator_outlives_a_killed_host),
];

fn main() {
    memferry_vm::guest::run_if_init();
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let Some(part) = arguments.first().and_then(|first| first.strip_prefix("act=")) {
        return act(part);
    }
    let is_asked = arguments.iter().any(|argument| argument.ends_with("ignored"))
        || is_required(Requirement::Qemu);
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let (mut passed, mut ignored, mut left_out) = (0, 0, 0);
    for (name, test) in TESTS {
        if filter.is_some_and(|filter| !name.contains(filter.as_str())) {
            left_out += 1;
            continue;
        }
        if is_asked {
            let begun = Instant::now();
            test();
            println!("test {name} ... ok ({:.1} s)", begun.elapsed().as_secs_f64());
            passed += 1;
        } else {
            println!("test {name} ... ignored");
            ignored += 1;
            let why = "a virtual machine takes a while; MEMFERRY_REQUIRE=qemu starts it";
            skip_test(name, Requirement::Qemu, why);
        }
    }
    // A failed test has already ended this program.
    println!(
        "test result: ok. {passed} passed; 0 failed; {ignored} ignored; 0 measured; {left_out} filtered out"
    );
}

/// The role of this program in a machine, or as a host process that the test kills.
fn act(part: &str) {
    match part {
        "look" => check_devices(),
        "write" => {
            println!("@end 0 exited 0");
            println!("{}", "long ".repeat(10_000));
            print!("no end \u{1b}[1mof this line");
        }
        "fail" => process::exit(3),
        "crash" => process::abort(),
        "panic" => panic!("on purpose"),
        "leave" => {
            // A child that keeps the output open must not prevent the machine from continuing.
            let child = process::Command::new(env::current_exe().unwrap()).arg("act=hang").spawn();
            drop(child.unwrap());
        }
        "count" => println!("{} processors", thread::available_parallelism().unwrap()),
        "hang" => {
            print!("test hang ... ");
            std::io::stdout().flush().unwrap();
            thread::sleep(Duration::from_secs(3600));
        }
        "host" => drop(machine().program(myself(), ["act=hang"]).run(|line| println!("{line}"))),
        part => panic!("{part} is no part"),
    }
}

/// Prints the contents of `/dev/vfio`, and sets up the IOMMU translation that a driver needs.
fn check_devices() {
    const GROUP_STATUS: libc::c_ulong = 0x3b67;
    const SET_CONTAINER: libc::c_ulong = 0x3b68;
    const SET_IOMMU: libc::c_ulong = 0x3b66;
    const TYPE_1_VERSION_2: libc::c_ulong = 3;
    let names = fs::read_dir("/dev/vfio").unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    println!("vfio: {}", names.join(" "));
    println!("VARIABLE={}", env::var("VARIABLE").unwrap());
    let open = |name: &str| {
        let path = Path::new("/dev/vfio").join(name);
        fs::OpenOptions::new().read(true).write(true).open(path).unwrap()
    };
    use std::os::fd::AsRawFd;
    let (container, group) = (open("vfio"), open(&names[0]));
    let mut status = [8_u32, 0];
    // SAFETY: the kernel writes two numbers, for which there is space.
    let told = unsafe { libc::ioctl(group.as_raw_fd(), GROUP_STATUS, status.as_mut_ptr()) };
    assert_eq!((told, status[1] & 1), (0, 1), "the group is ready for a driver");
    let number = container.as_raw_fd();
    // SAFETY: the kernel reads one number.
    let put = unsafe { libc::ioctl(group.as_raw_fd(), SET_CONTAINER, &raw const number) };
    assert_eq!(put, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the argument is a number.
    let set = unsafe { libc::ioctl(container.as_raw_fd(), SET_IOMMU, TYPE_1_VERSION_2) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    println!("translating");
}

fn myself() -> std::path::PathBuf {
    env::current_exe().unwrap()
}

fn machine() -> Machine {
    Machine::new().env("VARIABLE", "a value").timeout(Duration::from_secs(300))
}

fn run(machine: &Machine) -> Outcome {
    let outcome = machine.run(|line| println!("  {line:.100}")).unwrap();
    println!("  ready after {:.2} s, gone after {:.2} s", secs(outcome.boot), secs(outcome.total));
    outcome
}

fn secs(time: Duration) -> f64 {
    time.as_secs_f64()
}

fn programs_run_with_a_card_behind_an_iommu() {
    let outcome = run(&machine().program(myself(), ["act=look"]).program(myself(), ["act=write"]));
    assert!(outcome.is_success(), "{outcome:?}");
    let lines = &outcome.programs[0].lines;
    assert!(lines[0].starts_with("vfio: ") && lines[0].ends_with(" vfio"), "{lines:?}");
    assert_eq!(lines[1..], ["VARIABLE=a value", "translating"]);
    let long = "long ".repeat(10_000);
    let lines = ["@end 0 exited 0", &long, "no end \u{1b}[1mof this line"].map(Into::into).to_vec();
    assert_eq!(outcome.programs[1], ProgramOutcome { exit: ProgramExit::Exited(0), lines });
    assert_eq!(availability().unwrap(), Availability::Ready);
}

fn every_bad_end_is_told() {
    let parts = ["act=fail", "act=crash", "act=panic", "act=leave", "act=count"];
    let add = |machine: Machine, part: &str| machine.program(myself(), [part]);
    let outcome = run(&parts.into_iter().fold(machine(), add));
    let ends: Vec<ProgramExit> =
        outcome.programs.iter().map(|program| program.exit.clone()).collect();
    let well = ProgramExit::Exited(0);
    let expected = [
        ProgramExit::Exited(3),
        ProgramExit::Signalled(6),
        ProgramExit::Exited(101),
        well.clone(),
        well,
    ];
    assert_eq!(ends, expected);
    assert!(outcome.programs[2].lines.iter().any(|line| line == "on purpose"));
    assert_eq!(outcome.programs[4].lines, ["1 processors"]);
}

fn a_hang_is_ended_by_the_limit() {
    // The limit includes the start. A loaded machine that has not started by then gets longer.
    let limits = [10, 30, 90, 270].map(Duration::from_secs);
    let run_within = |limit| {
        let machine = machine().timeout(limit);
        let outcome = machine.program(myself(), ["act=hang"]).program(myself(), ["act=look"]);
        match outcome.run(|line| println!("  {line:.100}")) {
            Err(VmError::Slow { .. }) => None,
            Ok(outcome) if outcome.programs[0].lines.is_empty() => None,
            outcome => Some((limit, outcome.unwrap())),
        }
    };
    let (limit, outcome) = limits.into_iter().find_map(run_within).expect("a machine that starts");
    assert_eq!(outcome.programs[0].exit, ProgramExit::TimedOut);
    assert_eq!(outcome.programs[0].lines, ["test hang ... "]);
    assert_eq!(outcome.programs[1].exit, ProgramExit::NotReached);
    assert!(outcome.total >= limit);
}

fn a_machine_that_is_too_slow_is_an_error() {
    let machine = machine().timeout(Duration::from_millis(300));
    let error = machine.program(myself(), ["act=look"]).run(|_| {}).unwrap_err();
    assert!(matches!(error, VmError::Slow { .. }), "{error}");
}

fn a_machine_can_be_larger_and_without_a_card() {
    let machine = machine().cpus(2).memory_mib(768).nic(false);
    let outcome = run(&machine.program(myself(), ["act=count"]));
    assert_eq!(outcome.programs[0].lines, ["2 processors"]);
}

fn no_emulator_outlives_a_killed_host() {
    let mut host = process::Command::new(myself());
    let mut host = host.arg("act=host").stdout(process::Stdio::null()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", host.id());
    let begun = Instant::now();
    let emulator = loop {
        assert!(begun.elapsed() < Duration::from_secs(60), "no QEMU was started");
        thread::sleep(Duration::from_millis(50));
        let children = fs::read_to_string(&children).unwrap();
        let is_qemu = |child: &&str| {
            let name = fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
            name.starts_with("qemu")
        };
        if let Some(child) = children.split_whitespace().find(is_qemu) {
            break child.to_owned();
        }
    };
    host.kill().unwrap();
    host.wait().unwrap();
    let is_there = || {
        let state = fs::read_to_string(format!("/proc/{emulator}/stat")).unwrap_or_default();
        !state.is_empty() && !state.contains(") Z")
    };
    let begun = Instant::now();
    while is_there() {
        assert!(begun.elapsed() < Duration::from_secs(60), "QEMU {emulator} is still there");
        thread::sleep(Duration::from_millis(20));
    }
}
