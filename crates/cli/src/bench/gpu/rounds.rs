//! The ways to make a copy against each other, in turn, round by round. Only the copies are timed,
//! not what makes memory fresh, and afterwards every way shows that it moves every byte.

use std::time::Instant;

use anyhow::Context;
use memferry::Region;
use memferry::sys::clock;
use memferry::sys::pages::Pages;

use super::cases::{Buffers, Case, Direction, Way};
use super::memory::Host;
use super::rig::Rig;
use crate::bench::Effort;
use crate::bench::measure::median;
use crate::outcome::Row;

/// What one copy took.
#[derive(Debug, Clone, Copy)]
struct Sample {
    ns: f64,
    /// Processor time of the whole process, as a share of the time.
    cores: f64,
}

/// What each way took, round by round.
#[derive(Default)]
pub(super) struct Rounds {
    series: Vec<(&'static str, Vec<Sample>)>,
    /// Ways that could not make the copy, with the reason.
    pub(super) failed: Vec<(&'static str, String)>,
}

/// Lets every way make the copy in turn.
pub(super) fn contest(rig: &mut Rig, case: &Case, effort: Effort) -> anyhow::Result<Rounds> {
    let mut rounds = Rounds::default();
    rig.prepare(case.direction, case.bytes)?;
    let mut kept = Kept::new(rig, case, effort)?;
    let mut field = Vec::new();
    for (series, way) in case.field(effort) {
        match kept.warm_up(rig, case, way) {
            Ok(()) => {
                field.push(way);
                rounds.series.push((series, Vec::new()));
            }
            Err(error) => rounds.failed.push((series, format!("{error:#}"))),
        }
    }
    let (count, repeats) = case.pace(effort);
    for round in 0..count {
        for turn in 0..field.len() {
            // The one that goes first changes, and so does the direction.
            let place = (turn + round / 2) % field.len();
            let index = if round % 2 == 0 { place } else { field.len() - 1 - place };
            let (way, series) = (field[index], rounds.series[index].0);
            let sample = match case.buffers {
                Buffers::Reused => kept.timed(rig, way, repeats),
                Buffers::Fresh => timed_fresh(rig, case, way, round + 1 == count),
            };
            rounds.series[index].1.push(sample.with_context(|| failure(series, case))?);
        }
    }
    for (index, &way) in field.iter().enumerate() {
        kept.verify(rig, way).with_context(|| failure(rounds.series[index].0, case))?;
    }
    kept.retire(rig);
    Ok(rounds)
}

fn failure(series: &str, case: &Case) -> String {
    format!("{series} failed, {}, {} bytes", case.figure(), case.bytes)
}

/// Memory that is used again and again; nothing, if every copy gets fresh memory.
struct Kept {
    /// First, so that nothing is unmapped that is registered.
    regions: Vec<Region>,
    hosts: Vec<(Way, Host)>,
}

impl Kept {
    /// To a device and from it, everyone has memory of his own: what is registered for the ferry is not
    /// pageable for the driver any more. Between ordinary memory all share what is registered.
    fn new(rig: &Rig, case: &Case, effort: Effort) -> anyhow::Result<Self> {
        let (mut hosts, mut regions) = (Vec::new(), Vec::new());
        if case.buffers == Buffers::Reused {
            let field = case.field(effort);
            let own = if case.direction == Direction::HostToHost { 1 } else { field.len() };
            for &(_, way) in &field[..own] {
                hosts.push((way, memory_for(rig, case, way)?));
            }
        }
        if let Some((_, ours)) = hosts.iter().find(|(way, _)| *way == Way::Ferry) {
            // What is refused is counted, and a note says so.
            // SAFETY: regions are dropped before the pages that they are of.
            let register =
                |pages: &Pages| unsafe { rig.ferry.register(pages.as_ptr(), pages.len()) }.ok();
            regions.extend(ours.all().filter_map(register));
        }
        Ok(Self { regions, hosts })
    }

    fn host(&mut self, way: Way) -> Option<&mut Host> {
        let own = self.hosts.iter().position(|(owner, _)| *owner == way);
        self.hosts.get_mut(own.unwrap_or(0)).map(|(_, host)| host)
    }

    /// Makes a few copies that do not count.
    fn warm_up(&mut self, rig: &mut Rig, case: &Case, way: Way) -> anyhow::Result<()> {
        const COPIES: usize = 3;
        match self.host(way) {
            Some(host) => (0..COPIES).try_for_each(|_| rig.perform(way, host)),
            None => timed_fresh(rig, case, way, false).map(|_| ()),
        }
    }

    fn timed(&mut self, rig: &mut Rig, way: Way, repeats: usize) -> anyhow::Result<Sample> {
        let host = self.host(way).context("no memory was kept")?;
        // The first settles what the neighbour left behind.
        rig.perform(way, host)?;
        timed(rig, way, host, repeats)
    }

    fn verify(&mut self, rig: &mut Rig, way: Way) -> anyhow::Result<()> {
        let Some(host) = self.host(way) else { return Ok(()) };
        rig.spoil(way, host)?;
        rig.perform(way, host)?;
        rig.verify(way, host)
    }

    fn retire(self, rig: &Rig) {
        drop(self.regions);
        self.hosts.into_iter().for_each(|(_, host)| host.retire(&rig.ferry));
    }
}

/// Memory as a case wants it. Nobody touches it if the driver has memory of its own.
fn memory_for(rig: &Rig, case: &Case, way: Way) -> anyhow::Result<Host> {
    match way {
        Way::Pinned => Host::untouched(case.direction, case.pages, case.bytes),
        _ => rig.fresh(case.direction, case.pages, case.bytes),
    }
}

/// One copy of fresh memory; afterwards, if that is wanted, a look whether it is there.
fn timed_fresh(rig: &mut Rig, case: &Case, way: Way, verified: bool) -> anyhow::Result<Sample> {
    let mut host = memory_for(rig, case, way)?;
    // Fresh targets are wrong as they are.
    if verified && (way == Way::Pinned || case.direction == Direction::ToDevice) {
        rig.spoil(way, &mut host)?;
    }
    let sample = timed(rig, way, &mut host, 1)?;
    if verified {
        rig.verify(way, &host)?;
    }
    host.retire(&rig.ferry);
    Ok(sample)
}

fn timed(rig: &mut Rig, way: Way, host: &mut Host, repeats: usize) -> anyhow::Result<Sample> {
    let (before_ns, start) = (clock::process_cpu_ns(), Instant::now());
    for _ in 0..repeats {
        rig.perform(way, host)?;
    }
    let ns = start.elapsed().as_nanos().max(1) as f64;
    let cpu_ns = clock::process_cpu_ns() - before_ns;
    Ok(Sample { ns: ns / repeats as f64, cores: cpu_ns as f64 / ns })
}

impl Rounds {
    fn of(&self, series: &str) -> Option<&[Sample]> {
        self.series.iter().find(|(name, _)| *name == series).map(|(_, samples)| &samples[..])
    }

    /// The median over rounds of how many times faster `series` is than `peer`; not a number if one
    /// of them did not take part.
    pub(super) fn speedup(&self, series: &str, peer: &str) -> f64 {
        match (self.of(series), self.of(peer)) {
            (Some(ours), Some(theirs)) => {
                let ratio = |(ours, theirs): (&Sample, &Sample)| theirs.ns / ours.ns;
                median(ours.iter().zip(theirs).map(ratio).collect())
            }
            _ => f64::NAN,
        }
    }

    /// The median of how many cores the process kept busy.
    pub(super) fn cores(&self, series: &str) -> f64 {
        let samples = self.of(series).unwrap_or_default();
        median(samples.iter().map(|sample| sample.cores).collect())
    }

    /// A row of bandwidth for each way.
    pub(super) fn bandwidth_rows(&self, figure: &str, bytes: usize) -> Vec<Row> {
        self.rows(figure, bytes, "GB/s", |sample| bytes as f64 / sample.ns)
    }

    /// A row of processor time for each way.
    pub(super) fn cores_rows(&self, figure: &str, bytes: usize) -> Vec<Row> {
        self.rows(figure, bytes, "cores", |sample| sample.cores)
    }

    fn rows(
        &self,
        figure: &str,
        bytes: usize,
        unit: &str,
        of_sample: impl Fn(&Sample) -> f64,
    ) -> Vec<Row> {
        let row = |(series, samples): &(&'static str, Vec<Sample>)| {
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
        let samples = |times: [f64; 3]| times.map(|ns| Sample { ns, cores: 1.0 }).to_vec();
        let series =
            vec![("memcpy", samples([10.0, 100.0, 10.0])), ("ours", samples([5.0, 50.0, 10.0]))];
        let rounds = Rounds { series, failed: Vec::new() };
        assert_eq!(rounds.speedup("ours", "memcpy"), 2.0);
        assert!(rounds.speedup("ours", "driver").is_nan());
        assert_eq!(rounds.cores("ours"), 1.0);
        assert!(rounds.cores("driver").is_nan());
        assert_eq!(rounds.bandwidth_rows("figure", 100)[0].value, 10.0);
    }
}
