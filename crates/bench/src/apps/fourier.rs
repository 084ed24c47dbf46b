//! Three-dimensional Fourier transform after the FT kernel of the NAS benchmarks: every member
//! holds some planes of a cube, transforms them in two dimensions, exchanges them so that it holds
//! complete columns, and transforms those. The C candidate does the same steps in the same order.

use std::time::Instant;

use anyhow::ensure;

use crate::group::exchange::{Exchange, all_agree, exchange_blocks, gather_all};
use crate::group::plain::{Plain, TouchedPages, splitmix64};
use crate::harness::{Sample, warm_up_iterations};

/// Complex number.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct Complex {
    pub(crate) re: f64,
    pub(crate) im: f64,
}

// SAFETY: two numbers without padding, of which every bit pattern is a value.
unsafe impl Plain for Complex {}

/// One member's part of a cube.
struct Cube<'a, E> {
    members: &'a mut E,
    /// Points along an edge.
    points: usize,
    /// Planes of this member.
    planes: usize,
    field: TouchedPages<Complex>,
    work: TouchedPages<Complex>,
    packed: TouchedPages<Complex>,
    columns: TouchedPages<Complex>,
    scratch: TouchedPages<Complex>,
    /// Roots of unity for the forward transform.
    roots: Vec<Complex>,
    messages_ns: f64,
}

/// Transforms a cube of `points` along each edge repeatedly. The inverse is checked first if the
/// last checked cube was not of this size (`checked_points`); the energy is checked at the end.
pub(crate) fn fourier(
    members: &mut impl Exchange,
    points: u64,
    iterations: u64,
    checked_points: &mut u64,
) -> anyhow::Result<Sample> {
    let dealt = points.is_multiple_of(members.size() as u64);
    let fits = (2..=1024).contains(&points) && points.is_power_of_two() && dealt;
    ensure!(fits, "the planes cannot be dealt");
    let mut cube = Cube::new(members, points as usize)?;
    if *checked_points != points {
        ensure!(cube.inverts()?, "the inverse transform does not give the field back");
        *checked_points = points;
    }
    for _ in 0..warm_up_iterations(iterations) {
        cube.transform()?;
    }
    all_agree(cube.members, true)?;
    cube.messages_ns = 0.0;
    let begin = Instant::now();
    for _ in 0..iterations {
        cube.transform()?;
    }
    let total_ns = begin.elapsed().as_nanos() as f64;
    let messages_ns = cube.messages_ns;
    ensure!(cube.keeps_energy()?, "the transform lost energy");
    Ok(Sample::of_parts(total_ns, messages_ns))
}

impl<'a, E: Exchange> Cube<'a, E> {
    fn new(members: &'a mut E, points: usize) -> anyhow::Result<Self> {
        let planes = points / members.size();
        let cells = planes * points * points;
        let mut field = TouchedPages::new(cells)?;
        for (cell, place) in field.iter_mut().zip((members.rank() * cells) as u64..) {
            *cell = cell_value(place);
        }
        let angle = |p: usize| -std::f64::consts::TAU * p as f64 / points as f64;
        Ok(Self {
            points,
            planes,
            field,
            work: TouchedPages::new(cells)?,
            packed: TouchedPages::new(cells)?,
            columns: TouchedPages::new(cells)?,
            scratch: TouchedPages::new(points * points)?,
            roots: (0..points)
                .map(|p| Complex { re: angle(p).cos(), im: angle(p).sin() })
                .collect(),
            messages_ns: 0.0,
            members,
        })
    }

    /// Transforms `field` into `columns`, which is ordered by row, plane, column.
    fn transform(&mut self) -> anyhow::Result<()> {
        self.work.copy_from_slice(&self.field);
        self.transform_planes();
        self.transpose()?;
        for sheet in self.columns.chunks_exact_mut(self.points * self.points) {
            transform_rows(sheet, &mut self.scratch, &self.roots, self.points);
        }
        Ok(())
    }

    fn transform_planes(&mut self) {
        for plane in self.work.chunks_exact_mut(self.points * self.points) {
            for row in plane.chunks_exact_mut(self.points) {
                transform_rows(row, &mut self.scratch, &self.roots, 1);
            }
            transform_rows(plane, &mut self.scratch, &self.roots, self.points);
        }
    }

    /// Converts this member's planes of all rows to this member's rows of all planes.
    fn transpose(&mut self) -> anyhow::Result<()> {
        let (points, planes) = (self.points, self.planes);
        // Number of cells of one plane, and of all planes, for one member.
        let part = planes * points;
        let block = planes * part;
        for (to, block) in self.packed.chunks_exact_mut(block).enumerate() {
            let plane_parts = self.work.chunks_exact(points * points);
            for (place, plane) in block.chunks_exact_mut(part).zip(plane_parts) {
                place.copy_from_slice(&plane[to * part..][..part]);
            }
        }
        let begin = Instant::now();
        exchange_blocks(self.members, &self.packed, &mut self.work)?;
        self.messages_ns += begin.elapsed().as_nanos() as f64;
        for (depth, rows) in self.work.chunks_exact(part).enumerate() {
            for (row, cells) in rows.chunks_exact(points).enumerate() {
                self.columns[(row * points + depth) * points..][..points].copy_from_slice(cells);
            }
        }
        Ok(())
    }

