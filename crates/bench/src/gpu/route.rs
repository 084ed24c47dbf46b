//! Copy methods as candidates. Only the copies are timed, not the preparation of fresh memory. At the
//! end every method is verified to copy every byte.

use std::cell::RefCell;
use std::time::Instant;

use anyhow::Context;
use memferry::Region;
use memferry::sys::clock;
use memferry::sys::pages::Pages;

use super::cases::{BufferState, Case, CopyMethod, GpuCopyDirection};
use super::fixture::GpuFixture;
use super::memory::HostBuffers;
use crate::Effort;
use crate::harness::{Budget, Candidate, Harness, Role, Sample, Samples};
use crate::results::figure::is_memferry;

/// Runs every method of the case, interleaved.
pub(super) fn interleave(
    rig: &mut GpuFixture,
    case: &Case,
    effort: Effort,
) -> anyhow::Result<Samples> {
    rig.prepare(case.direction, case.bytes)?;
    let kept = ReusedBuffers::new(rig, case, effort)?;
    let shared = RefCell::new((rig, kept));
    let route = |(series, method)| GpuRoute { series, method, case, shared: &shared };
    let mut routes: Vec<_> = case.candidates(effort).into_iter().map(route).collect();
    let (rounds, repeats) = case.rounds_and_repeats(effort);
    let samples = Harness::new(Budget::fixed(rounds, repeats)).interleave(&mut routes);
    let (rig, kept) = shared.into_inner();
    kept.unmap(rig);
    samples
        .require_verified()
        .with_context(|| format!("{}, {} bytes", case.figure(), case.bytes))?;
    Ok(samples)
}

/// One method of a case.
struct GpuRoute<'a, 'r> {
    series: &'static str,
    method: CopyMethod,
    case: &'a Case,
    shared: &'a RefCell<(&'r mut GpuFixture, ReusedBuffers)>,
}

impl Candidate for GpuRoute<'_, '_> {
    fn series(&self) -> &str {
        self.series
    }

    fn role(&self) -> Role {
        if is_memferry(self.series) { Role::Memferry } else { Role::Peer }
    }

    fn prepare(&mut self) -> Result<(), String> {
        let (rig, kept) = &mut *self.shared.borrow_mut();
        kept.warm_up(rig, self.case, self.method).map_err(error_text)
    }

    fn run(&mut self, iterations: u64) -> Result<Sample, String> {
        let (rig, kept) = &mut *self.shared.borrow_mut();
        match self.case.buffers {
            BufferState::Reused => kept.timed(rig, self.method, iterations),
            BufferState::Fresh => timed_fresh(rig, self.case, self.method, false),
        }
        .map_err(error_text)
    }

    fn verify(&mut self) -> Result<(), String> {
        let (rig, kept) = &mut *self.shared.borrow_mut();
        match self.case.buffers {
            BufferState::Reused => kept.verify(rig, self.method),
            BufferState::Fresh => timed_fresh(rig, self.case, self.method, true).map(|_| ()),
        }
        .map_err(error_text)
    }
}

fn error_text(error: anyhow::Error) -> String {
    format!("{error:#}")
}

/// Memory that is reused for all copies; empty if every copy gets fresh memory.
struct ReusedBuffers {
    /// Declared first, so that registrations are dropped before their memory is unmapped.
    regions: Vec<Region>,
    hosts: Vec<(CopyMethod, HostBuffers)>,
}

impl ReusedBuffers {
    /// Allocates the memory. For copies to and from a device, every method has memory of its own:
    /// what is registered for the ferry is no longer pageable for the driver. From host to host,
    /// all methods share the registered memory.
    fn new(rig: &GpuFixture, case: &Case, effort: Effort) -> anyhow::Result<Self> {
        let (mut hosts, mut regions) = (Vec::new(), Vec::new());
        if case.buffers == BufferState::Reused {
            let field = case.candidates(effort);
            let own = if case.direction == GpuCopyDirection::HostToHost { 1 } else { field.len() };
            for &(_, way) in &field[..own] {
                hosts.push((way, memory_for(rig, case, way)?));
            }
        }
        if let Some((_, ours)) = hosts.iter().find(|(way, _)| *way == CopyMethod::Ferry) {
            // SAFETY: regions are dropped before their pages. A refused registration is counted,
            // and a note reports it.
            let register =
                |pages: &Pages| unsafe { rig.ferry.register(pages.as_ptr(), pages.len()) }.ok();
            regions.extend(ours.all().filter_map(register));
        }
        Ok(Self { regions, hosts })
    }

