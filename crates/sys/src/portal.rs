//! Submission portals: pages of a device to which a program writes descriptors of 64 bytes, each by
//! one instruction, so that the device receives it whole.
//!
//! A dedicated queue is written by a direct store (`movdir64b`), and its only user counts what fits
//! into it. A shared queue is written by `enqcmd`, whose answer says whether the queue had space.

use std::fmt::Debug;
use std::io;

/// A descriptor as it is submitted.
pub type PortalWords = [u64; 8];

/// The offset from one store to the next. Consecutive stores go to different lines of the page, so
/// that they need not wait for each other.
pub const PORTAL_STRIDE: usize = 64;

/// The portals of a device, addressed by their offset.
pub trait Portal: Send + Sync + Debug {
    /// Writes a descriptor to the portal of a dedicated queue. What the calling thread has written
    /// to memory before is visible to the device. A queue without space drops the descriptor.
    ///
    /// # Safety
    /// The caller has exclusive use of the queue, and whatever the descriptor makes the device do,
    /// the device accesses only memory that the caller may access.
    unsafe fn store(&self, at: usize, descriptor: &PortalWords);

    /// Writes a descriptor to the portal of a shared queue, as [`Portal::store`] does. Returns
    /// whether the queue had space for it.
    ///
    /// # Safety
    /// As for the accesses of [`Portal::store`].
    unsafe fn enqueue(&self, at: usize, descriptor: &PortalWords) -> bool;
}

/// The instructions of a queue that this processor does not have.
///
/// # Errors
/// The name of the instruction.
pub fn check_instruction(is_dedicated: bool) -> io::Result<()> {
    let cpu = crate::cpu::info();
    let (is_there, name) =
        if is_dedicated { (cpu.movdir64b, "movdir64b") } else { (cpu.enqcmd, "enqcmd") };
    match is_there {
        true => Ok(()),
        false => Err(io::Error::other(format!("this processor has no {name} instruction"))),
    }
}

/// Makes earlier stores to portals precede everything that this thread does later.
pub fn complete_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence accesses no memory; every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Stores 64 bytes by one instruction, after all earlier stores.
///
/// # Safety
/// The target must be writable and aligned to 64 bytes, and the processor must have `movdir64b`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn store(target: *mut u8, descriptor: &PortalWords) {
    // SAFETY: the fence accesses no memory. The store reads 64 bytes of the descriptor and writes
    // them to the target, which the caller guarantees.
    unsafe {
        std::arch::x86_64::_mm_sfence();
        std::arch::asm!("movdir64b {target}, [{source}]", target = in(reg) target,
             source = in(reg) descriptor, options(nostack, preserves_flags));
    }
}

/// Enqueues 64 bytes by one instruction, after all earlier stores; returns whether the device
/// accepted them.
///
/// # Safety
/// The target must be a portal of a shared queue, aligned to 64 bytes, and the processor must have
/// `enqcmd`.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn enqueue(target: *mut u8, descriptor: &PortalWords) -> bool {
    let refused: u8;
    // SAFETY: as for `store`; the instruction sets the zero flag if the device did not accept.
    unsafe {
        std::arch::x86_64::_mm_sfence();
        std::arch::asm!("enqcmd {target}, [{source}]", "setz {refused}",
             target = in(reg) target, source = in(reg) descriptor, refused = out(reg_byte) refused,
             options(nostack));
    }
    refused == 0
}

/// There is no such device on other processors.
///
/// # Safety
/// None; it never returns.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn store(_target: *mut u8, _descriptor: &PortalWords) {
    unreachable!("`check_instruction` rejects this processor");
}

/// There is no such device on other processors.
///
/// # Safety
/// None; it never returns.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn enqueue(_target: *mut u8, _descriptor: &PortalWords) -> bool {
    unreachable!("`check_instruction` rejects this processor");
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_store_writes_the_whole_descriptor_and_nothing_else() {
        if check_instruction(true).is_err() {
            return; // the other test compares this with the processor
        }
        let mut page = Pages::new(4096).unwrap();
        let words = [1, 2, 3, 4, 5, 6, 7, u64::MAX];
        // SAFETY: an aligned line of the test's own page.
        unsafe { store(page.as_mut_slice().as_mut_ptr().add(64), &words) };
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (before, rest) = page.as_slice().split_at(64);
        assert_eq!(&rest[..64], bytes);
        assert!(before.iter().chain(&rest[64..]).all(|byte| *byte == 0));
    }

    #[test]
    fn a_missing_instruction_is_named() {
        for (is_dedicated, is_there, name) in [
            (true, crate::cpu::info().movdir64b, "movdir64b"),
            (false, crate::cpu::info().enqcmd, "enqcmd"),
        ] {
            match check_instruction(is_dedicated) {
                Ok(()) => assert!(is_there),
                Err(error) => assert!(!is_there && error.to_string().contains(name), "{error}"),
            }
        }
    }
}
