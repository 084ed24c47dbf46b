//! Ordered descriptors of one channel: chains that are submitted together.

use std::sync::Arc;

use super::buffers::{ALIGNED, TestBuffers};
use super::test_engine::{ReportsTo, TestEngine, TestOperation};
use super::{EngineUnderTest, Verdict};
use crate::completion::{ChannelBatch, Completion};
use crate::contract::{Descriptor, ExecutionError, MemoryKind};

/// The verdict of an engine without ordered descriptors.
fn skip(bench: &TestEngine) -> Verdict {
    bench.skip("order descriptors")
}

/// The slots of a chain: each link copies the bytes that the link before it wrote.
struct Chain {
    buffers: TestBuffers,
    length: usize,
}

impl Chain {
    fn new(subject: &EngineUnderTest, bench: &TestEngine, links: usize) -> Self {
        let length = bench.max_part(512);
        Self { buffers: TestBuffers::new(subject, (links + 1) * length), length }
    }

    fn slot(&self, link: usize) -> usize {
        ALIGNED + link * self.length
    }

    /// Writes other bytes to the first slot than before, and expects them in all others.
    fn begin(&mut self, links: usize, round: usize) {
        let bytes = self.buffers.source_bytes(7 * round, self.length).to_vec();
        self.buffers.write(self.slot(0), &bytes);
        for link in 0..links {
            self.buffers.expect_move(self.slot(link), self.slot(link + 1), self.length);
        }
    }

    /// The descriptor of a link, ordered after others.
    fn link(&self, link: usize, after: &[Arc<Completion>]) -> (Descriptor, Arc<Completion>) {
        let [source, target] =
            [link, link + 1].map(|slot| self.buffers.target(self.slot(slot), self.length));
        let completion = Arc::new(Completion::whole().ordered_after(after.iter().cloned()));
        let job = TestOperation::copy(source, target, self.length);
        let descriptor = job.descriptor().reports_to(completion.clone());
        (if after.is_empty() { descriptor } else { descriptor.ordered() }, completion)
    }

    /// All links.
    fn links(&self, count: usize) -> (Vec<Descriptor>, Vec<Arc<Completion>>) {
        let (mut descriptors, mut completions) = (Vec::new(), Vec::new());
        for link in 0..count {
            let after = &completions[link.saturating_sub(1)..];
            let (descriptor, completion) = self.link(link, after);
            descriptors.push(descriptor);
            completions.push(completion);
        }
        (descriptors, completions)
    }
}

/// Asserts that nothing ends before what is before it.
fn ends_in_order(bench: &TestEngine, completions: &[Arc<Completion>]) {
    let mut done = 0;
    bench.wait_until("the end of a chain", || {
        // From the end: a link that ends meanwhile is not looked at again.
        let last = completions.iter().rposition(|completion| completion.is_done());
        let now = last.map_or(0, |last| last + 1);
        assert!(completions[..now].iter().all(|completion| completion.is_done()));
        assert!(now >= done);
        done = now;
        done == completions.len()
    });
}

pub(super) fn a_chain_that_is_submitted_at_once_is_executed_in_order(
    subject: &EngineUnderTest,
) -> Verdict {
    let bench = TestEngine::new(subject);
    if !bench.engine.orders_descriptors() {
        return skip(&bench);
    }
    for links in [2, 3, 8, 64, 200] {
        let mut chain = Chain::new(subject, &bench, links);
        for round in 0..10 {
            chain.begin(links, round);
            let (descriptors, completions) = chain.links(links);
            bench.submit(descriptors);
            ends_in_order(&bench, &completions);
            completions.iter().for_each(|completion| _ = bench.succeeds(completion));
            chain.buffers.check_all();
        }
    }
    Verdict::Passed
}

