//! `memferry load FILE` loads a file to a GPU or to memory, and prints how fast, from where, and with
//! how much processor time.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use memferry::engine::MemoryKind;
use memferry::load::{
    FileSource, LoadReport, Loader, Loading, Placement, ReadMode, SafetensorsFile,
};
use memferry::{Buffer, EngineSelection, Ferry};
use memferry_bench::results::size;
use serde::Serialize;

use crate::args::LoadArgs;
use crate::show;

/// The object that `memferry load --json` prints.
#[derive(Debug, Serialize)]
struct LoadOutcome {
    file: String,
    /// The number of tensors, if it is a safetensors file.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<usize>,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    cpu_seconds: f64,
    cached_bytes: u64,
    direct_bytes: u64,
    buffered_bytes: u64,
    threads: usize,
    staging_bytes: usize,
}

/// Loads a file.
pub(crate) fn run(args: &LoadArgs) -> anyhow::Result<()> {
    // Every safetensors file is checked before anything is allocated for it.
    let tensors = if args.file.extension().is_some_and(|extension| extension == "safetensors") {
        Some(SafetensorsFile::open(&args.file)?.tensors().len())
    } else {
        None
    };
    let source = FileSource::open(&args.file)?;
    let length = usize::try_from(source.len()).context("the file is larger than memory can be")?;
    let gpu = args.gpu.map_or(EngineSelection::Off, EngineSelection::device);
    let ferry = Ferry::builder().gpu(gpu).build()?;
    let mode = if args.direct { ReadMode::Direct } else { ReadMode::Auto };
    let mut builder = Loader::builder().read_mode(mode);
    if let Some(threads) = args.threads {
        builder = builder.threads(threads);
    }
    let report = match args.gpu {
        Some(number) => {
            let allocator = ferry.device_allocator().context("the GPU has no memory")?;
            let memory = allocator
                .allocate(length.max(1))
                .with_context(|| format!("{} on GPU {number}", size::format(length as u64)))?;
            let placement = source.whole(0, memory.as_ptr());
            load(&builder.build(ferry)?, source, placement, MemoryKind::Device, args)?
        }
        None => {
            let mut memory = Buffer::new(length.max(1))?;
            let placement = source.whole(0, memory.as_mut_ptr());
            load(&builder.build(ferry)?, source, placement, MemoryKind::Host, args)?
        }
    };
    show_report(&args.file, tensors, &report, args)
}

/// Loads into memory that the caller keeps until this returns.
fn load(
    loader: &Loader,
    source: FileSource,
    placement: Placement,
    memory: MemoryKind,
    args: &LoadArgs,
) -> anyhow::Result<LoadReport> {
    // SAFETY: the caller has allocated memory of this kind for the whole file, and keeps it until
    // this function returns, which is after the load: waiting or dropping ends its threads.
    let loading = unsafe { loader.start_raw(vec![source], &[placement], memory) }?;
    let is_shown = !args.json && std::io::stderr().is_terminal();
    Ok(if is_shown { wait_with_progress(loading)? } else { loading.wait()? })
}

/// Shows the progress on standard error while the load runs.
fn wait_with_progress(mut loading: Loading) -> anyhow::Result<LoadReport> {
    const INTERVAL: Duration = Duration::from_millis(100);
    let started = std::time::Instant::now();
    loop {
        let ended = loading.wait_timeout(INTERVAL);
        let (done, all) = (loading.delivered_bytes(), loading.total_bytes().max(1));
        let speed = done as f64 / started.elapsed().as_secs_f64() / 1e9;
        let mut line = std::io::stderr().lock();
        write!(
            line,
            "\rloading: {:3} %, {}, {speed:.1} GB/s ",
            100 * done / all,
            size::format(done)
        )?;
        if let Some(report) = ended {
            write!(line, "\r\x1b[K")?;
            return Ok(report?);
        }
    }
}

fn show_report(
    file: &Path,
    tensors: Option<usize>,
    report: &LoadReport,
    args: &LoadArgs,
) -> anyhow::Result<()> {
    let seconds = report.elapsed.as_secs_f64();
    let gb_per_s = report.bytes as f64 / seconds.max(1e-9) / 1e9;
    if args.json {
        return show::print_json(&LoadOutcome {
            file: file.display().to_string(),
            tensors,
            bytes: report.bytes,
            seconds,
            gb_per_s,
            cpu_seconds: report.cpu_time.as_secs_f64(),
            cached_bytes: report.cached_bytes,
            direct_bytes: report.direct_bytes,
            buffered_bytes: report.buffered_bytes,
            threads: report.threads,
            staging_bytes: report.staging_bytes,
        });
    }
    let target = args.gpu.map_or("memory".into(), |number| format!("GPU {number}"));
    let tensors = tensors.map(|count| format!(", {count} tensors")).unwrap_or_default();
    let share = |bytes: u64| 100 * bytes / report.bytes.max(1);
    let text = format!(
        "{}{tensors} to {target} in {seconds:.3} s: {gb_per_s:.1} GB/s\n\
         found in the page cache {} %, read past it {} %, read through it {} %\n\
         {} threads, {:.2} s of processor time, {} of staging buffers\n",
        size::format(report.bytes),
        share(report.cached_bytes),
        share(report.direct_bytes),
        share(report.buffered_bytes),
        report.threads,
        report.cpu_time.as_secs_f64(),
        size::format(report.staging_bytes as u64),
    );
    Ok(show::print(&text)?)
}
