//! Measured numbers as text: three significant digits, thousands separators, and times in a
//! suitable unit. Tables, plots and the report all format numbers with these functions, so that
//! they agree.

/// A number with three significant digits and no exponent; `–` if it is not finite.
pub fn short(value: f64) -> String {
    if !value.is_finite() {
        return "–".to_owned();
    }
    let size = value.abs();
    if size >= 99.95 {
        return thousands(value.round());
    }
    let decimals = match size {
        _ if size >= 9.995 => 1,
        _ if size >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// The units of counts.
const COUNT_UNITS: [&str; 6] = ["bytes", "cases", "count", "descriptors", "frames", "packets"];

/// A number in a column of a unit: as [`short`], but a count is written as an integer.
pub fn in_unit(value: f64, unit: &str) -> String {
    let is_count = COUNT_UNITS.contains(&unit) && value.fract() == 0.0;
    if is_count { thousands(value) } else { short(value) }
}

/// A number with its unit, as in running text: `21.3 GB/s`, `2.31×`, `190 ns`.
pub fn with_unit(value: f64, unit: &str) -> String {
    match unit {
        _ if !value.is_finite() => short(value),
        "ratio" => format!("{}×", short(value)),
        "ns" => duration(value),
        "" | "count" => in_unit(value, unit),
        _ => format!("{} {unit}", in_unit(value, unit)),
    }
}

/// The label of an axis tick, with as few digits as possible.
pub fn tick(value: f64) -> String {
    let rounded = (value * 1e6).round() / 1e6;
    if rounded.abs() >= 1000.0 { thousands(rounded) } else { format!("{rounded}") }
}

/// Nanoseconds as text, in ns, µs, ms or s.
pub fn duration(ns: f64) -> String {
    let (scale, unit) = match ns.abs() {
        size if size < 1e3 => (1.0, "ns"),
        size if size < 1e6 => (1e3, "µs"),
        size if size < 1e9 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{} {unit}", trimmed(&short(ns / scale)))
}

fn trimmed(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

fn thousands(value: f64) -> String {
    let plain = format!("{value:.0}");
    let (sign, digits) = plain.strip_prefix('-').map_or(("", plain.as_str()), |rest| ("-", rest));
    let mut text = sign.to_owned();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_kept_at_every_magnitude() {
        assert_eq!(short(0.9712), "0.971");
        assert_eq!(short(2.0), "2.00");
        assert_eq!(short(21.34), "21.3");
        assert_eq!(short(99.97), "100");
        assert_eq!(short(1_234_567.0), "1,234,567");
        assert_eq!(short(-1234.4), "-1,234");
    }

    #[test]
    fn what_is_no_number_is_a_dash() {
        assert_eq!(short(f64::NAN), "–");
        assert_eq!(with_unit(f64::INFINITY, "GB/s"), "–");
    }

    #[test]
    fn what_is_counted_is_whole() {
        assert_eq!(in_unit(3.0, "frames"), "3");
        assert_eq!(in_unit(0.0, "cases"), "0");
        assert_eq!(in_unit(2.75, "packets"), "2.75");
        assert_eq!(in_unit(3.0, "GB/s"), "3.00");
        assert_eq!(in_unit(f64::NAN, "frames"), "–");
        assert_eq!(with_unit(1024.0, "descriptors"), "1,024 descriptors");
        assert_eq!(with_unit(1024.0, "count"), "1,024");
    }

    #[test]
    fn times_take_the_unit_that_suits_them() {
        assert_eq!(duration(190.0), "190 ns");
        assert_eq!(duration(1000.0), "1 µs");
        assert_eq!(duration(2_500_000.0), "2.5 ms");
        assert_eq!(with_unit(2.309, "ratio"), "2.31×");
        assert_eq!(with_unit(21.34, "GB/s"), "21.3 GB/s");
    }

    #[test]
    fn ticks_are_as_short_as_they_can_be() {
        assert_eq!(tick(0.0), "0");
        assert_eq!(tick(0.1 + 0.2), "0.3");
        assert_eq!(tick(25_000.0), "25,000");
    }
}
