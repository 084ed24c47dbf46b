//! Runs programs in a virtual machine that has what few machines let a program have: a network card
//! behind an IOMMU, for a driver in user space. QEMU emulates both, so nothing of the machine that
//! the program runs on is touched, and neither its kernel nor its administrator has to agree.
//!
//! [`Machine`] is the host's side: it finds a [`kernel`], packs programs into an [`initramfs`], starts
//! QEMU and listens. [`guest`] is the other side: the program that uses this library is also the first
//! process of the machine, so its `main` begins with [`guest::enter_if_first`].
//!
//! ```no_run
//! fn main() -> Result<(), memferry_vm::VmError> {
//!     memferry_vm::guest::enter_if_first();
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
mod story;
mod wire;

pub use error::VmError;
pub use machine::{Availability, Machine, availability};
pub use outcome::{End, Outcome, ProgramOutcome};
