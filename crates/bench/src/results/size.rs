//! Sizes for display: `4 KiB`, `1.5 MiB`. Tables and plots use `format`. The command line uses
//! [`parse`], which also parses environment variables.

pub use memferry_sys::settings::size::parse;

/// The units; each is 1024 times its predecessor.
const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// Formats a size in the largest unit that keeps it short: `4 KiB`, `1.5 MiB`, `4097 B`.
pub fn format(bytes: u64) -> String {
    // Below 10 KiB a size that is not a multiple of 1 KiB is chosen deliberately, so it is shown
    // exactly.
    const EXACT_BELOW: u64 = 10 << 10;
    if bytes < EXACT_BELOW && !bytes.is_multiple_of(1024) {
        return format!("{bytes} B");
    }
    let mut power = 0;
    while power + 1 < UNITS.len() && bytes >> (10 * (power + 1)) > 0 {
        power += 1;
    }
    let one = 1_u64 << (10 * power);
    if bytes.is_multiple_of(one) {
        format!("{} {}", bytes / one, UNITS[power])
    } else {
        format!("{:.1} {}", bytes as f64 / one as f64, UNITS[power])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_sizes_are_written_without_a_fraction() {
        assert_eq!(format(0), "0 B");
        assert_eq!(format(64), "64 B");
        assert_eq!(format(4096), "4 KiB");
        assert_eq!(format(256 << 20), "256 MiB");
        assert_eq!(format(1 << 40), "1 TiB");
    }

    #[test]
    fn odd_sizes_stay_distinguishable_from_their_neighbours() {
        assert_eq!(format(4097), "4097 B");
        assert_eq!(format(3 << 19), "1.5 MiB");
        assert_ne!(format(4095), format(4096));
    }

    #[test]
    fn a_written_size_is_read_back() {
        for shift in 0..50 {
            assert_eq!(parse(&format(1 << shift)), Ok(1 << shift));
        }
    }
}
