//! Values that are on or off.

/// What a valid switch is, for error messages.
pub const EXPECTED: &str = "on or off (also 1 or 0, true or false, yes or no)";

/// Reads a switch in any case; `None` if the text is none.
pub fn parse(text: &str) -> Option<bool> {
    const ON: [&str; 4] = ["on", "1", "true", "yes"];
    const OFF: [&str; 4] = ["off", "0", "false", "no"];
    let is_one_of = |words: [&str; 4]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    match () {
        () if is_one_of(ON) => Some(true),
        () if is_one_of(OFF) => Some(false),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_has_four_spellings_in_any_case() {
        for word in ["on", "On", "ON", "1", "true", "TRUE", "yes", "Yes"] {
            assert_eq!(parse(word), Some(true), "{word}");
        }
        for word in ["off", "OFF", "0", "false", "False", "no", "NO"] {
            assert_eq!(parse(word), Some(false), "{word}");
        }
    }

    #[test]
    fn other_words_are_no_switch() {
        for word in ["", "of", "2", "auto", "yes please", " on"] {
            assert_eq!(parse(word), None, "{word}");
        }
    }
}
