//! Manual pages, generated from the command line: one for the program and one for each visible
//! command.

use std::path::Path;

use anyhow::Context;

use crate::args;

/// Writes `memferry.1`, `memferry-bench.1` and so on into an existing folder.
pub(crate) fn write_pages(folder: &Path) -> anyhow::Result<()> {
    clap_mangen::generate_to(args::command(), folder)
        .with_context(|| format!("the manual pages cannot be written to {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_command_of_the_help_has_a_page_and_no_other_has() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(folder.path()).unwrap();
        let files = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name());
        let mut files: Vec<_> = files.map(|name| name.into_string().unwrap()).collect();
        let command = args::command();
        let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
        let mut pages: Vec<_> = shown.map(|it| format!("memferry-{}.1", it.get_name())).collect();
        pages.push("memferry.1".into());
        files.sort();
        pages.sort();
        assert_eq!(files, pages);
        let bench = fs::read_to_string(folder.path().join("memferry-bench.1")).unwrap();
        assert!(bench.contains("copy\\-latency"), "{bench}");
    }
}
