//! Numbers in few characters.

/// A count or a rate: `17`, `4.2k`, `310M`.
pub(super) fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G", "T", "P"])
}

/// Bytes, or bytes per second, in binary units: `512`, `4.0K`, `1.2G`.
pub(super) fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &["", "K", "M", "G", "T", "P"])
}

/// A time in nanoseconds: `64n`, `1.0u`, `2.1m`.
pub(super) fn time(value: Option<u64>) -> String {
    value.map_or_else(
        || "-".to_owned(),
        |ns| scaled(ns as f64, 1000.0, &["n", "u", "m", "s", "ks", "Ms"]),
    )
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    match value {
        // A small rate must not look like none.
        value if unit == 0 && value > 0.0 && value < 1.0 => format!("{value:.1}"),
        value if unit == 0 || value >= 99.95 => format!("{value:.0}{}", units[unit]),
        value => format!("{value:.1}{}", units[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let counts = [(0.0, "0"), (0.25, "0.2"), (17.0, "17"), (4200.0, "4.2k"), (3.1e8, "310M")];
        counts.iter().for_each(|(value, text)| assert_eq!(count(*value), *text));
        let sizes = [(512.0, "512"), (4096.0, "4.0K"), (1.3e9, "1.2G")];
        sizes.iter().for_each(|(value, text)| assert_eq!(bytes(*value), *text));
        assert_eq!(
            (time(None), time(Some(64)), time(Some(2048))),
            ("-".into(), "64n".into(), "2.0u".into())
        );
        assert!(bytes(f64::MAX).len() > 3 && count(u64::MAX as f64).len() <= 6);
    }
}
