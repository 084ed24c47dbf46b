//! `devices`: the drivers of devices that copy. Intel's copy engine and its successor, the data
//! streaming accelerator, are models of their registers.
//! The network card is an emulated one in a virtual machine if QEMU is installed, else a model; its
//! transmit side is connected to its own receive side. The devices count descriptors, frames and
//! bytes, and their figures state no speed of hardware. A real DSA or I/OAT that the environment selects
//! is compared with memcpy.

mod accelerator;
mod against_memcpy;
mod card;
mod copy_engine;
mod driver_cost;
pub mod guest;
mod lossy;
mod memory;
mod nic_counters;
mod report;
mod suite;
mod syscalls;
mod virtual_machine;

use std::sync::Arc;

use memferry::engine::nic::{NicConfig, NicEngine};
use memferry::engine::testing::nic_model::NicModel;

use self::accelerator::AcceleratorVariant;
use self::copy_engine::ModelVariant;
use self::suite::{CaseException, SuiteResult};
use self::virtual_machine::{VmReport, VmRun};
use super::{Bench, Effort};
use crate::Progress;
use crate::harness::set;
use crate::results::outcome::Outcome;

pub(crate) static BENCH: Bench = Bench::new(
    "devices",
    "Drivers of copy devices: Intel's I/OAT and DSA (models), a network card (emulated)",
    run,
);

/// Name of the model of a network card.
const MODEL: &str = "model of a card";

/// Summary key of the conformance suite over the card in the virtual machine.
const NIC_KEY: &str = "nic_conformance_passed";

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    outcome.notes.push(SPEED.into());
    let trials = copy_engine::model_variants(effort);
    let lossy = if effort == Effort::Full { lossy::SUITES.len() } else { 0 };
    let guest = if effort == Effort::Brief { 0 } else { guest::suites(effort) };
    let accelerators = accelerator::variants(effort);
    let suites = (trials.len() + accelerators.len() + lossy) as u64 + guest;
    let others = 5 + (against_memcpy::KINDS.len() + card::FIGURES.len()) as u64;
    progress.start(suites * suite::count() + others, &outcome.bench);
    // The card first, so that its rows are at the top of the table.
    if effort == Effort::Brief {
        outcome.notes.push(NOT_STARTED.into());
        measure_model(&mut outcome, effort, progress);
    } else {
        measure_emulated_card(&mut outcome, effort, progress);
    }
    let on_case = |name: &str, case: &str| progress.step(&format!("{name}: {case}"));
    progress.step("descriptors of the copy engine");
    let measured = copy_engine::measure(&mut outcome, effort);
    record_part(&mut outcome, "ioat, descriptors", measured);
    let run = |trial: &ModelVariant| trial.run(|case| on_case(trial.name, case));
    let tallies: Vec<_> = trials.iter().map(run).collect();
    add_suites(&mut outcome, "ioat_conformance_passed", &tallies);
    progress.step("time beside the device");
    let measured = driver_cost::measure(&mut outcome, effort);
    record_part(&mut outcome, "ioat, time beside the device", measured);
    progress.step("descriptors of the accelerator");
    let measured = accelerator::measure(&mut outcome, effort);
    record_part(&mut outcome, "dsa, descriptors", measured);
    let run = |variant: &AcceleratorVariant| variant.run(|case| on_case(variant.name, case));
    let tallies: Vec<_> = accelerators.iter().map(run).collect();
    add_suites(&mut outcome, "dsa_conformance_passed", &tallies);
    progress.step("lost frames");
    let rows = lossy::measure();
    let rows = record_part(&mut outcome, "nic over a model that loses frames", rows);
    outcome.rows.extend(rows.unwrap_or_default());
    if lossy > 0 {
        for tally in lossy::run_suites(on_case) {
            add_suite(&mut outcome, &tally);
        }
    }
    for kind in &against_memcpy::KINDS {
        progress.step(&format!("{} against memcpy", kind.name));
        let measured = kind.measure(&mut outcome, effort);
        record_part(&mut outcome, &format!("{} against memcpy", kind.name), measured);
    }
    outcome.notes.extend(notes());
    Ok(outcome)
}

/// Returns the result of a part of the bench. An error is recorded in the outcome, and the results
/// of the other parts stay.
fn record_part<T>(outcome: &mut Outcome, part: &str, result: anyhow::Result<T>) -> Option<T> {
    match result {
        Ok(found) => Some(found),
        Err(error) => {
            outcome.missing.push(format!("memferry {part} ({error:#})"));
            None
        }
    }
}

