//! Report of the program in the virtual machine to the host: progress lines while it works, and one
//! line with all results at the end.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::suite::SuiteResult;
use crate::results::outcome::Row;

/// Prefix of the last line.
const REPORT_PREFIX: &str = "report: ";

/// Number of output lines that are shown if a program ends without a report.
const LAST_LINES: usize = 8;

/// All results from the virtual machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GuestReport {
    /// Kernel version of the virtual machine.
    pub(super) kernel: String,
    /// Suite over the card, one result for each run.
    pub(super) suites: Vec<SuiteResult>,
    /// Share of an aligned 1 MiB copy that the card moved.
    pub(super) share: Option<f64>,
    /// Figures of the card.
    pub(super) rows: Vec<Row>,
    /// Reason why the share and the figures are missing.
    pub(super) trouble: Option<String>,
}

impl GuestReport {
    /// Formats the report as one line.
    pub(super) fn line(&self) -> anyhow::Result<String> {
        Ok(format!("{REPORT_PREFIX}{}", serde_json::to_string(self)?))
    }

    /// Finds the report in the output of a program: exactly one, as the last line.
    pub(super) fn find(lines: &[String]) -> anyhow::Result<Self> {
        let reports: Vec<_> =
            lines.iter().filter_map(|line| line.strip_prefix(REPORT_PREFIX)).collect();
        match reports[..] {
            [report] if lines.last().is_some_and(|last| last.ends_with(report)) => {
                serde_json::from_str(report).context("its report cannot be read")
            }
            [_] => bail!("it wrote on behind its report: {}", last_lines(lines)),
            [] => bail!("it gave no report; its last lines: {}", last_lines(lines)),
            _ => bail!("it gave {} reports", reports.len()),
        }
    }
}

/// Returns whether a line is a progress line for the user.
pub(super) fn is_step(line: &str) -> bool {
    !line.starts_with(REPORT_PREFIX)
}

/// Joins the last lines of a program.
pub(super) fn last_lines(lines: &[String]) -> String {
    let first = lines.len().saturating_sub(LAST_LINES);
    if lines.is_empty() { "none".into() } else { lines[first..].join(" / ") }
}

#[cfg(test)]
mod tests {
    use super::super::suite::CaseException;
    use super::*;

    fn report() -> GuestReport {
        GuestReport {
            kernel: "6.1".into(),
            suites: vec![SuiteResult {
                name: "nic".into(),
                cases: 3,
                passed: 1,
                skipped: vec![CaseException { case: "b".into(), reason: "no fills".into() }],
                failed: vec![CaseException { case: "c".into(), reason: "\"x\"\nis wrong".into() }],
                wrong: vec!["the card moved nothing".into()],
            }],
            share: Some(1.0),
            rows: vec![Row::of_rounds("figure", "series", 64, "frames", &[1.0, 2.0])],
            trouble: None,
        }
    }

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|&line| line.into()).collect()
    }

    #[test]
    fn a_report_is_read_as_it_was_told() {
        let line = report().line().unwrap();
        assert!(!line.contains('\n') && !is_step(&line) && is_step("nic: a_case"));
        assert_eq!(GuestReport::find(&lines(&["nic: a_case", &line])).unwrap(), report());
    }

    #[test]
    fn without_a_report_the_last_lines_are_told() {
        let error = GuestReport::find(&lines(&["nic: a_case", "memferry: no card"])).unwrap_err();
        assert!(error.to_string().ends_with("nic: a_case / memferry: no card"), "{error}");
        let many: Vec<_> = (0..20).map(|number| format!("line {number}")).collect();
        let error = GuestReport::find(&many).unwrap_err().to_string();
        assert!(error.contains("line 19") && !error.contains("line 11 "), "{error}");
        assert!(GuestReport::find(&[]).unwrap_err().to_string().ends_with("none"));
    }

    #[test]
    fn a_report_that_is_cut_off_or_not_the_only_one_or_not_the_last_line_is_refused() {
        let line = report().line().unwrap();
        assert!(GuestReport::find(&lines(&[&line[..line.len() - 1]])).is_err());
        assert!(GuestReport::find(&lines(&[&line, &line])).is_err());
        assert!(GuestReport::find(&lines(&[&line, "and more"])).is_err());
        let unknown = line.replacen("\"kernel\"", "\"colour\":1,\"kernel\"", 1);
        assert!(GuestReport::find(&lines(&[&unknown])).is_err());
    }
}