    fn host(&mut self, way: CopyMethod) -> Option<&mut HostBuffers> {
        let own = self.hosts.iter().position(|(owner, _)| *owner == way);
        self.hosts.get_mut(own.unwrap_or(0)).map(|(_, host)| host)
    }

    /// Makes a few untimed copies.
    fn warm_up(
        &mut self,
        rig: &mut GpuFixture,
        case: &Case,
        way: CopyMethod,
    ) -> anyhow::Result<()> {
        // Until the ferry has tried a shared copy without processors too.
        const COPIES: usize = 9;
        match self.host(way) {
            Some(host) => (0..COPIES).try_for_each(|_| rig.copy(way, host)),
            None => timed_fresh(rig, case, way, false).map(|_| ()),
        }
    }

    fn timed(
        &mut self,
        rig: &mut GpuFixture,
        way: CopyMethod,
        repeats: u64,
    ) -> anyhow::Result<Sample> {
        let host = self.host(way).context("no memory was kept")?;
        // The first copy is untimed: it removes the effects of the previous method on the caches.
        rig.copy(way, host)?;
        timed(rig, way, host, repeats)
    }

    fn verify(&mut self, rig: &mut GpuFixture, way: CopyMethod) -> anyhow::Result<()> {
        let Some(host) = self.host(way) else { return Ok(()) };
        rig.poison(way, host)?;
        rig.copy(way, host)?;
        rig.verify(way, host)
    }

    fn unmap(self, rig: &GpuFixture) {
        drop(self.regions);
        self.hosts.into_iter().for_each(|(_, host)| host.unmap(&rig.ferry));
    }
}

/// Returns memory of the kind that a case needs. If the driver has memory of its own, the pages are
/// not touched.
fn memory_for(rig: &GpuFixture, case: &Case, way: CopyMethod) -> anyhow::Result<HostBuffers> {
    match way {
        CopyMethod::Pinned => HostBuffers::unpopulated(case.direction, case.pages, case.bytes),
        _ => rig.fresh_buffers(case.direction, case.pages, case.bytes),
    }
}

/// Measures one copy of fresh memory, and verifies it if `verified` is set.
fn timed_fresh(
    rig: &mut GpuFixture,
    case: &Case,
    way: CopyMethod,
    verified: bool,
) -> anyhow::Result<Sample> {
    let mut host = memory_for(rig, case, way)?;
    // Fresh targets already have other contents than the pattern.
    if verified && (way == CopyMethod::Pinned || case.direction == GpuCopyDirection::ToDevice) {
        rig.poison(way, &mut host)?;
    }
    let sample = timed(rig, way, &mut host, 1)?;
    if verified {
        rig.verify(way, &host)?;
    }
    host.unmap(&rig.ferry);
    Ok(sample)
}

fn timed(
    rig: &mut GpuFixture,
    way: CopyMethod,
    host: &mut HostBuffers,
    repeats: u64,
) -> anyhow::Result<Sample> {
    let (before_ns, start) = (clock::process_cpu_ns(), Instant::now());
    for _ in 0..repeats {
        rig.copy(way, host)?;
    }
    let ns = start.elapsed().as_nanos().max(1) as f64;
    let cpu_ns = clock::process_cpu_ns() - before_ns;
    let all = Sample { total_ns: ns, messages_ns: 0.0, cpu_ns: cpu_ns as f64 };
    Ok(all.per_iteration(repeats))
}
