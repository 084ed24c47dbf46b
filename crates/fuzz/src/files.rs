//! Files that Memferry reads: traces of the lookup, and saved profiles. An accepted profile must
//! give a plan for every size.

use std::sync::Arc;

use memferry_copy::plan::{self as copies, DirectionCosts, EngineSummary};
use memferry_engine::Engine;
use memferry_engine::cpu::{CpuEngine, CpuProfile};
use memferry_engine::runtime::profile_store::{self, StoredProfile};
use memferry_memory::lookup::Geometry;
use memferry_memory::lookup::trace::replay;
use memferry_message::plan::{
    self as messages, AccessMethod, BufferEnds, Locality, PathThresholds,
};

pub(crate) fn run(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    match first % 3 {
        0 => trace(rest),
        1 => profile(rest, copy_plans),
        _ => profile(rest, message_plans),
    }
}

fn trace(bytes: &[u8]) {
    // As it is, and after the header of a trace, which the fuzzer need not find.
    for file in [bytes.to_vec(), [b"memferry trace 1", bytes].concat()] {
        for (entries, line, ways) in [(64, 1, 1), (256, 8, 4)] {
            let geometry = Geometry::new(entries, line, ways).expect("a small cache");
            let _ = replay(file.as_slice(), geometry);
        }
    }
}

/// Reads a profile as it is, and after the first line of one of this machine. An accepted profile
/// is the same after it was written and read again.
fn profile<S: StoredProfile + PartialEq + std::fmt::Debug>(bytes: &[u8], check: impl Fn(&S)) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let whole = profile_store::to_text(&S::built_in());
    let line = whole.lines().next().unwrap_or_default();
    for text in [text.to_owned(), format!("{line}\n{text}"), format!("{whole}{text}")] {
        let Ok(Some(values)) = profile_store::from_text::<S>(&text) else { continue };
        check(&values);
        let again = profile_store::from_text::<S>(&profile_store::to_text(&values));
        assert_eq!(again.as_ref().map(Option::as_ref), Ok(Some(&values)));
    }
}

const SIZES: [u64; 10] =
    [0, 1, 48, 4096, 64 << 10, 1 << 20, 64 << 20, 5 << 30, 1 << 45, isize::MAX as u64];

fn copy_plans(profile: &CpuProfile) {
    let cpu = CpuEngine::new(Arc::new(profile.clone()));
    let engine = EngineSummary {
        name: cpu.name().into(),
        devices: cpu.devices(),
        capabilities: cpu.capabilities().clone(),
        costs: DirectionCosts::measured(&cpu),
        registration_costs: None,
        channels: 3,
        tuning: Vec::new(),
    };
    let facts =
        copies::CopyPlanContext { profile: profile.clone(), engines: vec![engine], spread: 4 };
    for bytes in SIZES {
        for blocking in [true, false] {
            let plan = copies::plan(&facts, &copies::CopyQuery::copy(bytes, blocking));
            assert!(plan.is_some(), "no plan for {bytes} bytes with {profile:?}");
        }
    }
}

fn message_plans(profile: &messages::MessageProfile) {
    let facts = messages::MessagePlanContext {
        profile: profile.clone(),
        thresholds: PathThresholds::default(),
        l2_bytes: 2 << 20,
        stream_bytes: 2 << 20,
        has_device: false,
    };
    for bytes in SIZES {
        for closeness in Locality::ALL {
            let question = messages::MessageQuery {
                bytes,
                receiver_access: AccessMethod::CrossMemory,
                sender_access: AccessMethod::Mapped,
                locality: closeness,
                spare_cores: 1,
                sender_is_busy: false,
                is_ahead: false,
                nonresident: BufferEnds::default(),
            };
            let _ = messages::message(&facts, &question, true);
        }
    }
}
