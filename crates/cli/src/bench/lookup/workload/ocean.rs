//! Cycles of a solver with many grids, as ocean simulations have them: neighbours are averaged in
//! two colours, what is left goes to a grid of half the width and comes back. A member has a
//! rectangle of every grid; it gets the borders of its neighbours, cell by cell where they are
//! columns.

use anyhow::ensure;

use super::{Workload, rows_and_columns};
use crate::bench::group::mixed;
use crate::bench::lookup::team::{Team, agree, sum};

const CYCLES: usize = 2;
/// Sweeps on every level on the way down, and on the way up.
const SWEEPS: usize = 2;
/// Sweeps on the coarsest level.
const COARSE_SWEEPS: usize = 16;
/// Cells along the edge of the coarsest level.
const COARSEST: usize = 8;

pub(super) struct Ocean {
    levels: Vec<Level>,
    rank: usize,
    rows: usize,
    columns: usize,
    bytes: usize,
}

/// A grid as one member has it, with a border of one cell around it.
#[derive(Debug, Clone, Copy)]
struct Level {
    high: usize,
    wide: usize,
    /// Where the wanted field begins, and where that which it comes from.
    field: usize,
    source: usize,
    /// The square of the width of a cell.
    square: f64,
    /// Whether the first own cell is of the first colour.
    even: bool,
}

impl Level {
    fn pitch(&self) -> usize {
        self.wide + 2
    }

    fn at(&self, row: usize, column: usize) -> usize {
        row * self.pitch() + column
    }

    fn cells(&self) -> usize {
        (self.high + 2) * self.pitch()
    }
}

impl Ocean {
    pub(super) fn new(edge: usize, rank: usize, size: usize) -> anyhow::Result<Self> {
        let (rows, columns) = rows_and_columns(size);
        let (mut high, mut wide) = (edge / rows, edge / columns);
        let dealt = edge.is_power_of_two() && size.is_power_of_two();
        // Every member has a square of four cells of the coarsest level.
        let fits = edge >= COARSEST && COARSEST / rows.max(columns) >= 2;
        ensure!(dealt && fits, "{edge}² cells cannot be dealt among {size}");
        let (mut levels, mut next, mut square) = (Vec::new(), 0, (edge as f64).powi(-2));
        for _ in 0..=(edge / COARSEST).ilog2() {
            let (row, column) = (rank / columns * high, rank % columns * wide);
            let even = (row + column).is_multiple_of(2);
            let mut level = Level { high, wide, field: next, source: 0, square, even };
            level.source = next + level.cells();
            next += 2 * level.cells();
            levels.push(level);
            (high, wide, square) = (high / 2, wide / 2, 4.0 * square);
        }
        Ok(Self { levels, rank, rows, columns, bytes: next * size_of::<f64>() })
    }

    /// The member beside this one, if there is one.
    fn neighbour(&self, down: isize, right: isize) -> Option<usize> {
        let row = (self.rank / self.columns).checked_add_signed(down)?;
        let column = (self.rank % self.columns).checked_add_signed(right)?;
        (row < self.rows && column < self.columns).then(|| row * self.columns + column)
    }