/// Measures the card of the virtual machine, or the model of a card if no virtual machine can be
/// started.
fn measure_emulated_card(outcome: &mut Outcome, effort: Effort, progress: &dyn Progress) {
    match virtual_machine::run(effort, progress) {
        VmRun::Reported(told) => add_vm_report(outcome, *told),
        VmRun::Missing(reason) => {
            outcome.missing.push("a network card in a virtual machine".into());
            outcome.notes.push(format!(
                "The driver of the network card was not tried in a virtual machine: {reason}. \
                 A model of a card in this process stands in for the figures, but not for the keys."
            ));
            measure_model(outcome, effort, progress);
        }
        VmRun::Failed(reason) => {
            // A failure of Memferry's driver or of the virtual machine, in contrast to a missing
            // QEMU.
            outcome.summary.set(NIC_KEY, 0.0);
            outcome.missing.push(format!("memferry nic in a virtual machine ({reason})"));
            measure_model(outcome, effort, progress);
        }
    }
}

fn measure_model(outcome: &mut Outcome, effort: Effort, progress: &dyn Progress) {
    let step = |figure: &str| progress.step(&format!("{MODEL}: {figure}"));
    let found = NicEngine::over_model(NicModel::new(), NicConfig::default())
        .map_err(anyhow::Error::from)
        .and_then(|engine| card::measure(Arc::new(engine), None, MODEL, effort, step));
    let found = record_part(outcome, "nic over a model of a card", found);
    outcome.rows.extend(found.map(|found| found.rows).unwrap_or_default());
}

/// Adds what the program in the virtual machine reported.
fn add_vm_report(outcome: &mut Outcome, told: VmReport) {
    let VmReport { report, kernel_warning: complaint, boot, total } = told;
    outcome.versions.insert("Linux in the virtual machine".into(), report.kernel);
    outcome
        .versions
        .extend(virtual_machine::emulator_version().map(|version| ("QEMU".to_owned(), version)));
    add_suites(outcome, NIC_KEY, &report.suites);
    if let Some(line) = complaint {
        // A warning of the guest's kernel, such as a DMA fault of the card, fails the suite even if
        // every case passed.
        outcome.summary.set(NIC_KEY, 0.0);
        outcome
            .missing
            .push(format!("memferry nic in a virtual machine (the kernel said: {line})"));
    }
    if let Some(share) = report.share {
        set(&mut outcome.summary, "nic_bytes_by_device_share", share);
    }
    outcome.rows.extend(report.rows);
    if let Some(trouble) = report.trouble {
        outcome.missing.push(format!("memferry nic, copies by the emulated card ({trouble})"));
    }
    outcome.notes.push(format!(
        "The virtual machine took {:.1} s to start and {:.1} s in all.",
        boot.as_secs_f64(),
        total.as_secs_f64()
    ));
}

/// Adds the rows of suites, and one key for all of them: 1 if every case was run and none failed,
/// else 0.
fn add_suites(outcome: &mut Outcome, key: &str, tallies: &[SuiteResult]) {
    let is_good = !tallies.is_empty() && tallies.iter().all(SuiteResult::is_good);
    outcome.summary.set(key, if is_good { 1.0 } else { 0.0 });
    tallies.iter().for_each(|tally| add_suite(outcome, tally));
}

/// Adds the rows of a suite, its failed cases, and a note that it ran.
fn add_suite(outcome: &mut Outcome, tally: &SuiteResult) {
    outcome.rows.extend(tally.rows());
    outcome.notes.push(skipped_note(tally));
    for failed in &tally.failed {
        let CaseException { case, reason } = failed;
        outcome.missing.push(format!("memferry {}: the case {case} failed ({reason})", tally.name));
    }
    for wrong in &tally.wrong {
        outcome.missing.push(format!("memferry {}: {wrong}", tally.name));
    }
    if tally.failed.is_empty() && tally.wrong.is_empty() && !tally.is_good() {
        let SuiteResult { name, cases, passed, .. } = tally;
        let turns = tally.completed();
        outcome.missing.push(format!(
            "memferry {name}: {turns} of {cases} cases had their turn, and {passed} passed"
        ));
    }
}

