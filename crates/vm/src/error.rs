//! Errors of a virtual machine.

use std::io;
use std::time::Duration;

use thiserror::Error;

use crate::initramfs::PackError;
use crate::kernel::KernelError;

/// An error that prevents the machine from becoming ready. The results of programs in a ready
/// machine are part of the [`Outcome`](crate::Outcome).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VmError {
    /// The host is not x86-64 Linux.
    #[error("virtual machines are for x86-64 Linux only, which this is not")]
    Platform,
    /// QEMU is not installed.
    #[error("qemu-system-x86_64 is not installed: sudo apt install qemu-system-x86")]
    NoQemu,
    /// No kernel was found or downloaded.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A program could not be packed for the machine.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The host denied something that the emulator needs.
    #[error("the virtual machine could not be started: {0}")]
    Start(#[from] io::Error),
    /// The first process of the machine could not set it up.
    #[error("the virtual machine could not be made ready: {reason}")]
    Guest {
        /// The error of the first process.
        reason: String,
    },
    /// The machine stopped before it was ready.
    #[error(
        "the virtual machine stopped before it was ready: has it enough memory? Its last words: \
         {console}"
    )]
    Stopped {
        /// The last lines of QEMU and of the kernel.
        console: String,
    },
    /// The machine was not ready before the timeout.
    #[error(
        "the virtual machine was not ready after {} s: allow more time; its last words: {console}",
        limit.as_secs()
    )]
    Slow {
        /// The timeout.
        limit: Duration,
        /// The last lines of QEMU and of the kernel.
        console: String,
    },
}
