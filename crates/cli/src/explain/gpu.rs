//! The part of `memferry explain --gpu` about the GPU: the memory of source and target, and the
//! values that were measured when the GPU was opened.

use memferry::MemoryKind;
use memferry::engine::contract::ReuseHint;
use memferry::engine::cuda::{CudaDeviceInfo, CudaProfile};
use memferry::plan::CopyQuery;
use serde::Serialize;

use super::copy::MeasuredValue;

/// The GPU that takes part in a copy.
#[derive(Debug, Serialize)]
pub(super) struct GpuExplanation {
    ordinal: usize,
    name: String,
    from: &'static str,
    to: &'static str,
    /// `known` if the ordinary memory is registered or, with a sole user of CUDA, was used before;
    /// `fresh` otherwise.
    memory: &'static str,
    pub(super) measured: Vec<MeasuredValue>,
}

impl GpuExplanation {
    pub(super) fn new(facts: &CudaDeviceInfo, rates: &CudaProfile, question: &CopyQuery) -> Self {
        let place = |kind| match kind {
            MemoryKind::Host => "host",
            MemoryKind::Device => "device",
        };
        Self {
            ordinal: facts.ordinal,
            name: facts.name.clone(),
            from: place(question.source_memory),
            to: place(question.target_memory),
            memory: match question.reuse {
                ReuseHint::Reused => "known",
                _ => "fresh",
            },
            measured: measured(rates),
        }
    }

    /// The route, for the title of the explanation.
    pub(super) fn route(&self) -> String {
        let memory = match (self.from, self.to, self.memory) {
            ("device", "device", _) => "",
            (.., "known") => ", of registered memory",
            _ => ", of memory that is not registered",
        };
        format!(" from {} to {}{memory}", self.from, self.to)
    }

    /// The title of the measured values.
    pub(super) fn title(&self) -> String {
        format!("what GPU {} does, {}", self.ordinal, self.name)
    }
}

fn measured(rates: &CudaProfile) -> Vec<MeasuredValue> {
    let rate = |name, value: f64, meaning| MeasuredValue {
        name,
        value,
        text: format!("{value:.0} GB/s"),
        meaning,
    };
    vec![
        MeasuredValue {
            name: "startup_ns",
            value: rates.startup_ns,
            text: format!("{:.0} ns", rates.startup_ns),
            meaning: "from the hand-over of a small copy to its end",
        },
        rate("inward_gb_per_s", rates.host_to_device, "from registered memory to the GPU"),
        rate("outward_gb_per_s", rates.device_to_host, "from the GPU to registered memory"),
        rate("through_gb_per_s", rates.host_to_host, "between registered memory, through the GPU"),
        rate("within_gb_per_s", rates.device_to_device, "inside the GPU"),
        rate("register_gb_per_s", rates.register, "registering memory of ordinary pages"),
        rate("register_huge_gb_per_s", rates.register_huge, "registering memory of huge pages"),
        rate("stage_gb_per_s", rates.staging, "one channel, through its ring"),
    ]
}
