//! The emulator QEMU: its command line and its process.

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

/// The kernel command line. The console is the first serial port, because the second one transports
/// the messages of the guest. Log level 5 prints warnings and errors. `no_timer_check` prevents a
/// panic, because the timer check sometimes fails on a busy host. The last three options shorten
/// the boot by about a tenth.
const KERNEL_LINE: &str = "console=ttyS0 panic=-1 loglevel=5 intel_iommu=on no_timer_check \
                           tsc=reliable mitigations=off cryptomgr.notests";

/// The maximum number of queued lines.
const LINES: usize = 1024;

/// The configuration of a machine.
#[derive(Debug, Clone)]
pub(crate) struct QemuConfig<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) memory_mib: u32,
    pub(crate) cpus: u32,
    pub(crate) nic: bool,
    pub(crate) iommu_address_bits: u32,
}

/// A line of QEMU's output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SerialLine {
    /// A line of the first serial port, or an error of QEMU.
    Console(Vec<u8>),
    /// A line of the second serial port.
    Port(Vec<u8>),
}

/// Finds the emulator in `PATH`.
pub(crate) fn find() -> Option<PathBuf> {
    let paths = env::var_os("PATH")?;
    let mut places = env::split_paths(&paths).map(|folder| folder.join("qemu-system-x86_64"));
    places.find(|place| place.is_file())
}

/// Creates an anonymous file (memfd), which disappears with this process.
pub(crate) fn nameless_file() -> io::Result<File> {
    Ok(File::from(memfd_create("memferry-vm", MemfdFlags::CLOEXEC)?))
}

/// A running emulator. It is killed when this value is dropped, and when the thread that started it
/// exits.
#[derive(Debug)]
pub(crate) struct Qemu(Child);

impl Qemu {
    /// Starts the emulator. The receiver gets its output until the emulator exits.
    pub(crate) fn start(
        program: &Path,
        parts: &QemuConfig<'_>,
        initramfs: File,
    ) -> io::Result<(Self, Receiver<SerialLine>)> {
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
        // SAFETY: between fork and exec, the closure makes three system calls, takes no lock and
        // allocates nothing: errors are numbers.
        unsafe { command.pre_exec(prepare) };
        let mut child = command.spawn()?;
        let (sender, receiver) = sync_channel(LINES);
        let (port, console) = (child.stdout.take(), child.stderr.take());
        let qemu = Self(child);
        read_lines(port.ok_or(io::ErrorKind::BrokenPipe)?, SerialLine::Port, sender.clone());
        read_lines(console.ok_or(io::ErrorKind::BrokenPipe)?, SerialLine::Console, sender);
        Ok((qemu, receiver))
    }

    /// Kills the emulator and waits for its exit.
    pub(crate) fn kill(&mut self) {
        // An error means that the emulator has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}

fn read_lines<R: Read + Send + 'static>(
    output: R,
    heard: fn(Vec<u8>) -> SerialLine,
    lines: SyncSender<SerialLine>,
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

/// The command line without the initramfs. Only the named devices are emulated.
fn arguments(parts: &QemuConfig<'_>) -> Vec<OsString> {
    let QemuConfig { kernel, memory_mib, cpus, nic: card, iommu_address_bits } = parts;
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
        let parts =
            QemuConfig { kernel, memory_mib: 256, cpus: 2, nic: card, iommu_address_bits: 48 };
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
