//! Endpoints as candidates: the same processes and the same memory, over the full table and over a
//! cache.

use std::cell::RefCell;

use super::command::PutPattern;
use super::session::TranslationSession;
use crate::harness::{Budget, Candidate, Harness, Role, Sample, Samples};

/// Series of the endpoint with the full table.
pub(super) const FULL: &str = "full table";
/// Series of the endpoint with a cache.
pub(super) const CACHE: &str = "cache";

/// What is run over an endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) enum EndpointTask {
    /// The current program; an iteration is one run.
    Program,
    /// Puts of this pattern; an iteration is one put.
    Puts(PutPattern),
}

/// Runs a task over two endpoints, the full table and a cache, interleaved.
pub(super) fn compare(
    session: &mut TranslationSession,
    endpoints: [usize; 2],
    task: EndpointTask,
    budget: Budget,
) -> anyhow::Result<Samples> {
    compare_in([FULL, CACHE], session, endpoints, task, budget)
}

/// [`compare`] with the order of the two in the first round; it is the opposite in the next.
pub(super) fn compare_in(
    order: [&'static str; 2],
    session: &mut TranslationSession,
    [full, cache]: [usize; 2],
    task: EndpointTask,
    budget: Budget,
) -> anyhow::Result<Samples> {
    let session = &RefCell::new(session);
    let mut candidates = order.map(|series| {
        let (role, number) = match series {
            FULL => (Role::Peer, full),
            _ => (Role::Memferry, cache),
        };
        EndpointCandidate { series, role, number, task, session }
    });
    let samples = Harness::new(budget).interleave(&mut candidates);
    // The processes are the same: without one endpoint there is nothing to compare.
    samples.require_all()?;
    Ok(samples)
}

struct EndpointCandidate<'a, 's> {
    series: &'static str,
    role: Role,
    number: usize,
    task: EndpointTask,
    session: &'a RefCell<&'s mut TranslationSession>,
}

impl EndpointCandidate<'_, '_> {
    fn times(&self, iterations: u64) -> anyhow::Result<Sample> {
        let mut session = self.session.borrow_mut();
        match self.task {
            EndpointTask::Program => {
                let (mut total_ns, mut cpu_ns) = (0.0, 0.0);
                for _ in 0..iterations {
                    let ran = session.run(self.number)?;
                    total_ns += ran.ns;
                    cpu_ns += ran.processor_ns;
                }
                let all = Sample { cpu_ns, ..Sample::of_total(total_ns) };
                Ok(all.per_iteration(iterations))
            }
            EndpointTask::Puts(pattern) => {
                let pattern = PutPattern { count: usize::try_from(iterations)?, ..pattern };
                session.put(self.number, pattern).map(Sample::of_total)
            }
        }
    }
}

impl Candidate for EndpointCandidate<'_, '_> {
    fn series(&self) -> &str {
        self.series
    }

    fn role(&self) -> Role {
        self.role
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        self.times(iterations).map_err(|error| format!("{error:#}"))
    }
}
