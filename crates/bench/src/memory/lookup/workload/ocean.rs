//! Cycles of a multigrid solver, as in ocean simulations: red-black relaxation on every grid,
//! restriction of the residual to a grid of half the width, and prolongation of the correction. A
//! member has a rectangle of every grid; it gets the borders of its neighbours, cell by cell for
//! columns.

use anyhow::ensure;

use super::{Workload, rows_and_columns};
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all, sum};

const CYCLES: usize = 2;
/// Sweeps on every level before the restriction, and after the prolongation.
const SWEEPS: usize = 2;
/// Sweeps on the coarsest level.
const COARSE_SWEEPS: usize = 16;
/// Cells along the edge of the coarsest level.
const COARSEST_CELLS: usize = 8;

pub(super) struct Ocean {
    levels: Vec<Level>,
    rank: usize,
    rows: usize,
    columns: usize,
    bytes: usize,
}

/// One member's part of a grid, with a border of one cell around it.
#[derive(Debug, Clone, Copy)]
struct Level {
    height: usize,
    width: usize,
    /// Offsets of the solution and of the right-hand side.
    field: usize,
    source: usize,
    /// Square of the width of a cell.
    square: f64,
    /// Whether the first own cell has the first colour.
    even: bool,
}

impl Level {
    fn pitch(&self) -> usize {
        self.width + 2
    }

    fn at(&self, row: usize, column: usize) -> usize {
        row * self.pitch() + column
    }

    fn cells(&self) -> usize {
        (self.height + 2) * self.pitch()
    }
}

impl Ocean {
    pub(super) fn new(edge: usize, rank: usize, size: usize) -> anyhow::Result<Self> {
        let (rows, columns) = rows_and_columns(size);
        let (mut high, mut wide) = (edge / rows, edge / columns);
        let dealt = edge.is_power_of_two() && size.is_power_of_two();
        // Every member has at least 2 × 2 cells of the coarsest level.
        let fits = edge >= COARSEST_CELLS && COARSEST_CELLS / rows.max(columns) >= 2;
        ensure!(dealt && fits, "{edge}² cells cannot be dealt among {size}");
        let (mut levels, mut next, mut square) = (Vec::new(), 0, (edge as f64).powi(-2));
        for _ in 0..=(edge / COARSEST_CELLS).ilog2() {
            let (row, column) = (rank / columns * high, rank % columns * wide);
            let even = (row + column).is_multiple_of(2);
            let mut level =
                Level { height: high, width: wide, field: next, source: 0, square, even };
            level.source = next + level.cells();
            next += 2 * level.cells();
            levels.push(level);
            (high, wide, square) = (high / 2, wide / 2, 4.0 * square);
        }
        Ok(Self { levels, rank, rows, columns, bytes: next * size_of::<f64>() })
    }

    /// Rank of a neighbour, if there is one.
    fn neighbour(&self, down: isize, right: isize) -> Option<usize> {
        let row = (self.rank / self.columns).checked_add_signed(down)?;
        let column = (self.rank % self.columns).checked_add_signed(right)?;
        (row < self.rows && column < self.columns).then(|| row * self.columns + column)
    }

