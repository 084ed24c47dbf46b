//! The engines that a copy could take, and why each is or is not used: the part of `memferry explain`
//! about devices.

use memferry::engine::dsa::published_tuning;
use memferry::engine::factories;
use memferry::plan::{
    CopyPlan, CopyPlanContext, CopyQuery, CopyStrategy, EngineSummary, TuningFact,
};
use memferry::{EngineSelection, FerryBuilder};
use serde::Serialize;

use super::copy::Estimate;

/// The devices that the arguments and the environment ask for, by engine.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestedDevices {
    requests: Vec<DeviceRequest>,
}

/// The selection of devices for one engine.
#[derive(Debug, Clone)]
pub(super) struct DeviceRequest {
    engine: &'static str,
    pub(super) selection: EngineSelection,
    /// Who asks: `--dsa=auto` or `MEMFERRY_DSA=auto`.
    pub(super) asked: String,
    is_argument: bool,
}

/// An engine, and the planner's verdict about it.
#[derive(Debug, Serialize)]
pub(super) struct EngineVerdict {
    pub(super) engine: String,
    /// The devices that it uses.
    pub(super) devices: Vec<String>,
    /// Whether this copy takes it.
    pub(super) is_chosen: bool,
    pub(super) verdict: String,
}

/// The values by which an engine is tuned.
#[derive(Debug, Serialize)]
pub(super) struct EngineTuning {
    pub(super) engine: String,
    /// Whether the engine is here; if not, the values are those of the literature.
    is_here: bool,
    pub(super) facts: Vec<EngineFact>,
}

/// One of these values.
#[derive(Debug, Serialize)]
pub(super) struct EngineFact {
    name: &'static str,
    value: f64,
    text: String,
    /// `measured`, `literature` or `reported`.
    origin: &'static str,
    reason: &'static str,
}

impl EngineTuning {
    /// The values of all engines that have some, and the published ones of a DSA that was asked for and
    /// is not there.
    pub(super) fn of(facts: &CopyPlanContext, devices: &RequestedDevices) -> Vec<Self> {
        let tuned = facts.engines.iter().filter(|engine| !engine.tuning.is_empty());
        let mut all: Vec<_> =
            tuned.map(|engine| Self::new(engine.name.clone(), true, &engine.tuning)).collect();
        if devices.absent(facts).any(|asked| asked.engine == "dsa") {
            all.push(Self::new("dsa".into(), false, &published_tuning()));
        }
        all
    }

    fn new(engine: String, is_here: bool, facts: &[TuningFact]) -> Self {
        let fact = |fact: &TuningFact| EngineFact {
            name: fact.name,
            value: fact.value,
            text: fact.text.clone(),
            origin: fact.origin.name(),
            reason: fact.reason,
        };
        Self { engine, is_here, facts: facts.iter().map(fact).collect() }
    }

    /// The heading of the lines.
    pub(super) fn title(&self) -> String {
        match self.is_here {
            true => format!("what engine {} goes by", self.engine),
            false => format!("what engine {} would go by (none is here)", self.engine),
        }
    }

    /// The lines for people.
    pub(super) fn lines(&self) -> String {
        let line = |fact: &EngineFact| {
            let EngineFact { name, text, origin, reason, .. } = fact;
            format!("    {name:<21} {text:>9}  {origin}: {reason}\n")
        };
        self.facts.iter().map(line).collect()
    }
}

impl RequestedDevices {
    /// Takes the devices of the arguments, each with the name of its engine, and those of the variables
    /// that `variable` reads.
    pub(super) fn new(
        arguments: &[(&str, Option<String>)],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let mut requests = Vec::new();
        for factory in factories() {
            let (engine, name) = (factory.name(), factory.variable());
            let Some((_, argument)) = arguments.iter().find(|(named, _)| *named == engine) else {
                continue;
            };
            let (text, is_argument) = match argument {
                Some(devices) => (devices.clone(), true),
                None => (variable(name).unwrap_or_default().trim().to_owned(), false),
            };
            if text.is_empty() && !is_argument {
                continue;
            }
            let source = if is_argument { flag(engine) } else { name };
            let selection = EngineSelection::parse(&text);
            let asked = format!("{source}={text}");
            requests.push(DeviceRequest { engine, selection, asked, is_argument });
        }
        Self { requests }
    }

    /// The selection for an engine, if there is one.
    pub(super) fn of(&self, engine: &str) -> Option<&DeviceRequest> {
        self.requests.iter().find(|request| request.engine == engine)
    }

