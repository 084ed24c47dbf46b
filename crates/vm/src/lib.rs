//! Runs programs in a virtual machine that has a network card behind an IOMMU, for drivers in user
//! space. QEMU emulates both, so the hardware of the host is not used and no privileges are needed.
//!
//! [`Machine`] is the host's side: it finds a [`kernel`], packs programs into an [`initramfs`],
//! starts QEMU and receives the output. [`guest`] is the guest's side: the program that uses this
//! library is also the first process (init) of the machine, so its `main` begins with
//! [`guest::run_if_init`].
//!
//! ```no_run
//! fn main() -> Result<(), memferry_vm::VmError> {
//!     memferry_vm::guest::run_if_init();
//!     let myself = std::env::current_exe().expect("a program has a name");
//!     let outcome = memferry_vm::Machine::new()
//!         .program(myself, ["--version"])
//!         .run(|line| eprintln!("{line}"))?;
//!     assert!(outcome.is_success());
//!     Ok(())
//! }
//! ```

mod console;
mod error;
pub mod guest;
pub mod initramfs;
pub mod kernel;
mod machine;
mod outcome;
mod plan;
mod qemu;
mod transcript;
mod wire;

pub use error::VmError;
pub use machine::{Availability, Machine, availability};
pub use outcome::{Outcome, ProgramExit, ProgramOutcome};
