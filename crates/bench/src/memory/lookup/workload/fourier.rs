//! One-dimensional Fourier transform in six steps: the points form a square, whose rows are
//! distributed among the members, and which is transposed three times. A member gets the parts of
//! rows that become its columns.

use std::f64::consts::TAU;

use anyhow::ensure;

use super::Workload;
use crate::apps::fourier::{Complex, cell_value, transform_rows};
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all, sum};

/// Rows that are fetched before they are transposed.
const BLOCK_ROWS: usize = 16;
/// Number of points of the result that are compared with the definition.
const CHECKED_POINTS: u64 = 2;

pub(super) struct Fourier {
    /// Points along the edge of the square.
    edge: usize,
    /// Rows of one member.
    rows: usize,
    /// Roots of unity, for one row.
    roots: Vec<Complex>,
}

impl Fourier {
    pub(super) fn new(edge: usize, size: usize) -> anyhow::Result<Self> {
        let dealt = edge.is_power_of_two() && edge.is_multiple_of(size);
        ensure!(dealt, "a square of {edge} rows cannot be dealt among {size}");
        let roots = (0..edge).map(|power| root_of_unity(power as f64 / edge as f64)).collect();
        Ok(Self { edge, rows: edge / size, roots })
    }

    fn cells(&self) -> usize {
        self.rows * self.edge
    }

    /// Transposes one array of all members into another.
    fn transpose(&self, team: &mut impl Team, from: usize, to: usize) -> anyhow::Result<()> {
        let (edge, rows, own) = (self.edge, self.rows, team.rank());
        let block_rows = BLOCK_ROWS.min(rows);
        let mut block = vec![Complex { re: 0.0, im: 0.0 }; block_rows * rows];
        // Each member starts with the next higher rank, so that not all members get from the same
        // one.
        for peer in (own + 1..team.size()).chain(0..=own) {
            for first in (0..rows).step_by(block_rows) {
                for (row, piece) in (first..).zip(block.chunks_exact_mut(rows)) {
                    team.get(peer, from + row * edge + own * rows, piece)?;
                }
                let place = to + peer * rows + first;
                team.own(|cells: &mut [Complex]| {
                    for column in 0..rows {
                        let target = &mut cells[place + column * edge..][..block_rows];
                        for (cell, piece) in target.iter_mut().zip(block.chunks_exact(rows)) {
                            *cell = piece[column];
                        }
                    }
                });
            }
        }
        Ok(())
    }

    /// Transforms this member's rows of an array; then, if `twiddles` is set, multiplies every cell
    /// with its twiddle factor.
    fn transform(&self, team: &mut impl Team, array: usize, twiddles: bool) {
        let (edge, first) = (self.edge, team.rank() * self.rows);
        let points = (edge * edge) as f64;
        let mut scratch = vec![Complex { re: 0.0, im: 0.0 }; edge];
        team.own(|cells: &mut [Complex]| {
            let rows = cells[array..][..self.cells()].chunks_exact_mut(edge);
            for (row, number) in rows.zip(first..) {
                transform_rows(row, &mut scratch, &self.roots, 1);
                if twiddles {
                    let step = root_of_unity(number as f64 / points);
                    let mut turn = root_of_unity(0.0);
                    for cell in row {
                        *cell = product(*cell, turn);
                        turn = product(turn, step);
                    }
                }
            }
        });
    }

