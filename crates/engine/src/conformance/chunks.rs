//! Transfers cut into chunks: claimed by channels and callers, used before the end, cancelled.

use std::sync::Arc;

use super::bench::{Bench, Job, Reporting, until};
use super::field::{Field, GUARD};
use super::{Subject, Verdict};
use crate::completion::Completion;
use crate::contract::{Descriptor, ExecutionError, Operation};

pub(super) fn transfers_cut_into_chunks_arrive_whole(subject: &Subject) -> Verdict {
    let mut field = Field::new(subject, 300_000);
    let bench = Bench::with_channels(subject, 2);
    let sizes = [(1, 4096), (4095, 4096), (4096, 4096), (4097, 4096), (100, 1), (200_017, 10_000)];
    for (length, chunk_bytes) in sizes {
        for (turn, helps) in [true, false].into_iter().enumerate() {
            let (from, to) = (turn * 13, GUARD + 7 * turn);
            let copy = Job::copy(field.source(from, length), field.target(to, length), length);
            field.prepare(to, length);
            field.expect_copy(from, to, length);
            assert_eq!(together(&bench, &copy, chunk_bytes, helps), None);
            field.check(to, length);
            if bench.can(Operation::Compare) {
                let compare = copy.operation(Operation::Compare);
                assert_eq!(together(&bench, &compare, chunk_bytes, helps), None);
                // Two differences in different chunks: the first counts, whoever finds it first.
                let bytes = [!field.bytes(to + length - 1, 1)[0]];
                field.write(to + length - 1, &bytes);
                let bytes = [!field.source_bytes(from + length / 3, 1)[0]];
                field.write(to + length / 3, &bytes);
                let found = together(&bench, &compare, chunk_bytes, helps);
                assert_eq!(found, Some(length as u64 / 3));
            }
            if bench.can(Operation::Fill) {
                field.expect_fill(to, length, 0x11);
                let fill = Job::fill(field.target(to, length), length, 0x11);
                assert_eq!(together(&bench, &fill, chunk_bytes, helps), None);
                field.check(to, length);
            }
        }
    }
    field.check_all();
    Verdict::Passed
}

/// Carries out a job by all channels, and by the caller from the back if it helps.
fn together(bench: &Bench, job: &Job, chunk_bytes: u64, helps: bool) -> Option<u64> {
    let completion = Arc::new(Completion::chunked(job.work(chunk_bytes)));
    bench.launch(job, &completion);
    while helps && completion.help_from_back() {}
    let finish = bench.succeeds(&completion);
    assert_eq!(completion.ready_bytes(job.length), job.length);
    assert!(completion.is_range_ready(0, job.length));
    assert!(!completion.help_from_back() && !completion.help_from_front(), "nothing is left");
    finish.difference
}