    /// Adds the devices of the arguments to a ferry. What is not asked for is as the environment says.
    pub(super) fn select(&self, mut builder: FerryBuilder) -> FerryBuilder {
        for request in self.requests.iter().filter(|request| request.is_argument) {
            let selection = request.selection.clone();
            builder = match request.engine {
                "cuda" => builder.gpu(selection),
                "ioat" => builder.ioat(selection),
                "nic" => builder.nic(selection),
                _ => builder.dsa(selection),
            };
        }
        builder
    }

    /// The engines that were asked for and have no device here, each with who asked.
    fn absent(&self, facts: &CopyPlanContext) -> impl Iterator<Item = &DeviceRequest> {
        let asked_for =
            self.requests.iter().filter(|asked| asked.selection != EngineSelection::Off);
        asked_for.filter(|asked| facts.engines.iter().all(|engine| engine.name != asked.engine))
    }

    /// The verdicts about all engines of a ferry, and about devices that were asked for and are not
    /// there.
    pub(super) fn verdicts(
        &self,
        facts: &CopyPlanContext,
        question: &CopyQuery,
        plan: &CopyPlan,
    ) -> Vec<EngineVerdict> {
        let here = facts.engines.iter().enumerate().map(|(index, engine)| EngineVerdict {
            engine: engine.name.clone(),
            devices: engine.devices.clone(),
            is_chosen: is_chosen(plan, index),
            verdict: verdict(facts, question, plan, index),
        });
        let absent = self.absent(facts).map(|request| EngineVerdict {
            engine: request.engine.into(),
            devices: Vec::new(),
            is_chosen: false,
            verdict: format!(
                "asked for by {}, but no device can be used: `memferry doctor --verbose` \
                 tells what is there, and what it needs",
                request.asked
            ),
        });
        here.chain(absent).collect()
    }
}

/// The argument that selects the devices of an engine.
pub(super) fn flag(engine: &str) -> &'static str {
    match engine {
        "cuda" => "--gpu",
        "ioat" => "--ioat",
        "nic" => "--nic",
        _ => "--dsa",
    }
}

/// The engines that take part in a plan.
pub(super) fn chosen<'a>(
    facts: &'a CopyPlanContext,
    plan: &CopyPlan,
) -> impl Iterator<Item = &'a EngineSummary> {
    let engines = facts.engines.iter().enumerate();
    engines.filter(|(index, _)| is_chosen(plan, *index)).map(|(_, engine)| engine)
}

fn is_chosen(plan: &CopyPlan, index: usize) -> bool {
    let processors = match plan.strategy {
        CopyStrategy::HybridWorkSharing { processors, .. } => Some(processors),
        _ => None,
    };
    plan.strategy.engine() == Some(index) || processors == Some(index)
}

