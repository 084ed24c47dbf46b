//! Sizes as people write and read them: `64k`, `4MiB`, `1g`. All units are binary, so `k`, `KB` and
//! `KiB` mean the same 1024 bytes. The command line parses with this; tables and plots format with
//! it.

use std::error::Error;
use std::fmt;

/// Names of the units, each 1024 times the one before.
const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SizeError {
    /// Nothing was written.
    Empty,
    /// The text does not begin with a whole number.
    NotANumber(String),
    /// A number with a fraction, such as `1.5m`.
    Fraction(String),
    /// The number is followed by something that is no unit.
    UnknownUnit(String),
    /// More bytes than 64 bits can count.
    TooLarge(String),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "a size is needed, such as 4096, 64k or 4MiB"),
            Self::NotANumber(text) => {
                write!(f, "`{text}` is not a size: begin with a number, such as 4096, 64k or 4MiB")
            }
            Self::Fraction(text) => {
                write!(f, "`{text}` has a fraction: use a smaller unit, such as 1536k for 1.5m")
            }
            Self::UnknownUnit(unit) => {
                write!(f, "`{unit}` is not a unit: use none (bytes), k, m, g or t")
            }
            Self::TooLarge(text) => write!(f, "`{text}` is more than 64 bits can count"),
        }
    }
}

impl Error for SizeError {}

/// Reads a size: a whole number and a binary unit in any case, with or without a space between.
pub(crate) fn parse(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(SizeError::Empty);
    }
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    if digits.is_empty() {
        return Err(SizeError::NotANumber(text.to_owned()));
    }
    if unit.starts_with(['.', ',']) {
        return Err(SizeError::Fraction(text.to_owned()));
    }
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(SizeError::UnknownUnit(unit.trim().to_owned())),
    };
    let too_large = || SizeError::TooLarge(text.to_owned());
    let count = digits.parse::<u64>().map_err(|_| too_large())?;
    count.checked_mul(1 << shift).ok_or_else(too_large)
}

/// Writes a size in the largest unit that keeps it short: `4 KiB`, `1.5 MiB`, `4097 B`.
pub(crate) fn format(bytes: u64) -> String {
    // Just above 4 KiB the exact number of bytes is the point of naming such a size at all.
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
    fn a_size_without_unit_is_bytes() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("17b"), Ok(17));
    }

    #[test]
    fn every_spelling_of_a_unit_is_binary() {
        for text in ["64k", "64K", "64kb", "64KiB", " 64 kib "] {
            assert_eq!(parse(text), Ok(64 << 10), "{text}");
        }
        assert_eq!(parse("4MiB"), Ok(4 << 20));
        assert_eq!(parse("1g"), Ok(1 << 30));
        assert_eq!(parse("2t"), Ok(2 << 40));
    }

    #[test]
    fn what_is_wrong_with_a_size_is_said() {
        assert_eq!(parse("  "), Err(SizeError::Empty));
        assert_eq!(parse("big"), Err(SizeError::NotANumber("big".into())));
        assert_eq!(parse("-4k"), Err(SizeError::NotANumber("-4k".into())));
        assert_eq!(parse("1.5m"), Err(SizeError::Fraction("1.5m".into())));
        assert_eq!(parse("4 apples"), Err(SizeError::UnknownUnit("apples".into())));
        assert_eq!(parse("4µ"), Err(SizeError::UnknownUnit("µ".into())));
    }

    #[test]
    fn a_size_beyond_64_bits_is_refused() {
        assert!(matches!(parse("99999999999999999999"), Err(SizeError::TooLarge(_))));
        assert!(matches!(parse("16777216t"), Err(SizeError::TooLarge(_))));
    }

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
