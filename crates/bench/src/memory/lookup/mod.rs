//! `lookup`: the cost in time and memory of a small translation cache for windows, against a full
//! table: programs over several processes, single accesses, and the lookup alone.

pub(crate) mod command;
mod compare;
mod costs;
mod memory;
mod misses;
mod puts;
mod session;
mod slowdown;
mod team;
mod windows;
mod worker;
mod workload;

use std::time::Instant;

use memferry::sys::affinity;

pub(crate) use worker::run_worker;

use self::puts::PutPlan;
use self::session::TranslationSession;
use self::workload::{Problem, ProgramKind};
use crate::Progress;
use crate::harness::{median, set};
use crate::results::outcome::Outcome;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "lookup",
    "Windows found through a small cache of translations, against the full table",
    run,
)
.with_screen(run_for_screen);

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let problems = problems(effort);
    let members = members(effort, affinity::allowed_cores().len());
    progress.start(2 * problems.len() as u64 + 3, &outcome.bench);
    progress.step("hits and misses");
    let costs = costs::measure(effort)?;
    outcome.rows.extend(costs.rows);
    set(&mut outcome.summary, "hit_ns", costs.hit_ns);
    let mut session = TranslationSession::start(members)?;
    slowdowns(&mut outcome, &mut session, &problems, effort, progress)?;
    progress.step("puts");
    puts::measure(&mut session, &PutPlan::of(effort), &mut outcome)?;
    progress.step("a large window");
    if effort != Effort::Brief {
        outcome.rows.extend(memory::sparse_rows(&mut session)?);
    }
    drop(session);
    all_misses(&mut outcome, &problems, members, effort, progress)?;
    outcome.notes.extend(notes(members));
    Ok(outcome)
}

/// Measures only puts that hit.
fn run_for_screen(
    mut outcome: Outcome,
    _until: Instant,
    progress: &dyn Progress,
) -> anyhow::Result<Outcome> {
    progress.start(1, &outcome.bench);
    progress.step("puts");
    let mut session = TranslationSession::start(2)?;
    puts::measure(&mut session, &PutPlan::HITS, &mut outcome)?;
    Ok(outcome)
}

/// Compares the programs over the cache with the full table, and the memory of the largest program.
fn slowdowns(
    outcome: &mut Outcome,
    session: &mut TranslationSession,
    problems: &[Problem],
    effort: Effort,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let (mut steady, mut first) = (Vec::new(), Vec::new());
    for &problem in problems {
        let name = problem.kind.name();
        progress.step(name);
        let found = slowdown::measure(session, problem, effort)?;
        outcome.rows.extend(found.rows);
        steady.push(found.steady);
        first.push(found.first);
        if problem.kind == LARGEST_PROGRAM {
            let megabytes = found.full.attached_window_bytes >> 20;
            let size = crate::results::size::format(megabytes << 20);
            let name = format!("{name}, {size} attached");
            outcome.rows.extend(memory::rows(&name, &found.cache, &found.full));
            let saving = memory::saving(&found.cache, &found.full);
            set(&mut outcome.summary, "memory_saving", saving);
            let series = format!("{name}, cache");
            let delay = ("delay of a miss", found.cache.delay_ns);
            for (part, spread) in [delay, ("processing of a miss", found.cache.processing_ns)] {
                outcome.rows.extend(costs::quantile_rows(part, &series, spread));
            }
        }
    }
    let worst = |ratios: &[f64]| ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let summary = &mut outcome.summary;
    set(summary, "worst_slowdown", worst(&steady));
    set(summary, "median_slowdown", median(steady));
    set(summary, "worst_first_slowdown", worst(&first));
    set(summary, "median_first_slowdown", median(first));
    Ok(())
}

