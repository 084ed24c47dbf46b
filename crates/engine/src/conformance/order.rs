//! Ordering: transfers that begin when others are over.

use std::sync::Arc;

use super::bench::{Bench, Job, Reporting, launch_after, launch_now};
use super::field::{ALIGNED, Field};
use super::{Subject, Verdict};
use crate::completion::Completion;
use crate::contract::{Descriptor, ExecutionError};

/// A field of places that one descriptor can copy between.
fn places(subject: &Subject, bench: &Bench, count: usize) -> (Field, usize) {
    let length = bench.one_piece(512);
    let mut field = Field::new(subject, count * length);
    field.prepare(ALIGNED, count * length);
    (field, length)
}

fn at(place: usize, length: usize) -> usize {
    ALIGNED + place * length
}

pub(super) fn a_chain_is_carried_out_link_by_link(subject: &Subject) -> Verdict {
    const LINKS: usize = 100;
    let bench = Bench::with_channels(subject, 2);
    let (mut field, length) = places(subject, &bench, LINKS + 2);
    let bytes = field.source_bytes(length, length).to_vec();
    field.write(at(0, length), &bytes);
    let mut last = Arc::new(Completion::over());
    for link in 0..LINKS {
        // Each link copies what the one before it wrote.
        let (from, to) = (at(link, length), at(link + 1, length));
        field.expect_move(from, to, length);
        let job = Job::copy(field.target(from, length), field.target(to, length), length);
        let next = Arc::new(Completion::whole());
        let order = bench.order(link, job.descriptor().reports_to(next.clone()));
        launch_after(&[last], next.clone(), vec![order]);
        last = next;
    }
    bench.succeeds(&last);
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_after_several_waits_for_all_of_them(subject: &Subject) -> Verdict {
    const PARTS: usize = 8;
    let bench = Bench::with_channels(subject, 3);
    let (mut field, length) = places(subject, &bench, 16);
    let (middle, end) = (at(0, length), at(1, length));
    for round in 0..50 {
        field.prepare(middle, 2 * length);
        let part = length / PARTS;
        let predecessors: Vec<_> = (0..PARTS).map(|_| Arc::new(Completion::whole())).collect();
        let all = Arc::new(Completion::whole());
        let job = Job::copy(field.target(middle, length), field.target(end, length), length);
        let order = bench.order(0, job.descriptor().reports_to(all.clone()));
        // Registered with some of them launched and some not.
        let mut late = Some((all.clone(), vec![order]));
        for (index, predecessor) in predecessors.iter().enumerate() {
            if index == round % (PARTS + 1) {
                let (all, orders) = late.take().expect("registered once");
                launch_after(&predecessors, all, orders);
            }
            let (from, to) = ((round + 3 * index) * part, middle + index * part);
            field.expect_copy(from, to, part);
            let job = Job::copy(field.source(from, part), field.target(to, part), part);
            let order = bench.order(index, job.descriptor().reports_to(predecessor.clone()));
            launch_now(predecessor, [order]);
        }
        if let Some((all, orders)) = late {
            launch_after(&predecessors, all, orders);
        }
        bench.succeeds(&all);
        field.expect_move(middle, end, length);
        field.check(middle, 2 * length);
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_after_a_failed_one_is_not_begun(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let (mut field, length) = places(subject, &bench, 2);
    let to = at(0, length);
    field.prepare(to, length);
    let job = Job::copy(field.source(0, length), field.target(to, length), length);
    let abandon =
        |completion: &Arc<Completion>| drop(job.descriptor().reports_to(completion.clone()));
    for fails_first in [true, false] {
        let failed = Arc::new(Completion::whole());
        let good = Arc::new(Completion::over());
        let successors =
            [Arc::new(Completion::whole()), Arc::new(Completion::chunked(job.work(16)))];
        if fails_first {
            abandon(&failed);
        }
        let whole = bench.order(0, job.descriptor().reports_to(successors[0].clone()));
        launch_after(&[good.clone(), failed.clone()], successors[0].clone(), vec![whole]);
        let chunks = if bench.capabilities().claims_chunks {
            vec![bench.order(0, Descriptor::chunks(successors[1].clone()))]
        } else {
            Vec::new()
        };
        launch_after(&[failed.clone(), good], successors[1].clone(), chunks);
        if !fails_first {
            assert!(successors.iter().all(|successor| !successor.is_done()));
            abandon(&failed);
        }
        for successor in &successors {
            assert_eq!(bench.outcome(successor), Err(ExecutionError::Predecessor));
        }
        assert_eq!(bench.channel().statistics().submitted, 0);
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_transfer_after_one_that_is_over_starts_at_once(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    let (mut field, length) = places(subject, &bench, 20);
    let mut last = Arc::new(Completion::over());
    for round in 0..20 {
        let to = at(round % 2, length);
        field.prepare(to, length);
        field.expect_copy(round * length, to, length);
        let source = field.source(round * length, length);
        let job = Job::copy(source, field.target(to, length), length);
        let next = Arc::new(Completion::whole());
        let order = bench.order(0, job.descriptor().reports_to(next.clone()));
        launch_after(&[last.clone(), last], next.clone(), vec![order]);
        bench.succeeds(&next);
        field.check(to, length);
        last = next;
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn nobody_can_help_a_transfer_before_its_turn(subject: &Subject) -> Verdict {
    let bench = Bench::new(subject);
    if !bench.capabilities().claims_chunks {
        return bench.skip("claim chunks");
    }
    let (mut field, length) = places(subject, &bench, 4);
    let (middle, end) = (at(0, length), at(2, length));
    for round in 0..100 {
        field.prepare(middle, 3 * length);
        let first = Arc::new(Completion::whole());
        let job = Job::copy(field.target(middle, length), field.target(end, length), length);
        let second = Arc::new(Completion::chunked(job.work(length as u64 / 5)));
        let invitation = bench.order(0, Descriptor::chunks(second.clone()));
        launch_after(std::slice::from_ref(&first), second.clone(), vec![invitation]);
        assert!(!second.help_from_back() && !second.help_from_front(), "it is not its turn");
        field.check(middle, 3 * length);

        let source = field.source(round % 4 * length, length);
        let job = Job::copy(source, field.target(middle, length), length);
        field.expect_copy(round % 4 * length, middle, length);
        field.expect_move(middle, end, length);
        bench.submit([job.descriptor().reports_to(first)]);
        // Whoever gets a chunk gets it after the bytes that it copies.
        bench.until("the end", || {
            second.help_from_back();
            second.is_done()
        });
        field.check(middle, 3 * length);
    }
    field.check_all();
    Verdict::Passed
}

pub(super) fn a_long_chain_that_falls_at_once_needs_no_deep_stack(subject: &Subject) -> Verdict {
    const LINKS: usize = 50_000;
    let bench = Bench::new(subject);
    let (mut field, length) = places(subject, &bench, 2);
    let to = at(0, length);
    field.prepare(to, length);
    field.expect_copy(0, to, length);
    let job = Job::copy(field.source(0, length), field.target(to, length), length);
    let first = Arc::new(Completion::whole());
    let mut last = first.clone();
    for _ in 0..LINKS {
        let next = Arc::new(Completion::whole());
        // A transfer without bytes is over as soon as it is launched.
        launch_after(&[last], next.clone(), Vec::new());
        last = next;
    }
    let order = bench.order(0, job.descriptor().reports_to(first.clone()));
    launch_now(&first, [order]);
    bench.succeeds(&last);
    field.check_all();
    Verdict::Passed
}
