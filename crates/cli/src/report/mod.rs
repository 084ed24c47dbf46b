//! The report: one HTML file with plots, that needs nothing beside itself. It is made from
//! outcomes alone, so it shows exactly what `--json` would have said.

mod axis;
mod date;
mod html;
mod palette;
mod plot;

use std::fs;
use std::path::Path;

use anyhow::Context;

use crate::outcome::Outcome;

/// Writes the report of some outcomes to a file.
pub(crate) fn write(path: &Path, outcomes: &[Outcome]) -> anyhow::Result<()> {
    let page = html::page(outcomes, &date::today());
    fs::write(path, page).with_context(|| format!("cannot write the report {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn a_report_in_a_folder_that_does_not_exist_names_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nowhere/report.html");
        let error = write(&path, &[]).unwrap_err().to_string();
        assert!(error.contains("nowhere/report.html"), "{error}");
    }

    #[test]
    fn a_report_lands_in_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.html");
        write(&path, &sample::suite()).unwrap();
        assert!(fs::read_to_string(path).unwrap().starts_with("<!doctype html>"));
    }
}
