//! Forces between all pairs of molecules. Every member moves its own molecules; it gets the
//! positions of the others, one by one from their large records, and puts the forces on them into
//! their inboxes.

use anyhow::ensure;

use super::{Workload, unit_interval};
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all, sum};

/// Numbers of a record: position, velocity, force, and padding for what a real program stores.
const RECORD: usize = 64;
const VELOCITY: usize = 3;
const FORCE: usize = 6;
const STEPS: usize = 2;
const STEP_TIME: f64 = 1e-3;
/// Keeps the force between molecules at the same position finite.
const SOFTNESS: f64 = 1e-4;
/// Number of molecules of each member that are checked against all others.
const CHECKED: usize = 4;

pub(super) struct Water {
    /// Molecules of one member.
    own: usize,
    size: usize,
}

impl Water {
    pub(super) fn new(molecules: usize, size: usize) -> anyhow::Result<Self> {
        let dealt = molecules.is_multiple_of(2 * size) && molecules / size >= CHECKED;
        ensure!(dealt, "{molecules} molecules cannot be dealt among {size}");
        Ok(Self { own: molecules / size, size })
    }

    fn molecules(&self) -> usize {
        self.own * self.size
    }

    /// Offset of the forces that another member puts for these molecules.
    fn inbox(&self, from: usize) -> usize {
        self.own * RECORD + from * self.own * 3
    }

    /// Gets the positions of all molecules.
    fn positions(&self, team: &mut impl Team) -> anyhow::Result<Vec<[f64; 3]>> {
        let mut positions = vec![[0.0; 3]; self.molecules()];
        for (molecule, position) in positions.iter_mut().enumerate() {
            team.get(molecule / self.own, molecule % self.own * RECORD, position)?;
        }
        Ok(positions)
    }

    /// Forces of all pairs that begin with an own molecule, on both molecules of the pair. A
    /// molecule forms pairs with the half of all molecules that follow it.
    fn forces(&self, rank: usize, positions: &[[f64; 3]]) -> Vec<f64> {
        let (count, half) = (positions.len(), positions.len() / 2);
        let mut forces = vec![0.0; 3 * count];
        for one in rank * self.own..(rank + 1) * self.own {
            // Opposite molecules form one pair, not two.
            let last = if one < half { half } else { half - 1 };
            let mut total = [0.0; 3];
            let end = one + 1 + last;
            for others in [one + 1..end.min(count), 0..end.saturating_sub(count)] {
                let pushed = forces[3 * others.start..3 * others.end].chunks_exact_mut(3);
                for (other, pushed) in positions[others].iter().zip(pushed) {
                    let force = force(&positions[one], other);
                    for axis in 0..3 {
                        total[axis] += force[axis];
                        pushed[axis] -= force[axis];
                    }
                }
            }
            for axis in 0..3 {
                forces[3 * one + axis] += total[axis];
            }
        }
        forces
    }

    fn step(&self, team: &mut impl Team) -> anyhow::Result<()> {
        let own = team.rank();
        let positions = self.positions(team)?;
        let forces = self.forces(own, &positions);
        for peer in (own + 1..self.size).chain(0..=own) {
            team.put(peer, self.inbox(own), &forces[3 * peer * self.own..][..3 * self.own])?;
        }
        team.barrier()?;
        team.own(|numbers: &mut [f64]| {
            let (records, inboxes) = numbers.split_at_mut(self.own * RECORD);
            for (molecule, record) in records.chunks_exact_mut(RECORD).enumerate() {
                for axis in 0..3 {
                    let from = |rank: usize| inboxes[(rank * self.own + molecule) * 3 + axis];
                    let force: f64 = (0..self.size).map(from).sum();
                    record[FORCE + axis] = force;
                    record[VELOCITY + axis] += STEP_TIME * force;
                    record[axis] += STEP_TIME * record[VELOCITY + axis];
                }
            }
        });
        team.barrier()
    }
}

