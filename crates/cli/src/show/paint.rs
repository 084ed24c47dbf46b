//! Colour for a terminal, and only for a terminal: a pipe or a set `NO_COLOR` gets plain text.
//! Callers pad first and paint afterwards, because the escapes have no width.

use std::io::IsTerminal;

/// Paints text, or leaves it alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paint {
    on: bool,
}

impl Paint {
    /// Paints only where standard output is a terminal that wants colour.
    pub(crate) fn for_stdout() -> Self {
        Self { on: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() }
    }

    /// Never paints.
    #[cfg(test)]
    pub(crate) fn plain() -> Self {
        Self { on: false }
    }

    /// A heading.
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// Something of less weight.
    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// Good news.
    pub(crate) fn good(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// Something to look at.
    pub(crate) fn bad(self, text: &str) -> String {
        self.wrap("33", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_stays_as_it_is() {
        assert_eq!(Paint::plain().good("yes"), "yes");
    }

    #[test]
    fn painted_text_ends_its_colour() {
        assert_eq!(Paint { on: true }.bold("title"), "\x1b[1mtitle\x1b[0m");
    }
}
