//! Comparison of copy methods, interleaved, round by round. Only the copies are timed, not the
//! preparation of fresh memory. At the end every method is verified to copy every byte.

use std::time::Instant;

use anyhow::Context;
use memferry::Region;
use memferry::sys::clock;
use memferry::sys::pages::Pages;

use super::cases::{BufferState, Case, CopyMethod, GpuCopyDirection};
use super::fixture::GpuFixture;
use super::memory::HostBuffers;
use crate::Effort;
use crate::harness::median;
use crate::results::outcome::Row;

/// Times of one copy.
#[derive(Debug, Clone, Copy)]
struct CopySample {
    ns: f64,
    /// Processor time of the whole process, divided by the elapsed time.
    cores: f64,
}

/// Samples of each method, round by round.
#[derive(Default)]
pub(super) struct GpuSamples {
    series: Vec<(&'static str, Vec<CopySample>)>,
    /// Methods that could not copy, with the reason.
    pub(super) failed: Vec<(&'static str, String)>,
}

/// Runs every method of the case, interleaved.
pub(super) fn interleave(
    rig: &mut GpuFixture,
    case: &Case,
    effort: Effort,
) -> anyhow::Result<GpuSamples> {
    let mut rounds = GpuSamples::default();
    rig.prepare(case.direction, case.bytes)?;
    let mut kept = ReusedBuffers::new(rig, case, effort)?;
    let mut field = Vec::new();
    for (series, way) in case.candidates(effort) {
        match kept.warm_up(rig, case, way) {
            Ok(()) => {
                field.push(way);
                rounds.series.push((series, Vec::new()));
            }
            Err(error) => rounds.failed.push((series, format!("{error:#}"))),
        }
    }
    let (count, repeats) = case.rounds_and_repeats(effort);
    for round in 0..count {
        for turn in 0..field.len() {
            // The first method and the direction change from round to round.
            let place = (turn + round / 2) % field.len();
            let index = if round % 2 == 0 { place } else { field.len() - 1 - place };
            let (way, series) = (field[index], rounds.series[index].0);
            let sample = match case.buffers {
                BufferState::Reused => kept.timed(rig, way, repeats),
                BufferState::Fresh => timed_fresh(rig, case, way, round + 1 == count),
            };
            rounds.series[index].1.push(sample.with_context(|| failure(series, case))?);
        }
    }
    for (index, &way) in field.iter().enumerate() {
        kept.verify(rig, way).with_context(|| failure(rounds.series[index].0, case))?;
    }
    kept.unmap(rig);
    Ok(rounds)
}

fn failure(series: &str, case: &Case) -> String {
    format!("{series} failed, {}, {} bytes", case.figure(), case.bytes)
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
        const COPIES: usize = 3;
        match self.host(way) {
            Some(host) => (0..COPIES).try_for_each(|_| rig.copy(way, host)),
            None => timed_fresh(rig, case, way, false).map(|_| ()),
        }
    }

    fn timed(
        &mut self,
        rig: &mut GpuFixture,
        way: CopyMethod,
        repeats: usize,
    ) -> anyhow::Result<CopySample> {
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
) -> anyhow::Result<CopySample> {
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
    repeats: usize,
) -> anyhow::Result<CopySample> {
    let (before_ns, start) = (clock::process_cpu_ns(), Instant::now());
    for _ in 0..repeats {
        rig.copy(way, host)?;
    }
    let ns = start.elapsed().as_nanos().max(1) as f64;
    let cpu_ns = clock::process_cpu_ns() - before_ns;
    Ok(CopySample { ns: ns / repeats as f64, cores: cpu_ns as f64 / ns })
}

impl GpuSamples {
    fn samples_of(&self, series: &str) -> Option<&[CopySample]> {
        self.series.iter().find(|(name, _)| *name == series).map(|(_, samples)| &samples[..])
    }

    /// Returns the median over rounds of the speedup of `series` over `peer`; NaN if one of them
    /// did not run.
    pub(super) fn speedup(&self, series: &str, peer: &str) -> f64 {
        match (self.samples_of(series), self.samples_of(peer)) {
            (Some(ours), Some(theirs)) => {
                let ratio = |(ours, theirs): (&CopySample, &CopySample)| theirs.ns / ours.ns;
                median(ours.iter().zip(theirs).map(ratio).collect())
            }
            _ => f64::NAN,
        }
    }

    /// Median of the number of cores that the process kept busy.
    pub(super) fn cores(&self, series: &str) -> f64 {
        let samples = self.samples_of(series).unwrap_or_default();
        median(samples.iter().map(|sample| sample.cores).collect())
    }

    /// Rows of bandwidth, one for each method.
    pub(super) fn bandwidth_rows(&self, figure: &str, bytes: usize) -> Vec<Row> {
        self.rows(figure, bytes, "GB/s", |sample| bytes as f64 / sample.ns)
    }

    /// Rows of processor time, one for each method.
    pub(super) fn cores_rows(&self, figure: &str, bytes: usize) -> Vec<Row> {
        self.rows(figure, bytes, "cores", |sample| sample.cores)
    }

    fn rows(
        &self,
        figure: &str,
        bytes: usize,
        unit: &str,
        of_sample: impl Fn(&CopySample) -> f64,
    ) -> Vec<Row> {
        let row = |(series, samples): &(&'static str, Vec<CopySample>)| {
            let values: Vec<_> = samples.iter().map(&of_sample).collect();
            Row::of_rounds(figure, series, bytes as u64, unit, &values)
        };
        self.series.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_a_round_and_those_that_failed_have_none() {
        let samples = |times: [f64; 3]| times.map(|ns| CopySample { ns, cores: 1.0 }).to_vec();
        let series =
            vec![("memcpy", samples([10.0, 100.0, 10.0])), ("ours", samples([5.0, 50.0, 10.0]))];
        let rounds = GpuSamples { series, failed: Vec::new() };
        assert_eq!(rounds.speedup("ours", "memcpy"), 2.0);
        assert!(rounds.speedup("ours", "driver").is_nan());
        assert_eq!(rounds.cores("ours"), 1.0);
        assert!(rounds.cores("driver").is_nan());
        assert_eq!(rounds.bandwidth_rows("figure", 100)[0].value, 10.0);
    }
}
