use memferry::engine::runtime::profile_store::ProfileOrigin;
use memferry::message::plan::{Measurement, MessageProfile, PathThresholds};

use super::*;

fn context(limits: PathThresholds) -> MessagePlanContext {
    let (l2_bytes, stream_bytes) = (2 << 20, 4 << 20);
    MessagePlanContext {
        profile: MessageProfile::built_in(),
        thresholds: limits,
        l2_bytes,
        stream_bytes,
        has_device: false,
    }
}

fn explain_message(bytes: u64) -> Explanation {
    explain(&context(PathThresholds::default()), bytes, &Locality::ALL[..1], 0)
}

fn paths(explanation: &Explanation) -> Vec<&str> {
    explanation.cases.iter().map(|case| case.path).collect()
}

#[test]
fn every_situation_gets_its_path_and_its_reason() {
    assert_eq!(paths(&explain_message(8)), ["inline"; 4]);
    assert_eq!(paths(&explain_message(2 << 10)), ["eager"; 4]);
    assert_eq!(
        paths(&explain_message(1 << 20)),
        ["cooperative", "cooperative", "pipeline", "cooperative"]
    );
    let refused = &explain_message(1 << 20).cases[2];
    assert!(!refused.permitted && refused.reason.contains("may not read"), "{}", refused.reason);
    assert!(refused.estimate_us.is_some_and(|us| us > 0.0));
}

#[test]
fn spare_cores_take_what_is_mapped_and_large() {
    let explanation =
        explain(&context(PathThresholds::default()), 64 << 20, &Locality::ALL[..1], 2);
    assert_eq!(paths(&explanation), ["cooperative", "offload", "pipeline", "offload"]);
    assert_eq!(explanation.cases[1].estimate_us, None, "the planner of messages does not know it");
}

#[test]
fn a_limit_says_whether_it_was_set_or_measured() {
    let origin = |facts: &MessagePlanContext, name: &str| {
        let limits = explain(facts, 100, &Locality::ALL[..1], 0).limits;
        limits.iter().find(|limit| limit.name == name).expect("it is listed").origin.clone()
    };
    let built_in = context(PathThresholds::default());
    assert!(origin(&built_in, "eager up to").contains("built-in"));
    assert!(origin(&built_in, "offload, shareable, from").contains("second-level cache"));
    let by_hand = context(PathThresholds { eager_bytes: Some(77), ..PathThresholds::default() });
    assert_eq!(origin(&by_hand, "eager up to"), "set by MEMFERRY_EAGER_BYTES");
    let measured = Measurement::new([Some(100.0), None, None, None, None, None]);
    let profile = MessageProfile::new(ProfileOrigin::Measured, measured, Measurement::default());
    let measured = MessagePlanContext { profile, ..built_in };
    assert!(origin(&measured, "eager up to").contains("measured"));
}

#[test]
fn far_cores_are_listed_where_there_are_such() {
    let explanation = explain(&context(PathThresholds::default()), 1 << 20, &Locality::ALL, 0);
    assert_eq!(explanation.cases.len(), 8);
    let text = text::render(&explanation, Paint::plain());
    assert!(text.contains("ordinary memory, cores apart"), "{text}");
    assert!(
        !text::render(&explain_message(1 << 20), Paint::plain()).contains("cores shared-cache")
    );
}

#[test]
fn the_text_names_paths_limits_and_costs() {
    let text = text::render(&explain_message(64 << 10), Paint::plain());
    for words in [
        "a message of 64 KiB",
        "ordinary memory\n    path      cooperative\n    because   ",
        "shareable memory, access to each other not permitted",
        "pipeline",
        "eager up to",
        "cross_call_ns",
        "built in",
        "not measured: built-in values",
    ] {
        assert!(text.contains(words), "{words} is missing from:\n{text}");
    }
}

#[test]
fn a_short_message_that_is_received_ahead_is_copied_by_its_sender() {
    let explanation = explain_message(20 << 10);
    let case = &explanation.cases[0];
    assert_eq!((case.path, case.if_ahead.path), ("single", "cooperative"));
    let text = text::render(&explanation, Paint::plain());
    let words = "if the receive was posted ahead\n      path      cooperative\n      because   ";
    assert!(text.contains(words), "{words} is missing from:\n{text}");
    let text = text::render(&explain_message(64 << 10), Paint::plain());
    assert!(!text.contains("posted ahead"), "{text}");
}

#[test]
fn a_target_that_is_not_in_memory_changes_what_is_brought_in_and_the_path_of_short_messages() {
    let explanation = explain_message(64 << 10);
    let case = &explanation.cases[0];
    assert_eq!((case.path, case.if_absent.path), ("cooperative", "single"));
    assert!(case.if_absent.reason.contains("not resident"), "{}", case.if_absent.reason);
    let text = text::render(&explanation, Paint::plain());
    for words in ["prefaults nothing: the memory is resident", "if the target is not resident\n"] {
        assert!(text.contains(words), "{words} is missing from:\n{text}");
    }
    let text = text::render(&explain_message(8), Paint::plain());
    assert!(!text.contains("if the target"), "{text}");
}