pub(super) fn an_ordered_descriptor_waits_for_all_before_it_and_for_none_behind_it(
    subject: &EngineUnderTest,
) -> Verdict {
    const PARTS: usize = 8;
    let bench = TestEngine::new(subject);
    if !bench.engine.orders_descriptors() {
        return skip(&bench);
    }
    let length = bench.max_part(512);
    let part = length / PARTS;
    let mut buffers = TestBuffers::new(subject, 3 * length);
    let [middle, end, free] = [0, 1, 2].map(|slot| ALIGNED + slot * length);
    for round in 0..100 {
        buffers.prepare(middle, 3 * length);
        let mut batch = Vec::new();
        let parts: Vec<_> = (0..PARTS).map(|_| Arc::new(Completion::whole())).collect();
        for (index, completion) in parts.iter().enumerate() {
            let (from, to) = (round + 3 * index * part, middle + index * part);
            let job =
                TestOperation::copy(buffers.source(from, part), buffers.target(to, part), part);
            batch.push(job.descriptor().reports_to(completion.clone()));
            buffers.expect_copy(from, to, part);
        }
        let all = Arc::new(Completion::whole().ordered_after(parts));
        let (from, to) = (buffers.target(middle, length), buffers.target(end, length));
        let job = TestOperation::copy(from, to, length);
        batch.push(job.descriptor().reports_to(all.clone()).ordered());
        buffers.expect_move(middle, end, length);
        let other = Arc::new(Completion::whole());
        let job = TestOperation::fill(buffers.target(free, length), length, round as u8);
        batch.push(job.descriptor().reports_to(other.clone()));
        buffers.expect_fill(free, length, round as u8);
        bench.submit(batch);
        bench.succeeds(&all);
        bench.succeeds(&other);
        buffers.check_all();
    }
    Verdict::Passed
}

pub(super) fn what_is_ordered_after_a_failed_descriptor_is_not_begun(
    subject: &EngineUnderTest,
) -> Verdict {
    const LINKS: usize = 4;
    let bench = TestEngine::new(subject);
    if !bench.engine.orders_descriptors() {
        return skip(&bench);
    }
    if bench.capabilities().memory.contains(MemoryKind::Device) {
        return bench.skip("reject device memory");
    }
    let mut chain = Chain::new(subject, &bench, LINKS + 1);
    let target = chain.slot(1);
    for bad in 0..LINKS {
        chain.begin(bad, bad);
        chain.buffers.prepare(target + LINKS * chain.length, 1);
        let (mut descriptors, completions) = chain.links(LINKS);
        descriptors = descriptors
            .into_iter()
            .enumerate()
            .map(|(link, descriptor)| match link == bad {
                true => descriptor.memory(MemoryKind::Host, MemoryKind::Device),
                false => descriptor,
            })
            .collect();
        // It is ordered behind them, and after none of them.
        let job = TestOperation::fill(chain.buffers.target(chain.slot(LINKS + 1), 1), 1, 0x55);
        let other = Arc::new(Completion::whole().ordered_after([Arc::new(Completion::done())]));
        descriptors.push(job.descriptor().reports_to(other.clone()).ordered());
        chain.buffers.expect_fill(chain.slot(LINKS + 1), 1, 0x55);
        bench.submit(descriptors);
        bench.succeeds(&other);
        for (link, completion) in completions.iter().enumerate() {
            let outcome = bench.outcome(completion).map(|_| ());
            match link.cmp(&bad) {
                std::cmp::Ordering::Less => assert_eq!(outcome, Ok(())),
                std::cmp::Ordering::Equal => {
                    assert!(matches!(outcome, Err(ExecutionError::Engine { .. })), "{outcome:?}");
                }
                std::cmp::Ordering::Greater => {
                    assert_eq!(outcome, Err(ExecutionError::Predecessor));
                }
            }
        }
        chain.buffers.check_all();
    }
    Verdict::Passed
}

pub(super) fn what_a_full_or_closed_channel_does_not_accept_keeps_its_order(
    subject: &EngineUnderTest,
) -> Verdict {
    const LINKS: usize = 100;
    let bench = TestEngine::with_capacity(subject, 4);
    if !bench.engine.orders_descriptors() {
        return skip(&bench);
    }
    let mut chain = Chain::new(subject, &bench, LINKS);
    for round in 0..20 {
        chain.begin(LINKS, round);
        let (descriptors, completions) = chain.links(LINKS);
        if round == 10 {
            bench.channel().close();
        }
        // A channel that claims to move by itself is not waited for when it is full.
        let batch = ChannelBatch::many(bench.channel().clone(), true, descriptors);
        super::test_engine::dispatch_now(&completions[LINKS - 1], [batch]);
        for completion in &completions {
            bench.succeeds(completion);
        }
        chain.buffers.check_all();
    }
    Verdict::Passed
}
