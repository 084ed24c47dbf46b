//! The conditions of a stress round: what else the machine does, and how test programs start.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Signal, set_parent_process_death_signal};

/// What the memory hog leaves.
const LEFT_BYTES: u64 = 1 << 30;
const PAGE: usize = 4096;

/// A kind of round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Condition {
    /// Nothing else runs
    Idle,
    /// A busy loop for each core
    Busy,
    /// Two busy loops for each core
    TwiceBusy,
    /// All programs on one core
    OneCore,
    /// A process that leaves 1 GiB of memory
    LittleMemory,
    /// The lowest priority, beside a compiler for every second core
    BesideCompiler,
    /// A soft limit of 64 descriptors
    FewDescriptors,
}

impl Condition {
    pub(super) const ALL: [Self; 7] = [
        Self::Idle,
        Self::Busy,
        Self::TwiceBusy,
        Self::OneCore,
        Self::LittleMemory,
        Self::BesideCompiler,
        Self::FewDescriptors,
    ];

    /// The words in front of a test program.
    pub(super) fn wrapper(self) -> Vec<OsString> {
        let words: &[&str] = match self {
            Self::OneCore => &["taskset", "-c", "0"],
            Self::BesideCompiler => &["nice", "-n", "19"],
            Self::FewDescriptors => &["sh", "-c", r#"ulimit -Sn 64 && exec "$0" "$@""#],
            Self::Idle | Self::Busy | Self::TwiceBusy | Self::LittleMemory => &[],
        };
        words.iter().map(OsString::from).collect()
    }

    /// Starts what runs beside the tests of a round. It ends when dropped.
    pub(super) fn begin(self) -> anyhow::Result<Load> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (command, count): (fn() -> anyhow::Result<Command>, usize) = match self {
            Self::Busy => (busy_loop, cores),
            Self::TwiceBusy => (busy_loop, 2 * cores),
            Self::LittleMemory => (memory_hog, 1),
            // What has the lowest priority would hardly run on cores that all compile.
            Self::BesideCompiler => (compiler, cores.div_ceil(2)),
            Self::Idle | Self::OneCore | Self::FewDescriptors => return Ok(Load(Vec::new())),
        };
        let mut load = Load(Vec::new());
        for _ in 0..count {
            load.0.push(start(command()?)?);
        }
        Ok(load)
    }
}

/// Processes that are killed when this is dropped.
pub(super) struct Load(Vec<Child>);

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(mut command: Command) -> anyhow::Result<Child> {
    // SAFETY: between fork and exec, the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    child.with_context(|| format!("{} cannot be run", command.get_program().display()))
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

fn busy_loop() -> anyhow::Result<Command> {
    Ok(shell("while :; do :; done"))
}

/// A C compiler that never ends. Its children end soon after it is killed.
fn compiler() -> anyhow::Result<Command> {
    let script = r#"
        program() { n=0; while [ $n -lt 2000 ]; do
            echo "int f$n(int *a) { int s = 0; for (int i = 0; i < a[$n % 7]; i++) s += a[i] * i; return s; }"
            n=$((n + 1)); done; }
        source=$(program)
        while :; do printf '%s\n' "$source" | "${CC:-cc}" -O2 -S -o /dev/null -x c - || exit; done"#;
    Ok(shell(script))
}

/// This program in the role of the memory hog.
fn memory_hog() -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("the path of this program")?);
    command.arg("hog");
    Ok(command)
}

/// Occupies memory until only 1 GiB is available, and keeps it until the process is killed.
pub(crate) fn occupy_memory() -> anyhow::Result<Infallible> {
    // If memory runs out all the same, the kernel ends this process first.
    fs::File::options().write(true).open("/proc/self/oom_score_adj")?.write_all(b"1000")?;
    let mut occupied: Vec<Vec<u8>> = Vec::new();
    loop {
        if available_bytes()? < LEFT_BYTES {
            thread::sleep(Duration::from_secs(1));
            continue;
        }
        let mut block = vec![0u8; 64 << 20];
        // Each page differs, so that none can be shared.
        for (number, page) in block.chunks_mut(PAGE).enumerate() {
            page[..8].copy_from_slice(&(occupied.len() * (64 << 20) + number).to_ne_bytes());
        }
        occupied.push(block);
    }
}

fn available_bytes() -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    Ok(number.context("MemAvailable in /proc/meminfo")? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapper_runs_the_program_with_its_arguments() {
        for condition in Condition::ALL {
            let mut words = condition.wrapper();
            words.extend(["printf", "%s-%s", "a b", "c"].map(OsString::from));
            let output = Command::new(&words[0]).args(&words[1..]).output().unwrap();
            assert_eq!(output.stdout, b"a b-c", "{condition:?}");
        }
    }

    #[test]
    fn a_load_ends_when_it_is_dropped() {
        for condition in [Condition::Busy, Condition::TwiceBusy, Condition::BesideCompiler] {
            let load = condition.begin().unwrap();
            let processes: Vec<u32> = load.0.iter().map(Child::id).collect();
            assert!(!processes.is_empty());
            drop(load);
            for process in processes {
                assert!(!fs::exists(format!("/proc/{process}")).unwrap(), "{condition:?}");
            }
        }
    }
}
