use std::sync::Arc;

use memferry::engine::contract::Acquaintance;
use memferry::engine::cpu::{CpuEngine, ProfileSource};
use memferry::engine::cuda::model::ModelDevice;
use memferry::engine::cuda::{DeviceFacts, Rates};
use memferry::{CudaEngine, MemoryKind, PinLimits};

use super::*;

fn facts() -> Facts {
    let ferry = Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .channels(1)
        .inline_bytes(4 << 10)
        .split_bytes(256 << 10)
        .stream_bytes(2 << 20)
        .build()
        .unwrap();
    ferry.facts().clone()
}

fn ask(bytes: u64, temperature: Temperature) -> Explanation {
    let question = Question { temperature, ..Question::copy(bytes, true) };
    explain(&facts(), question, None).unwrap()
}

/// What the planner knows with a model of a GPU.
fn facts_with_gpu() -> Facts {
    let limits = PinLimits { most_bytes: 64 << 20, most_entries: 64 };
    let gpu = CudaEngine::with_driver(ModelDevice::new(), Rates::default(), limits).unwrap();
    let profile = Profile::load(&ProfileSource::BuiltIn).unwrap();
    let ferry = Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .engine(Arc::new(CpuEngine::new(profile)), 1)
        .engine(Arc::new(gpu), 2)
        .build()
        .unwrap();
    ferry.facts().clone()
}

fn ask_with_gpu(
    bytes: u64,
    source_memory: MemoryKind,
    target_memory: MemoryKind,
    acquaintance: Acquaintance,
) -> Explanation {
    let name = "Invented GPU".to_owned();
    let device = DeviceFacts {
        ordinal: 0,
        name,
        driver_version: 12_080,
        copy_engines: 3,
        registers_read_only: true,
    };
    let copy = Question::copy(bytes, true);
    let question = Question { source_memory, target_memory, acquaintance, ..copy };
    let device = Device::new(&device, &Rates::default(), &question);
    explain(&facts_with_gpu(), question, Some(device)).unwrap()
}

#[test]
fn small_copies_are_explained_as_the_callers_own() {
    let explanation = ask(4096, Temperature::Unknown);
    assert_eq!(explanation.blocking.path, "the caller, at once");
    assert_eq!(explanation.asynchronous.path, "the caller, at once");
}

#[test]
fn large_copies_name_engine_kernel_and_reason() {
    let explanation = ask(64 << 20, Temperature::Unknown);
    assert!(explanation.blocking.path.contains("engine cpu"));
    assert_ne!(explanation.blocking.kernel, "cached");
    let text = render(&explanation, "not measured", Paint::plain());
    for word in ["a copy of 64 MiB", "blocking", "asynchronous", "because", "split_bytes"] {
        assert!(text.contains(word), "{word} is missing from:\n{text}");
    }
}

#[test]
fn temperature_changes_the_kernel() {
    let kernel = |temperature| ask(1 << 20, temperature).blocking.kernel;
    assert_eq!(kernel(Temperature::Hot), "cached");
    assert_ne!(kernel(Temperature::Cold), "cached");
}

#[test]
fn a_copy_to_a_gpu_is_estimated_by_what_was_measured_of_it() {
    use MemoryKind::{Device, Host};
    let bytes = 64 << 20;
    let known = ask_with_gpu(bytes, Host, Device, Acquaintance::Known);
    assert!(known.blocking.path.contains("engine cuda"), "{}", known.blocking.path);
    assert_eq!(known.blocking.kernel, "none");
    // 50 GB/s, and some microseconds to begin.
    let limit_us = bytes as f64 / 50_000.0;
    assert!((limit_us..1.1 * limit_us).contains(&known.blocking.estimate_us), "{known:?}");
    let fresh = ask_with_gpu(bytes, Host, Device, Acquaintance::New);
    assert!(fresh.blocking.estimate_us > 1.5 * known.blocking.estimate_us, "{fresh:?}");
    assert!(
        fresh.blocking.reason.contains("the memory is not registered"),
        "{}",
        fresh.blocking.reason
    );
    let inside = ask_with_gpu(bytes, Device, Device, Acquaintance::Known);
    assert!(inside.asynchronous.estimate_us < known.asynchronous.estimate_us, "{inside:?}");
}

#[test]
fn a_copy_that_gpu_and_processors_share_is_quicker_than_either() {
    let bytes = 256 << 20;
    let shared = ask_with_gpu(bytes, MemoryKind::Host, MemoryKind::Host, Acquaintance::Known);
    let alone = ask(bytes, Temperature::Unknown);
    assert!(shared.blocking.path.contains("cuda and up to"), "{}", shared.blocking.path);
    assert!(shared.blocking.estimate_us < alone.blocking.estimate_us);
    assert!(shared.blocking.estimate_us < shared.asynchronous.estimate_us);
}

#[test]
fn an_explanation_with_a_gpu_shows_the_way_and_the_measured_lines() {
    let explanation =
        ask_with_gpu(1 << 20, MemoryKind::Device, MemoryKind::Host, Acquaintance::New);
    let text = render(&explanation, "not measured", Paint::plain());
    for word in [
        "a copy of 1 MiB from device to host, of memory that is not registered\n",
        "what GPU 0 does, Invented GPU (measured just now)",
        "outward_gb_per_s",
        "50 GB/s",
    ] {
        assert!(text.contains(word), "{word} is missing from:\n{text}");
    }
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!((&json["gpu"]["from"], &json["gpu"]["memory"]), (&"device".into(), &"fresh".into()));
    let without = serde_json::to_value(ask(4096, Temperature::Unknown)).unwrap();
    assert!(without.get("gpu").is_none());
}