pub(super) fn the_finished_prefix_can_be_used_early(subject: &Subject) -> Verdict {
    const LENGTH: usize = 1 << 20;
    let mut field = Field::new(subject, LENGTH);
    let bench = Bench::with_channels(subject, 2);
    for round in 0..4 {
        field.prepare(GUARD, LENGTH);
        field.expect_copy(round, GUARD, LENGTH);
        let job = Job::copy(field.source(round, LENGTH), field.target(GUARD, LENGTH), LENGTH);
        let completion = Arc::new(Completion::chunked(job.work(32 << 10)));
        std::thread::scope(|scope| {
            // Looks while the bytes move: what is said to be ready is there, and stays so.
            scope.spawn(|| {
                let mut ready = 0;
                until("all bytes to be ready", || {
                    let now = completion.ready_bytes(LENGTH as u64) as usize;
                    assert!(now >= ready, "the prefix only grows");
                    field.check_inside(GUARD + ready, now - ready);
                    ready = now;
                    for from in (0..LENGTH - 50_000).step_by(41_000) {
                        if completion.is_range_ready(from as u64, from as u64 + 50_000) {
                            field.check_inside(GUARD + from, 50_000);
                        }
                    }
                    ready == LENGTH
                });
            });
            bench.launch(&job, &completion);
            if round % 2 == 0 {
                while completion.help_from_back() {}
            }
            bench.succeeds(&completion);
        });
        field.check(GUARD, LENGTH);
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_cancelled_transfer_leaves_each_chunk_done_or_untouched(
    subject: &Subject,
) -> Verdict {
    const CHUNKS: usize = 6;
    const CHUNK: usize = 2000;
    const LENGTH: usize = CHUNKS * CHUNK;
    let mut field = Field::new(subject, LENGTH);
    let bench = Bench::with_channels(subject, 2);
    for round in 0..300 {
        field.prepare(GUARD, LENGTH);
        let job = Job::copy(field.source(7, LENGTH), field.target(GUARD, LENGTH), LENGTH);
        let completion = Arc::new(Completion::chunked(job.work(CHUNK as u64)));
        bench.launch(&job, &completion);
        for _ in 0..round % 4 {
            completion.help_from_back();
        }
        completion.cancel();
        let outcome = bench.outcome(&completion);

        let mut done = 0;
        for from in (0..LENGTH).step_by(CHUNK) {
            if field.bytes(GUARD + from, CHUNK) == field.source_bytes(7 + from, CHUNK) {
                field.expect_copy(7 + from, GUARD + from, CHUNK);
                done += CHUNK;
            }
            // Otherwise the model still has the chunk as it was before.
        }
        field.check(GUARD, LENGTH);
        match outcome {
            Ok(_) => assert_eq!(done, LENGTH, "a transfer that ended well is complete"),
            Err(error) => {
                assert_eq!(error, ExecutionError::Cancelled { done_bytes: done as u64 });
                assert!(completion.ready_bytes(LENGTH as u64) <= done as u64);
            }
        }
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_cancelled_before_it_began_touches_nothing(subject: &Subject) -> Verdict {
    const LENGTH: usize = 10_000;
    let mut field = Field::new(subject, LENGTH);
    let bench = Bench::new(subject);
    field.prepare(GUARD, LENGTH);
    let job = Job::copy(field.source(0, LENGTH), field.target(GUARD, LENGTH), LENGTH);
    let completion = Arc::new(Completion::chunked(job.work(1000)));
    completion.cancel();
    let cancelled = Err(ExecutionError::Cancelled { done_bytes: 0 });
    assert_eq!(completion.outcome(), Some(cancelled.clone()));
    assert!(!completion.help_from_back());
    if bench.capabilities().claims_chunks {
        // A late invitation finds nothing to claim.
        let taken = bench.submit([Descriptor::chunks(completion.clone())]);
        assert!(bench.channel().park(taken[0].last(), super::LIMIT));
    }
    completion.cancel();
    assert_eq!(completion.outcome(), Some(cancelled));
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_cancelled_whole_transfer_is_done_or_untouched(subject: &Subject) -> Verdict {
    const COUNT: usize = 40;
    let bench = Bench::new(subject);
    let length = bench.one_piece(512);
    let mut field = Field::new(subject, COUNT * (length + 2 * GUARD));
    let place = |index: usize| super::field::ALIGNED + index * length;
    for round in 0..20 {
        field.prepare(place(0), COUNT * length);
        let completions: Vec<_> = (0..COUNT).map(|_| Arc::new(Completion::whole())).collect();
        bench.submit(completions.iter().enumerate().map(|(index, completion)| {
            let source = field.source(index * length, length);
            let job = Job::copy(source, field.target(place(index), length), length);
            job.descriptor().reports_to(completion.clone())
        }));
        completions.iter().skip(round).step_by(2).for_each(|completion| completion.cancel());
        for (index, completion) in completions.iter().enumerate() {
            match bench.outcome(completion) {
                Ok(_) => field.expect_copy(index * length, place(index), length),
                // Then nothing of it was done: the model has it as it was before.
                Err(error) => assert_eq!(error, ExecutionError::Cancelled { done_bytes: 0 }),
            }
            assert!(completion.is_cancelled() || completion.outcome().is_some_and(|o| o.is_ok()));
        }
        field.check(place(0), COUNT * length);
    }
    Verdict::Passed
}
