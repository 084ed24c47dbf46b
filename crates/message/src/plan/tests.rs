use super::*;

fn facts() -> Facts {
    let (limits, l2_bytes) = (Limits::default(), 2 << 20);
    Facts {
        profile: Profile::built_in(),
        limits,
        l2_bytes,
        stream_bytes: 2 << 20,
        has_device: false,
    }
}

fn question(bytes: u64) -> Question {
    Question {
        bytes,
        receiver_reads: Way::Cross,
        sender_writes: Way::Cross,
        closeness: Closeness::SharedCache,
        spare_cores: 0,
        sender_is_busy: false,
        absent: Ends::default(),
    }
}

#[test]
fn growing_messages_take_the_paths_in_order() {
    let facts = facts();
    let path = |bytes| message(&facts, &question(bytes), true).path;
    assert_eq!(path(0), PathKind::Inline);
    assert_eq!(path(48), PathKind::Inline);
    assert_eq!(path(49), PathKind::Eager);
    assert_eq!(path(4096), PathKind::Eager);
    assert_eq!(path(20 << 10), PathKind::Single);
    assert_eq!(path(64 << 10), PathKind::Cooperative);
    assert_eq!(path(5 << 30), PathKind::Cooperative);
}

#[test]
fn without_access_everything_large_goes_through_the_pipeline() {
    let none =
        Question { receiver_reads: Way::None, sender_writes: Way::None, ..question(1 << 20) };
    assert_eq!(rendezvous(&facts(), &none).path, PathKind::Pipeline);
    let reads_only = Question { sender_writes: Way::None, ..question(1 << 20) };
    assert_eq!(rendezvous(&facts(), &reads_only).path, PathKind::Single);
}

#[test]
fn engines_are_used_for_mapped_memory_when_cores_are_spare() {
    let near = Question { receiver_reads: Way::Near, spare_cores: 2, ..question(64 << 20) };
    let plan = rendezvous(&facts(), &near);
    assert_eq!(plan.path, PathKind::Offload);
    assert!(plan.warm_bytes > 0 && plan.warm_bytes < 64 << 20);
    let busy = Question { spare_cores: 0, ..near };
    assert_eq!(rendezvous(&facts(), &busy).path, PathKind::Cooperative);
}

#[test]
fn a_path_set_by_hand_is_taken_where_it_is_possible() {
    let mut facts = facts();
    facts.limits.path = Some(PathKind::Pipeline);
    assert_eq!(rendezvous(&facts, &question(1 << 20)).path, PathKind::Pipeline);
    facts.limits.path = Some(PathKind::Offload);
    assert_eq!(rendezvous(&facts, &question(1 << 20)).path, PathKind::Cooperative);
    facts.limits = Limits { eager_bytes: Some(0), ..Limits::default() };
    assert!(at_once(&facts, 49, Closeness::Apart, true).is_none());
}

#[test]
fn chunks_are_never_too_many_for_a_record() {
    for bytes in [1, 32 << 10, 1 << 20, 5 << 30, 1 << 50] {
        for way in [Way::Near, Way::Cross] {
            let chunk = u64::from(cooperative_chunk(bytes, way));
            if bytes <= 1 << 53 {
                assert!(bytes.div_ceil(chunk) <= crate::ring::record::MOST_CHUNKS, "{bytes}");
            }
        }
    }
}

#[test]
fn a_fresh_target_is_brought_in_and_a_short_one_copied_by_the_receiver_alone() {
    let fresh = Ends { source: false, target: true };
    let plan =
        |facts: &Facts, bytes| rendezvous(facts, &Question { absent: fresh, ..question(bytes) });
    let mut facts = facts();
    assert_eq!(plan(&facts, 64 << 10).path, PathKind::Single);
    assert_eq!(plan(&facts, 64 << 10).populating.ends, fresh);
    assert_eq!(plan(&facts, 4 << 20).path, PathKind::Cooperative);
    assert_eq!(plan(&facts, 4 << 20).populating.reason, PinReason::Absent);
    assert_eq!(plan(&facts, 20 << 10).populating.ends, Ends::default());
    let shared = plan(&facts, 2 << 20);
    assert_eq!((shared.path, shared.populating.ends), (PathKind::Cooperative, Ends::default()));
    let near =
        Question { receiver_reads: Way::Near, sender_writes: Way::Near, ..question(2 << 20) };
    let near = rendezvous(&facts, &Question { absent: fresh, ..near });
    assert_eq!((near.path, near.populating.ends), (PathKind::Cooperative, fresh));
    facts.limits.pinning = Pinning::Off;
    assert_eq!(plan(&facts, 64 << 10).path, PathKind::Cooperative);
    assert_eq!(plan(&facts, 4 << 20).populating.reason, PinReason::Off);
}

#[test]
fn memory_that_is_there_is_left_alone_unless_it_was_set_otherwise() {
    let mut facts = facts();
    let populating = |facts: &Facts| rendezvous(facts, &question(4 << 20)).populating;
    assert_eq!(populating(&facts), Populating::nothing(PinReason::Present));
    facts.limits.pinning = Pinning::On;
    assert_eq!(populating(&facts).ends, Ends { source: false, target: true });
    assert_eq!(rendezvous(&facts, &question(4 << 20)).path, PathKind::Cooperative);
}

#[test]
fn engines_get_both_ends_brought_in() {
    let absent = Ends { source: true, target: true };
    let near = Question { receiver_reads: Way::Near, spare_cores: 2, ..question(64 << 20) };
    let plan = |absent| rendezvous(&facts(), &Question { absent, ..near });
    assert_eq!(plan(absent).path, PathKind::Offload);
    assert_eq!(plan(absent).populating.ends, absent);
    assert_eq!(plan(Ends::default()).populating.reason, PinReason::Present);
}

#[test]
fn a_device_copies_large_messages_in_mapped_memory_without_a_spare_core() {
    let facts = Facts { has_device: true, ..facts() };
    let near = Question { receiver_reads: Way::Near, ..question(16 << 20) };
    assert_eq!(rendezvous(&facts, &near).path, PathKind::Offload);
    assert_ne!(
        rendezvous(&facts, &Question { bytes: (16 << 20) - 1, ..near }).path,
        PathKind::Offload
    );
    assert_ne!(rendezvous(&facts, &question(64 << 20)).path, PathKind::Offload);
}