    /// Fetches the borders of the neighbours. Outside the grid, the border is the mirror image with
    /// the opposite sign, so that the field is zero at the edge of the grid on every level.
    fn exchange(&self, team: &mut impl Team, level: &Level) -> anyhow::Result<()> {
        let &Level { height: high, width: wide, field, .. } = level;
        for (down, theirs, border, edge) in [(-1, high, 0, 1), (1, 1, high + 1, high)] {
            let mut row = vec![0.0; wide];
            let peer = self.neighbour(down, 0);
            if let Some(peer) = peer {
                team.get(peer, field + level.at(theirs, 1), &mut row)?;
            }
            team.own(|cells: &mut [f64]| {
                for (column, fetched) in (1..).zip(&row) {
                    let mirrored = -cells[field + level.at(edge, column)];
                    let value = if peer.is_some() { *fetched } else { mirrored };
                    cells[field + level.at(border, column)] = value;
                }
            });
        }
        for (right, theirs, border, edge) in [(-1, wide, 0, 1), (1, 1, wide + 1, wide)] {
            let mut column = vec![0.0; high];
            let peer = self.neighbour(0, right);
            if let Some(peer) = peer {
                for (row, cell) in (1..).zip(&mut column) {
                    team.get(peer, field + level.at(row, theirs), std::slice::from_mut(cell))?;
                }
            }
            team.own(|cells: &mut [f64]| {
                for (row, fetched) in (1..).zip(&column) {
                    let mirrored = -cells[field + level.at(row, edge)];
                    let value = if peer.is_some() { *fetched } else { mirrored };
                    cells[field + level.at(row, border)] = value;
                }
            });
        }
        team.barrier()
    }

    /// Averages the neighbours, one colour after the other.
    fn sweep(&self, team: &mut impl Team, level: &Level) -> anyhow::Result<()> {
        let pitch = level.pitch();
        for colour in 0..2 {
            self.exchange(team, level)?;
            team.own(|cells: &mut [f64]| {
                let (field, source) = cells[level.field..].split_at_mut(level.cells());
                for row in 1..=level.height {
                    let odd = (row + usize::from(level.even) + colour) % 2;
                    for column in (1 + odd..=level.width).step_by(2) {
                        let at = level.at(row, column);
                        let around =
                            field[at - 1] + field[at + 1] + field[at - pitch] + field[at + pitch];
                        field[at] = 0.25 * (around + level.square * source[at]);
                    }
                }
            });
            team.barrier()?;
        }
        Ok(())
    }

    /// Restricts the residual of a level to the right-hand side of the next, whose field starts at
    /// zero.
    fn restrict(&self, team: &mut impl Team, level: &Level, next: &Level) -> anyhow::Result<()> {
        self.exchange(team, level)?;
        team.own(|cells: &mut [f64]| {
            let (upper, lower) = cells[level.field..].split_at_mut(2 * level.cells());
            let (field, source) = upper.split_at(level.cells());
            let (next_field, next_source) = lower.split_at_mut(next.cells());
            next_field.fill(0.0);
            for row in 1..=next.height {
                for column in 1..=next.width {
                    let at = level.at(2 * row - 1, 2 * column - 1);
                    let four = [at, at + 1, at + level.pitch(), at + level.pitch() + 1];
                    let rest = |at: usize| residual(level, field, source, at);
                    let total: f64 = four.into_iter().map(rest).sum();
                    next_source[next.at(row, column)] = 0.25 * total;
                }
            }
        });
        team.barrier()
    }

    /// Adds the correction of a coarse level to the finer one, interpolated between neighbours.
    fn prolongate(&self, team: &mut impl Team, level: &Level, next: &Level) -> anyhow::Result<()> {
        self.exchange(team, next)?;
        team.own(|cells: &mut [f64]| {
            let (upper, lower) = cells[level.field..].split_at_mut(2 * level.cells());
            let pitch = next.pitch();
            for row in 1..=level.height {
                for column in 1..=level.width {
                    let at = next.at(row.div_ceil(2), column.div_ceil(2));
                    // The coarse neighbours on the side of the fine cell.
                    let beside = if column % 2 == 1 { at - 1 } else { at + 1 };
                    let above = if row % 2 == 1 { at - pitch } else { at + pitch };
                    let coarse = 0.5 * lower[at] + 0.25 * (lower[beside] + lower[above]);
                    upper[level.at(row, column)] += coarse;
                }
            }
        });
        team.barrier()
    }

