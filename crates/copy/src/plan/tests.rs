use memferry_engine::contract::{MemoryKindSet, OpcodeSet, RegistrationMode};
use memferry_engine::cpu::CpuProfile;

use super::*;

fn capabilities(claims_chunks: bool) -> Capabilities {
    Capabilities {
        operations: OpcodeSet::of(&[Opcode::Copy, Opcode::Move]),
        memory: MemoryKindSet::of(&[MemoryKind::Host]),
        max_descriptor_bytes: usize::MAX,
        preferred_alignment: 64,
        boundary_bytes: None,
        registration: RegistrationMode::NotRequired,
        claims_chunks,
        infallible: claims_chunks,
        auto_progress: true,
        writes_notifications: false,
    }
}

fn engine(name: &str, claims_chunks: bool, startup_ns: f64, gb_per_s: f64) -> EngineSummary {
    EngineSummary {
        name: name.into(),
        devices: Vec::new(),
        capabilities: capabilities(claims_chunks),
        costs: DirectionCosts::uniform(CostLine::from_bandwidth(startup_ns, gb_per_s)),
        registration_costs: None,
        channels: 3,
        tuning: Vec::new(),
    }
}

fn context() -> CopyPlanContext {
    let profile = CpuProfile {
        inline_bytes: 4 << 10,
        split_bytes: 256 << 10,
        stream_bytes: 2 << 20,
        shared_stream_bytes: 4 << 20,
        chunk_bytes: 256 << 10,
        ..CpuProfile::built_in()
    };
    CopyPlanContext { profile, engines: vec![engine("cpu", true, 200.0, 10.0)], spread: 2 }
}

fn planned(question: CopyQuery) -> CopyPlan {
    plan(&context(), &question).unwrap()
}

#[test]
fn small_copies_are_done_by_the_caller() {
    assert_eq!(planned(CopyQuery::copy(4 << 10, false)).strategy, CopyStrategy::Inline);
    assert_eq!(planned(CopyQuery::copy(255 << 10, true)).strategy, CopyStrategy::Inline);
}

#[test]
fn nothing_is_never_handed_to_an_engine() {
    let question = CopyQuery { no_caller_assist: true, ..CopyQuery::copy(0, true) };
    assert_eq!(planned(question).strategy, CopyStrategy::Inline);
}

#[test]
fn middle_copies_are_one_descriptor_and_large_ones_are_shared() {
    assert_eq!(
        planned(CopyQuery::copy(8 << 10, false)).strategy,
        CopyStrategy::SingleDescriptor { engine: 0 }
    );
    let large = planned(CopyQuery::copy(64 << 20, true)).strategy;
    assert_eq!(large, CopyStrategy::WorkSharing { engine: 0, chunk_bytes: 256 << 10, channels: 2 });
}

#[test]
fn chunks_shrink_with_the_copy_so_that_everybody_gets_some() {
    let CopyStrategy::WorkSharing { chunk_bytes, .. } =
        planned(CopyQuery::copy(600_000, true)).strategy
    else {
        panic!("600 kB are shared");
    };
    assert_eq!(chunk_bytes % 4096, 0);
    assert!(chunk_bytes * 6 <= 600_000, "{chunk_bytes}");
}

#[test]
fn a_waiting_caller_shares_a_copy_with_as_many_channels_as_are_worth_it() {
    let mut facts = context();
    facts.engines[0].channels = 15;
    facts.spread = 15;
    let channels = |bytes, blocking| match plan(&facts, &CopyQuery::copy(bytes, blocking)) {
        Some(CopyPlan { strategy: CopyStrategy::WorkSharing { channels, .. }, .. }) => channels,
        other => panic!("{other:?}"),
    };
    assert_eq!([512 << 10, 1 << 20, 64 << 20].map(|bytes| channels(bytes, true)), [2, 4, 15]);
    assert_eq!(channels(128 << 10, false), 4, "nobody has the data of an asynchronous copy");
}

#[test]
fn the_kernel_follows_size_company_and_temperature() {
    let kernel = |question| planned(question).kernel;
    let stream = Kernel::Stream(context().profile.streaming);
    assert_eq!(kernel(CopyQuery::copy(3 << 20, false)), Kernel::Cached, "two channels share it");
    assert_eq!(kernel(CopyQuery::copy(4 << 20, true)), stream);
    assert_eq!(
        kernel(CopyQuery { cache_hint: CacheHint::Hot, ..CopyQuery::copy(4 << 20, true) }),
        Kernel::Cached
    );
    assert_eq!(
        kernel(CopyQuery { cache_hint: CacheHint::Cold, ..CopyQuery::copy(1 << 20, true) }),
        stream
    );
}

