//! Why a machine could not do its work.

use std::io;
use std::time::Duration;

use thiserror::Error;

use crate::initramfs::PackError;
use crate::kernel::KernelError;

/// The machine did not come up. What becomes of programs in a machine that did is an outcome.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VmError {
    /// The emulated machine and its programs are for another kind of machine.
    #[error("virtual machines are for x86-64 Linux only, which this is not")]
    Platform,
    /// There is no emulator.
    #[error("qemu-system-x86_64 is not installed: sudo apt install qemu-system-x86")]
    NoQemu,
    /// There is no kernel, and none could be fetched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A program could not be packed for the machine.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The host refused something that the emulator needs.
    #[error("the virtual machine could not be started: {0}")]
    Start(#[from] io::Error),
    /// The first process of the machine could not make it ready.
    #[error("the virtual machine could not be made ready: {reason}")]
    Guest {
        /// What it said.
        reason: String,
    },
    /// The machine ended by itself before it was ready.
    #[error(
        "the virtual machine stopped before it was ready: has it enough memory? Its last words: \
         {console}"
    )]
    Stopped {
        /// The last lines of QEMU and of the kernel.
        console: String,
    },
    /// The machine was not ready in time.
    #[error(
        "the virtual machine was not ready after {} s: allow more time; its last words: {console}",
        limit.as_secs()
    )]
    Slow {
        /// How long it was allowed to take.
        limit: Duration,
        /// The last lines of QEMU and of the kernel.
        console: String,
    },
}