fn force(one: &[f64; 3], other: &[f64; 3]) -> [f64; 3] {
    let away = [one[0] - other[0], one[1] - other[1], one[2] - other[2]];
    let square = away[0] * away[0] + away[1] * away[1] + away[2] * away[2] + SOFTNESS;
    let strength = 1e-6 / (square * square);
    away.map(|part| part * strength)
}

impl Workload for Water {
    fn bytes(&self) -> usize {
        self.inbox(self.size) * size_of::<f64>()
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let first = team.rank() * self.own;
        team.own(|numbers: &mut [f64]| {
            let records = numbers[..self.own * RECORD].chunks_exact_mut(RECORD);
            for (molecule, record) in records.enumerate() {
                record.fill(0.0);
                for (axis, part) in record[..3].iter_mut().enumerate() {
                    *part = unit_interval(splitmix64((3 * (first + molecule) + axis) as u64));
                }
            }
        });
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        (0..STEPS).try_for_each(|_| self.step(team))
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        let rank = team.rank();
        let mut before = self.positions(team)?;
        let mut velocity = [0.0; 3];
        for (molecule, position) in before.iter_mut().enumerate() {
            let place = molecule % self.own * RECORD + VELOCITY;
            team.get(molecule / self.own, place, &mut velocity)?;
            for axis in 0..3 {
                position[axis] -= STEP_TIME * velocity[axis];
            }
        }
        let (shares, found, bits) = team.own(|numbers: &mut [f64]| {
            let mut shares = [0.0; 4];
            let mut found = [[0.0; 3]; CHECKED];
            let records = numbers[..self.own * RECORD].chunks_exact(RECORD);
            for (molecule, record) in records.enumerate() {
                for axis in 0..3 {
                    shares[axis] += record[FORCE + axis];
                    shares[3] += record[FORCE + axis].abs();
                }
                if let Some(found) = found.get_mut(molecule) {
                    found.copy_from_slice(&record[FORCE..FORCE + 3]);
                }
            }
            let bits = numbers[..self.own * RECORD].iter().map(|number| number.to_bits());
            (shares, found, super::digest(bits))
        });
        let right = found.iter().enumerate().all(|(molecule, found)| {
            let one = rank * self.own + molecule;
            let others = (0..before.len()).filter(|&other| other != one);
            let pulls = others.map(|other| force(&before[one], &before[other]));
            let (mut total, mut size) = ([0.0; 3], 0.0);
            for pull in pulls {
                for axis in 0..3 {
                    total[axis] += pull[axis];
                    size += pull[axis].abs();
                }
            }
            (0..3).all(|axis| (total[axis] - found[axis]).abs() < 1e-9 * size)
        });
        ensure_all(team, right, "the force on a molecule is the sum over all others")?;
        let totals = sum(team, &shares)?;
        let balanced = totals[..3].iter().all(|total| total.abs() < 1e-9 * totals[3]);
        ensure_all(team, balanced, "all forces together are nothing")?;
        let digests = team.gather(&[bits])?;
        Ok(super::digest(digests.into_iter().flatten()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lookup::team::threads::run_members;

    #[test]
    fn every_pair_is_counted_once() {
        let water = Water::new(16, 2).unwrap();
        let positions: Vec<_> = (0..16).map(|n| [f64::from(n), 0.5, 0.0]).collect();
        let (first, second) = (water.forces(0, &positions), water.forces(1, &positions));
        for one in 0..16 {
            let others = (0..16).filter(|&other| other != one);
            let direct: f64 = others.map(|o| force(&positions[one], &positions[o])[0]).sum();
            assert!((first[3 * one] + second[3 * one] - direct).abs() < 1e-15, "{one}");
        }
    }

    #[test]
    fn a_wrong_force_is_noticed() {
        let bytes = Water::new(32, 1).unwrap().bytes();
        run_members(1, bytes, |mut team| {
            let mut water = Water::new(32, 1).unwrap();
            water.prepare(&mut team).unwrap();
            water.run(&mut team).unwrap();
            team.own(|numbers: &mut [f64]| numbers[RECORD + FORCE] *= 1.001);
            assert!(water.check(&mut team).is_err());
        });
    }
}