fn verdict(facts: &CopyPlanContext, question: &CopyQuery, plan: &CopyPlan, index: usize) -> String {
    let engine = &facts.engines[index];
    let estimate = |engine: &EngineSummary| Estimate::of_engine(facts, engine, question).text();
    if is_chosen(plan, index) {
        // Engines that share a copy have one estimate.
        return format!("chosen, {}", Estimate::of_plan(facts, plan, question).text());
    }
    let capabilities = &engine.capabilities;
    if !capabilities.operations.contains(question.operation) {
        return "not chosen: it does not execute this operation".into();
    }
    let reaches = |kind| capabilities.memory.contains(kind);
    if !reaches(question.source_memory) || !reaches(question.target_memory) {
        return "not chosen: it does not reach this memory".into();
    }
    let own = estimate(engine);
    match plan.strategy.engine().map(|chosen| &facts.engines[chosen]) {
        None => format!("not chosen, {own}: the caller copies, because {}", plan.reason),
        Some(chosen) if engine.is_device() => {
            format!("not chosen, {own}: {} takes {}", chosen.name, estimate(chosen))
        }
        Some(chosen) => format!(
            "not chosen, {own}: {} takes {} and leaves the processors free, whose time counts double",
            chosen.name,
            estimate(chosen)
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memferry::Ferry;
    use memferry::engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
    use memferry::engine::dsa::DsaEngine;
    use memferry::engine::ioat::IoatEngine;
    use memferry::engine::testing::dsa_model::DsaModel;
    use memferry::engine::testing::ioat_model::IoatModel;

    use super::*;

    /// A request for any DSA, by an argument.
    fn dsa_requested(environment: impl Fn(&str) -> Option<String>) -> RequestedDevices {
        let any = Some("auto".into());
        RequestedDevices::new(&[("ioat", None), ("nic", None), ("dsa", any)], environment)
    }

    fn verdicts(bytes: u64, requested: &RequestedDevices) -> Vec<EngineVerdict> {
        let profile = CpuProfile::load(&ProfileSource::BuiltIn).unwrap();
        let ferry = Ferry::builder()
            .profile(ProfileSource::BuiltIn)
            .engine(Arc::new(CpuEngine::new(profile)), 1)
            .engine(Arc::new(IoatEngine::over_model(IoatModel::new()).unwrap()), 1)
            .build()
            .unwrap();
        let question = CopyQuery::copy(bytes, true);
        let plan = ferry.explain(&question).unwrap();
        requested.verdicts(ferry.plan_context(), &question, &plan)
    }

    #[test]
    fn a_dsa_engine_explains_what_it_goes_by_and_where_that_is_from() {
        let engine = Arc::new(DsaEngine::over_model(DsaModel::new()).unwrap());
        let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).engine(engine, 1);
        let ferry = ferry.build().unwrap();
        let tuning = EngineTuning::of(ferry.plan_context(), &RequestedDevices::default());
        assert_eq!(tuning.len(), 1);
        assert_eq!(tuning[0].title(), "what engine dsa goes by");
        let text = tuning[0].lines();
        for name in ["descriptor_ns", "max_batch", "aligned_from_bytes", "queues"] {
            assert!(text.contains(name), "{text}");
        }
        for name in ["populated_bytes", "cache_control", "interrupt_bytes"] {
            assert!(text.contains(name), "{text}");
        }
        // A model is not measured.
        assert!(text.contains("1150 ns  literature: "), "{text}");
        assert!(text.contains("2 KiB  literature: "), "{text}");
    }

    #[test]
    fn devices_that_the_environment_asks_for_have_a_verdict_too() {
        let environment = |name: &str| match name {
            "MEMFERRY_NIC" => Some("auto".into()),
            "MEMFERRY_IOAT" => Some("off".into()),
            "MEMFERRY_DSA" => Some("wq0.0".into()),
            _ => None,
        };
        let requested = dsa_requested(environment);
        let found = verdicts(64, &requested);
        let names: Vec<_> = found.iter().map(|found| found.engine.as_str()).collect();
        assert_eq!(names, ["cpu", "ioat", "dsa", "nic"]);
        assert!(found[2].verdict.contains("--dsa=auto"), "an argument comes before the variable");
        assert!(found[3].verdict.contains("MEMFERRY_NIC=auto"), "{}", found[3].verdict);
    }

    #[test]
    fn a_dsa_that_is_not_here_is_explained_by_published_values() {
        let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).build().unwrap();
        let asked = dsa_requested(|_| None);
        assert!(EngineTuning::of(ferry.plan_context(), &RequestedDevices::default()).is_empty());
        let tuning = EngineTuning::of(ferry.plan_context(), &asked);
        let text = tuning[0].lines();
        assert_eq!(tuning[0].title(), "what engine dsa would go by (none is here)");
        assert_eq!(tuning[0].engine, "dsa");
        for value in ["1150 ns  literature: ", "28.0 GB/s  literature: ", "aligned_from_bytes"] {
            assert!(text.contains(value), "{text}");
        }
        assert!(!text.contains("reported"), "what only a device reports is unknown: {text}");
    }

    #[test]
    fn a_device_that_is_switched_off_was_not_asked_for() {
        let off = Some("off".into());
        let requested =
            RequestedDevices::new(&[("ioat", None), ("nic", None), ("dsa", off)], |_| None);
        let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).build().unwrap();
        assert!(EngineTuning::of(ferry.plan_context(), &requested).is_empty());
        assert!(verdicts(64, &requested).iter().all(|verdict| verdict.engine != "dsa"));
    }

    #[test]
    fn every_engine_has_a_verdict_and_absent_devices_too() {
        let requested = dsa_requested(|_| None);
        for bytes in [64, 64 << 20] {
            let found = verdicts(bytes, &requested);
            let names: Vec<_> = found.iter().map(|found| found.engine.as_str()).collect();
            assert_eq!(names, ["cpu", "ioat", "dsa"]);
            assert_eq!(
                found.iter().filter(|found| found.is_chosen).count(),
                usize::from(bytes > 64)
            );
            assert!(found[2].verdict.contains("--dsa=auto"), "{}", found[2].verdict);
            assert!(found[2].verdict.contains("memferry doctor"), "{}", found[2].verdict);
            let is_told = |found: &EngineVerdict| found.verdict.contains("chosen, ");
            assert!(found[..2].iter().all(is_told), "{found:?}");
        }
    }
}
