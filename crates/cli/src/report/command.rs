//! `memferry report` writes the report, or the headline figure, of recorded runs.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use memferry_bench::results::recorded;

use super::{DEFAULT_FILE, Origin, ReportView, headline_svg, location, write};
use crate::args::ReportArgs;
use crate::show;

/// Writes the files that the arguments name.
pub(crate) fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let outcomes = recorded::read(&args.runs)?;
    if let Some(path) = &args.headline {
        let svg = headline_svg::draw(&outcomes)?;
        fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        show::print(&format!("The figure is in {}\n", path.display()))?;
    }
    let default = || args.headline.is_none().then(|| PathBuf::from(DEFAULT_FILE));
    if let Some(path) = args.out.clone().or_else(default) {
        write(&path, &outcomes, ReportView { origin: Origin::Recorded, bars: args.bars })?;
        show::print(&format!("{}\n", location(&path)))?;
    }
    Ok(())
}