    /// Difference of one point of the result from the definition, as this member's share of it.
    fn difference(&self, team: &mut impl Team, point: usize) -> Complex {
        let (edge, own) = (self.edge, team.rank());
        let points = edge * edge;
        let step = root_of_unity(point as f64 / points as f64);
        let mut total = Complex { re: 0.0, im: 0.0 };
        for row in own * self.rows..(own + 1) * self.rows {
            // In integers, because the product has more digits than a float.
            let begin = (row as u128 * edge as u128 * point as u128 % points as u128) as f64;
            let mut turn = root_of_unity(begin / points as f64);
            for column in 0..edge {
                let cell = product(cell_value((row * edge + column) as u64), turn);
                total = Complex { re: total.re + cell.re, im: total.im + cell.im };
                turn = product(turn, step);
            }
        }
        if point / edge / self.rows == own {
            let place = self.cells() + point - own * self.cells();
            let found = team.own(|cells: &mut [Complex]| cells[place]);
            total = Complex { re: total.re - found.re, im: total.im - found.im };
        }
        total
    }
}

impl Workload for Fourier {
    fn bytes(&self) -> usize {
        2 * self.cells() * size_of::<Complex>()
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let first = (team.rank() * self.cells()) as u64;
        team.own(|cells: &mut [Complex]| {
            for (cell, place) in cells[..self.cells()].iter_mut().zip(first..) {
                *cell = cell_value(place);
            }
        });
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let (first, second) = (0, self.cells());
        self.transpose(team, first, second)?;
        self.transform(team, second, true);
        team.barrier()?;
        self.transpose(team, second, first)?;
        self.transform(team, first, false);
        team.barrier()?;
        self.transpose(team, first, second)?;
        team.barrier()
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        let (own, cells) = (team.rank(), self.cells());
        let points = (self.edge * self.edge) as f64;
        let energy = |cell: Complex| cell.re * cell.re + cell.im * cell.im;
        let before: f64 =
            (own * cells..(own + 1) * cells).map(|p| energy(cell_value(p as u64))).sum();
        let (after, bits) = team.own(|all: &mut [Complex]| {
            let result = &all[cells..2 * cells];
            let bits = result.iter().flat_map(|cell| [cell.re.to_bits(), cell.im.to_bits()]);
            (result.iter().map(|cell| energy(*cell)).sum::<f64>(), super::digest(bits))
        });
        let energies = sum(team, &[before, after / points])?;
        let kept = (energies[1] / energies[0] - 1.0).abs() < 1e-9;
        ensure_all(team, kept, "the transform keeps the energy")?;
        for number in 0..CHECKED_POINTS {
            let point = (splitmix64(number) % (self.edge * self.edge) as u64) as usize;
            let share = self.difference(team, point);
            let difference = sum(team, &[share.re, share.im])?;
            let small = difference[0].hypot(difference[1]) < 1e-8 * points;
            ensure_all(team, small, "a point of the transform is what the definition says")?;
        }
        let digests = team.gather(&[bits])?;
        Ok(super::digest(digests.into_iter().flatten()))
    }
}

/// Returns the complex number one, rotated clockwise by `turns` full turns.
fn root_of_unity(turns: f64) -> Complex {
    let angle = -TAU * turns;
    Complex { re: angle.cos(), im: angle.sin() }
}

fn product(a: Complex, b: Complex) -> Complex {
    Complex { re: a.re * b.re - a.im * b.im, im: a.re * b.im + a.im * b.re }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lookup::team::threads::run_members;

    #[test]
    fn a_wrong_point_is_noticed_by_all_members() {
        let bytes = Fourier::new(16, 2).unwrap().bytes();
        run_members(2, bytes, |mut team| {
            let mut fourier = Fourier::new(16, 2).unwrap();
            fourier.prepare(&mut team).unwrap();
            team.barrier().unwrap();
            fourier.run(&mut team).unwrap();
            if team.rank() == 1 {
                team.own(|cells: &mut [Complex]| cells[fourier.cells() + 3].re += 1.0);
            }
            let error = fourier.check(&mut team).unwrap_err().to_string();
            assert!(error.contains("keeps the energy"), "{error}");
        });
    }

    #[test]
    fn a_square_that_cannot_be_dealt_is_refused() {
        assert!(Fourier::new(12, 2).is_err());
        assert!(Fourier::new(16, 3).is_err());
    }
}
