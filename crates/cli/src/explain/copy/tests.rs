use std::path::Path;
use std::sync::Arc;

use memferry::engine::contract::ReuseHint;
use memferry::engine::cpu::{CpuEngine, ProfileSource};
use memferry::engine::cuda::{CudaDeviceInfo, CudaProfile};
use memferry::engine::ioat::IoatEngine;
use memferry::engine::testing::cuda_model::CudaModel;
use memferry::engine::testing::ioat_model::IoatModel;
use memferry::{CudaEngine, MemoryKind, PinLimits};

use super::*;

fn ferry() -> Ferry {
    Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .channels(1)
        .inline_bytes(4 << 10)
        .split_bytes(256 << 10)
        .stream_bytes(2 << 20)
        .build()
        .unwrap()
}

/// A machine without devices.
fn bare_machine() -> MachineDevices {
    MachineDevices::with_root(Path::new("/nowhere"))
}

fn explain_copy(bytes: u64, temperature: CacheHint) -> Explanation {
    let question = CopyQuery { cache_hint: temperature, ..CopyQuery::copy(bytes, true) };
    explain(&ferry(), question, &RequestedDevices::default(), &bare_machine(), None).unwrap()
}

/// A ferry with a model of a GPU.
fn ferry_with_gpu() -> Ferry {
    let limits = PinLimits { max_bytes: 64 << 20, max_entries: 64 };
    let gpu = CudaEngine::with_driver(CudaModel::new(), CudaProfile::default(), limits).unwrap();
    let profile = CpuProfile::load(&ProfileSource::BuiltIn).unwrap();
    Ferry::builder()
        .profile(ProfileSource::BuiltIn)
        .engine(Arc::new(CpuEngine::new(profile)), 1)
        .engine(Arc::new(gpu), 2)
        .build()
        .unwrap()
}

fn explain_gpu_copy(
    bytes: u64,
    source_memory: MemoryKind,
    target_memory: MemoryKind,
    acquaintance: ReuseHint,
) -> Explanation {
    let name = "Invented GPU".to_owned();
    let device = CudaDeviceInfo {
        ordinal: 0,
        name,
        address: None,
        driver_version: 12_080,
        copy_engines: 3,
        registers_read_only: true,
    };
    let copy = CopyQuery::copy(bytes, true);
    let question = CopyQuery { source_memory, target_memory, reuse: acquaintance, ..copy };
    let device = GpuExplanation::new(&device, &CudaProfile::default(), &question);
    explain(
        &ferry_with_gpu(),
        question,
        &RequestedDevices::default(),
        &bare_machine(),
        Some(device),
    )
    .unwrap()
}

#[test]
fn small_copies_are_explained_as_the_callers_own() {
    let explanation = explain_copy(4096, CacheHint::Unknown);
    assert_eq!(explanation.blocking.path, "the caller, at once");
    assert_eq!(explanation.asynchronous.path, "the caller, at once");
}

#[test]
fn large_copies_name_engine_kernel_and_reason() {
    let explanation = explain_copy(64 << 20, CacheHint::Unknown);
    assert!(explanation.blocking.path.contains("engine cpu"));
    assert_ne!(explanation.blocking.kernel, "cached");
    let text = render(&explanation, "not measured", false, Paint::plain());
    for word in ["a copy of 64 MiB", "blocking", "asynchronous", "because", "split_bytes"] {
        assert!(text.contains(word), "{word} is missing from:\n{text}");
    }
}

#[test]
fn a_plan_has_one_estimate_which_names_where_the_data_is_taken_to_be() {
    for (bytes, temperature, place) in [
        (1 << 20, CacheHint::Unknown, "(data in the cache)"),
        (1 << 20, CacheHint::Hot, "(data in the cache)"),
        (1 << 20, CacheHint::Cold, "(data in no cache)"),
        (64 << 20, CacheHint::Unknown, "(data in no cache)"),
    ] {
        let explanation = explain_copy(bytes, temperature);
        let estimate = &explanation.blocking.estimate;
        assert!(estimate.ends_with(place), "{estimate}");
        assert!(explanation.engines[0].is_chosen);
        assert_eq!(explanation.engines[0].verdict, format!("chosen, {estimate}"));
        let text = render(&explanation, "not measured", false, Paint::plain());
        assert!(text.contains(&format!("    estimate  {estimate}\n")), "{text}");
    }
    let (small, cold) = (explain_copy(512, CacheHint::Hot), explain_copy(512, CacheHint::Cold));
    assert!(small.blocking.estimate.ends_with("(data in the cache)"));
    assert!(cold.blocking.estimate.ends_with("(data in no cache)"));
}

