//! Columns of text, for every table.

/// Pads cells to columns. Numbers are right-aligned; a first column of names is left-aligned.
pub(crate) fn align(lines: &[Vec<String>], names_first: bool) -> Vec<String> {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let pad = |(column, cell): (usize, &String)| {
        let width = widths[column];
        if names_first && column == 0 {
            format!("{cell:<width$}")
        } else {
            format!("{cell:>width$}")
        }
    };
    lines
        .iter()
        .map(|line| line.iter().enumerate().map(pad).collect::<Vec<_>>().join("  "))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_and_numbers_end_in_one_column() {
        let lines = [["a", "10"], ["long", "9"]].map(|line| line.map(str::to_owned).to_vec());
        assert_eq!(align(&lines, true), ["a     10", "long   9"]);
        assert_eq!(align(&lines, false), ["   a  10", "long   9"]);
    }
}
