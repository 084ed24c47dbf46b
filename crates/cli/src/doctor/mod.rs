//! `memferry doctor` reports what this machine supports, what is missing, and the command that
//! fixes it. Each check inspects one thing. Nothing is changed, except the saved profiles with
//! `--measure`.

mod accelerators;
mod copies;
mod devices;
pub(crate) mod echo_peer;
mod gpu;
mod memory;
mod messages;
mod mpi;
mod text;

use memferry::engine::cpu::CpuProfile;
use memferry::message::plan;
use memferry_bench::results::outcome::Machine;
use serde::Serialize;

use self::accelerators::DsaReport;
use crate::args::DoctorArgs;
use crate::show::{self, Paint};

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// Nothing can be improved.
    Ok,
    /// It works, but can be improved.
    Warn,
    /// It does not work or does not exist.
    Missing,
}

/// One check and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// The name of the check.
    pub(crate) name: &'static str,
    /// The result.
    pub(crate) status: Status,
    /// The finding and its meaning.
    pub(crate) detail: String,
    /// What else there is to know, a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    /// The command or change that fixes the problem.
    pub(crate) fix: Option<String>,
    /// Another command that fixes it as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) other_fix: Option<String>,
    /// The text for the one line of the subject. A check that passes with a summary makes its
    /// subject ready.
    #[serde(skip)]
    pub(crate) summary: Option<String>,
    /// How much the checked thing matters.
    #[serde(skip)]
    pub(crate) need: Need,
}

/// How the fix of a check begins whose detail ends with advice.
const DO_AS_SAID: &str = "do what the message says";

/// How much a missing thing matters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Need {
    /// Without it programs are slower or fail.
    #[default]
    Usual,
    /// Optional software.
    OptionalSoftware,
    /// Hardware that this machine does not have, or something that only such hardware needs.
    OptionalHardware,
}

impl Check {
    fn new(name: &'static str, status: Status, detail: impl Into<String>) -> Self {
        Self {
            name,
            status,
            detail: detail.into(),
            notes: Vec::new(),
            fix: None,
            other_fix: None,
            summary: None,
            need: Need::Usual,
        }
    }

    fn notes(mut self, notes: Vec<String>) -> Self {
        self.notes = notes;
        self
    }

    fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    fn other_fix(mut self, fix: Option<String>) -> Self {
        self.other_fix = fix;
        self
    }

    fn summary(mut self, summary: impl Into<String>) -> Self {
        self.summary = Some(summary.into());
        self
    }

    fn need(mut self, need: Need) -> Self {
        self.need = need;
        self
    }

    /// Whether the checked thing is optional and missing.
    fn is_absent_option(&self) -> bool {
        self.need != Need::Usual && self.status != Status::Ok
    }
}

/// The object that `memferry doctor --json` prints.
#[derive(Debug, Serialize)]
struct Diagnosis {
    machine: Machine,
    /// Checks of copies.
    checks: Vec<Check>,
    /// Checks of messages.
    messages: Vec<Check>,
    /// Checks of MPI programs over Memferry.
    mpi: Vec<Check>,
    /// Checks of pinning and windows.
    memory: Vec<Check>,
    /// Checks of GPUs that can copy.
    gpus: Vec<Check>,
    /// Checks of other devices that can copy.
    devices: Vec<Check>,
    /// The devices of Intel's data streaming accelerator, each with all its work queues.
    dsa: Vec<DsaReport>,
}

/// A capability that this machine can have, with its checks.
struct Subject<'a> {
    /// The name of the capability.
    name: &'static str,
    /// The heading of the checks.
    title: &'static str,
    checks: &'a [Check],
}

impl Diagnosis {
    /// All subjects, in the order of display.
    fn subjects(&self) -> [Subject<'_>; 6] {
        let subject = |name, title, checks| Subject { name, title, checks };
        [
            subject("copies", "copies", &self.checks),
            subject("messages", "messages", &self.messages),
            subject("windows", "memory", &self.memory),
            subject("MPI", "MPI", &self.mpi),
            subject("GPU copies", "GPUs", &self.gpus),
            subject("device copies", "copy devices", &self.devices),
        ]
    }

