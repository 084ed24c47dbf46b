//! Console output as plain text.

/// The text of a line without escape sequences and control characters.
pub(crate) fn plain(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let mut characters = text.chars().peekable();
    let mut plain = String::with_capacity(text.len());
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' if characters.peek() == Some(&'[') => {
                characters.next();
                // The sequence ends at the first character that is not a parameter.
                while characters.next_if(|character| matches!(character, ' '..='?')).is_some() {}
                characters.next();
            }
            '\u{1b}' => {
                characters.next();
            }
            '\t' => plain.push('\t'),
            character if character.is_control() => {}
            character => plain.push(character),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_codes_and_carriage_returns_are_left_out() {
        assert_eq!(
            plain(b"\x1bc\x1b[?7l\x1b[2J[    0.1] DMAR: fault\r\n"),
            "[    0.1] DMAR: fault"
        );
        assert_eq!(plain(b"\x1b[1;31mred\x1b[0m\tand\x07 plain\n"), "red\tand plain");
    }

    #[test]
    fn a_line_that_is_cut_off_or_no_text_is_still_a_line() {
        assert_eq!(plain(b"cut \x1b["), "cut ");
        assert_eq!(plain(b"cut \x1b"), "cut ");
        assert_eq!(plain(b"\xffno text"), "\u{fffd}no text");
    }
}
