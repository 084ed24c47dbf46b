//! Loads the pages of a large file to a GPU with progress, and compares the speed with the driver's
//! own copy of the same pages.
//!
//! `cargo run --release -p memferry --example load_to_device [FILE]`
//!
//! Without a file argument it creates a file; without a GPU it uses less data and a model of a GPU.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memferry::engine::cpu::ProfileSource;
use memferry::engine::cuda::CudaProfile;
use memferry::engine::testing::cuda_model::CudaModel;
use memferry::{
    Buffer, CudaEngine, DeviceBuffer, EngineSelection, Ferry, OwnedSource, OwnedTransfer, PinLimits,
};
use memferry_sys::cuda::{Cuda, CudaDriver, MemcpyKind};
use memferry_sys::pages::MappedFile;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const MADE_BYTES: usize = 512 << 20;
const MODEL_BYTES: usize = 16 << 20;

/// A GPU, accessed by Memferry and by its driver alone.
struct Machine {
    ferry: Ferry,
    gpu: Arc<CudaEngine>,
    driver: Arc<dyn CudaDriver>,
}

/// The pages of the file.
struct Contents(MappedFile);

// SAFETY: a mapping keeps its address until it is dropped, and no process changes the file
// meanwhile.
unsafe impl OwnedSource for Contents {
    fn source(&self) -> (*const u8, usize) {
        (self.0.as_slice().as_ptr(), self.0.as_slice().len())
    }
}

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn main() -> Outcome<()> {
    let named = std::env::args_os().nth(1).map(PathBuf::from);
    match Ferry::builder().gpu(EngineSelection::device(0)).build() {
        Ok(ferry) => {
            let gpu = ferry.engine_as::<CudaEngine>().ok_or("the ferry has no GPU")?;
            let driver = Arc::new(Cuda::open(gpu.info().ordinal)?);
            println!("{}", gpu.info().name);
            demonstrate(&Machine { ferry, gpu, driver }, named.as_deref(), MADE_BYTES)
        }
        Err(error) => {
            println!("no GPU: {error}");
            println!(
                "the same with a MODEL of a GPU: its speed is that of threads, and means nothing"
            );
            if let Some(path) = &named {
                println!("{} is left alone: it would be loaded by a GPU", path.display());
            }
            demonstrate(&model()?, None, MODEL_BYTES)
        }
    }
}

/// Returns a model of a GPU, for machines without one.
fn model() -> Outcome<Machine> {
    let driver = CudaModel::new();
    let limits = PinLimits { max_bytes: 64 << 20, max_entries: 64 };
    let gpu = Arc::new(CudaEngine::with_driver(driver.clone(), CudaProfile::default(), limits)?);
    let builder = Ferry::builder().profile(ProfileSource::BuiltIn).gpu(EngineSelection::Off);
    let ferry = builder.engine(gpu.clone(), 2).build()?;
    Ok(Machine { ferry, gpu, driver })
}

#[allow(clippy::print_stdout, reason = "an example shows something")]
fn demonstrate(machine: &Machine, named: Option<&Path>, bytes: usize) -> Outcome<()> {
    let contents = match named {
        Some(path) => mapped(&File::open(path)?)?,
        None => made(bytes)?,
    };
    let bytes = contents.0.as_slice().len();
    let expected = contents.0.as_slice().iter().map(|&byte| u64::from(byte)).sum::<u64>();
    println!("{} MiB in the pages of a file", bytes >> 20);

    let memory = machine.gpu.allocate(bytes)?;
    let by_driver = (0..3).map(|_| copy_by_driver(machine, &contents, &memory));
    let by_driver = by_driver.collect::<Outcome<Vec<_>>>()?.into_iter().min().unwrap_or_default();

    let start = Instant::now();
    let transfer = machine.ferry.icopy(contents, memory)?;
    let sum = show_progress(&transfer)?;
    let (contents, memory) = transfer.wait()?;
    let first = start.elapsed();
    let start = Instant::now();
    let (contents, memory) = machine.ferry.icopy(contents, memory)?.wait()?;
    let again = start.elapsed();

    let mut back = Buffer::new(bytes)?;
    machine.ferry.copy_from_device(&memory, 0, &mut back)?;
    let total = back.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    assert!(*back == *contents.0.as_slice() && total == expected, "other bytes came back");

    let gb_per_s = |time: Duration| bytes as f64 / time.as_nanos() as f64;
    let line = |name: &str, time: Duration| {
        let ratio = by_driver.as_secs_f64() / time.as_secs_f64();
        println!("{name:<32} {:6.1} GB/s  {ratio:4.1} times the driver", gb_per_s(time));
    };
    line("the driver's own copy", by_driver);
    line("Memferry, with progress", first);
    line("Memferry, again", again);
    println!("{bytes} bytes came back as they were; the program summed up {sum:.6} meanwhile");
    Ok(())
}

/// Prints the progress of a transfer while the program computes.
#[allow(clippy::print_stdout, reason = "an example shows something")]
fn show_progress(transfer: &OwnedTransfer<Contents, DeviceBuffer>) -> Outcome<f64> {
    const POLL_INTERVAL: Duration = Duration::from_millis(2);
    let transfer = transfer.transfer();
    let (mut sum, mut next, mut shown) = (0.0, 1.0, Instant::now());
    loop {
        let is_done = transfer.is_done();
        if is_done || shown.elapsed() >= POLL_INTERVAL {
            let (ready, all) = (transfer.ready_bytes(), transfer.len().max(1));
            print!("\rloading: {:3} %, {} of {} MiB", 100 * ready / all, ready >> 20, all >> 20);
            io::stdout().flush()?;
            shown = Instant::now();
        }
        if is_done {
            println!();
            return Ok(sum);
        }
        // Stands for the program's own work.
        for _ in 0..1000 {
            sum += 1.0 / (next * next);
            next += 1.0;
        }
    }
}

/// Copies without Memferry: one call of the driver with unregistered memory.
fn copy_by_driver(machine: &Machine, from: &Contents, to: &DeviceBuffer) -> Outcome<Duration> {
    machine.driver.make_current()?;
    let from = from.0.as_slice();
    let start = Instant::now();
    // SAFETY: both buffers are valid for the length of the first one, which is also that of the
    // second; no other code uses them before this call returns, and then the copy is complete.
    unsafe {
        machine.driver.copy_sync(
            MemcpyKind::HostToDevice,
            from.as_ptr() as u64,
            to.address(),
            from.len(),
        )?;
    };
    Ok(start.elapsed())
}

/// Creates a file, and maps it.
fn made(bytes: usize) -> Outcome<Contents> {
    let path = std::env::temp_dir().join(format!("memferry-load-{}", std::process::id()));
    let written = write(&path, bytes).and_then(|()| File::open(&path));
    let contents = written.map_err(Into::into).and_then(|file| mapped(&file));
    let _ = std::fs::remove_file(&path);
    contents
}

fn write(path: &Path, bytes: usize) -> io::Result<()> {
    let mut file = io::BufWriter::new(File::create(path)?);
    let block: Vec<u8> = (0..1 << 20).map(|at: usize| (at ^ (at >> 8)) as u8).collect();
    for number in 0..bytes >> 20 {
        file.write_all(&(number as u64).to_le_bytes())?;
        file.write_all(&block[8..])?;
    }
    file.flush()
}

fn mapped(file: &File) -> Outcome<Contents> {
    if file.metadata()?.len() == 0 {
        return Err("the file is empty: name one with something in it".into());
    }
    // SAFETY: the user of the example does not change its file meanwhile.
    Ok(Contents(unsafe { MappedFile::map(file) }?))
}
