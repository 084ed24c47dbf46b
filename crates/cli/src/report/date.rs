//! Today's date in UTC. One line of a report does not justify a calendar library, so this module
//! converts days since 1970 into a date.

use std::time::{SystemTime, UNIX_EPOCH};

/// Today's date in the form `2026-01-31`.
pub(super) fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    civil(seconds / 86_400)
}

/// The date of a day counted from 1970-01-01. Years start in March, so that the leap day is the
/// last day of its year.
fn civil(days: u64) -> String {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates_also_around_leap_days() {
        assert_eq!(civil(0), "1970-01-01");
        assert_eq!(civil(11_016), "2000-02-29");
        assert_eq!(civil(11_017), "2000-03-01");
        assert_eq!(civil(20_453), "2025-12-31");
        assert_eq!(civil(20_454), "2026-01-01");
    }
}
