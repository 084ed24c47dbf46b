//! The memory that the device can access: pages that were mapped for it, or the address space of
//! the process.
//!
//! In the address space of the process, a page that is not resident is a page fault, as it is for a
//! device without page requests. Accesses go through the kernel, which notices memory that is not
//! mapped or not writable.

use std::sync::atomic::{AtomicU64, Ordering};

use memferry_sys::cross_memory::{self, IoVec};
use memferry_sys::pages::page_bytes;
use memferry_sys::residency;

use crate::testing::iova_memory::IovaMemory;

/// The memory.
#[derive(Debug)]
pub(super) enum DsaModelMemory {
    /// What was mapped.
    Mapped(IovaMemory),
    /// The address space of the process.
    SharedVirtual,
}

/// An access that the device could not make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AccessFault {
    pub(super) address: u64,
    pub(super) is_write: bool,
}

impl DsaModelMemory {
    /// Reads memory that lies in one page.
    pub(super) fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), AccessFault> {
        let fault = AccessFault { address, is_write: false };
        match self {
            Self::Mapped(memory) => {
                let length = buffer.len();
                let hold = memory.hold(address, length as u64, false).map_err(|_| fault)?;
                // SAFETY: mapped for the device for this many bytes and held; its owner guarantees
                // it until it is unmapped, and lets no other code write it while the device reads.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        hold.host as *const u8,
                        buffer.as_mut_ptr(),
                        length,
                    );
                }
                Ok(())
            }
            Self::SharedVirtual => {
                check_residency(address, fault)?;
                let remote = [IoVec { address: address as usize, length: buffer.len() }];
                let local = [IoVec { address: buffer.as_mut_ptr() as usize, length: buffer.len() }];
                // SAFETY: the local memory is the buffer; the kernel checks the other.
                let read = unsafe { cross_memory::read(std::process::id(), &remote, &local) };
                (read.ok() == Some(buffer.len())).then_some(()).ok_or(fault)
            }
        }
    }

    /// Writes memory that lies in one page.
    pub(super) fn write(&self, address: u64, buffer: &[u8]) -> Result<(), AccessFault> {
        let fault = AccessFault { address, is_write: true };
        match self {
            Self::Mapped(memory) => {
                let length = buffer.len();
                let hold = memory.hold(address, length as u64, true).map_err(|_| fault)?;
                // SAFETY: as above; nothing else accesses the target of a descriptor.
                unsafe {
                    std::ptr::copy_nonoverlapping(buffer.as_ptr(), hold.host as *mut u8, length);
                }
                Ok(())
            }
            Self::SharedVirtual => {
                check_residency(address, fault)?;
                write_virtual(address, buffer).then_some(()).ok_or(fault)
            }
        }
    }

    /// Writes a completion record, its first word last; returns whether that is possible.
    pub(super) fn write_record(&self, address: u64, words: [u64; 4]) -> bool {
        match self {
            Self::Mapped(memory) => {
                let Ok(hold) = memory.hold(address, 32, true) else { return false };
                let store = |index: usize, order| {
                    // SAFETY: the record is mapped for the device, aligned and held; its owner
                    // reads it by atomic loads only.
                    let word = unsafe { AtomicU64::from_ptr((hold.host as *mut u64).add(index)) };
                    word.store(words[index].to_le(), order);
                };
                (1..4).for_each(|index| store(index, Ordering::Relaxed));
                // Release: a reader of the word sees the data that was written before it.
                store(0, Ordering::Release);
                true
            }
            Self::SharedVirtual => {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                write_virtual(address + 8, &bytes[8..]) && write_virtual(address, &bytes[..8])
            }
        }
    }

    pub(super) fn mapped(&self) -> Option<&IovaMemory> {
        match self {
            Self::Mapped(memory) => Some(memory),
            Self::SharedVirtual => None,
        }
    }
}

fn check_residency(address: u64, fault: AccessFault) -> Result<(), AccessFault> {
    residency::is_resident(address as usize).then_some(()).ok_or(fault)
}

fn write_virtual(address: u64, buffer: &[u8]) -> bool {
    let remote = [IoVec { address: address as usize, length: buffer.len() }];
    let local = [IoVec { address: buffer.as_ptr() as usize, length: buffer.len() }];
    // SAFETY: the local memory is the buffer. The driver submitted the address for this write; the
    // kernel checks that it is mapped and writable.
    let written = unsafe { cross_memory::write(std::process::id(), &remote, &local) };
    written.ok() == Some(buffer.len())
}

/// The number of bytes from an address to the end of its page.
pub(super) fn left_in_page(address: u64) -> u64 {
    let page = page_bytes() as u64;
    page - address % page
}
