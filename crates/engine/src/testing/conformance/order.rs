//! Ordering: transfers that start after others are complete.

use std::sync::Arc;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation, dispatch_after, dispatch_now};
use super::{EngineUnderTest, Verdict};
use crate::completion::Completion;
use crate::contract::{Descriptor, ExecutionError};

/// Test buffers of slots that one descriptor can copy between.
fn slots(subject: &EngineUnderTest, bench: &TestEngine, count: usize) -> (TestBuffers, usize) {
    let length = bench.max_part(512);
    let mut buffers = TestBuffers::new(subject, count * length);
    buffers.prepare(ALIGNED, count * length);
    (buffers, length)
}

fn slot_offset(slot: usize, length: usize) -> usize {
    ALIGNED + slot * length
}

pub(super) fn a_chain_is_carried_out_link_by_link(subject: &EngineUnderTest) -> Verdict {
    const LINKS: usize = 100;
    let bench = TestEngine::with_channels(subject, 2);
    let (mut buffers, length) = slots(subject, &bench, LINKS + 2);
    let bytes = buffers.source_bytes(length, length).to_vec();
    buffers.write(slot_offset(0, length), &bytes);
    let mut last = Arc::new(Completion::done());
    for link in 0..LINKS {
        // Each link copies the bytes that the link before it wrote.
        let (from, to) = (slot_offset(link, length), slot_offset(link + 1, length));
        buffers.expect_move(from, to, length);
        let job =
            TestOperation::copy(buffers.target(from, length), buffers.target(to, length), length);
        let next = Arc::new(Completion::whole());
        let batch = bench.channel_batch(link, job.descriptor().reports_to(next.clone()));
        dispatch_after(&[last], next.clone(), vec![batch]);
        last = next;
    }
    bench.succeeds(&last);
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_after_several_waits_for_all_of_them(subject: &EngineUnderTest) -> Verdict {
    const PARTS: usize = 8;
    let bench = TestEngine::with_channels(subject, 3);
    let (mut buffers, length) = slots(subject, &bench, 16);
    let (middle, end) = (slot_offset(0, length), slot_offset(1, length));
    for round in 0..50 {
        buffers.prepare(middle, 2 * length);
        let part = length / PARTS;
        let predecessors: Vec<_> = (0..PARTS).map(|_| Arc::new(Completion::whole())).collect();
        let all = Arc::new(Completion::whole());
        let job = TestOperation::copy(
            buffers.target(middle, length),
            buffers.target(end, length),
            length,
        );
        let batch = bench.channel_batch(0, job.descriptor().reports_to(all.clone()));
        // Registered when some of them are dispatched and some are not.
        let mut late = Some((all.clone(), vec![batch]));
        for (index, predecessor) in predecessors.iter().enumerate() {
            if index == round % (PARTS + 1) {
                let (all, batches) = late.take().expect("registered once");
                dispatch_after(&predecessors, all, batches);
            }
            let (from, to) = ((round + 3 * index) * part, middle + index * part);
            buffers.expect_copy(from, to, part);
            let job =
                TestOperation::copy(buffers.source(from, part), buffers.target(to, part), part);
            let batch =
                bench.channel_batch(index, job.descriptor().reports_to(predecessor.clone()));
            dispatch_now(predecessor, [batch]);
        }
        if let Some((all, batches)) = late {
            dispatch_after(&predecessors, all, batches);
        }
        bench.succeeds(&all);
        buffers.expect_move(middle, end, length);
        buffers.check(middle, 2 * length);
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_after_a_failed_one_is_not_begun(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    let (mut buffers, length) = slots(subject, &bench, 2);
    let to = slot_offset(0, length);
    buffers.prepare(to, length);
    let job = TestOperation::copy(buffers.source(0, length), buffers.target(to, length), length);
    let abandon =
        |completion: &Arc<Completion>| drop(job.descriptor().reports_to(completion.clone()));
    for fails_first in [true, false] {
        let failed = Arc::new(Completion::whole());
        let good = Arc::new(Completion::done());
        let successors =
            [Arc::new(Completion::whole()), Arc::new(Completion::chunked(job.work(16)))];
        if fails_first {
            abandon(&failed);
        }
        let whole = bench.channel_batch(0, job.descriptor().reports_to(successors[0].clone()));
        dispatch_after(&[good.clone(), failed.clone()], successors[0].clone(), vec![whole]);
        let chunks = if bench.capabilities().claims_chunks {
            vec![bench.channel_batch(0, Descriptor::work_offer(successors[1].clone()))]
        } else {
            Vec::new()
        };
        dispatch_after(&[failed.clone(), good], successors[1].clone(), chunks);
        if !fails_first {
            assert!(successors.iter().all(|successor| !successor.is_done()));
            abandon(&failed);
        }
        for successor in &successors {
            assert_eq!(bench.outcome(successor), Err(ExecutionError::Predecessor));
        }
        assert_eq!(bench.channel().statistics().submitted, 0);
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_after_one_that_is_over_starts_at_once(
    subject: &EngineUnderTest,
) -> Verdict {
    let bench = TestEngine::new(subject);
    let (mut buffers, length) = slots(subject, &bench, 20);
    let mut last = Arc::new(Completion::done());
    for round in 0..20 {
        let to = slot_offset(round % 2, length);
        buffers.prepare(to, length);
        buffers.expect_copy(round * length, to, length);
        let source = buffers.source(round * length, length);
        let job = TestOperation::copy(source, buffers.target(to, length), length);
        let next = Arc::new(Completion::whole());
        let batch = bench.channel_batch(0, job.descriptor().reports_to(next.clone()));
        dispatch_after(&[last.clone(), last], next.clone(), vec![batch]);
        bench.succeeds(&next);
        buffers.check(to, length);
        last = next;
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn nobody_can_help_a_transfer_before_its_turn(subject: &EngineUnderTest) -> Verdict {
    let bench = TestEngine::new(subject);
    if !bench.capabilities().claims_chunks {
        return bench.skip("claim chunks");
    }
    let (mut buffers, length) = slots(subject, &bench, 4);
    let (middle, end) = (slot_offset(0, length), slot_offset(2, length));
    for round in 0..100 {
        buffers.prepare(middle, 3 * length);
        let first = Arc::new(Completion::whole());
        let job = TestOperation::copy(
            buffers.target(middle, length),
            buffers.target(end, length),
            length,
        );
        let second = Arc::new(Completion::chunked(job.work(length as u64 / 5)));
        let offer = bench.channel_batch(0, Descriptor::work_offer(second.clone()));
        dispatch_after(std::slice::from_ref(&first), second.clone(), vec![offer]);
        assert!(
            !second.help_from_back() && !second.help_from_front(),
            "its predecessor is not complete"
        );
        buffers.check(middle, 3 * length);

        let source = buffers.source(round % 4 * length, length);
        let job = TestOperation::copy(source, buffers.target(middle, length), length);
        buffers.expect_copy(round % 4 * length, middle, length);
        buffers.expect_move(middle, end, length);
        bench.submit([job.descriptor().reports_to(first)]);
        // A chunk can be claimed only after its source bytes are written.
        bench.wait_until("the end", || {
            second.help_from_back();
            second.is_done()
        });
        buffers.check(middle, 3 * length);
    }
    buffers.check_all();
    Verdict::Passed
}

pub(super) fn a_long_chain_that_falls_at_once_needs_no_deep_stack(
    subject: &EngineUnderTest,
) -> Verdict {
    const LINKS: usize = 50_000;
    let bench = TestEngine::new(subject);
    let (mut buffers, length) = slots(subject, &bench, 2);
    let to = slot_offset(0, length);
    buffers.prepare(to, length);
    buffers.expect_copy(0, to, length);
    let job = TestOperation::copy(buffers.source(0, length), buffers.target(to, length), length);
    let first = Arc::new(Completion::whole());
    let mut last = first.clone();
    for _ in 0..LINKS {
        let next = Arc::new(Completion::whole());
        // A transfer without bytes is complete as soon as it is dispatched.
        dispatch_after(&[last], next.clone(), Vec::new());
        last = next;
    }
    let batch = bench.channel_batch(0, job.descriptor().reports_to(first.clone()));
    dispatch_now(&first, [batch]);
    bench.succeeds(&last);
    buffers.check_all();
    Verdict::Passed
}
