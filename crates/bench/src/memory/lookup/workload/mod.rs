//! Programs over windows: their data is in the windows, and the data of other members is accessed
//! by put and get. A program states how much memory a member needs, runs, and checks its result.
//! The programs have the access patterns of the SPLASH-2 programs of the same names.

mod fourier;
mod lu;
mod ocean;
mod radix;
mod random;
mod sparse;
mod water;

use serde::{Deserialize, Serialize};

use super::team::Team;

/// A program of several members.
pub(super) trait Workload {
    /// Bytes of memory that every member exposes.
    fn bytes(&self) -> usize;

    /// Writes the input. Not timed.
    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()>;

    /// Runs the program. Ends with a barrier.
    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()>;

    /// Checks the result; fails at all members if it is wrong at one. Returns a number that is the
    /// same for every correct run. Not timed.
    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64>;
}

/// A program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ProgramKind {
    /// A six-step Fourier transform.
    Fourier,
    /// An LU factorisation by blocks.
    Lu,
    /// A radix sort.
    Radix,
    /// A multigrid solver.
    Ocean,
    /// Forces between all pairs of molecules.
    Water,
    /// Blocks at random positions of a large window.
    Random,
    /// Pages at random positions of a window that is far larger than the memory behind it.
    Sparse,
}

/// A program and its size, in a unit that depends on the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Problem {
    pub(super) kind: ProgramKind,
    pub(super) scale: usize,
}

impl ProgramKind {
    /// Name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fourier => "fourier",
            Self::Lu => "lu",
            Self::Radix => "radix",
            Self::Ocean => "ocean",
            Self::Water => "water",
            Self::Random => "random",
            Self::Sparse => "sparse",
        }
    }
}

/// Any of the programs, for one member.
pub(super) struct AnyProgram(Program);

enum Program {
    Fourier(fourier::Fourier),
    Lu(lu::Lu),
    Radix(radix::Radix),
    Ocean(ocean::Ocean),
    Water(water::Water),
    Random(random::Random),
    Sparse(sparse::Sparse),
}

/// Calls a method of the contained program.
macro_rules! each {
    ($any:expr, $workload:ident => $call:expr) => {
        match $any {
            Program::Fourier($workload) => $call,
            Program::Lu($workload) => $call,
            Program::Radix($workload) => $call,
            Program::Ocean($workload) => $call,
            Program::Water($workload) => $call,
            Program::Random($workload) => $call,
            Program::Sparse($workload) => $call,
        }
    };
}

impl AnyProgram {
    /// Creates the program of a problem; fails if it cannot be distributed among `size` members.
    pub(super) fn new(problem: Problem, rank: usize, size: usize) -> anyhow::Result<Self> {
        let scale = problem.scale;
        Ok(Self(match problem.kind {
            ProgramKind::Fourier => Program::Fourier(fourier::Fourier::new(scale, size)?),
            ProgramKind::Lu => Program::Lu(lu::Lu::new(scale, rank, size)?),
            ProgramKind::Radix => Program::Radix(radix::Radix::new(scale, size)?),
            ProgramKind::Ocean => Program::Ocean(ocean::Ocean::new(scale, rank, size)?),
            ProgramKind::Water => Program::Water(water::Water::new(scale, size)?),
            ProgramKind::Random => Program::Random(random::Random::new(scale, size)?),
            ProgramKind::Sparse => Program::Sparse(sparse::Sparse::new(scale, size)?),
        }))
    }

    /// Returns whether the memory is touched before it is exposed.
    pub(super) fn is_dense(&self) -> bool {
        !matches!(self.0, Program::Sparse(_))
    }
}

impl Workload for AnyProgram {
    fn bytes(&self) -> usize {
        each!(&self.0, workload => workload.bytes())
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        each!(&mut self.0, workload => workload.prepare(team))
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        each!(&mut self.0, workload => workload.run(team))
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        each!(&mut self.0, workload => workload.check(team))
    }
}

/// Converts bits to a number from 0 to 1.
fn unit_interval(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Rows and columns of members, as close to a square as their number permits.
fn rows_and_columns(size: usize) -> (usize, usize) {
    let rows = (1..=size).take_while(|rows| rows * rows <= size);
    let rows = rows.filter(|&rows| size.is_multiple_of(rows)).last().unwrap_or(1);
    (rows, size / rows)
}

/// Folds values into one checksum, so that results can be compared without storing them.
fn digest(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0, |sum: u64, value| sum.rotate_left(5).wrapping_add(value))
}

#[cfg(test)]
mod tests {
    use super::super::team::threads::run_members;
    use super::*;

    /// Runs a program twice on `size` members and returns its checksum.
    fn result(kind: ProgramKind, scale: usize, size: usize) -> u64 {
        let problem = Problem { kind, scale };
        let bytes = AnyProgram::new(problem, 0, size).unwrap().bytes();
        let results = run_members(size, bytes, |mut team| {
            let mut program = AnyProgram::new(problem, team.rank(), size).unwrap();
            let mut once = || {
                program.prepare(&mut team).unwrap();
                team.barrier().unwrap();
                program.run(&mut team).unwrap();
                program.check(&mut team).unwrap()
            };
            (once(), once())
        });
        let (first, again) = results[0];
        assert_eq!(first, again, "{kind:?} with {size} members");
        assert!(results.iter().all(|result| *result == results[0]), "{kind:?}: {results:?}");
        first
    }

    #[test]
    fn every_program_checks_out_with_any_number_of_members() {
        for size in [1, 2, 4] {
            for (kind, scale) in [
                (ProgramKind::Fourier, 16),
                (ProgramKind::Lu, 160),
                (ProgramKind::Radix, 1 << 14),
                (ProgramKind::Ocean, 128),
                (ProgramKind::Water, 64),
                (ProgramKind::Random, 8),
            ] {
                result(kind, scale, size);
            }
        }
    }

    #[test]
    fn programs_without_sums_give_the_same_however_they_are_dealt() {
        for (kind, scale) in [(ProgramKind::Radix, 1 << 12), (ProgramKind::Ocean, 64)] {
            let alone = result(kind, scale, 1);
            assert_eq!(result(kind, scale, 2), alone, "{kind:?}");
            assert_eq!(result(kind, scale, 4), alone, "{kind:?}");
        }
    }

    #[test]
    fn members_are_dealt_as_square_as_they_can_be() {
        let dealt = [1, 2, 3, 4, 6, 8].map(rows_and_columns);
        assert_eq!(dealt, [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)]);
    }
}