/// Note about the skipped cases, with their reasons.
fn skipped_note(tally: &SuiteResult) -> String {
    let SuiteResult { name, cases, passed, skipped, failed, .. } = tally;
    let each = skipped.iter().map(|CaseException { case, reason }| format!("{case} ({reason})"));
    let each: Vec<_> = each.collect();
    let list = if each.is_empty() { "none".to_owned() } else { each.join(", ") };
    let failed = failed.len();
    format!("Of {cases} cases, {name} passed {passed} and failed {failed}; skipped: {list}.")
}

const SPEED: &str = "The only rows of real devices are those against memcpy, if there are any. All other \
                     devices are models in this process, and a card that QEMU emulates. They do \
                     what the datasheets say hardware does; how fast they are says nothing about \
                     hardware. QEMU's card does its work inside the register \
                     write that asks for it, and its machine has one processor: order and timing \
                     are tested by the models, and not by that card.";

const NOT_STARTED: &str = "The short suite starts no virtual machine, so nic_conformance_passed and \
                           nic_bytes_by_device_share are not here: `memferry bench devices --quick` \
                           has them.";

fn notes() -> [String; 7] {
    [
        "Conformance is the suite that every engine of Memferry passes, the same cases that its \
         tests run. A case is skipped where it is about something that the engine does not claim to \
         do, such as fills by a network card. The keys are 1 if every case had its turn, none \
         failed, only those were skipped that are known to be, the device itself has moved bytes, \
         and nothing went wrong beside the cases: a mistake that a model saw in the driver, work \
         that the card gave up, a complaint of the kernel in the virtual machine."
            .into(),
        "Descriptors are those that the model of the copy engine has carried out, by its own count. \
         A descriptor must not cross a page on either side, so a copy takes one for each page if \
         both sides begin at the same place in their pages, and two if not, however far apart they \
         are. Where pages lie one behind the other for the device, as behind an IOMMU, a descriptor \
         goes from one into the next, up to 1 MiB. Exactly 1024 and 2048 are expected of the keys."
            .into(),
        "The time beside the device is that of a model which takes exactly 2 µs for a copy of 4 KiB, \
         from the doorbell to the last byte: what a copy and its wait take beyond that. What the \
         model's thread adds, because it comes later or reports the end, is also shown alone. Submits are those of a channel whose \
         memory is pinned, 64 in a row; the one before them, which finds neither code nor data in \
         the caches after a pause of milliseconds, has a row of its own. The model takes a doorbell \
         as a device does: it is written, and nobody waits for it. System calls are counted on the \
         thread that submits such a descriptor and waits for it. A ferry also asks the kernel, once \
         for each copy, whether memory of its pin cache is still mapped."
            .into(),
        "The accelerator is tried in two ways: as a device that is bound to vfio-pci, whose memory \
         is pinned, and as a work queue of the kernel, which uses the addresses of the program, and \
         whose page faults the driver resolves. The keys are counted over a work queue. A target that \
         begins in the middle of a cache line takes one descriptor more."
            .into(),
        "The card sends to itself what it reads at the source, and receives it at the target: up \
         to 8 KiB in a frame, behind a head that never reaches the target. Bytes too few for a \
         frame, and an odd byte at the start of a target, are left to the processor. A notice is a \
         frame that carries the value of a notification variable behind the data. Frames are \
         counted by the driver, and for an aligned mebibyte by the emulated card as well."
            .into(),
        "In all of these counts the device is the only engine, the caller is spared, and the ring \
         is large, so that nothing is left to the caller; with usual settings it helps."
            .into(),
        "Every copy that is counted is also compared, byte by byte; those that are timed are not."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::report::GuestReport;
    use super::*;
    use crate::results::outcome::Row;
    use crate::results::sample;
    use crate::results::summary_keys::{TargetStatus, judge};

    fn suite_result(failed: &[&str]) -> SuiteResult {
        let failed = failed
            .iter()
            .map(|&case| CaseException { case: case.into(), reason: "one is not two".into() });
        let failed: Vec<_> = failed.collect();
        SuiteResult {
            name: "nic".into(),
            cases: 3,
            passed: 3 - failed.len() as u64,
            skipped: Vec::new(),
            failed,
            wrong: Vec::new(),
        }
    }

    fn vm_report(failed: &[&str]) -> VmReport {
        let report = GuestReport {
            kernel: "6.1".into(),
            suites: vec![suite_result(failed)],
            share: Some(0.995),
            rows: vec![Row::of_rounds("emulated card: frames", "memferry", 64, "frames", &[1.0])],
            trouble: None,
        };
        VmReport {
            report,
            kernel_warning: None,
            boot: Duration::from_secs(4),
            total: Duration::from_secs(9),
        }
    }

    #[test]
    fn what_was_found_in_the_machine_becomes_part_of_the_outcome() {
        let mut outcome = sample::empty("devices");
        add_vm_report(&mut outcome, vm_report(&[]));
        assert_eq!(outcome.summary.get("nic_conformance_passed"), Some(1.0));
        assert_eq!(outcome.summary.get("nic_bytes_by_device_share"), Some(0.995));
        assert_eq!(outcome.rows.len(), 1 + 3);
        assert!(outcome.missing.is_empty(), "{:?}", outcome.missing);
    }

    #[test]
    fn a_case_that_failed_is_named_and_fails_the_bench() {
        let mut outcome = sample::empty("devices");
        add_vm_report(&mut outcome, vm_report(&["a_notification_comes_after_the_data"]));
        assert_eq!(outcome.summary.get("nic_conformance_passed"), Some(0.0));
        let missing = &outcome.missing[0];
        assert!(missing.starts_with("memferry "), "{missing}");
        assert!(missing.contains("a_notification_comes_after_the_data"), "{missing}");
        assert!(missing.contains("one is not two"), "{missing}");
    }

    #[test]
    fn a_complaint_of_the_kernel_fails_the_bench_though_all_cases_passed() {
        let mut outcome = sample::empty("devices");
        let complaint = Some("DMAR: fault addr 0x1000".to_owned());
        add_vm_report(&mut outcome, VmReport { kernel_warning: complaint, ..vm_report(&[]) });
        assert_eq!(outcome.summary.get("nic_conformance_passed"), Some(0.0));
        let missing = &outcome.missing[0];
        assert!(missing.starts_with("memferry ") && missing.contains("0x1000"), "{missing}");
    }

    #[test]
    fn what_is_wrong_beside_the_cases_fails_the_bench() {
        let mut outcome = sample::empty("devices");
        let mut told = vm_report(&[]);
        told.report.suites[0].wrong.push("the card moved nothing".into());
        add_vm_report(&mut outcome, told);
        assert_eq!(outcome.summary.get("nic_conformance_passed"), Some(0.0));
        assert_eq!(outcome.missing, ["memferry nic: the card moved nothing"]);
    }

    #[test]
    fn a_part_that_went_wrong_is_told_and_leaves_the_others() {
        let mut outcome = sample::empty("devices");
        let wrong: anyhow::Result<()> = Err(anyhow::anyhow!("no memory"));
        assert_eq!(record_part(&mut outcome, "ioat", wrong), None);
        assert_eq!(outcome.missing, ["memferry ioat (no memory)"]);
        assert_eq!(record_part(&mut outcome, "ioat", Ok(7)), Some(7));
    }

    #[test]
    fn no_suite_at_all_is_not_taken_for_a_good_one() {
        let mut outcome = sample::empty("devices");
        add_suites(&mut outcome, "nic_conformance_passed", &[]);
        assert_eq!(outcome.summary.get("nic_conformance_passed"), Some(0.0));
    }

    #[test]
    fn every_key_has_a_bar() {
        for (key, good, bad) in [
            ("nic_conformance_passed", 1.0, 0.0),
            ("nic_bytes_by_device_share", 0.99, 0.98),
            ("ioat_conformance_passed", 1.0, 0.0),
            ("ioat_descriptors_aligned_4m", 1024.0, 1025.0),
            ("ioat_descriptors_misaligned_4m", 2048.0, 2100.0),
            ("dsa_conformance_passed", 1.0, 0.0),
            ("dsa_descriptors_aligned_4m", 4.0, 5.0),
            ("dsa_batch_of_64_doorbells", 1.0, 2.0),
            ("dsa_fault_resumed", 1.0, 0.0),
            ("device_roundtrip_ns", 1500.0, 1600.0),
            ("device_submit_ns", 200.0, 210.0),
            ("device_batch_submit_ns", 40.0, 45.0),
            ("device_syscalls_per_copy", 0.0, 0.1),
        ] {
            assert_eq!(judge("devices", key, good, None).status, TargetStatus::Reached, "{key}");
            assert_eq!(judge("devices", key, bad, None).status, TargetStatus::Missed, "{key}");
        }
    }
}
