//! The arguments of `memferry bench`.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Args, Command};
use memferry_bench::{all, find};

/// Arguments of `memferry bench`.
#[derive(Debug, Default, Args)]
pub(crate) struct BenchArgs {
    /// The bench to run; without it, a dozen lines about copies, messages, windows and the GPU
    #[arg(value_name = "NAME", value_parser = BenchName, group = "benches")]
    pub(crate) name: Option<String>,
    /// Measure fewer points: half a minute or less for one bench, two minutes for all
    #[arg(long)]
    pub(crate) quick: bool,
    /// Run every bench
    #[arg(long, group = "benches")]
    pub(crate) all: bool,
    /// Show the developers' performance targets, and fail if one is missed
    #[arg(long, requires = "benches")]
    pub(crate) bars: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a report with plots to this file
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Write a timeline of the transfers to this file, for chrome://tracing or ui.perfetto.dev; tracing makes small
    /// copies slower
    #[arg(long, value_name = "FILE.json", requires = "name")]
    pub(crate) trace: Option<PathBuf>,
}

/// The benches, for the help of `bench`.
pub(super) fn list() -> String {
    let width = all().iter().map(|bench| bench.name.len()).max().unwrap_or(0);
    let mut help = String::from("Benches:");
    for bench in all() {
        help.push_str(&format!("\n  {:<width$}  {}", bench.name, bench.about));
    }
    if all().is_empty() {
        help.push_str(" none in this build");
    }
    help
}

/// The value parser of bench names. It accepts the benches of this build and lists them for shell
/// completion.
#[derive(Debug, Clone)]
struct BenchName;

impl TypedValueParser for BenchName {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        _argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        let name = value.to_string_lossy();
        match find(&name) {
            Ok(found) => Ok(found.name.to_owned()),
            Err(reason) => {
                let reason = format!("{reason}\n");
                Err(clap::Error::raw(ErrorKind::InvalidValue, reason).with_cmd(command))
            }
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let names = all().iter().map(|bench| PossibleValue::new(bench.name));
        Some(Box::new(names))
    }
}
