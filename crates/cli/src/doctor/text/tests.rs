use memferry_bench::results::sample;

use super::*;

fn check(name: &'static str, status: Status) -> Check {
    Check::new(name, status, format!("detail of {name}"))
}

fn diagnosis() -> Diagnosis {
    Diagnosis {
        machine: sample::empty("x").machine,
        checks: vec![check("a copy", Status::Ok).summary("copied"), check("eventfd", Status::Ok)],
        messages: vec![
            check("a message", Status::Ok).summary("sent"),
            check("huge shared pages", Status::Warn).fix("echo advise"),
        ],
        mpi: vec![
            check("an MPI", Status::Missing).need(Need::OptionalSoftware).fix("apt install it"),
        ],
        memory: vec![check("a window", Status::Ok).summary("put")],
        gpus: vec![
            check("GPU driver", Status::Missing).need(Need::OptionalHardware).fix("buy one"),
        ],
        devices: vec![
            check("IOMMU", Status::Missing).need(Need::OptionalHardware),
            check("copy devices", Status::Missing).need(Need::OptionalHardware),
        ],
        dsa: Vec::new(),
    }
}

fn render(diagnosis: &Diagnosis) -> String {
    overview(diagnosis, Paint::plain()) + &conclusion(diagnosis, Paint::plain())
}

#[test]
fn each_subject_has_one_line() {
    let text = render(&diagnosis());
    let lines: Vec<&str> = text.lines().skip(2).take_while(|line| !line.is_empty()).collect();
    assert_eq!(
        lines,
        [
            "  ✓ copies         copied",
            "  ! messages       sent",
            "  ✓ windows        put",
            "  – MPI            detail of an MPI",
            "  – GPU copies     detail of GPU driver",
            "  – device copies  detail of copy devices",
        ]
    );
}

#[test]
fn one_core_is_not_many() {
    let mut diagnosis = diagnosis();
    let first = |diagnosis: &Diagnosis| render(diagnosis).lines().next().unwrap().to_owned();
    diagnosis.machine.cores = 1;
    assert!(first(&diagnosis).contains(", 1 core, "), "{}", first(&diagnosis));
    diagnosis.machine.cores = 2;
    assert!(first(&diagnosis).contains(", 2 cores, "), "{}", first(&diagnosis));
}

#[test]
fn it_ends_with_what_is_ready_and_what_would_add_more() {
    let text = render(&diagnosis());
    let end = "\nready: copies, messages, windows\n\
               for more: (`!` works and could do more, `✗` does not work, `–` is not here)\n  \
               huge shared pages  echo advise\n  \
               an MPI             apt install it\n";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn a_machine_on_which_nothing_can_be_better_ends_with_what_is_ready() {
    let mut diagnosis = diagnosis();
    diagnosis.messages.pop();
    diagnosis.mpi = vec![check("provider", Status::Ok).summary("MPICH")];
    assert!(render(&diagnosis).ends_with("\nready: copies, messages, windows, MPI\n"));
}

#[test]
fn absent_hardware_is_a_dash_and_a_broken_one_is_a_cross() {
    let mut diagnosis = diagnosis();
    assert!(!overview(&diagnosis, Paint::plain()).contains('✗'));
    assert!(!details(&diagnosis, Paint::plain()).contains('✗'));
    diagnosis.gpus = vec![check("GPU driver", Status::Missing)];
    assert!(render(&diagnosis).contains("  ✗ GPU copies "), "{}", render(&diagnosis));
}

#[test]
fn what_failed_is_not_ready_and_says_why() {
    let mut diagnosis = diagnosis();
    diagnosis.checks[0].status = Status::Missing;
    let text = render(&diagnosis);
    assert!(text.contains("  ✗ copies         detail of a copy\n"), "{text}");
    assert!(text.contains("\nready: messages, windows\n"), "{text}");
}

#[test]
fn what_failed_is_shown_with_its_advice_if_the_cure_refers_to_it() {
    let mut diagnosis = diagnosis();
    let failed = |detail: &str| Check::new("a copy", Status::Missing, detail);
    diagnosis.checks = vec![failed("it fails; set another value").fix(DO_AS_SAID)];
    let text = render(&diagnosis);
    assert!(text.contains("  ✗ copies         it fails; set another value\n"), "{text}");
    diagnosis.checks = vec![failed("it fails; set another value").fix("unset the value")];
    assert!(render(&diagnosis).contains("  ✗ copies         it fails\n"));
    diagnosis.checks = vec![failed("none: why; where").need(Need::OptionalHardware)];
    assert!(render(&diagnosis).contains("  – copies         none\n"));
}

#[test]
fn a_fix_of_two_checks_is_advised_once() {
    let mut diagnosis = diagnosis();
    diagnosis.memory.push(check("locked memory", Status::Warn).fix("echo advise"));
    assert_eq!(render(&diagnosis).matches("echo advise").count(), 1);
}

#[test]
fn details_have_every_check_with_its_fix() {
    let text = details(&diagnosis(), Paint::plain());
    for line in ["  ✓ eventfd ", "  ! huge shared pages ", "fix: echo advise", "  – GPU driver "]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn notes_and_both_forms_of_a_fix_stand_below_their_check() {
    let check = check("DSA", Status::Warn).notes(vec!["one".into(), "two".into()]);
    let check = check.fix("the tool").other_fix(Some("the files".into()));
    let diagnosis = Diagnosis { devices: vec![check], ..diagnosis() };
    let lines = details(&diagnosis, Paint::plain());
    let below = lines.lines().skip_while(|line| !line.contains("detail of DSA")).skip(1);
    let below: Vec<_> = below.map(str::trim).collect();
    assert_eq!(below, ["one", "two", "fix: the tool", "or:  the files"]);
    assert!(conclusion(&diagnosis, Paint::plain()).contains("DSA                the tool\n"));
    assert!(!overview(&diagnosis, Paint::plain()).contains("one"));
}
