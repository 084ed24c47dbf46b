//! Sizes as users write them: `4096`, `64k`, `3.5MiB`, `1GB`. A unit that is one letter, or that ends in
//! `iB`, is binary: `64k` and `64KiB` are 65536 bytes. A unit that ends in `B` alone is decimal: `1GB` is
//! 1,000,000,000 bytes. Case does not matter.

use std::error::Error;
use std::fmt;

/// What a valid size is, for error messages.
pub const EXPECTED: &str = "a size such as 65536, 64k, 3.5MiB or 1GB";

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeError {
    /// The text is empty.
    Empty,
    /// The text does not begin with a decimal number.
    NotANumber(String),
    /// A part of a byte, such as `1.5`.
    Fraction(String),
    /// The number is followed by an unknown unit.
    UnknownUnit(String),
    /// More bytes than 64 bits can count.
    TooLarge(String),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "a size is needed, such as 4096, 64k or 3.5MiB"),
            Self::NotANumber(text) => write!(
                f,
                "`{text}` is not a size: begin with a number, such as 4096, 64k or 3.5MiB"
            ),
            Self::Fraction(text) => {
                write!(f, "`{text}` is not a whole number of bytes: add a unit, such as 1.5k")
            }
            Self::UnknownUnit(unit) => write!(
                f,
                "`{unit}` is not a unit: use none (bytes), k, M, G or T (binary, as KiB), or KB, MB, GB \
                 or TB (decimal)"
            ),
            Self::TooLarge(text) => write!(f, "`{text}` is more than 64 bits can count"),
        }
    }
}

impl Error for SizeError {}

/// Reads a size: a number, with a fraction if there is a unit, and the unit, with or without a space
/// between them. A fraction of a byte that remains is dropped.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(SizeError::Empty);
    }
    let (whole, rest) = split_digits(text);
    let (fraction, unit) = match rest.strip_prefix('.') {
        Some(rest) => split_digits(rest),
        None => ("0", rest),
    };
    if whole.is_empty() || fraction.is_empty() {
        return Err(SizeError::NotANumber(text.to_owned()));
    }
    let unit = unit.trim();
    let one = bytes_of_unit(unit).ok_or_else(|| SizeError::UnknownUnit(unit.to_owned()))?;
    let too_large = || SizeError::TooLarge(text.to_owned());
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let fraction = fraction.trim_end_matches('0');
    if one == 1 && !fraction.is_empty() {
        return Err(SizeError::Fraction(text.to_owned()));
    }
    whole
        .checked_mul(one)
        .and_then(|bytes| bytes.checked_add(part_of(one, fraction)))
        .ok_or_else(too_large)
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

fn bytes_of_unit(unit: &str) -> Option<u64> {
    Some(match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    })
}

/// The whole bytes in a fraction of a unit. Digits behind the 18th are less than a byte of any unit.
fn part_of(one: u64, fraction: &str) -> u64 {
    let digits = fraction.bytes().take(18).map(|digit| u128::from(digit - b'0'));
    let (numerator, denominator) =
        digits.fold((0, 1), |(sum, power), digit| (sum * 10 + digit, power * 10));
    // Less than `one`, which is a `u64`.
    (u128::from(one) * numerator / denominator) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_without_unit_is_bytes() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("17b"), Ok(17));
        assert_eq!(parse("17.0"), Ok(17));
        assert_eq!(parse("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn a_unit_of_one_letter_or_with_an_i_is_binary() {
        for text in ["64k", "64K", "64KiB", "64kib", " 64 kib "] {
            assert_eq!(parse(text), Ok(64 << 10), "{text}");
        }
        assert_eq!(parse("4MiB"), Ok(4 << 20));
        assert_eq!(parse("1g"), Ok(1 << 30));
        assert_eq!(parse("1GiB"), Ok(1 << 30));
        assert_eq!(parse("2t"), Ok(2 << 40));
    }

    #[test]
    fn a_unit_that_ends_in_b_alone_is_decimal() {
        assert_eq!(parse("64kB"), Ok(64_000));
        assert_eq!(parse("5MB"), Ok(5_000_000));
        assert_eq!(parse("1GB"), Ok(1_000_000_000));
        assert_eq!(parse("1 tb"), Ok(1_000_000_000_000));
    }

    #[test]
    fn a_fraction_of_a_unit_is_whole_bytes() {
        assert_eq!(parse("3.5MiB"), Ok(7 << 19));
        assert_eq!(parse("0.5k"), Ok(512));
        assert_eq!(parse("1.10k"), Ok(1126));
        assert_eq!(parse("1.5GB"), Ok(1_500_000_000));
        assert_eq!(parse("1.99999999999999999999999999k"), Ok(2047));
    }

    #[test]
    fn what_is_wrong_with_a_size_is_said() {
        assert_eq!(parse("  "), Err(SizeError::Empty));
        assert_eq!(parse("big"), Err(SizeError::NotANumber("big".into())));
        assert_eq!(parse("-4k"), Err(SizeError::NotANumber("-4k".into())));
        assert_eq!(parse("4.k"), Err(SizeError::NotANumber("4.k".into())));
        assert_eq!(parse(".5k"), Err(SizeError::NotANumber(".5k".into())));
        assert_eq!(parse("1.5"), Err(SizeError::Fraction("1.5".into())));
        assert_eq!(parse("4 apples"), Err(SizeError::UnknownUnit("apples".into())));
        assert_eq!(parse("4,5k"), Err(SizeError::UnknownUnit(",5k".into())));
        assert_eq!(parse("4µ"), Err(SizeError::UnknownUnit("µ".into())));
    }

    #[test]
    fn a_size_beyond_64_bits_is_refused() {
        for text in ["99999999999999999999", "18446744073709551616", "16777216t", "18446745TB"] {
            assert!(matches!(parse(text), Err(SizeError::TooLarge(_))), "{text}");
        }
    }
}
