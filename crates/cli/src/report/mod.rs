//! The report: one self-contained HTML file, and the headline figure as an SVG file. Both are made
//! from outcomes alone, so they show exactly the data of `--json`.

mod axis;
pub(crate) mod command;
#[cfg(feature = "bench")]
mod date;
mod headline_svg;
mod html;
mod keys;
mod palette;
mod plot;

use std::fs;
use std::path::Path;

use anyhow::Context;

use memferry_bench::results::outcome::Outcome;

/// The default file of a report.
pub(crate) const DEFAULT_FILE: &str = "memferry-report.html";

/// When the outcomes of a report were measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// During this run of the program.
    #[cfg(feature = "bench")]
    Today,
    /// In an earlier run; recordings have no date.
    Recorded,
}

/// The options of a report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReportView {
    pub(crate) origin: Origin,
    /// Whether the keys are shown with their targets.
    pub(crate) bars: bool,
}

/// Writes the report of the outcomes to a file.
pub(crate) fn write(path: &Path, outcomes: &[Outcome], view: ReportView) -> anyhow::Result<()> {
    let origin = match view.origin {
        #[cfg(feature = "bench")]
        Origin::Today => format!("on {}", date::today()),
        Origin::Recorded => "from recorded runs".to_owned(),
    };
    let page = html::page(outcomes, &origin, view.bars);
    fs::write(path, page).with_context(|| format!("cannot write the report {}", path.display()))
}

/// The line that names the file of a report, for display.
pub(crate) fn location(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    format!("The report is in {}", full.display())
}

#[cfg(test)]
mod tests {
    use memferry_bench::results::sample;

    use super::*;

    const VIEW: ReportView = ReportView { origin: Origin::Recorded, bars: false };

    #[test]
    fn a_report_in_a_folder_that_does_not_exist_names_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nowhere/report.html");
        let error = write(&path, &[], VIEW).unwrap_err().to_string();
        assert!(error.contains("nowhere/report.html"), "{error}");
    }

    #[test]
    fn a_report_lands_in_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.html");
        write(&path, &sample::suite(), VIEW).unwrap();
        assert!(fs::read_to_string(path).unwrap().starts_with("<!doctype html>"));
    }
}