/// Measures the misses of all programs for all cache shapes.
fn all_misses(
    outcome: &mut Outcome,
    problems: &[Problem],
    members: usize,
    effort: Effort,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let mut differences = Vec::new();
    for &problem in problems {
        let name = problem.kind.name();
        progress.step(&format!("misses of {name}"));
        let found = misses::measure(problem, members, effort)?;
        outcome.rows.extend(found.rows);
        if found.live != found.replayed {
            let misses::MissResults { live, replayed, .. } = found;
            differences.push(format!("{name} counted {live}, its replay {replayed}"));
        }
    }
    outcome.notes.push(if differences.is_empty() {
        "The replay of every recorded run, with the shape it was recorded with, has exactly the \
         misses that the run has counted."
            .into()
    } else {
        format!(
            "Misses of recorded runs and of their replays with the same shape differ: {}. In a \
             replay a line is attached at once and accesses come in the order of the recording; in a \
             run a line may be evicted between a request and its retry, and threads may reach \
             the cache in another order.",
            differences.join("; ")
        )
    });
    Ok(())
}

/// The program with the largest windows.
const LARGEST_PROGRAM: ProgramKind = ProgramKind::Random;

/// The programs and their sizes.
fn problems(effort: Effort) -> [Problem; 6] {
    let scales = match effort {
        Effort::Brief => [512, 512, 1 << 20, 512, 2 << 10, 512],
        Effort::Quick => [2048, 1024, 1 << 22, 1024, 4 << 10, 512],
        Effort::Full => [4096, 4096, 1 << 25, 4096, 8 << 10, 512],
    };
    let kinds = [
        ProgramKind::Fourier,
        ProgramKind::Lu,
        ProgramKind::Radix,
        ProgramKind::Ocean,
        ProgramKind::Water,
        LARGEST_PROGRAM,
    ];
    std::array::from_fn(|place| Problem { kind: kinds[place], scale: scales[place] })
}

/// Number of processes: 4 for a full run on at least 4 cores, else 2.
fn members(effort: Effort, cores: usize) -> usize {
    if effort == Effort::Full && cores >= 4 { 4 } else { 2 }
}

fn notes(members: usize) -> Vec<String> {
    vec![
        format!(
            "Programs run over {members} processes, each bound to a core, with their data in windows \
             of shareable memory; what belongs to another process is put and got, and barriers are \
             notifications. Both lookups serve the same processes and the same memory over an \
             endpoint each, in turn; a ratio is that of two runs side by side, and the \
             median over rounds counts. Every run is checked, and must come to the same result as all \
             others."
        ),
        "The clock runs in the first process from a barrier before the program to the one at its \
         end. The full table is attached in advance, which is not timed. The first run with a cache \
         begins with nothing attached and nothing in the cache, and all its misses are timed; later \
         runs miss what the cache has no room for. worst_slowdown and median_slowdown are of later \
         runs. The processor time of the first process stands beside the slowdown: where others use \
         the processors too, the clock says more about them than about the lookup."
            .into(),
        "A program whose memory at other processes fits the cache does not miss in later runs: its \
         slowdown is then that of hits alone, and differs from 1 by little more than chance. The \
         misses of later runs say which programs these are; only the full effort makes most of \
         them larger than the cache."
            .into(),
        "C, L and A are entries of the cache, entries of a line, lines of a set; an entry is a page \
         of 4 KiB. Traces are recorded with L8, so that no line of any shape is passed over, and \
         a miss ratio is that of the lookups in the trace. They, and all counters, are \
         the first process's."
            .into(),
        "A hit is one translation looked up, read and let go, of lines that are all in the cache. Two \
         locked additions are what counting the users of a line takes by itself on this machine."
            .into(),
        "memory_saving compares what copies look at: the cache with its tags, or the full table. \
         Tables behind the cache are ordinary memory that grows with what is attached, and are shown \
         beside it."
            .into(),
        "Puts with misses go around in a circle of lines larger than the cache; the full table gets \
         puts to the very same places, so that what the caches of the processor cost is on both \
         sides."
            .into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_can_be_dealt() {
        for effort in [Effort::Brief, Effort::Quick, Effort::Full] {
            for problem in problems(effort) {
                let size = members(effort, 64);
                let program = workload::AnyProgram::new(problem, 0, size).unwrap();
                if problem.kind == LARGEST_PROGRAM {
                    assert!(workload::Workload::bytes(&program) >= 512 << 20);
                }
            }
        }
    }
}