#[test]
fn a_plan_for_a_device_has_one_estimate_which_does_not_depend_on_the_caches() {
    use MemoryKind::{Device, Host};
    let explanation = explain_gpu_copy(64 << 20, Host, Device, ReuseHint::Reused);
    let chosen = explanation.engines.iter().find(|engine| engine.is_chosen).unwrap();
    assert_eq!(chosen.verdict, format!("chosen, {}", explanation.blocking.estimate));
    assert!(!chosen.verdict.contains("cache"), "{}", chosen.verdict);
}

#[test]
fn temperature_changes_the_kernel() {
    let kernel = |temperature| explain_copy(1 << 20, temperature).blocking.kernel;
    assert_eq!(kernel(CacheHint::Hot), "cached");
    assert_ne!(kernel(CacheHint::Cold), "cached");
}

#[test]
fn a_copy_to_a_gpu_is_estimated_by_what_was_measured_of_it() {
    use MemoryKind::{Device, Host};
    let bytes = 64 << 20;
    let known = explain_gpu_copy(bytes, Host, Device, ReuseHint::Reused);
    assert!(known.blocking.path.contains("engine cuda"), "{}", known.blocking.path);
    assert_eq!(known.blocking.kernel, "none");
    // The GPU copies at 50 GB/s, after a start-up time of some microseconds.
    let limit_us = bytes as f64 / 50_000.0;
    assert!((limit_us..1.1 * limit_us).contains(&known.blocking.estimate_us), "{known:?}");
    let fresh = explain_gpu_copy(bytes, Host, Device, ReuseHint::FirstUse);
    assert!(fresh.blocking.estimate_us > 1.5 * known.blocking.estimate_us, "{fresh:?}");
    assert!(
        fresh.blocking.reason.contains("the memory is not registered"),
        "{}",
        fresh.blocking.reason
    );
    let inside = explain_gpu_copy(bytes, Device, Device, ReuseHint::Reused);
    assert!(inside.asynchronous.estimate_us < known.asynchronous.estimate_us, "{inside:?}");
}

#[test]
fn a_copy_that_gpu_and_processors_share_is_quicker_than_either() {
    let bytes = 256 << 20;
    let shared = explain_gpu_copy(bytes, MemoryKind::Host, MemoryKind::Host, ReuseHint::Reused);
    let alone = explain_copy(bytes, CacheHint::Unknown);
    assert!(shared.blocking.path.contains("cuda and up to"), "{}", shared.blocking.path);
    assert!(shared.blocking.estimate_us < alone.blocking.estimate_us);
    assert!(shared.blocking.estimate_us < shared.asynchronous.estimate_us);
}

#[test]
fn an_explanation_with_a_gpu_shows_the_way_and_the_measured_lines() {
    let explanation =
        explain_gpu_copy(1 << 20, MemoryKind::Device, MemoryKind::Host, ReuseHint::FirstUse);
    let text = render(&explanation, "not measured", false, Paint::plain());
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
    let without = serde_json::to_value(explain_copy(4096, CacheHint::Unknown)).unwrap();
    assert!(without.get("gpu").is_none());
}

#[test]
fn a_short_blocking_copy_to_a_gpu_is_explained_as_the_callers_own() {
    use MemoryKind::{Device, Host};
    let short = explain_gpu_copy(1 << 20, Host, Device, ReuseHint::FirstUse);
    assert_eq!(short.blocking.path, "the caller, by the driver's own copy");
    assert_eq!(short.blocking.kernel, "none");
    assert!(short.blocking.reason.contains("up to 4194304 bytes"), "{}", short.blocking.reason);
    assert!(short.asynchronous.path.contains("engine cuda"), "{}", short.asynchronous.path);
    assert!(short.blocking.estimate_us > 0.0);
    let back = explain_gpu_copy(3 << 20, Device, Host, ReuseHint::FirstUse);
    assert!(back.blocking.path.contains("engine cuda"), "{}", back.blocking.path);
}

#[test]
fn only_an_error_of_the_gpu_says_that_there_is_no_gpu() {
    let error = |engine: &str, has_gpu| {
        let (engine, reason) = (engine.to_owned(), "no".to_owned());
        let error = BuildError::Open(OpenError::System { engine, reason });
        format!("{:#}", with_context(error, has_gpu))
    };
    assert!(error("cuda", true).starts_with("no GPU to explain with; "));
    for (engine, has_gpu) in [("dsa", true), ("ioat", true), ("cuda", false)] {
        assert!(error(engine, has_gpu).starts_with("engine "), "{}", error(engine, has_gpu));
    }
}

#[test]
fn the_largest_chunk_is_fixed_and_not_measured() {
    let explanation = explain_copy(4096, CacheHint::Unknown);
    let has = |values: &[MeasuredValue]| values.iter().any(|value| value.name == "chunk_bytes");
    assert!(has(&explanation.fixed) && !has(&explanation.measured));
}

