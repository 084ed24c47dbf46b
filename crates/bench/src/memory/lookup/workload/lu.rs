//! LU factorisation by blocks. Every block is contiguous in the memory of its owner; a member that
//! needs it gets it once in each step.

use anyhow::ensure;

use super::{Workload, rows_and_columns, unit_interval};
use crate::group::splitmix64;
use crate::memory::lookup::team::{Team, ensure_all, sum};

/// Rows and columns of a block.
const EDGE: usize = 32;
const CELLS: usize = EDGE * EDGE;

type Block = [f64];

pub(super) struct Lu {
    /// Blocks along an edge of the matrix.
    blocks: usize,
    /// Rows and columns of members.
    rows: usize,
    columns: usize,
    rank: usize,
}

impl Lu {
    pub(super) fn new(edge: usize, rank: usize, size: usize) -> anyhow::Result<Self> {
        ensure!(edge.is_multiple_of(EDGE) && edge > 0, "{edge} is not a number of whole blocks");
        let (rows, columns) = rows_and_columns(size);
        Ok(Self { blocks: edge / EDGE, rows, columns, rank })
    }

    fn owner(&self, row: usize, column: usize) -> usize {
        row % self.rows * self.columns + column % self.columns
    }

    /// Offset of a block in its owner's memory.
    fn block_offset(&self, row: usize, column: usize) -> usize {
        let width = self.blocks.div_ceil(self.columns);
        (row / self.rows * width + column / self.columns) * CELLS
    }

    /// Rows (or columns) from `from` on in which this member owns blocks.
    fn own_rows(&self, from: usize) -> impl Iterator<Item = usize> + use<> {
        let (rows, own) = (self.rows, self.rank / self.columns);
        (from..self.blocks).filter(move |row| row % rows == own)
    }

    fn own_columns(&self, from: usize) -> impl Iterator<Item = usize> + use<> {
        let (columns, own) = (self.columns, self.rank % self.columns);
        (from..self.blocks).filter(move |column| column % columns == own)
    }

    fn fetch(
        &self,
        team: &mut impl Team,
        row: usize,
        column: usize,
        block: &mut Block,
    ) -> anyhow::Result<()> {
        team.get(self.owner(row, column), self.block_offset(row, column), block)
    }

    /// Updates this member's blocks to the right of and below a diagonal block.
    fn perimeter(&self, team: &mut impl Team, step: usize) -> anyhow::Result<()> {
        let mut diagonal = vec![0.0; CELLS];
        self.fetch(team, step, step, &mut diagonal)?;
        team.own(|cells: &mut [f64]| {
            let mut change = |row, column, solve: fn(&Block, &mut Block)| {
                if self.owner(row, column) == self.rank {
                    solve(&diagonal, &mut cells[self.block_offset(row, column)..][..CELLS]);
                }
            };
            for other in step + 1..self.blocks {
                change(other, step, divide_by_upper);
                change(step, other, divide_by_lower);
            }
        });
        Ok(())
    }

    /// Updates the blocks to the right and below: subtracts the products of the perimeter blocks.
    fn interior(
        &self,
        team: &mut impl Team,
        step: usize,
        left: &mut [f64],
        upper: &mut [f64],
    ) -> anyhow::Result<()> {
        for row in self.own_rows(step + 1) {
            self.fetch(team, row, step, &mut left[row * CELLS..][..CELLS])?;
        }
        for column in self.own_columns(step + 1) {
            self.fetch(team, step, column, &mut upper[column * CELLS..][..CELLS])?;
        }
        team.own(|cells: &mut [f64]| {
            for row in self.own_rows(step + 1) {
                for column in self.own_columns(step + 1) {
                    let target = &mut cells[self.block_offset(row, column)..][..CELLS];
                    subtract_product(
                        target,
                        &left[row * CELLS..][..CELLS],
                        &upper[column * CELLS..][..CELLS],
                    );
                }
            }
        });
        Ok(())
    }

    /// Row and column of every block of this member.
    fn own_blocks(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.own_rows(0).flat_map(|row| self.own_columns(0).map(move |column| (row, column)))
    }

    /// This member's share of the product of a part of the result with a vector.
    fn product(
        &self,
        team: &mut impl Team,
        vector: &[f64],
        cell_of: impl Fn(usize, usize, f64) -> f64,
    ) -> Vec<f64> {
        let mut product = vec![0.0; vector.len()];
        team.own(|cells: &mut [f64]| {
            for (block_row, block_column) in self.own_blocks() {
                let block = &cells[self.block_offset(block_row, block_column)..][..CELLS];
                for (place, &cell) in block.iter().enumerate() {
                    let row = block_row * EDGE + place / EDGE;
                    let column = block_column * EDGE + place % EDGE;
                    product[row] += cell_of(row, column, cell) * vector[column];
                }
            }
        });
        product
    }
}

impl Workload for Lu {
    fn bytes(&self) -> usize {
        let (high, wide) = (self.blocks.div_ceil(self.rows), self.blocks.div_ceil(self.columns));
        high * wide * CELLS * size_of::<f64>()
    }

    fn prepare(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let edge = self.blocks * EDGE;
        team.own(|cells: &mut [f64]| {
            for (block_row, block_column) in self.own_blocks() {
                let block = &mut cells[self.block_offset(block_row, block_column)..][..CELLS];
                for (place, cell) in block.iter_mut().enumerate() {
                    let row = block_row * EDGE + place / EDGE;
                    *cell = cell_value(row, block_column * EDGE + place % EDGE, edge);
                }
            }
        });
        Ok(())
    }

