//! What the program in the virtual machine tells the one outside: lines for people while it works, and
//! one line with everything at the end.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::suite::Tally;
use crate::outcome::Row;

/// What the last line begins with.
const MARK: &str = "report: ";

/// How many lines of a program are shown when it did not come to its report.
const LAST_LINES: usize = 8;

/// Everything that was found out in the virtual machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Report {
    /// The kernel of the machine.
    pub(super) kernel: String,
    /// The suite over the card, in each way in which it was tried.
    pub(super) suites: Vec<Tally>,
    /// The share of an aligned mebibyte that the card has moved.
    pub(super) share: Option<f64>,
    /// The figures of the card.
    pub(super) rows: Vec<Row>,
    /// Why there is no share and are no figures.
    pub(super) trouble: Option<String>,
}

impl Report {
    /// The line that tells all of it.
    pub(super) fn line(&self) -> anyhow::Result<String> {
        Ok(format!("{MARK}{}", serde_json::to_string(self)?))
    }

    /// Finds the report in what a program has written: one, as the last line.
    pub(super) fn find(lines: &[String]) -> anyhow::Result<Self> {
        let reports: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix(MARK)).collect();
        match reports[..] {
            [report] if lines.last().is_some_and(|last| last.ends_with(report)) => {
                serde_json::from_str(report).context("its report cannot be read")
            }
            [_] => bail!("it wrote on behind its report: {}", last_of(lines)),
            [] => bail!("it gave no report; its last lines: {}", last_of(lines)),
            _ => bail!("it gave {} reports", reports.len()),
        }
    }
}

/// Whether a line is one of those that people follow the work by.
pub(super) fn is_step(line: &str) -> bool {
    !line.starts_with(MARK)
}

/// The last lines of a program, in one.
pub(super) fn last_of(lines: &[String]) -> String {
    let first = lines.len().saturating_sub(LAST_LINES);
    if lines.is_empty() { "none".into() } else { lines[first..].join(" / ") }
}

#[cfg(test)]
mod tests {
    use super::super::suite::Exception;
    use super::*;

    fn report() -> Report {
        Report {
            kernel: "6.1".into(),
            suites: vec![Tally {
                name: "nic".into(),
                cases: 3,
                passed: 1,
                skipped: vec![Exception { case: "b".into(), reason: "no fills".into() }],
                failed: vec![Exception { case: "c".into(), reason: "\"x\"\nis wrong".into() }],
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
        assert_eq!(Report::find(&lines(&["nic: a_case", &line])).unwrap(), report());
    }

    #[test]
    fn without_a_report_the_last_lines_are_told() {
        let error = Report::find(&lines(&["nic: a_case", "memferry: no card"])).unwrap_err();
        assert!(error.to_string().ends_with("nic: a_case / memferry: no card"), "{error}");
        let many: Vec<_> = (0..20).map(|number| format!("line {number}")).collect();
        let error = Report::find(&many).unwrap_err().to_string();
        assert!(error.contains("line 19") && !error.contains("line 11 "), "{error}");
        assert!(Report::find(&[]).unwrap_err().to_string().ends_with("none"));
    }

    #[test]
    fn a_report_that_is_cut_off_or_not_the_only_one_or_not_the_last_line_is_refused() {
        let line = report().line().unwrap();
        assert!(Report::find(&lines(&[&line[..line.len() - 1]])).is_err());
        assert!(Report::find(&lines(&[&line, &line])).is_err());
        assert!(Report::find(&lines(&[&line, "and more"])).is_err());
        let unknown = line.replacen("\"kernel\"", "\"colour\":1,\"kernel\"", 1);
        assert!(Report::find(&lines(&[&unknown])).is_err());
    }
}
