use super::*;

fn context() -> MessagePlanContext {
    let (limits, l2_bytes) = (PathThresholds::default(), 2 << 20);
    MessagePlanContext {
        profile: MessageProfile::built_in(),
        thresholds: limits,
        l2_bytes,
        stream_bytes: 2 << 20,
        has_device: false,
    }
}

fn query(bytes: u64) -> MessageQuery {
    MessageQuery {
        bytes,
        receiver_access: AccessMethod::CrossMemory,
        sender_access: AccessMethod::CrossMemory,
        locality: Locality::SharedCache,
        spare_cores: 0,
        sender_is_busy: false,
        is_ahead: false,
        nonresident: BufferEnds::default(),
    }
}

#[test]
fn growing_messages_take_the_paths_in_order() {
    let context = context();
    let path = |bytes| message(&context, &query(bytes), true).path;
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
    let none = MessageQuery {
        receiver_access: AccessMethod::None,
        sender_access: AccessMethod::None,
        ..query(1 << 20)
    };
    assert_eq!(rendezvous(&context(), &none).path, PathKind::Pipeline);
    let reads_only = MessageQuery { sender_access: AccessMethod::None, ..query(1 << 20) };
    assert_eq!(rendezvous(&context(), &reads_only).path, PathKind::Single);
}

#[test]
fn the_sender_copies_a_short_message_whose_receive_was_posted_ahead() {
    let (context, ahead) = (context(), MessageQuery { is_ahead: true, ..query(20 << 10) });
    let plan = rendezvous(&context, &ahead);
    assert_eq!((plan.path, plan.reason), (PathKind::Cooperative, MessageReason::ReceivedAhead));
    assert!(u64::from(plan.chunk_bytes) >= ahead.bytes, "one side copies all of it");
    // Longer ones have the plan of all.
    let long = |is_ahead| rendezvous(&context, &MessageQuery { is_ahead, ..query(64 << 10) });
    assert_eq!(long(true), long(false));
    let absent = BufferEnds { source: false, target: true };
    let mapped = AccessMethod::Mapped;
    for other in [
        MessageQuery { bytes: 6000, ..ahead },
        MessageQuery { sender_is_busy: true, ..ahead },
        MessageQuery { nonresident: absent, ..ahead },
        MessageQuery { sender_access: AccessMethod::None, ..ahead },
        MessageQuery { sender_access: mapped, receiver_access: mapped, ..ahead },
    ] {
        assert_eq!(rendezvous(&context, &other).path, PathKind::Single, "{other:?}");
    }
    let thresholds = PathThresholds { cooperative_bytes: Some(32 << 10), ..context.thresholds };
    let configured = MessagePlanContext { thresholds, ..context };
    assert_eq!(rendezvous(&configured, &ahead).path, PathKind::Single);
}

#[test]
fn engines_are_used_for_mapped_memory_when_cores_are_spare() {
    let mapped =
        MessageQuery { receiver_access: AccessMethod::Mapped, spare_cores: 2, ..query(64 << 20) };
    let plan = rendezvous(&context(), &mapped);
    assert_eq!(plan.path, PathKind::Offload);
    assert!(plan.cached_bytes > 0 && plan.cached_bytes < 64 << 20);
    let busy = MessageQuery { spare_cores: 0, ..mapped };
    assert_eq!(rendezvous(&context(), &busy).path, PathKind::Cooperative);
}

#[test]
fn a_path_set_by_hand_is_taken_where_it_is_possible() {
    let mut context = context();
    context.thresholds.path = Some(PathKind::Pipeline);
    assert_eq!(rendezvous(&context, &query(1 << 20)).path, PathKind::Pipeline);
    context.thresholds.path = Some(PathKind::Offload);
    assert_eq!(rendezvous(&context, &query(1 << 20)).path, PathKind::Cooperative);
    context.thresholds = PathThresholds { eager_bytes: Some(0), ..PathThresholds::default() };
    assert!(inline_or_eager(&context, 49, Locality::SeparateCache, true).is_none());
}

