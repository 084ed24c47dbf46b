//! The emulator: its command line, and its process, which ends with the value that stands for it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::{env, thread};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// What the kernel is told. The programs' port must not be its console. It says what it warns of, and
/// nothing less. On a busy host the check of the timer fails now and then, and the kernel gives up.
/// The last three make the start a little quicker, about a tenth.
const KERNEL_LINE: &str = "console=ttyS0 panic=-1 loglevel=5 intel_iommu=on no_timer_check \
                           tsc=reliable mitigations=off cryptomgr.notests";

/// How many lines may wait to be looked at.
const LINES: usize = 1024;

/// What a machine consists of.
#[derive(Debug, Clone)]
pub(crate) struct Parts<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) memory_mib: u32,
    pub(crate) cpus: u32,
    pub(crate) card: bool,
    pub(crate) iommu_address_bits: u32,
}

/// A line that QEMU wrote.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The machine's first serial port, and QEMU's own complaints.
    Console(Vec<u8>),
    /// The second serial port.
    Port(Vec<u8>),
}

/// The emulator of this host.
pub(crate) fn find() -> Option<PathBuf> {
    let paths = env::var_os("PATH")?;
    let mut places = env::split_paths(&paths).map(|folder| folder.join("qemu-system-x86_64"));
    places.find(|place| place.is_file())
}

/// A file without a name: nothing is left of it, whatever becomes of this process.
pub(crate) fn nameless_file() -> io::Result<File> {
    Ok(File::from(memfd_create("memferry-vm", MemfdFlags::CLOEXEC)?))
}

/// A running emulator. It is killed when this is dropped, and when the thread that started it dies.
#[derive(Debug)]
pub(crate) struct Qemu(Child);

impl Qemu {
    /// Starts it. What it writes arrives until it is gone.
    pub(crate) fn start(
        program: &Path,
        parts: &Parts<'_>,
        initramfs: File,
    ) -> io::Result<(Self, Receiver<Heard>)> {
        let initramfs = OwnedFd::from(initramfs);
        let files = format!("/proc/self/fd/{}", initramfs.as_raw_fd());
        let mut command = Command::new(program);
        command.args(arguments(parts)).arg("-initrd").arg(files);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let parent = getpid();
        let prepare = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            if getppid() != Some(parent) {
                return Err(Errno::SRCH.into());
            }
            Ok(fcntl_setfd(&initramfs, FdFlags::empty())?)
        };
        // SAFETY: between fork and exec, this makes three system calls, takes no lock and allocates
        // nothing: errors are numbers.
        unsafe { command.pre_exec(prepare) };
        let mut child = command.spawn()?;
        let (sender, receiver) = sync_channel(LINES);
        let (port, console) = (child.stdout.take(), child.stderr.take());
        let qemu = Self(child);
        listen(port.ok_or(io::ErrorKind::BrokenPipe)?, Heard::Port, sender.clone());
        listen(console.ok_or(io::ErrorKind::BrokenPipe)?, Heard::Console, sender);
        Ok((qemu, receiver))
    }

    /// Ends it at once.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself: then there is nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

fn listen<R: Read + Send + 'static>(
    output: R,
    heard: fn(Vec<u8>) -> Heard,
    lines: SyncSender<Heard>,
) {
    thread::spawn(move || {
        let mut output = BufReader::new(output);
        loop {
            let mut line = Vec::new();
            match output.read_until(b'\n', &mut line) {
                Ok(1..) if lines.send(heard(line)).is_ok() => {}
                _ => return,
            }
        }
    });
}

/// The command line, but for the files of the machine. Only what is named is emulated.
fn arguments(parts: &Parts<'_>) -> Vec<OsString> {
    let Parts { kernel, memory_mib, cpus, card, iommu_address_bits } = parts;
    let mut arguments: Vec<OsString> = [
        "-nodefaults -no-user-config -no-reboot -display none",
        "-machine q35,accel=tcg,usb=off,smbus=off,vmport=off",
        "-cpu max",
        "-chardev file,id=console,path=/dev/stderr -serial chardev:console",
        "-chardev stdio,id=port,signal=off -serial chardev:port",
    ]
    .iter()
    .flat_map(|words| words.split(' '))
    .map(Into::into)
    .collect();
    let mut add = |name: &str, value: String| arguments.extend([name.into(), value.into()]);
    add("-m", memory_mib.to_string());
    add("-smp", cpus.to_string());
    if *card {
        add("-device", format!("intel-iommu,aw-bits={iommu_address_bits}"));
        add("-device", "e1000e".into());
    }
    add("-append", KERNEL_LINE.into());
    arguments.extend(["-kernel".into(), kernel.into()]);
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(card: bool) -> String {
        let kernel = Path::new("/a kernel");
        let parts = Parts { kernel, memory_mib: 256, cpus: 2, card, iommu_address_bits: 48 };
        let arguments = arguments(&parts);
        arguments.iter().map(|argument| format!("{} ", argument.display())).collect()
    }

    #[test]
    fn a_card_comes_with_an_iommu_before_it() {
        let line = line(true);
        assert!(line.contains("-device intel-iommu,aw-bits=48 -device e1000e "), "{line}");
        assert!(line.contains("-m 256 -smp 2 ") && line.ends_with("-kernel /a kernel "), "{line}");
    }

    #[test]
    fn a_machine_without_a_card_has_no_devices() {
        assert!(!line(false).contains("-device"));
    }
}
