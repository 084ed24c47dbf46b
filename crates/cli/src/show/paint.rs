//! Terminal colours. A pipe or a set `NO_COLOR` gets plain text. Callers pad text before they
//! colour it, because escape sequences have no width.

use std::io::IsTerminal;

/// Adds colours to text if they are enabled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paint {
    on: bool,
}

impl Paint {
    /// Enables colours if standard output is a terminal and `NO_COLOR` is not set.
    pub(crate) fn for_stdout() -> Self {
        Self { on: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() }
    }

    /// Disables colours.
    #[cfg(test)]
    pub(crate) const fn plain() -> Self {
        Self { on: false }
    }

    /// Formats a heading.
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// Formats text of less importance.
    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// Formats a success.
    pub(crate) fn good(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// Formats a warning or a failure.
    pub(crate) fn bad(self, text: &str) -> String {
        self.wrap("33", text)
    }

    /// Formats Memferry's own values in a chart.
    #[cfg(feature = "bench")]
    pub(crate) fn accent(self, text: &str) -> String {
        self.wrap("36", text)
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