    fn cycle(&self, team: &mut impl Team) -> anyhow::Result<()> {
        let coarsest = self.levels.len() - 1;
        for pair in self.levels.windows(2) {
            (0..SWEEPS).try_for_each(|_| self.sweep(team, &pair[0]))?;
            self.restrict(team, &pair[0], &pair[1])?;
        }
        (0..COARSE_SWEEPS).try_for_each(|_| self.sweep(team, &self.levels[coarsest]))?;
        for pair in self.levels.windows(2).rev() {
            self.prolongate(team, &pair[0], &pair[1])?;
            (0..SWEEPS).try_for_each(|_| self.sweep(team, &pair[0]))?;
        }
        Ok(())
    }

    /// Sum of the squares of the residuals on the finest level.
    fn residual_norm(&self, team: &mut impl Team) -> anyhow::Result<f64> {
        let level = &self.levels[0];
        self.exchange(team, level)?;
        let share = team.own(|cells: &mut [f64]| {
            let (field, source) = cells[level.field..].split_at(level.cells());
            let places =
                (1..=level.height).flat_map(|row| (1..=level.width).map(move |c| (row, c)));
            let rest = |(row, column)| residual(level, field, source, level.at(row, column));
            places.map(|place| rest(place).powi(2)).sum()
        });
        Ok(sum(team, &[share])?[0])
    }
}

/// Residual of the equation of a cell.
fn residual(level: &Level, field: &[f64], source: &[f64], at: usize) -> f64 {
    let pitch = level.pitch();
    let around = field[at - 1] + field[at + 1] + field[at - pitch] + field[at + pitch];
    source[at] + (around - 4.0 * field[at]) / level.square
}

impl Workload for Ocean {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let level = self.levels[0];
        let row = self.rank / self.columns * level.height;
        let column = self.rank % self.columns * level.width;
        let edge = self.columns * level.width;
        team.own(|cells: &mut [f64]| {
            cells.fill(0.0);
            for down in 0..level.height {
                for right in 0..level.width {
                    let place = ((row + down) * edge + column + right) as u64;
                    let at = level.source + level.at(down + 1, right + 1);
                    cells[at] = super::unit_interval(splitmix64(place)) - 0.25;
                }
            }
        });
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        (0..CYCLES).try_for_each(|_| self.cycle(team))
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        let level = self.levels[0];
        let after = self.residual_norm(team)?;
        let share = team.own(|cells: &mut [f64]| {
            let source = &cells[level.source..][..level.cells()];
            source.iter().map(|cell| cell.powi(2)).sum()
        });
        let before = sum(team, &[share])?[0];
        ensure_all(team, after < 1e-3 * before, "the equations are nearly fulfilled")?;
        // Depends on positions but not on an order, so that it is the same for every distribution
        // of the grid.
        let (row, column) = (self.rank / self.columns * level.height, self.rank % self.columns);
        let (column, edge) = (column * level.width, self.columns * level.width);
        let share = team.own(|cells: &mut [f64]| {
            let mut sum = 0u64;
            for down in 0..level.height {
                for right in 0..level.width {
                    let place = ((row + down) * edge + column + right) as u64;
                    let bits = cells[level.field + level.at(down + 1, right + 1)].to_bits();
                    sum = sum.wrapping_add(splitmix64(place ^ bits));
                }
            }
            sum
        });
        let shares = team.gather(&[share])?;
        Ok(shares.into_iter().flatten().fold(0, u64::wrapping_add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lookup::team::threads::run_members;

    #[test]
    fn unsolved_equations_are_noticed() {
        let bytes = Ocean::new(64, 0, 1).unwrap().bytes();
        run_members(1, bytes, |mut team| {
            let mut ocean = Ocean::new(64, 0, 1).unwrap();
            ocean.prepare(&mut team).unwrap();
            assert!(ocean.check(&mut team).is_err());
        });
    }

    #[test]
    fn members_have_their_neighbours_and_nobody_beyond_the_edge() {
        let corner = Ocean::new(128, 0, 4).unwrap();
        assert_eq!(corner.neighbour(0, 1), Some(1));
        assert_eq!(corner.neighbour(1, 0), Some(2));
        assert_eq!(corner.neighbour(-1, 0), None);
        assert_eq!(corner.neighbour(0, -1), None);
    }
}