#[test]
fn the_text_shows_the_important_limits_and_all_of_them_if_asked() {
    let explanation = explain_copy(4096, CacheHint::Unknown);
    let usual = render(&explanation, "not measured", false, Paint::plain());
    assert!(usual.contains("min_share") && usual.contains("--all"), "{usual}");
    assert!(!usual.contains("share_period"), "{usual}");
    // One screen.
    assert!(usual.lines().count() <= 50, "{} lines", usual.lines().count());
    let all = render(&explanation, "not measured", true, Paint::plain());
    let json = serde_json::to_value(&explanation).unwrap();
    let listed = json["fixed"].as_array().unwrap();
    assert_eq!(listed.len(), plan::FIXED_LIMITS.len() + 1);
    for limit in plan::FIXED_LIMITS {
        assert!(all.contains(limit.name), "{} is missing from:\n{all}", limit.name);
        assert!(listed.iter().any(|value| value["name"] == limit.name), "{}", limit.name);
    }
}

#[test]
fn limits_of_time_are_shown_in_a_unit_in_which_they_are_short() {
    let texts = [25.0, 2.5, 50_000.0, 10_000_000.0, 1_500_000.0, 1001.0].map(nanoseconds);
    assert_eq!(texts, ["25 ns", "2.5 ns", "50 µs", "10 ms", "1500 µs", "1001 ns"]);
    let fixed = fixed(&CpuProfile::built_in());
    assert!(fixed.iter().any(|limit| limit.text == "50 µs"), "{fixed:?}");
    assert!(fixed.iter().all(|limit| !limit.text.contains("000 ns")), "{fixed:?}");
}

#[test]
fn one_line_says_what_adapts_and_what_it_starts_from() {
    let explanation = explain_copy(4096, CacheHint::Unknown);
    let text = render(&explanation, "not measured", false, Paint::plain());
    let line = text.lines().find(|line| line.contains("adapts")).unwrap();
    assert!(line.contains("They start as: inline_bytes 4 KiB; submitting a delivery "), "{line}");
    assert!(line.contains(" ns; groups of small copies through the caches (non-"), "{line}");
    // The size from which copies are shared was set, so sharing is not measured.
    assert!(!line.contains("sharing"), "{line}");
    let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).channels(1).build().unwrap();
    let adapts = AdaptedStart::new(&ferry.learned());
    assert!(adapts.line().contains(" ns; sharing always; "), "{}", adapts.line());
}

#[test]
fn the_devices_of_an_engine_are_named_in_the_text_and_for_scripts() {
    let device = IoatModel::builder().name("0000:00:04.0").channels(2).build();
    let engine = Arc::new(IoatEngine::over_model(device).unwrap());
    let ferry = Ferry::builder().profile(ProfileSource::BuiltIn).engine(engine, 2);
    let ferry = ferry.build().unwrap();
    let question = CopyQuery::copy(64 << 20, true);
    let none = RequestedDevices::default();
    let mut explanation = explain(&ferry, question, &none, &bare_machine(), None).unwrap();
    explanation.unused_devices.push(UnusedDevice {
        engine: "dsa",
        device: "wq0.0".into(),
        reason: "it is not configured".into(),
    });
    let json = serde_json::to_value(&explanation).unwrap();
    assert!(explanation.blocking.path.contains("engine ioat"), "{explanation:?}");
    assert_eq!(json["blocking"]["devices"], serde_json::json!(["0000:00:04.0"]));
    assert_eq!(json["engines"][0]["devices"], serde_json::json!(["0000:00:04.0"]));
    assert_eq!(json["unused_devices"][0]["device"], "wq0.0");
    let text = render(&explanation, "not measured", false, Paint::plain());
    assert!(text.contains("    on        0000:00:04.0\n"), "{text}");
    let unused = "  devices that are not used\n    dsa       wq0.0: it is not configured\n";
    assert!(text.contains(unused), "{text}");
    let alone = explain_copy(64 << 20, CacheHint::Unknown);
    assert!(alone.blocking.devices.is_empty() && alone.engines[0].devices.is_empty());
    let text = render(&alone, "not measured", false, Paint::plain());
    assert!(!text.contains("devices that are not used"), "{text}");
}

#[test]
fn the_gain_of_the_other_thread_of_a_core_is_shown_with_what_follows_where_there_is_one() {
    let shown = |sibling_gain, neighbour_gain| {
        let usual = CpuProfile::built_in();
        let values = measured(&CpuProfile { sibling_gain, neighbour_gain, ..usual });
        let value = values.into_iter().find(|value| value.name == "sibling_gain");
        value.map(|value| format!("{}, {}", value.text, value.meaning))
    };
    assert_eq!(shown(0.0, 0.0), None);
    let unused = shown(1.0, 1.8).unwrap();
    assert!(unused.contains("against one core alone") && unused.ends_with("not used"), "{unused}");
    let last = shown(1.25, 1.8).unwrap();
    assert!(last.starts_with("1.25×") && last.ends_with("after other cores"), "{last}");
    assert!(shown(1.8, 1.8).unwrap().ends_with("as the nearest core"));
}
