//! What `memferry explain --gpu` says beside the rest: between which memory, and what was measured of
//! the GPU when it was opened.

use memferry::MemoryKind;
use memferry::engine::contract::Acquaintance;
use memferry::engine::cuda::{DeviceFacts, Rates};
use memferry::plan::Question;
use serde::Serialize;

use super::copy::Fact;

/// The GPU that takes part in a copy.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    ordinal: usize,
    name: String,
    from: &'static str,
    to: &'static str,
    /// Whether the ordinary memory, if any, is registered, or was met before by the sole user of CUDA:
    /// `known` or `fresh`.
    memory: &'static str,
    pub(super) measured: Vec<Fact>,
}

impl Device {
    pub(super) fn new(facts: &DeviceFacts, rates: &Rates, question: &Question) -> Self {
        let place = |kind| match kind {
            MemoryKind::Host => "host",
            MemoryKind::Device => "device",
        };
        Self {
            ordinal: facts.ordinal,
            name: facts.name.clone(),
            from: place(question.source_memory),
            to: place(question.target_memory),
            memory: match question.acquaintance {
                Acquaintance::Known => "known",
                _ => "fresh",
            },
            measured: measured(rates),
        }
    }

    /// For the title of the explanation.
    pub(super) fn way(&self) -> String {
        let memory = match (self.from, self.to, self.memory) {
            ("device", "device", _) => "",
            (.., "known") => ", of registered memory",
            _ => ", of memory that is not registered",
        };
        format!(" from {} to {}{memory}", self.from, self.to)
    }

    /// For the title of what was measured.
    pub(super) fn title(&self) -> String {
        format!("what GPU {} does, {}", self.ordinal, self.name)
    }
}

fn measured(rates: &Rates) -> Vec<Fact> {
    let rate =
        |name, value: f64, meaning| Fact { name, value, text: format!("{value:.0} GB/s"), meaning };
    vec![
        Fact {
            name: "startup_ns",
            value: rates.startup_ns,
            text: format!("{:.0} ns", rates.startup_ns),
            meaning: "from the hand-over of a small copy to its end",
        },
        rate("inward_gb_per_s", rates.inward, "from registered memory to the GPU"),
        rate("outward_gb_per_s", rates.outward, "from the GPU to registered memory"),
        rate("through_gb_per_s", rates.through, "between registered memory, through the GPU"),
        rate("within_gb_per_s", rates.within, "inside the GPU"),
        rate("register_gb_per_s", rates.register, "registering memory of ordinary pages"),
        rate("register_huge_gb_per_s", rates.register_huge, "registering memory of huge pages"),
        rate("stage_gb_per_s", rates.stage, "one channel, through its ring"),
    ]
}
