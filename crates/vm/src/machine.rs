//! The virtual machine, as the host configures and runs it.

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
use crate::plan::{GuestCommand, GuestPlan, PLAN};
use crate::qemu::{self, Qemu, QemuConfig, SerialLine};
use crate::transcript::{RunTranscript, StopReason};

/// Whether this host can run virtual machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// Emulator and kernel are available.
    Ready,
    /// The first machine downloads a kernel from the distribution, which requires network access.
    KernelToFetch,
}

/// Returns whether this host can run virtual machines, or what is missing. It downloads and starts
/// nothing.
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

/// A virtual machine that runs programs one after the other.
///
/// By default it has one processor, 512 MiB of memory, and a network card.
#[derive(Debug, Clone)]
pub struct Machine {
    programs: Vec<(PathBuf, Vec<OsString>)>,
    environment: Vec<(OsString, OsString)>,
    memory_mib: u32,
    cpus: u32,
    nic: bool,
    iommu_address_bits: u32,
    timeout: Duration,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            programs: Vec::new(),
            environment: Vec::new(),
            memory_mib: 512,
            cpus: 1,
            nic: true,
            iommu_address_bits: 39,
            timeout: Duration::from_secs(300),
        }
    }
}

impl Machine {
    /// Creates a machine without programs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a program of this host with its arguments. The program runs as root of the machine, and
    /// finds there only the libraries that it is linked with.
    pub fn program<A: Into<OsString>>(
        mut self,
        path: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        self.programs.push((path.into(), arguments));
        self
    }

    /// Sets an environment variable for all programs. The programs inherit no variables from this
    /// process.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Sets the size of the memory in MiB, which also holds the files of the machine.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Sets the number of processors. Each additional processor delays the boot.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets whether the machine has an e1000e card behind an IOMMU, bound to vfio-pci.
    pub fn nic(mut self, card: bool) -> Self {
        self.nic = card;
        self
    }

    /// Sets the width in bits of the addresses that the IOMMU translates: 39, as in small
    /// processors, or 48. The default is 39, which reveals drivers that assume that every address
    /// can be mapped.
    pub fn iommu_address_bits(mut self, bits: u32) -> Self {
        self.iommu_address_bits = bits;
        self
    }

    /// Sets the timeout for the whole run, from the start of QEMU to the exit of the last program.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = limit;
        self
    }

    /// Starts the machine, runs the programs, and stops the machine. `on_line` receives each line
    /// of a program as soon as it arrives; lines of the kernel and of QEMU, of which there are few,
    /// begin with `machine: `.
    ///
    /// Downloads a kernel if the host has none yet. The machine ends at the latest when this call
    /// returns or this process exits.
    pub fn run(&self, mut on_line: impl FnMut(&str)) -> Result<Outcome, VmError> {
        let emulator = emulator()?;
        let kernel = Kernel::find_or_fetch()?;
        let initramfs = self.pack(&kernel)?;
        let parts = QemuConfig {
            kernel: &kernel.image,
            memory_mib: self.memory_mib,
            cpus: self.cpus,
            nic: self.nic,
            iommu_address_bits: self.iommu_address_bits,
        };
        let begun = Instant::now();
        let mut story = RunTranscript::new(self.programs.len());
        let (mut qemu, lines) = Qemu::start(&emulator, &parts, initramfs)?;
        let mut ending = StopReason::Stopped;
        loop {
            // After the timeout QEMU is killed, so the loop only drains the lines that are already
            // queued.
            let left = match ending {
                StopReason::Stopped => self.timeout.saturating_sub(begun.elapsed()),
                StopReason::TimedOut => Duration::MAX,
            };
            let shown = match lines.recv_timeout(left) {
                Ok(SerialLine::Console(line)) => story.record_console(&line),
                Ok(SerialLine::Port(line)) => story.record(&line, begun.elapsed()),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    ending = StopReason::TimedOut;
                    qemu.kill();
                    None
                }
            };
            if let Some(line) = shown {
                on_line(&line);
            }
        }
        if let Some(line) = story.flush_partial_line() {
            on_line(&line);
        }
        story.finish(ending, self.timeout, begun.elapsed())
    }

    /// Packs the initramfs of the machine.
    fn pack(&self, kernel: &Kernel) -> Result<File, VmError> {
        let mut pack = Initramfs::new(BufWriter::new(qemu::nameless_file()?))?;
        pack.program(&this_program()?, "/init")?;
        let mut plan = GuestPlan {
            card: self.nic,
            modules: Vec::new(),
            environment: Vec::new(),
            programs: Vec::new(),
        };
        for (name, value) in &self.environment {
            plan.environment.push((text(name)?, text(value)?));
        }
        let modules: &[PathBuf] = if self.nic { &kernel.modules } else { &[] };
        for (number, module) in modules.iter().enumerate() {
            let place = guest_path("/modules", number, module)?;
            let failed = |error| PackError::File { path: module.clone(), error };
            let bytes = std::fs::read(module).map_err(failed)?;
            pack.file(&place, 0o644, &bytes).map_err(failed)?;
            plan.modules.push(place);
        }
        for (number, (program, arguments)) in self.programs.iter().enumerate() {
            let path = guest_path("/programs", number, program)?;
            pack.program(program, &path)?;
            let arguments = arguments.iter().map(|argument| text(argument));
            plan.programs
                .push(GuestCommand { path, arguments: arguments.collect::<Result<_, _>>()? });
        }
        pack.file(PLAN, 0o644, &plan.encode())?;
        let mut file = pack.finish()?.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.rewind()?;
        Ok(file)
    }
}

/// The path of a file in the machine. The number makes it unique, because file names may be the
/// same.
fn guest_path(folder: &str, number: usize, file: &Path) -> Result<String, PackError> {
    Ok(format!("{folder}/{number}-{}", text(file.file_name().unwrap_or_default())?))
}

fn text(text: &OsStr) -> Result<String, PackError> {
    text.to_str().map(Into::into).ok_or_else(|| PackError::NoText(text.into()))
}