#[test]
fn only_large_copies_wake_sleeping_channels() {
    let profile = CpuProfile {
        wake_ns: 2000.0,
        cached_gb_per_s: 40.0,
        stream_gb_per_s: 16.0,
        ..context().profile
    };
    assert_eq!(worth_waking(&profile, 256 << 10, true), 0);
    assert_eq!(worth_waking(&profile, 1 << 20, true), 1);
    assert_eq!(worth_waking(&profile, 1 << 20, false), 0);
    assert!(worth_waking(&profile, 64 << 20, true) >= 16);
}

#[test]
fn memory_is_looked_up_for_copies_that_take_two_cores_far_longer_than_that() {
    let profile = |node_query_ns, pair_stream_gb_per_s| CpuProfile {
        node_query_ns,
        stream_gb_per_s: 10.0,
        pair_stream_gb_per_s,
        ..context().profile
    };
    let placed = |node_query_ns, gb_per_s| placed_bytes(&profile(node_query_ns, gb_per_s));
    assert_eq!(placed(1000.0, 20.0), 640_000);
    assert_eq!(placed(2000.0, 20.0), 1_280_000);
    assert_eq!(placed(1.0, 20.0), MIN_SHARE);
    for gb_per_s in [8.0, 12.5, 20.0, 400.0] {
        let copy_ns = placed(1500.0, gb_per_s) as f64 / gb_per_s;
        assert!(1500.0 <= copy_ns / 32.0 + 1.0, "{gb_per_s} GB/s: a copy takes {copy_ns} ns");
    }
}

#[test]
fn a_backlog_is_what_is_copied_while_another_channel_wakes() {
    let backlog = |wake_ns, stream_gb_per_s| {
        max_backlog_bytes(&CpuProfile { wake_ns, stream_gb_per_s, ..context().profile })
    };
    assert_eq!(backlog(10_000.0, 10.0), 100_000);
    assert_eq!(backlog(100.0, 10.0), 32 << 10, "channels are not looked at for each copy");
    assert_eq!(backlog(1e9, 10.0), 512 << 10);
}

#[test]
fn overlapping_copies_are_not_cut() {
    let question = CopyQuery { operation: Opcode::Move, ..CopyQuery::copy(64 << 20, false) };
    assert_eq!(planned(question).strategy, CopyStrategy::SingleDescriptor { engine: 0 });
}

#[test]
fn a_spared_caller_does_nothing_itself() {
    let question = CopyQuery { no_caller_assist: true, ..CopyQuery::copy(64, true) };
    assert_eq!(planned(question).strategy, CopyStrategy::SingleDescriptor { engine: 0 });
}

#[test]
fn the_cheapest_engine_for_the_size_is_chosen_and_the_first_of_equals() {
    let mut facts = context();
    facts.engines.push(engine("device", false, 10_000.0, 40.0));
    let engine_of = |facts: &CopyPlanContext, bytes| match plan(
        facts,
        &CopyQuery::copy(bytes, false),
    ) {
        Some(CopyPlan {
            strategy:
                CopyStrategy::WorkSharing { engine, .. } | CopyStrategy::FixedParts { engine, .. },
            ..
        }) => engine,
        other => panic!("{other:?}"),
    };
    assert_eq!(engine_of(&facts, 128 << 10), 0);
    assert_eq!(engine_of(&facts, 16 << 20), 1);
    facts.engines[1].costs = facts.engines[0].costs;
    assert_eq!(engine_of(&facts, 16 << 20), 0);
}

#[test]
fn an_unknown_operation_on_ordinary_memory_falls_to_the_caller() {
    let question = CopyQuery { operation: Opcode::Compare, ..CopyQuery::copy(1 << 20, false) };
    assert_eq!(planned(question).strategy, CopyStrategy::Inline);
}

#[test]
fn memory_that_no_engine_reaches_has_no_plan() {
    let question = CopyQuery { target_memory: MemoryKind::Device, ..CopyQuery::copy(64, true) };
    assert_eq!(plan(&context(), &question), None);
}

#[test]
fn every_reason_is_a_sentence_part_without_debug_syntax() {
    for bytes in [1, 8 << 10, 1 << 20, 64 << 20] {
        for blocking in [false, true] {
            let text = planned(CopyQuery::copy(bytes, blocking)).reason.to_string();
            assert!(text.len() > 20 && !text.contains(['{', '}']), "{text}");
        }
    }
}
