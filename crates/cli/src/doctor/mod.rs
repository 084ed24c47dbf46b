//! `memferry doctor`: what this machine can do, what is missing, and the exact command that mends
//! it. Each check looks at one thing. Nothing is changed, but for the saved profiles when
//! `--measure` asks for it.

mod copies;
mod devices;
mod gpu;
mod memory;
mod messages;
mod mpi;
pub(crate) mod partner;

use memferry::engine::cpu::Profile;
use memferry::message::plan;
use serde::Serialize;

use crate::outcome::Machine;
use crate::show::{self, Paint};

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// As good as it can be.
    Ok,
    /// It works, and could work better.
    Warn,
    /// It is not there.
    Missing,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// What was looked at.
    pub(crate) name: &'static str,
    /// How it came out.
    pub(crate) status: Status,
    /// What was found and what it means.
    pub(crate) detail: String,
    /// The command or change that mends it.
    pub(crate) cure: Option<String>,
}

impl Check {
    fn new(name: &'static str, status: Status, detail: impl Into<String>) -> Self {
        Self { name, status, detail: detail.into(), cure: None }
    }

    fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }
}

/// Everything `memferry doctor --json` prints.
#[derive(Debug, Serialize)]
struct Diagnosis {
    machine: Machine,
    /// What copies need.
    checks: Vec<Check>,
    /// What messages need.
    messages: Vec<Check>,
    /// What MPI programs over Memferry need.
    mpi: Vec<Check>,
    /// What pinning and windows need.
    memory: Vec<Check>,
    /// GPUs that can copy.
    gpus: Vec<Check>,
    /// Other devices that can copy.
    devices: Vec<Check>,
}

impl Diagnosis {
    fn all(&self) -> impl Iterator<Item = &Check> {
        let Self { checks, messages, mpi, memory, gpus, devices, .. } = self;
        [checks, messages, mpi, memory, gpus, devices].into_iter().flatten()
    }

    /// What every program needs and is not there: a script can go by the exit status.
    fn broken(&self) -> Vec<&'static str> {
        const NEEDED: [&str; 3] = [copies::PROFILE, copies::A_COPY, messages::A_MESSAGE];
        self.all()
            .filter(|check| NEEDED.contains(&check.name) && check.status == Status::Missing)
            .map(|check| check.name)
            .collect()
    }
}

/// Looks at everything and prints it, as text or as JSON.
pub(crate) fn run(measure: bool, json: bool) -> anyhow::Result<()> {
    let remeasured =
        measure.then(|| (Profile::remeasure().origin, plan::Profile::remeasure().origin));
    let (copies, costs) = remeasured.as_ref().map(|(copies, costs)| (copies, costs)).unzip();
    let machine = Machine::look();
    let (checks, messages) = (copies::checks(&machine, copies), messages::checks(costs));
    let reach = messages.iter().find(|check| check.name == messages::CROSS_MEMORY);
    let mpi = mpi::checks(reach);
    let (memory, gpus, devices) = (memory::checks(), gpu::checks(), devices::checks());
    let diagnosis = Diagnosis { machine, checks, messages, mpi, memory, gpus, devices };
    if json {
        show::print_json(&diagnosis)?;
    } else {
        show::print(&render(&diagnosis, Paint::for_stdout()))?;
    }
    let broken = diagnosis.broken();
    anyhow::ensure!(broken.is_empty(), "not working: {}", broken.join(", "));
    Ok(())
}

fn render(diagnosis: &Diagnosis, paint: Paint) -> String {
    let facts = diagnosis.machine.facts();
    let names = facts.iter().map(|(name, _)| *name);
    let width =
        names.chain(diagnosis.all().map(|check| check.name)).map(str::len).max().unwrap_or(0);
    let mut text = format!("{}\n", paint.bold("this machine"));
    for (name, fact) in &facts {
        text.push_str(&format!("    {}  {fact}\n", paint.dim(&format!("{name:<width$}"))));
    }
    for (title, checks) in [
        ("copies", &diagnosis.checks),
        ("messages", &diagnosis.messages),
        ("MPI", &diagnosis.mpi),
        ("memory", &diagnosis.memory),
        ("GPUs", &diagnosis.gpus),
        ("copy devices", &diagnosis.devices),
    ] {
        text.push_str(&format!("\n{}\n", paint.bold(title)));
        checks.iter().for_each(|check| text.push_str(&line(check, width, paint)));
    }
    text
}

fn line(check: &Check, width: usize, paint: Paint) -> String {
    let sign = match check.status {
        Status::Ok => paint.good("✓"),
        Status::Warn => paint.bad("!"),
        Status::Missing => paint.bad("✗"),
    };
    let mut text = format!("  {sign} {:<width$}  {}\n", check.name, check.detail);
    if let Some(cure) = &check.cure {
        text.push_str(&format!("    {:<width$}  to mend: {}\n", "", paint.bold(cure)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn diagnosis(checks: Vec<Check>, messages: Vec<Check>) -> Diagnosis {
        let machine = sample::empty("x").machine;
        let (mpi, memory, gpus, devices) = (vec![], vec![], vec![], vec![]);
        Diagnosis { machine, checks, messages, mpi, memory, gpus, devices }
    }

    #[test]
    fn a_check_is_rendered_with_its_cure() {
        let checks = vec![copies::membarrier(false), copies::huge_pages(Some("[always]"))];
        let text = render(&diagnosis(checks, Vec::new()), Paint::plain());
        assert!(text.contains("  ✗ membarrier "), "{text}");
        assert!(text.contains("to mend: run Linux 4.14"), "{text}");
        assert!(text.contains("  ✓ huge pages "), "{text}");
    }

    #[test]
    fn a_check_has_the_fields_scripts_read() {
        let json = serde_json::to_value(copies::huge_pages(Some("[never]"))).unwrap();
        assert_eq!(json["status"], "warn");
        assert!(json["cure"].as_str().unwrap().starts_with("echo madvise"));
        assert!(json["name"].is_string() && json["detail"].is_string());
    }

    #[test]
    fn only_what_every_program_needs_makes_the_diagnosis_a_failure() {
        let missing = |name| Check::new(name, Status::Missing, "");
        assert!(diagnosis(vec![missing("membarrier")], vec![]).broken().is_empty());
        let no_gpu = Diagnosis { gpus: vec![missing("GPU driver")], ..diagnosis(vec![], vec![]) };
        assert!(no_gpu.broken().is_empty());
        let broken = diagnosis(vec![missing(copies::A_COPY)], vec![missing(messages::A_MESSAGE)]);
        assert_eq!(broken.broken(), [copies::A_COPY, messages::A_MESSAGE]);
        let fine = Check::new(messages::A_MESSAGE, Status::Warn, "");
        assert!(diagnosis(vec![], vec![fine]).broken().is_empty());
    }
}
