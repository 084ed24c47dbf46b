//! A machine, from what is wanted of it to what became of it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{BufWriter, Seek};
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::error::VmError;
use crate::initramfs::{Initramfs, PackError, this_program};
use crate::kernel::{self, Kernel};
use crate::outcome::Outcome;
use crate::plan::{Command, PLAN, Plan};
use crate::qemu::{self, Heard, Parts, Qemu};
use crate::story::{Ending, Story};

/// Whether machines can be made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// Everything is here.
    Ready,
    /// The first machine fetches a kernel from the distribution: it needs the network.
    KernelToFetch,
}

/// Says whether machines can be made here, or what is missing. Fetches and starts nothing.
pub fn availability() -> Result<Availability, VmError> {
    emulator()?;
    if Kernel::find()?.is_some() {
        return Ok(Availability::Ready);
    }
    kernel::can_be_fetched()?;
    Ok(Availability::KernelToFetch)
}

fn emulator() -> Result<PathBuf, VmError> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(VmError::Platform);
    }
    qemu::find().ok_or(VmError::NoQemu)
}

/// A machine that is to run programs, one after the other.
///
/// It has one processor, 512 MiB of memory, and a card; all of this can be changed.
#[derive(Debug, Clone)]
pub struct Machine {
    programs: Vec<(PathBuf, Vec<OsString>)>,
    environment: Vec<(OsString, OsString)>,
    memory_mib: u32,
    cpus: u32,
    card: bool,
    iommu_address_bits: u32,
    limit: Duration,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            programs: Vec::new(),
            environment: Vec::new(),
            memory_mib: 512,
            cpus: 1,
            card: true,
            iommu_address_bits: 39,
            limit: Duration::from_secs(300),
        }
    }
}

impl Machine {
    /// A machine without programs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a program of this host, and what it is to be told. It runs as the machine's root, with
    /// nothing of the host around it but the libraries it is linked with.
    pub fn program<A: Into<OsString>>(
        mut self,
        path: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        self.programs.push((path.into(), arguments));
        self
    }

    /// Gives every program a variable. Nothing is taken from the environment of this process.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// How much memory there is, programs and their files included.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// How many processors there are. Each more takes time to start.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Whether there is an e1000e card behind an IOMMU, in the hands of `vfio-pci`.
    pub fn card(mut self, card: bool) -> Self {
        self.card = card;
        self
    }

    /// How wide the addresses are that the IOMMU translates: 39 bits as in small processors, the
    /// default, which finds drivers that take every address for a good one, or 48.
    pub fn iommu_address_bits(mut self, bits: u32) -> Self {
        self.iommu_address_bits = bits;
        self
    }

    /// How long it may take, from the start of the machine to the end of the last program.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts the machine, runs the programs and ends it. Each line of a program is passed on as it
    /// comes; lines of the kernel and of QEMU, of which there are few, begin with `machine: `.
    ///
    /// Fetches a kernel if there is none yet. The machine does not outlive this call, nor this process.
    pub fn run(&self, mut on_line: impl FnMut(&str)) -> Result<Outcome, VmError> {
        let emulator = emulator()?;
        let kernel = Kernel::find_or_fetch()?;
        let initramfs = self.pack(&kernel)?;
        let parts = Parts {
            kernel: &kernel.image,
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            card: self.card,
            iommu_address_bits: self.iommu_address_bits,
        };
        let begun = Instant::now();
        let mut story = Story::new(self.programs.len());
        let (mut qemu, lines) = Qemu::start(&emulator, &parts, initramfs)?;
        let mut ending = Ending::Stopped;
        loop {
            // Once the time is up, what was said before is all that still comes.
            let left = match ending {
                Ending::Stopped => self.limit.saturating_sub(begun.elapsed()),
                Ending::TimedOut => Duration::MAX,
            };
            let shown = match lines.recv_timeout(left) {
                Ok(Heard::Console(line)) => story.console(&line),
                Ok(Heard::Port(line)) => story.note(&line, begun.elapsed()),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    ending = Ending::TimedOut;
                    qemu.kill();
                    None
                }
            };
            if let Some(line) = shown {
                on_line(&line);
            }
        }
        if let Some(line) = story.cut_off() {
            on_line(&line);
        }
        story.finish(ending, self.limit, begun.elapsed())
    }

    /// The files of the machine.
    fn pack(&self, kernel: &Kernel) -> Result<File, VmError> {
        let mut pack = Initramfs::new(BufWriter::new(qemu::nameless_file()?))?;
        pack.program(&this_program()?, "/init")?;
        let mut plan = Plan {
            card: self.card,
            modules: Vec::new(),
            environment: Vec::new(),
            programs: Vec::new(),
        };
        for (name, value) in &self.environment {
            plan.environment.push((text(name)?, text(value)?));
        }
        let modules: &[PathBuf] = if self.card { &kernel.modules } else { &[] };
        for (number, module) in modules.iter().enumerate() {
            let place = place("/modules", number, module)?;
            let failed = |error| PackError::File { path: module.clone(), error };
            let bytes = std::fs::read(module).map_err(failed)?;
            pack.file(&place, 0o644, &bytes).map_err(failed)?;
            plan.modules.push(place);
        }
        for (number, (program, arguments)) in self.programs.iter().enumerate() {
            let path = place("/programs", number, program)?;
            pack.program(program, &path)?;
            let arguments = arguments.iter().map(|argument| text(argument));
            plan.programs.push(Command { path, arguments: arguments.collect::<Result<_, _>>()? });
        }
        pack.file(PLAN, 0o644, &plan.encode())?;
        let mut file = pack.finish()?.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.rewind()?;
        Ok(file)
    }
}

/// Where a file goes: names may be the same, numbers are not.
fn place(folder: &str, number: usize, file: &Path) -> Result<String, PackError> {
    Ok(format!("{folder}/{number}-{}", text(file.file_name().unwrap_or_default())?))
}

fn text(text: &OsStr) -> Result<String, PackError> {
    text.to_str().map(Into::into).ok_or_else(|| PackError::NoText(text.into()))
}