    /// Fetches the borders of the neighbours. Behind the edge of the grid is the mirror image with
    /// the other sign, so that the field is nothing at the edge itself on every level.
    fn exchange(&self, team: &mut impl Team, level: &Level) -> anyhow::Result<()> {
        let &Level { high, wide, field, .. } = level;
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
                for row in 1..=level.high {
                    let odd = (row + usize::from(level.even) + colour) % 2;
                    for column in (1 + odd..=level.wide).step_by(2) {
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

    /// What is left to do on a level becomes the source of the next, whose field begins at nothing.
    fn go_down(&self, team: &mut impl Team, level: &Level, next: &Level) -> anyhow::Result<()> {
        self.exchange(team, level)?;
        team.own(|cells: &mut [f64]| {
            let (upper, lower) = cells[level.field..].split_at_mut(2 * level.cells());
            let (field, source) = upper.split_at(level.cells());
            let (next_field, next_source) = lower.split_at_mut(next.cells());
            next_field.fill(0.0);
            for row in 1..=next.high {
                for column in 1..=next.wide {
                    let at = level.at(2 * row - 1, 2 * column - 1);
                    let four = [at, at + 1, at + level.pitch(), at + level.pitch() + 1];
                    let rest = |at: usize| left_over(level, field, source, at);
                    let total: f64 = four.into_iter().map(rest).sum();
                    next_source[next.at(row, column)] = 0.25 * total;
                }
            }
        });
        team.barrier()
    }

    /// Adds what a coarse level has found to the finer one, in between by its neighbours.
    fn come_up(&self, team: &mut impl Team, level: &Level, next: &Level) -> anyhow::Result<()> {
        self.exchange(team, next)?;
        team.own(|cells: &mut [f64]| {
            let (upper, lower) = cells[level.field..].split_at_mut(2 * level.cells());
            let pitch = next.pitch();
            for row in 1..=level.high {
                for column in 1..=level.wide {
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
            self.go_down(team, &pair[0], &pair[1])?;
        }
        (0..COARSE_SWEEPS).try_for_each(|_| self.sweep(team, &self.levels[coarsest]))?;
        for pair in self.levels.windows(2).rev() {
            self.come_up(team, &pair[0], &pair[1])?;
            (0..SWEEPS).try_for_each(|_| self.sweep(team, &pair[0]))?;
        }
        Ok(())
    }

    /// The sum of the squares of what is left to do on the finest level.
    fn rest(&self, team: &mut impl Team) -> anyhow::Result<f64> {
        let level = &self.levels[0];
        self.exchange(team, level)?;
        let share = team.own(|cells: &mut [f64]| {
            let (field, source) = cells[level.field..].split_at(level.cells());
            let places = (1..=level.high).flat_map(|row| (1..=level.wide).map(move |c| (row, c)));
            let rest = |(row, column)| left_over(level, field, source, level.at(row, column));
            places.map(|place| rest(place).powi(2)).sum()
        });
        Ok(sum(team, &[share])?[0])
    }
}

/// By how much the equation of a cell is not fulfilled.
fn left_over(level: &Level, field: &[f64], source: &[f64], at: usize) -> f64 {
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
        let row = self.rank / self.columns * level.high;
        let column = self.rank % self.columns * level.wide;
        let edge = self.columns * level.wide;
        team.own(|cells: &mut [f64]| {
            cells.fill(0.0);
            for down in 0..level.high {
                for right in 0..level.wide {
                    let place = ((row + down) * edge + column + right) as u64;
                    let at = level.source + level.at(down + 1, right + 1);
                    cells[at] = super::unit(mixed(place)) - 0.25;
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
        let after = self.rest(team)?;
        let share = team.own(|cells: &mut [f64]| {
            let source = &cells[level.source..][..level.cells()];
            source.iter().map(|cell| cell.powi(2)).sum()
        });
        let before = sum(team, &[share])?[0];
        agree(team, after < 1e-3 * before, "the equations are nearly fulfilled")?;
        // By place and without order, so that it is the same however the grid is dealt.
        let (row, column) = (self.rank / self.columns * level.high, self.rank % self.columns);
        let (column, edge) = (column * level.wide, self.columns * level.wide);
        let share = team.own(|cells: &mut [f64]| {
            let mut sum = 0u64;
            for down in 0..level.high {
                for right in 0..level.wide {
                    let place = ((row + down) * edge + column + right) as u64;
                    let bits = cells[level.field + level.at(down + 1, right + 1)].to_bits();
                    sum = sum.wrapping_add(mixed(place ^ bits));
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
    use crate::bench::lookup::team::threads::together;

    #[test]
    fn unsolved_equations_are_noticed() {
        let bytes = Ocean::new(64, 0, 1).unwrap().bytes();
        together(1, bytes, |mut team| {
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
