//! `memferry top`: what the processes of this user that use Memferry are doing. [`sample`] reads their counters,
//! [`details`] describes one process; [`screen`] shows them in a [`terminal`], [`text`], [`json`] and [`metrics`] as text,
//! and [`listen`] serves the last one.

mod columns;
mod details;
mod json;
mod listen;
mod metrics;
mod quantity;
mod sample;
mod screen;
mod signals;
mod terminal;
mod text;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::args::TopArgs;
use crate::show;
use sample::Sample;

/// Runs what the arguments select.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    if let Some(address) = args.listen {
        return listen::serve(address, args.pid);
    }
    if args.metrics {
        return Ok(show::print(&metrics::render(&read(args.pid)?.processes))?);
    }
    if args.json && !args.once {
        return print_lines(args);
    }
    if args.once {
        let (before, now) = two_samples(args.pid, args.interval)?;
        if args.pid.is_some() && now.processes.is_empty() {
            bail!(no_process(args.pid));
        }
        return if args.json {
            show::print_json(&json::object(Some(&before), &now))
        } else {
            Ok(show::print(&text::render(&before, &now, args))?)
        };
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is no terminal: use --once, --json, --metrics or --listen");
    }
    screen::run(args)
}

fn read(pid: Option<u32>) -> anyhow::Result<Sample> {
    Sample::read(pid).context("the processes of this machine cannot be listed: is /proc mounted?")
}

/// Two samples, an interval apart.
fn two_samples(pid: Option<u32>, interval: Duration) -> anyhow::Result<(Sample, Sample)> {
    let before = read(pid)?;
    std::thread::sleep(interval);
    Ok((before, read(pid)?))
}

fn print_lines(args: &TopArgs) -> anyhow::Result<()> {
    use std::io::Write;
    let mut before = read(args.pid)?;
    loop {
        std::thread::sleep(args.interval);
        let now = read(args.pid)?;
        let mut line = serde_json::to_string(&json::object(Some(&before), &now))?;
        line.push('\n');
        let mut out = std::io::stdout().lock();
        match out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            done => done?,
        }
        before = now;
    }
}

/// What to tell if nothing was found.
fn no_process(pid: Option<u32>) -> String {
    match pid {
        Some(pid) => format!(
            "process {pid} has no counters that can be read: it has ended, does not use Memferry, was started with \
             MEMFERRY_STATS=off, or belongs to another user"
        ),
        None => "no process of this user uses Memferry; one that does is `memferry bench overlap`"
            .to_owned(),
    }
}
