//! Loads a file to a GPU with progress, and prints the speed.
//!
//! `cargo run --release -p memferry --example load_to_device [FILE]`
//!
//! Without a file argument it creates one; without a GPU it loads to host memory.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use memferry::engine::MemoryKind;
use memferry::load::{FileSource, LoadReport, Loader, Loading};
use memferry::{Buffer, EngineSelection, Ferry};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const MADE_BYTES: usize = 256 << 20;

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn main() -> Outcome<()> {
    let made = std::env::temp_dir().join(format!("memferry-load-{}", std::process::id()));
    let named = std::env::args_os().nth(1).map(PathBuf::from);
    if named.is_none() {
        std::fs::write(&made, vec![7; MADE_BYTES])?;
    }
    let outcome = load(named.as_deref().unwrap_or(&made));
    if named.is_none() {
        std::fs::remove_file(&made)?;
    }
    let report = outcome?;
    let gb_per_s = report.bytes as f64 / report.elapsed.as_secs_f64() / 1e9;
    println!("{} MiB: {gb_per_s:.1} GB/s by {} threads", report.bytes >> 20, report.threads);
    println!("{} MiB of them were in the page cache", report.cached_bytes >> 20);
    Ok(())
}

/// Loads a file to the first GPU, or to host memory if there is none.
#[allow(clippy::print_stdout, reason = "an example shows something")]
fn load(path: &Path) -> Outcome<LoadReport> {
    let file = FileSource::open(path)?;
    let ferry = Ferry::builder().gpu(EngineSelection::Auto).build()?;
    let bytes = usize::try_from(file.len())?.max(1);
    if let Some(gpu) = ferry.device_allocator() {
        let memory = gpu.allocate(bytes)?;
        let placement = file.whole(0, memory.as_ptr());
        let loader = Loader::builder().build(ferry)?;
        // SAFETY: the memory is as long as the file, and lives until the load has ended.
        let loading = unsafe { loader.start_raw(vec![file], &[placement], MemoryKind::Device) }?;
        show_progress(loading)
    } else {
        println!("no GPU: to host memory");
        let mut memory = Buffer::new(bytes)?;
        let placement = file.whole(0, memory.as_mut_ptr());
        let loader = Loader::builder().build(ferry)?;
        // SAFETY: as above.
        let loading = unsafe { loader.start_raw(vec![file], &[placement], MemoryKind::Host) }?;
        show_progress(loading)
    }
}

/// Prints the progress until the load has ended. A program would compute meanwhile.
#[allow(clippy::print_stdout, reason = "an example shows something")]
fn show_progress(mut loading: Loading) -> Outcome<LoadReport> {
    loop {
        let ended = loading.wait_timeout(Duration::from_millis(20));
        let (done, all) = (loading.delivered_bytes(), loading.total_bytes().max(1));
        print!("\rloading: {:3} %, {} of {} MiB", 100 * done / all, done >> 20, all >> 20);
        io::stdout().flush()?;
        if let Some(report) = ended {
            println!();
            return Ok(report?);
        }
    }
}