    fn run(&mut self, team: &mut impl Team) -> anyhow::Result<()> {
        let mut left = vec![0.0; self.blocks * CELLS];
        let mut upper = vec![0.0; self.blocks * CELLS];
        for step in 0..self.blocks {
            if self.owner(step, step) == self.rank {
                let place = self.block_offset(step, step);
                team.own(|cells: &mut [f64]| factorise(&mut cells[place..][..CELLS]));
            }
            team.barrier()?;
            self.perimeter(team, step)?;
            team.barrier()?;
            // No member changes a block of this step any more, so the next step may start.
            self.interior(team, step, &mut left, &mut upper)?;
        }
        team.barrier()
    }

    fn check(&mut self, team: &mut impl Team) -> anyhow::Result<u64> {
        let edge = self.blocks * EDGE;
        let vector: Vec<f64> =
            (0..edge as u64).map(|row| 0.5 + unit_interval(splitmix64(row))).collect();
        let share =
            self.product(team, &vector, |row, column, cell| if column >= row { cell } else { 0.0 });
        let upper = sum(team, &share)?;
        let lower = self.product(team, &upper, |row, column, cell| match column.cmp(&row) {
            std::cmp::Ordering::Less => cell,
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => 0.0,
        });
        let whole = self.product(team, &vector, |row, column, _| cell_value(row, column, edge));
        let share: Vec<f64> =
            lower.iter().zip(&whole).map(|(lower, whole)| lower - whole).collect();
        let differences = sum(team, &share)?;
        let small = differences.iter().all(|difference| difference.abs() < 1e-9 * edge as f64);
        ensure_all(team, small, "the product of the triangles is the matrix")?;
        let bits = team.own(|cells: &mut [f64]| {
            super::digest(cells[..self.bytes() / 8].iter().map(|cell| cell.to_bits()))
        });
        let digests = team.gather(&[bits])?;
        Ok(super::digest(digests.into_iter().flatten()))
    }
}

/// Cell of the matrix: pseudo-random, with a diagonal that makes pivoting unnecessary.
fn cell_value(row: usize, column: usize, edge: usize) -> f64 {
    let diagonal = if row == column { edge as f64 } else { 0.0 };
    unit_interval(splitmix64((row * edge + column) as u64)) + diagonal
}

/// Factorises a block in place.
fn factorise(block: &mut Block) {
    for step in 0..EDGE {
        for row in step + 1..EDGE {
            let (above, below) = block.split_at_mut(row * EDGE);
            let (pivot, row) = (&above[step * EDGE..][..EDGE], &mut below[..EDGE]);
            let factor = row[step] / pivot[step];
            row[step] = factor;
            for column in step + 1..EDGE {
                row[column] -= factor * pivot[column];
            }
        }
    }
}

/// Multiplies a block with the inverse of the upper triangle of a diagonal block, from the right.
fn divide_by_upper(diagonal: &Block, block: &mut Block) {
    for row in block.chunks_exact_mut(EDGE) {
        for step in 0..EDGE {
            let pivot = &diagonal[step * EDGE..][..EDGE];
            let factor = row[step] / pivot[step];
            row[step] = factor;
            for column in step + 1..EDGE {
                row[column] -= factor * pivot[column];
            }
        }
    }
}

/// Multiplies a block with the inverse of the lower triangle of a diagonal block, from the left.
fn divide_by_lower(diagonal: &Block, block: &mut Block) {
    for step in 0..EDGE {
        for row in step + 1..EDGE {
            let factor = diagonal[row * EDGE + step];
            let (above, below) = block.split_at_mut(row * EDGE);
            let (from, row) = (&above[step * EDGE..][..EDGE], &mut below[..EDGE]);
            for (cell, from) in row.iter_mut().zip(from) {
                *cell -= factor * from;
            }
        }
    }
}

fn subtract_product(target: &mut Block, left: &Block, right: &Block) {
    for (target, left) in target.chunks_exact_mut(EDGE).zip(left.chunks_exact(EDGE)) {
        for (&factor, right) in left.iter().zip(right.chunks_exact(EDGE)) {
            for (cell, right) in target.iter_mut().zip(right) {
                *cell -= factor * right;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::lookup::team::threads::run_members;

    #[test]
    fn a_wrong_cell_is_noticed() {
        let bytes = Lu::new(64, 0, 1).unwrap().bytes();
        run_members(1, bytes, |mut team| {
            let mut lu = Lu::new(64, 0, 1).unwrap();
            lu.prepare(&mut team).unwrap();
            lu.run(&mut team).unwrap();
            team.own(|cells: &mut [f64]| cells[17] += 1e-3);
            assert!(lu.check(&mut team).is_err());
        });
    }

    #[test]
    fn every_block_has_a_place_of_its_own() {
        let members: Vec<_> = (0..6).map(|rank| Lu::new(5 * EDGE, rank, 6).unwrap()).collect();
        let mut places: Vec<_> = members
            .iter()
            .flat_map(|lu| {
                lu.own_blocks().map(|(row, column)| (lu.rank, lu.block_offset(row, column)))
            })
            .collect();
        assert_eq!(places.len(), 25);
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 25);
        let fits = |(rank, place): &(usize, usize)| (place + CELLS) * 8 <= members[*rank].bytes();
        assert!(places.iter().all(fits));
    }
}
