//! Programs that live on windows: their data lies in them, and what belongs to another member is
//! put and got, piece by piece. Each says how much memory a member needs, does its work, and checks
//! what came out. They have the patterns of the SPLASH-2 programs of the same names.

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
    /// How much memory every member exposes.
    fn bytes(&self) -> usize;

    /// Writes the input. Not timed.
    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()>;

    /// The work. Ends with a barrier.
    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()>;

    /// Checks the result; all members learn if it is wrong at one. Returns a number that is the same
    /// for every right run. Not timed.
    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64>;
}

/// Which program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// A six-step Fourier transform.
    Fourier,
    /// A factorisation by blocks.
    Lu,
    /// A sort by digits.
    Radix,
    /// A grid of many levels.
    Ocean,
    /// Forces between all pairs.
    Water,
    /// Blocks in random places of a large window.
    Random,
    /// Pages in random places of a window that is far larger than the memory behind it.
    Sparse,
}

/// A program and its size, the meaning of which depends on the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Problem {
    pub(super) kind: Kind,
    pub(super) scale: usize,
}

impl Kind {
    /// Its name in tables.
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

/// Any of the programs, as one member sees it.
pub(super) struct Any(Program);

enum Program {
    Fourier(fourier::Fourier),
    Lu(lu::Lu),
    Radix(radix::Radix),
    Ocean(ocean::Ocean),
    Water(water::Water),
    Random(random::Random),
    Sparse(sparse::Sparse),
}

/// Calls a method of whichever program it is.
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

impl Any {
    /// The program of a problem, if it can be dealt among so many members.
    pub(super) fn new(problem: Problem, rank: usize, size: usize) -> anyhow::Result<Self> {
        let scale = problem.scale;
        Ok(Self(match problem.kind {
            Kind::Fourier => Program::Fourier(fourier::Fourier::new(scale, size)?),
            Kind::Lu => Program::Lu(lu::Lu::new(scale, rank, size)?),
            Kind::Radix => Program::Radix(radix::Radix::new(scale, size)?),
            Kind::Ocean => Program::Ocean(ocean::Ocean::new(scale, rank, size)?),
            Kind::Water => Program::Water(water::Water::new(scale, size)?),
            Kind::Random => Program::Random(random::Random::new(scale, size)?),
            Kind::Sparse => Program::Sparse(sparse::Sparse::new(scale, size)?),
        }))
    }

    /// Whether the memory is to be touched before anything is exposed.
    pub(super) fn is_dense(&self) -> bool {
        !matches!(self.0, Program::Sparse(_))
    }
}

impl Workload for Any {
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

/// A number from 0 to 1 out of the bits of another.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Rows and columns of members, as square as their number permits.
fn rows_and_columns(size: usize) -> (usize, usize) {
    let rows = (1..=size).take_while(|rows| rows * rows <= size);
    let rows = rows.filter(|&rows| size.is_multiple_of(rows)).last().unwrap_or(1);
    (rows, size / rows)
}

/// Folds bits of numbers into one, so that equal results are known without keeping them.
fn digest(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0, |sum: u64, value| sum.rotate_left(5).wrapping_add(value))
}

#[cfg(test)]
mod tests {
    use super::super::team::threads::together;
    use super::*;

    /// Runs a program twice on so many members and hands back its number.
    fn result(kind: Kind, scale: usize, size: usize) -> u64 {
        let problem = Problem { kind, scale };
        let bytes = Any::new(problem, 0, size).unwrap().bytes();
        let results = together(size, bytes, |mut team| {
            let mut program = Any::new(problem, team.rank(), size).unwrap();
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
                (Kind::Fourier, 16),
                (Kind::Lu, 160),
                (Kind::Radix, 1 << 14),
                (Kind::Ocean, 128),
                (Kind::Water, 64),
                (Kind::Random, 8),
            ] {
                result(kind, scale, size);
            }
        }
    }

    #[test]
    fn programs_without_sums_give_the_same_however_they_are_dealt() {
        for (kind, scale) in [(Kind::Radix, 1 << 12), (Kind::Ocean, 64)] {
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