    /// Returns whether the inverse transform restores the field. The inverse is a second transform
    /// with real and imaginary parts swapped before and after; it also transposes rows and planes
    /// back.
    fn inverts(&mut self) -> anyhow::Result<bool> {
        let cells = (self.field.len() * self.members.size()) as f64;
        let kept = self.field.to_vec();
        self.transform()?;
        for (cell, column) in self.field.iter_mut().zip(&*self.columns) {
            *cell = Complex { re: column.im, im: column.re };
        }
        self.transform()?;
        let near = |(column, cell): (&Complex, &Complex)| {
            let (re, im) = (column.im / cells - cell.re, column.re / cells - cell.im);
            re.abs() < 1e-9 && im.abs() < 1e-9
        };
        let right = self.columns.iter().zip(&kept).all(near);
        self.field.copy_from_slice(&kept);
        all_agree(self.members, right)
    }

    /// Returns whether the transform preserves the energy, up to the factor of the number of cells.
    fn keeps_energy(&mut self) -> anyhow::Result<bool> {
        let cells = (self.field.len() * self.members.size()) as f64;
        let own = [energy(&self.field), energy(&self.columns) / cells];
        let mut all = vec![0.0; 2 * self.members.size()];
        gather_all(self.members, &own, &mut all)?;
        let sum = |of: usize| all.iter().skip(of).step_by(2).sum::<f64>();
        Ok((sum(1) - sum(0)).abs() < 1e-9 * sum(0))
    }
}

/// Pseudo-random value of a cell.
pub(crate) fn cell_value(place: u64) -> Complex {
    let value = splitmix64(place);
    let part = |bits: u64| bits as f64 / 4_294_967_296.0 - 0.5;
    Complex { re: part(value >> 32), im: part(value & 0xFFFF_FFFF) }
}

fn energy(cells: &[Complex]) -> f64 {
    cells.iter().map(|cell| cell.re * cell.re + cell.im * cell.im).sum()
}

/// Transforms along the slow axis of an array of rows of `width` cells (Stockham, radix 2). The
/// result is in `data`.
pub(crate) fn transform_rows(
    data: &mut [Complex],
    scratch: &mut [Complex],
    roots: &[Complex],
    width: usize,
) {
    let points = data.len() / width;
    let scratch = &mut scratch[..data.len()];
    let (mut from, mut to) = (data, scratch);
    let (mut stride, mut length, mut swapped) = (width, points, false);
    while length > 1 {
        let half = length / 2;
        let (upper, lower) = from.split_at(stride * half);
        let inputs = upper.chunks_exact(stride).zip(lower.chunks_exact(stride));
        let roots = roots.iter().step_by(points / length);
        for (((a, b), pair), &root) in inputs.zip(to.chunks_exact_mut(2 * stride)).zip(roots) {
            let (sum, difference) = pair.split_at_mut(stride);
            butterflies(a, b, sum, difference, root);
        }
        std::mem::swap(&mut from, &mut to);
        swapped = !swapped;
        stride *= 2;
        length = half;
    }
    if swapped {
        // After the last swap, `to` is the caller's array and `from` is the scratch with the
        // result.
        to.copy_from_slice(from);
    }
}

#[inline(always)]
fn butterflies(
    a: &[Complex],
    b: &[Complex],
    sum: &mut [Complex],
    difference: &mut [Complex],
    root: Complex,
) {
    let inputs = a.iter().zip(b);
    let outputs = sum.iter_mut().zip(difference);
    for ((a, b), (sum, difference)) in inputs.zip(outputs) {
        let (re, im) = (a.re - b.re, a.im - b.im);
        *sum = Complex { re: a.re + b.re, im: a.im + b.im };
        *difference = Complex { re: re * root.re - im * root.im, im: re * root.im + im * root.re };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::exchange::threads::run_members;

    #[test]
    fn a_cube_is_transformed_by_any_number_of_members() {
        for size in [1, 2, 4] {
            run_members(size, |mut member| {
                let mut checked = 0;
                fourier(&mut member, 16, 2, &mut checked).unwrap();
                assert_eq!(checked, 16);
            });
        }
    }

    #[test]
    fn a_row_is_transformed_as_the_definition_says() {
        const POINTS: usize = 8;
        let turn = |p: usize| std::f64::consts::TAU * p as f64 / POINTS as f64;
        let root = |p: usize| Complex { re: turn(p).cos(), im: -turn(p).sin() };
        let roots: Vec<_> = (0..POINTS).map(root).collect();
        let row: Vec<_> = (0..POINTS as u64).map(cell_value).collect();
        let (mut data, mut scratch) = (row.clone(), row.clone());
        transform_rows(&mut data, &mut scratch, &roots, 1);
        for (k, cell) in data.iter().enumerate() {
            let (mut re, mut im) = (0.0, 0.0);
            for (place, value) in row.iter().enumerate() {
                let root = roots[place * k % POINTS];
                re += value.re * root.re - value.im * root.im;
                im += value.re * root.im + value.im * root.re;
            }
            assert!((cell.re - re).abs() < 1e-12 && (cell.im - im).abs() < 1e-12, "{k}");
        }
    }

    #[test]
    fn planes_that_cannot_be_dealt_are_refused() {
        run_members(1, |mut member| assert!(fourier(&mut member, 12, 1, &mut 0).is_err()));
        run_members(3, |mut member| assert!(fourier(&mut member, 16, 1, &mut 0).is_err()));
    }
}