#[test]
fn chunks_are_never_too_many_for_a_record() {
    for bytes in [1, 32 << 10, 1 << 20, 5 << 30, 1 << 50] {
        for method in [AccessMethod::Mapped, AccessMethod::CrossMemory] {
            let chunk = u64::from(cooperative_chunk(bytes, method));
            if bytes <= 1 << 53 {
                assert!(bytes.div_ceil(chunk) <= crate::ring::claims::MAX_CHUNKS, "{bytes}");
            }
        }
    }
}

#[test]
fn a_fresh_target_is_brought_in_and_a_short_one_copied_by_the_receiver_alone() {
    let fresh = BufferEnds { source: false, target: true };
    let plan = |context: &MessagePlanContext, bytes| {
        rendezvous(context, &MessageQuery { nonresident: fresh, ..query(bytes) })
    };
    let mut context = context();
    assert_eq!(plan(&context, 64 << 10).path, PathKind::Single);
    assert_eq!(plan(&context, 64 << 10).prefault.ends, fresh);
    assert_eq!(plan(&context, 4 << 20).path, PathKind::Cooperative);
    assert_eq!(plan(&context, 4 << 20).prefault.reason, PrefaultReason::NotResident);
    assert_eq!(plan(&context, 20 << 10).prefault.ends, BufferEnds::default());
    let shared = plan(&context, 2 << 20);
    assert_eq!((shared.path, shared.prefault.ends), (PathKind::Cooperative, BufferEnds::default()));
    let mapped = MessageQuery {
        receiver_access: AccessMethod::Mapped,
        sender_access: AccessMethod::Mapped,
        ..query(2 << 20)
    };
    let mapped = rendezvous(&context, &MessageQuery { nonresident: fresh, ..mapped });
    assert_eq!((mapped.path, mapped.prefault.ends), (PathKind::Cooperative, fresh));
    context.thresholds.pinning = Pinning::Off;
    assert_eq!(plan(&context, 64 << 10).path, PathKind::Cooperative);
    assert_eq!(plan(&context, 4 << 20).prefault.reason, PrefaultReason::Off);
}

#[test]
fn memory_that_is_there_is_left_alone_unless_it_was_set_otherwise() {
    let mut context = context();
    let prefault = |context: &MessagePlanContext| rendezvous(context, &query(4 << 20)).prefault;
    assert_eq!(prefault(&context), PrefaultPlan::none(PrefaultReason::Resident));
    context.thresholds.pinning = Pinning::On;
    assert_eq!(prefault(&context).ends, BufferEnds { source: false, target: true });
    assert_eq!(rendezvous(&context, &query(4 << 20)).path, PathKind::Cooperative);
}

#[test]
fn engines_get_both_ends_brought_in() {
    let nonresident = BufferEnds { source: true, target: true };
    let mapped =
        MessageQuery { receiver_access: AccessMethod::Mapped, spare_cores: 2, ..query(64 << 20) };
    let plan = |nonresident| rendezvous(&context(), &MessageQuery { nonresident, ..mapped });
    assert_eq!(plan(nonresident).path, PathKind::Offload);
    assert_eq!(plan(nonresident).prefault.ends, nonresident);
    assert_eq!(plan(BufferEnds::default()).prefault.reason, PrefaultReason::Resident);
}

#[test]
fn a_device_copies_large_messages_in_mapped_memory_without_a_spare_core() {
    let context = MessagePlanContext { has_device: true, ..context() };
    let mapped = MessageQuery { receiver_access: AccessMethod::Mapped, ..query(16 << 20) };
    assert_eq!(rendezvous(&context, &mapped).path, PathKind::Offload);
    assert_ne!(
        rendezvous(&context, &MessageQuery { bytes: (16 << 20) - 1, ..mapped }).path,
        PathKind::Offload
    );
    assert_ne!(rendezvous(&context, &query(64 << 20)).path, PathKind::Offload);
}