    fn all(&self) -> impl Iterator<Item = &Check> {
        let Self { checks, messages, mpi, memory, gpus, devices, .. } = self;
        [checks, messages, mpi, memory, gpus, devices].into_iter().flatten()
    }

    /// The checks that every program needs and that failed. They determine the exit status.
    fn missing_essentials(&self) -> Vec<&'static str> {
        const NEEDED: [&str; 3] = [copies::PROFILE, copies::A_COPY, messages::A_MESSAGE];
        self.all()
            .filter(|check| NEEDED.contains(&check.name) && check.status == Status::Missing)
            .map(|check| check.name)
            .collect()
    }
}

/// Runs all checks and prints them: as JSON, as one line per subject, or in full.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let remeasured = args
        .measure
        .then(|| (CpuProfile::remeasure().origin, plan::MessageProfile::remeasure().origin));
    let (copies, costs) = remeasured.as_ref().map(|(copies, costs)| (copies, costs)).unzip();
    let machine = Machine::detect();
    let (checks, messages) = (copies::checks(&machine, copies), messages::checks(costs));
    let reach = messages.iter().find(|check| check.name == messages::CROSS_MEMORY);
    let mpi = mpi::checks(reach);
    let (memory, gpus, devices) = (memory::checks(), gpu::checks(), devices::checks());
    let dsa = accelerators::reports();
    let diagnosis = Diagnosis { machine, checks, messages, mpi, memory, gpus, devices, dsa };
    if args.json {
        show::print_json(&diagnosis)?;
    } else {
        let paint = Paint::for_stdout();
        let render = if args.verbose { text::details } else { text::overview };
        show::print(&(render(&diagnosis, paint) + &text::conclusion(&diagnosis, paint)))?;
    }
    let broken = diagnosis.missing_essentials();
    anyhow::ensure!(broken.is_empty(), "not working: {}", broken.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::sample;

    use super::*;

    fn diagnosis(checks: Vec<Check>, messages: Vec<Check>) -> Diagnosis {
        let machine = sample::empty("x").machine;
        let (mpi, memory, gpus, devices, dsa) = (vec![], vec![], vec![], vec![], vec![]);
        Diagnosis { machine, checks, messages, mpi, memory, gpus, devices, dsa }
    }

    #[test]
    fn a_check_has_the_fields_scripts_read() {
        let json = serde_json::to_value(copies::huge_pages(Some("[never]"))).unwrap();
        assert_eq!(json["status"], "warn");
        assert!(json["fix"].as_str().unwrap().starts_with("echo madvise"));
        assert!(json["name"].is_string() && json["detail"].is_string());
        let absent = copies::membarrier(false).need(Need::OptionalHardware).summary("x");
        let json = serde_json::to_value(absent).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["name", "status", "detail", "fix"]);
        assert_eq!(json["status"], "missing");
    }

    #[test]
    fn only_what_every_program_needs_makes_the_diagnosis_a_failure() {
        let missing = |name| Check::new(name, Status::Missing, "");
        assert!(diagnosis(vec![missing("membarrier")], vec![]).missing_essentials().is_empty());
        let no_gpu = Diagnosis { gpus: vec![missing("GPU driver")], ..diagnosis(vec![], vec![]) };
        assert!(no_gpu.missing_essentials().is_empty());
        let broken = diagnosis(vec![missing(copies::A_COPY)], vec![missing(messages::A_MESSAGE)]);
        assert_eq!(broken.missing_essentials(), [copies::A_COPY, messages::A_MESSAGE]);
        let fine = Check::new(messages::A_MESSAGE, Status::Warn, "");
        assert!(diagnosis(vec![], vec![fine]).missing_essentials().is_empty());
    }
}
