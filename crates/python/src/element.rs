//! The types of elements, as the buffer protocol, DLPack and array interfaces name them.

/// The name of a type, as NumPy has it, from a kind as array interfaces write it. `None` if NumPy has no such name.
pub(crate) fn name_of_kind(kind: u8, bytes: usize) -> Option<String> {
    let kind = match kind {
        b'b' if bytes == 1 => return Some("bool".to_owned()),
        b'i' => "int",
        b'u' => "uint",
        b'f' => "float",
        b'c' => "complex",
        _ => return None,
    };
    Some(format!("{kind}{}", 8 * bytes))
}

/// The name of a type, from a format of the buffer protocol: the format itself if it is not that of one number of this
/// machine.
pub(crate) fn name_of_format(format: &str, bytes: usize) -> String {
    let kind = match format.trim_start_matches(['@', '=', '<']) {
        "b" | "h" | "i" | "l" | "q" | "n" => b'i',
        "B" | "c" | "H" | "I" | "L" | "Q" | "N" => b'u',
        "?" => b'b',
        "e" | "f" | "d" | "g" => b'f',
        "Zf" | "Zd" | "Zg" | "F" | "D" | "G" => b'c',
        _ => return format.to_owned(),
    };
    name_of_kind(kind, bytes).unwrap_or_else(|| format.to_owned())
}

/// Whether elements of a format of the buffer protocol hold references or pointers, which are no values to copy.
pub(crate) fn has_pointers(format: &str) -> bool {
    let mut codes = format.bytes().peekable();
    while let Some(code) = codes.next() {
        match code {
            // Objects, addresses, pointers, functions, and the texts of ctypes.
            b'O' | b'P' | b'&' | b'X' | b'z' => return true,
            b'Z' if !matches!(codes.peek(), Some(b'f' | b'd' | b'g')) => return true,
            // The name of a field ends at the next colon. One that has none, or that looks like a format, could hide
            // a field.
            b':' => loop {
                match codes.next() {
                    Some(b':') => break,
                    None | Some(b'<' | b'>' | b'&' | b'{') => return true,
                    Some(_) => {}
                }
            },
            _ => {}
        }
    }
    false
}
