//! `memferry run --profile`: starts the program, waits for its end, and reads what was counted.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use memferry::engine::cpu::CpuProfile;
use memferry_sys::call_profile::{
    CLASSES, CallProfile, CallProfileFile, Caller, OPERATIONS, VARIABLE,
};
use serde::Serialize;

use super::elf::{self, Elf, Symbol};
use super::report;
use crate::args::RunArgs;
use crate::show;

/// What `memferry run --profile --json` writes.
#[derive(Debug, Serialize)]
pub(super) struct Profile {
    pub(super) command: String,
    pub(super) processes: u64,
    pub(super) wall_seconds: f64,
    /// Processor time of the program and of its children that have ended.
    pub(super) cpu_seconds: f64,
    /// The part of it that the counted functions took.
    pub(super) counted_seconds: f64,
    /// What `memferry run --copies` would save, by the measured speed of this machine.
    pub(super) saved_seconds: f64,
    /// The size from which `memferry run --copies` shares a copy.
    pub(super) shared_from_bytes: u64,
    pub(super) functions: Vec<FunctionTotal>,
    pub(super) sizes: Vec<SizeTotal>,
    pub(super) callers: Vec<CallerTotal>,
}

/// All calls of one function.
#[derive(Debug, Serialize)]
pub(super) struct FunctionTotal {
    pub(super) function: &'static str,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

/// The calls of one function in one size class.
#[derive(Debug, Serialize)]
pub(super) struct SizeTotal {
    pub(super) function: &'static str,
    pub(super) from_bytes: u64,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    /// Estimated from sampled calls.
    pub(super) seconds: f64,
}

impl SizeTotal {
    /// Whether `memferry run --copies`, which shares from a size on, would share these calls.
    pub(super) fn can_be_shared(&self, from_bytes: u64) -> bool {
        let is_comparison = self.function == OPERATIONS[3];
        !is_comparison && self.calls > 0 && self.bytes / self.calls >= from_bytes
    }
}

/// The calls of one place, estimated from samples.
#[derive(Debug, Serialize)]
pub(super) struct CallerTotal {
    pub(super) module: String,
    pub(super) symbol: Option<String>,
    pub(super) offset: u64,
    pub(super) function: &'static str,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

/// Runs the command and reports. Returns its exit status.
pub(super) fn run(mut command: Command, args: &RunArgs) -> anyhow::Result<ExitCode> {
    let file = CallProfileFile::create().context("no memory for the counters")?;
    let (own, descriptor) = (std::process::id(), file.as_fd().as_raw_fd());
    command.env(VARIABLE, format!("/proc/{own}/fd/{descriptor}"));
    let shared = CpuProfile::load(&memferry::engine::cpu::ProfileSource::Automatic)?;
    let clock = TickClock::start();
    let status = run_to_end(&mut command)?;
    let wall_seconds = clock.started.elapsed().as_secs_f64();
    let seconds_per_tick = clock.seconds_per_tick();
    let words: Vec<_> = args.words.iter().map(|word| word.to_string_lossy()).collect();
    let profile = Profile {
        command: words.join(" "),
        wall_seconds,
        cpu_seconds: children_cpu_time().as_secs_f64(),
        ..read(file.contents(), seconds_per_tick, &shared)
    };
    if let Some(path) = &args.report {
        report::write_html(&profile, path)?;
    }
    let text = match args.json {
        true => serde_json::to_string_pretty(&profile)?,
        false => report::text(&profile),
    };
    match &args.output {
        Some(path) => std::fs::write(path, text + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?,
        None => show::print_error(text.trim_end()),
    }
    Ok(exit_code(status))
}

/// The time-stamp counter against the clock.
struct TickClock {
    started: Instant,
    ticks: u64,
}

impl TickClock {
    fn start() -> Self {
        Self { started: Instant::now(), ticks: ticks() }
    }

    fn seconds_per_tick(&self) -> f64 {
        // Short runs wait until the counter has advanced far enough for a precise ratio.
        while self.started.elapsed() < Duration::from_millis(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ticks = ticks().wrapping_sub(self.ticks);
        self.started.elapsed().as_secs_f64() / ticks.max(1) as f64
    }
}

fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// The child, for the signal handler.
static CHILD: AtomicI32 = AtomicI32::new(0);

extern "C" fn pass_on(signal: i32) {
    let child = CHILD.load(Ordering::Relaxed);
    if child > 0 {
        // SAFETY: the call is safe in a signal handler.
        unsafe { libc::kill(child, signal) };
    }
}

/// Runs a command while this process passes signals on. Signals of the terminal reach both anyway.
fn run_to_end(command: &mut Command) -> anyhow::Result<ExitStatus> {
    let signals = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];
    // SAFETY: the handler calls `kill` alone.
    unsafe {
        for signal in signals {
            libc::signal(signal, pass_on as *const () as libc::sighandler_t);
        }
        for signal in [libc::SIGINT, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
    let name = command.get_program().to_owned();
    let mut child =
        command.spawn().with_context(|| format!("{} cannot be started", name.display()))?;
    CHILD.store(child.id() as i32, Ordering::Relaxed);
    let status = child.wait()?;
    CHILD.store(0, Ordering::Relaxed);
    Ok(status)
}

/// The exit status of a shell for a program that ended like this.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(code as u8)
}

fn children_cpu_time() -> Duration {
    // SAFETY: zeros are a value of the structure, which is valid for writes.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let time = |it: libc::timeval| {
        Duration::from_secs(it.tv_sec as u64) + Duration::from_micros(it.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Adds up what was counted.
fn read(contents: &CallProfile, seconds_per_tick: f64, machine: &CpuProfile) -> Profile {
    let mut sizes = Vec::new();
    for (operation, function) in OPERATIONS.into_iter().enumerate() {
        for class in 0..CLASSES {
            let (calls, bytes) = contents.total(operation, class);
            if calls > 0 {
                let ticks = ticks_of(contents, operation, class, calls);
                let from_bytes = if class == 0 { 0 } else { 1 << class };
                let seconds = ticks * seconds_per_tick;
                sizes.push(SizeTotal { function, from_bytes, calls, bytes, seconds });
            }
        }
    }
    let functions: Vec<_> = OPERATIONS
        .into_iter()
        .map(|function| {
            let own = || sizes.iter().filter(|size| size.function == function);
            FunctionTotal {
                function,
                calls: own().map(|size| size.calls).sum(),
                bytes: own().map(|size| size.bytes).sum(),
                seconds: own().map(|size| size.seconds).sum(),
            }
        })
        .collect();
    Profile {
        command: String::new(),
        processes: contents.processes.load(Ordering::Relaxed),
        wall_seconds: 0.0,
        cpu_seconds: 0.0,
        counted_seconds: functions.iter().map(|function| function.seconds).sum(),
        saved_seconds: sizes.iter().map(|size| saved_seconds(size, machine)).sum(),
        shared_from_bytes: machine.split_bytes as u64,
        functions,
        sizes,
        callers: callers(contents, seconds_per_tick),
    }
}

/// The ticks of all calls of a class: as many as the sampled ones took on average. A class without a
/// sample is as fast per call as the nearest smaller one with one.
fn ticks_of(contents: &CallProfile, operation: usize, class: usize, calls: u64) -> f64 {
    let sampled = (0..=class).rev().find_map(|class| {
        let time = &contents.times[operation][class];
        let count = time.calls.load(Ordering::Relaxed);
        (count > 0).then(|| time.ticks.load(Ordering::Relaxed) as f64 / count as f64)
    });
    sampled.unwrap_or(0.0) * calls as f64
}

/// What sharing the calls of a class with a second core would save: at most half. The time of the calls has page
/// faults and waits in it, which the measured speed of the machine does not have.
fn saved_seconds(size: &SizeTotal, machine: &CpuProfile) -> f64 {
    let average = size.bytes / size.calls.max(1);
    if !size.can_be_shared(machine.split_bytes as u64) {
        return 0.0;
    }
    let is_streamed = average >= machine.shared_stream_bytes as u64;
    let pair =
        if is_streamed { machine.pair_stream_gb_per_s } else { 2.0 * machine.cached_gb_per_s };
    (size.seconds - size.bytes as f64 / (pair * 1e9)).clamp(0.0, size.seconds / 2.0)
}

/// The callers with the most time first.
fn callers(contents: &CallProfile, seconds_per_tick: f64) -> Vec<CallerTotal> {
    let mut symbols: HashMap<usize, Vec<Symbol>> = HashMap::new();
    let mut callers: Vec<_> = contents
        .callers
        .iter()
        .filter_map(|caller| {
            let key = caller.key.load(Ordering::Relaxed);
            let (module, operation, offset) = Caller::parts(key);
            let path = (key != 0).then(|| contents.module_path(module))??;
            let symbols = symbols.entry(module).or_insert_with(|| read_symbols(&path));
            // The address behind the call may be the first of the next function.
            let symbol = elf::name_at(symbols, offset.saturating_sub(1)).map(str::to_owned);
            Some(CallerTotal {
                symbol,
                module: path,
                offset,
                function: OPERATIONS[operation],
                calls: caller.calls.load(Ordering::Relaxed),
                bytes: caller.bytes.load(Ordering::Relaxed),
                seconds: caller.ticks.load(Ordering::Relaxed) as f64 * seconds_per_tick,
            })
        })
        .collect();
    callers.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    callers
}

fn read_symbols(path: &str) -> Vec<Symbol> {
    let bytes = std::fs::read(path).unwrap_or_default();
    Elf::parse(&bytes).map(|elf| elf.symbols()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_from_samples_and_counts_from_all_calls() {
        let file = CallProfileFile::create().unwrap();
        let contents = file.contents();
        contents.used_blocks.store(memferry_sys::call_profile::BLOCKS as u64, Ordering::Relaxed);
        let class = memferry_sys::call_profile::class_of(1 << 20);
        for block in 1..3 {
            let count = &contents.blocks[block].counts[0][class];
            count.calls.store(50, Ordering::Relaxed);
            count.bytes.store(50 << 20, Ordering::Relaxed);
        }
        contents.times[0][class].calls.store(4, Ordering::Relaxed);
        contents.times[0][class].ticks.store(4_000_000, Ordering::Relaxed);
        let machine = CpuProfile { split_bytes: 512 << 10, ..CpuProfile::built_in() };
        let profile = read(contents, 1e-9, &machine);
        let [size] = &profile.sizes[..] else { panic!("{:?}", profile.sizes) };
        assert_eq!((size.calls, size.bytes, size.from_bytes), (100, 100 << 20, 1 << 20));
        assert!((size.seconds - 0.1).abs() < 1e-9, "{}", size.seconds);
        assert!((profile.counted_seconds - 0.1).abs() < 1e-9);
        assert!(profile.saved_seconds > 0.0 && profile.saved_seconds <= 0.05, "half at most");
        let small =
            SizeTotal { function: "memcpy", from_bytes: 16, calls: 9, bytes: 160, seconds: 1.0 };
        assert_eq!(saved_seconds(&small, &machine), 0.0);
    }
}
