//! Rows grouped into figures. A figure holds the rows that share a name and a unit, so that one
//! axis or one table fits all of them. Tables and plots are both drawn from figures.

use crate::results::outcome::Row;

/// The rows of one plot or table.
#[derive(Debug)]
pub struct Figure<'a> {
    /// The name, such as `hot`.
    pub name: &'a str,
    /// The unit of all values.
    pub unit: &'a str,
    /// The names of the series, in the order of measurement.
    pub series: Vec<&'a str>,
    /// The sizes on the x axis in bytes, ascending.
    pub sizes: Vec<u64>,
    rows: Vec<&'a Row>,
}

impl<'a> Figure<'a> {
    /// Groups rows, keeping the order in which figures first appear.
    pub fn of(rows: &'a [Row]) -> Vec<Self> {
        let mut figures: Vec<Self> = Vec::new();
        for row in rows {
            let known = figures.iter().position(|f| f.name == row.figure && f.unit == row.unit);
            let place = known.unwrap_or_else(|| {
                figures.push(Self {
                    name: &row.figure,
                    unit: &row.unit,
                    series: Vec::new(),
                    sizes: Vec::new(),
                    rows: Vec::new(),
                });
                figures.len() - 1
            });
            figures[place].add(row);
        }
        figures
    }

    fn add(&mut self, row: &'a Row) {
        if !self.series.contains(&row.series.as_str()) {
            self.series.push(&row.series);
        }
        if let Err(place) = self.sizes.binary_search(&row.bytes) {
            self.sizes.insert(place, row.bytes);
        }
        self.rows.push(row);
    }

    /// The row of a series at a size, if it was measured.
    pub fn row(&self, series: &str, bytes: u64) -> Option<&'a Row> {
        self.rows.iter().find(|row| row.series == series && row.bytes == bytes).copied()
    }

    /// The rows of a series that can be drawn, by ascending size: those with a size above 0 and a
    /// finite value.
    pub fn line(&self, series: &str) -> Vec<&'a Row> {
        let sized = self.sizes.iter().filter(|&&bytes| bytes > 0);
        sized
            .filter_map(|&bytes| self.row(series, bytes))
            .filter(|row| row.value.is_finite())
            .collect()
    }

    /// Whether the figure has at least two sizes, so that it is drawn as lines instead of bars.
    pub fn is_curve(&self) -> bool {
        self.sizes.iter().filter(|&&bytes| bytes > 0).count() >= 2
    }

    /// All rows, in the order of measurement.
    pub fn rows(&self) -> &[&'a Row] {
        &self.rows
    }
}

/// Whether a series is Memferry's own. Tables and plots highlight these series.
pub fn is_memferry(series: &str) -> bool {
    series.starts_with("memferry")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(figure: &str, series: &str, bytes: u64, unit: &str) -> Row {
        Row::of_rounds(figure, series, bytes, unit, &[1.0])
    }

    #[test]
    fn rows_of_one_name_and_unit_make_one_figure() {
        let rows = [
            row("hot", "memcpy", 4096, "GB/s"),
            row("hot", "memferry", 64, "GB/s"),
            row("hot", "memferry", 64, "ns"),
            row("cold", "memcpy", 64, "GB/s"),
        ];
        let figures = Figure::of(&rows);
        let names: Vec<_> = figures.iter().map(|f| (f.name, f.unit)).collect();
        assert_eq!(names, [("hot", "GB/s"), ("hot", "ns"), ("cold", "GB/s")]);
        assert_eq!(figures[0].sizes, [64, 4096]);
        assert_eq!(figures[0].series, ["memcpy", "memferry"]);
        assert!(figures[0].row("memcpy", 64).is_none());
    }

    #[test]
    fn only_a_figure_with_two_sizes_is_a_curve() {
        let rows = [row("a", "memcpy", 0, "ns"), row("a", "memferry", 64, "ns")];
        assert!(!Figure::of(&rows)[0].is_curve());
        let rows = [row("a", "memcpy", 128, "ns"), row("a", "memferry", 64, "ns")];
        assert!(Figure::of(&rows)[0].is_curve());
    }

    #[test]
    fn a_point_that_was_not_measured_is_not_drawn() {
        let rows = [row("a", "memcpy", 64, "ns"), Row::of_rounds("a", "memcpy", 128, "ns", &[])];
        assert_eq!(Figure::of(&rows)[0].line("memcpy").len(), 1);
    }
}
