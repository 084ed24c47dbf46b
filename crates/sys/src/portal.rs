//! Submission portals: pages of a device to which a program writes descriptors of 64 bytes, each by
//! one instruction, so that the device receives it whole.
//!
//! A dedicated queue is written by a direct store (`movdir64b`), and its only user counts what fits
//! into it. A shared queue is written by `enqcmd`, whose answer says whether the queue had space.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::fork::OwnerProcess;

/// A descriptor as it is submitted.
pub type PortalWords = [u64; 8];

/// The offset from one store to the next. Consecutive stores go to different lines of the page, so
/// that they need not wait for each other.
pub const PORTAL_STRIDE: usize = size_of::<PortalWords>();
/// The number of lines of the page of a queue. The device takes descriptors from any of them.
pub const PORTAL_LINES: usize = 64;

/// The portals of a device, addressed by their offset: pages to which descriptors are stored. In
/// forked children a store has no effect.
#[derive(Debug)]
pub struct Portal {
    start: NonNull<u8>,
    bytes: usize,
    owner: OwnerProcess,
    /// Whether a store is one instruction.
    is_direct: bool,
    receiver: PortalReceiver,
}

/// What takes the descriptors out of the pages. It keeps them mapped.
#[derive(Debug)]
enum PortalReceiver {
    /// Dedicated queues of a device.
    Dedicated { _mapping: Box<dyn Any + Send + Sync> },
    /// A shared queue of a device.
    Shared { _mapping: Box<dyn Any + Send + Sync> },
    /// A model: the pages are ordinary memory.
    Watcher(Arc<dyn PortalWatcher>),
}

/// What watches portals that are ordinary memory, in place of a device. It takes a descriptor out of its
/// line when the first word is not 0, which is written last or together with the others, and clears that
/// word.
///
/// # Safety
/// The memory is writable and aligned to [`PORTAL_STRIDE`] as long as this value exists, and the watcher
/// accesses it by atomic operations on words only.
pub unsafe trait PortalWatcher: Send + Sync + Debug {
    /// The start of the pages, and their length in bytes.
    fn memory(&self) -> (NonNull<u8>, usize);

    /// Whether descriptors are stored by the instruction for devices, where the processor has it. It goes
    /// around the caches: on ordinary memory words are much faster.
    fn takes_direct_stores(&self) -> bool;

    /// Wakes the watcher if it sleeps. Called after each store; all threads see the store before they see
    /// what this call does.
    fn wake(&self);

    /// Answers as a shared queue does to `enqcmd`, which works with memory of devices only: takes the
    /// descriptor, or returns false if it has to be tried again.
    fn enqueue(&self, at: usize, descriptor: &PortalWords) -> bool;
}

// SAFETY: the receiver owns the memory, and any thread may store to it: a line is written by one
// instruction or by atomic operations.
unsafe impl Send for Portal {}
// SAFETY: as above.
unsafe impl Sync for Portal {}

impl Portal {
    /// The portals of a device. A store needs the instruction of the kind of queue; see
    /// [`check_instruction`].
    ///
    /// # Safety
    /// The memory is mapped for writing, and aligned to [`PORTAL_STRIDE`], as long as `mapping` exists.
    pub(crate) unsafe fn mapped(
        start: NonNull<u8>,
        bytes: usize,
        is_dedicated: bool,
        mapping: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let _mapping = mapping;
        let receiver = match is_dedicated {
            true => PortalReceiver::Dedicated { _mapping },
            false => PortalReceiver::Shared { _mapping },
        };
        Self { start, bytes, owner: OwnerProcess::current(), is_direct: true, receiver }
    }

    /// Portals that a model watches.
    pub fn watched(watcher: Arc<dyn PortalWatcher>) -> Self {
        let (start, bytes) = watcher.memory();
        let owner = OwnerProcess::current();
        // The sanitizer does not see what one instruction stores.
        let can_be_direct = !cfg!(tsan) && check_instruction(true).is_ok();
        let is_direct = can_be_direct && watcher.takes_direct_stores();
        Self { start, bytes, owner, is_direct, receiver: PortalReceiver::Watcher(watcher) }
    }

    /// Writes a descriptor to the portal of a dedicated queue. What the calling thread has written
    /// to memory before is visible to the device. A queue without space drops the descriptor.
    ///
    /// # Panics
    /// If there is no portal at the offset.
    ///
    /// # Safety
    /// The caller has exclusive use of the queue, and whatever the descriptor makes the device do,
    /// the device accesses only memory that the caller may access.
    pub unsafe fn store(&self, at: usize, descriptor: &PortalWords) {
        let Some(line) = self.line(at) else { return };
        match &self.receiver {
            // SAFETY: a line of the mapping, of a device of which `mapped` knows that the processor
            // has the instruction.
            PortalReceiver::Dedicated { .. } => unsafe { store(line, descriptor) },
            PortalReceiver::Shared { .. } => (),
            PortalReceiver::Watcher(watcher) => {
                // SAFETY: a line of the watcher's memory; `watched` has checked the instruction.
                unsafe {
                    if self.is_direct {
                        store(line, descriptor);
                    } else {
                        store_words(line, descriptor);
                    }
                }
                complete_stores();
                // Sequentially consistent: the watcher sees the store before it sleeps, or the call sees
                // that it sleeps.
                fence(Ordering::SeqCst);
                watcher.wake();
            }
        }
    }

    /// Writes a descriptor to the portal of a shared queue, as [`Portal::store`] does. Returns
    /// whether the queue had space for it.
    ///
    /// # Panics
    /// If there is no portal at the offset.
    ///
    /// # Safety
    /// As for the accesses of [`Portal::store`].
    pub unsafe fn enqueue(&self, at: usize, descriptor: &PortalWords) -> bool {
        let Some(line) = self.line(at) else { return false };
        match &self.receiver {
            PortalReceiver::Dedicated { .. } => false,
            // SAFETY: as for stores.
            PortalReceiver::Shared { .. } => unsafe { enqueue(line, descriptor) },
            PortalReceiver::Watcher(watcher) => watcher.enqueue(at, descriptor),
        }
    }

    /// The address of a line, or `None` in a forked child.
    fn line(&self, at: usize) -> Option<*mut u8> {
        let fits = at.checked_add(PORTAL_STRIDE).is_some_and(|end| end <= self.bytes);
        assert!(
            fits && at.is_multiple_of(PORTAL_STRIDE),
            "no portal at {at:#x}: the device has {:#x} bytes of portals",
            self.bytes
        );
        // SAFETY: the result is inside the memory, as asserted.
        self.owner.is_current().then(|| unsafe { self.start.as_ptr().add(at) })
    }
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
unsafe fn store(target: *mut u8, descriptor: &PortalWords) {
    // SAFETY: the fence accesses no memory. The store reads 64 bytes of the descriptor and writes
    // them to the target, which the caller guarantees.
    unsafe {
        std::arch::x86_64::_mm_sfence();
        std::arch::asm!("movdir64b {target}, [{source}]", target = in(reg) target,
             source = in(reg) descriptor, options(nostack, preserves_flags));
    }
}

/// Stores 64 bytes word by word, the first one last: who sees that by an acquire load sees the others.
///
/// # Safety
/// The target must be writable and aligned to 64 bytes, and be accessed by atomic operations only.
unsafe fn store_words(target: *mut u8, descriptor: &PortalWords) {
    for (index, value) in descriptor.iter().enumerate().rev() {
        let order = if index == 0 { Ordering::Release } else { Ordering::Relaxed };
        // SAFETY: an aligned word of the line that the caller guarantees.
        let word = unsafe { AtomicU64::from_ptr(target.cast::<u64>().add(index)) };
        word.store(value.to_le(), order);
    }
}

/// Enqueues 64 bytes by one instruction, after all earlier stores; returns whether the device
/// accepted them.
///
/// # Safety
/// The target must be a portal of a shared queue, aligned to 64 bytes, and the processor must have
/// `enqcmd`.
#[cfg(target_arch = "x86_64")]
unsafe fn enqueue(target: *mut u8, descriptor: &PortalWords) -> bool {
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
unsafe fn store(_target: *mut u8, _descriptor: &PortalWords) {
    unreachable!("`check_instruction` rejects this processor");
}

/// There is no such device on other processors.
///
/// # Safety
/// None; it never returns.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn enqueue(_target: *mut u8, _descriptor: &PortalWords) -> bool {
    unreachable!("`check_instruction` rejects this processor");
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;

    /// A page that a test watches, with the number of wakes. It refuses what is enqueued.
    #[derive(Debug)]
    struct TestPage {
        page: Pages,
        wakes: AtomicU64,
        is_direct: bool,
    }

    // SAFETY: the page exists as long as this, and is read after the stores only.
    unsafe impl PortalWatcher for TestPage {
        fn memory(&self) -> (NonNull<u8>, usize) {
            (NonNull::new(self.page.as_ptr()).unwrap(), self.page.len())
        }

        fn takes_direct_stores(&self) -> bool {
            self.is_direct
        }

        fn wake(&self) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
        }

        fn enqueue(&self, _at: usize, _descriptor: &PortalWords) -> bool {
            false
        }
    }

    fn portal(is_direct: bool) -> (Arc<TestPage>, Portal) {
        let (page, wakes) = (Pages::new(4096).unwrap(), AtomicU64::new(0));
        let page = Arc::new(TestPage { page, wakes, is_direct });
        (page.clone(), Portal::watched(page))
    }

    #[test]
    fn a_store_writes_the_whole_descriptor_and_nothing_else() {
        let words = [1, 2, 3, 4, 5, 6, 7, u64::MAX];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        for is_direct in [false, true] {
            let (page, portal) = portal(is_direct);
            // SAFETY: no device reads the page.
            unsafe { portal.store(64, &words) };
            let (before, rest) = page.page.as_slice().split_at(64);
            assert_eq!(&rest[..64], bytes);
            assert!(before.iter().chain(&rest[64..]).all(|byte| *byte == 0));
            assert_eq!(page.wakes.load(Ordering::Relaxed), 1);
        }
    }

    #[test]
    fn what_is_enqueued_is_answered_by_the_watcher() {
        let (page, portal) = portal(true);
        // SAFETY: the watcher takes nothing.
        assert!(!unsafe { portal.enqueue(0, &[1; 8]) });
        assert!(page.page.as_slice().iter().all(|byte| *byte == 0));
    }

    #[test]
    #[should_panic(expected = "no portal at 0x1000")]
    fn a_portal_behind_the_last_is_not_written() {
        // SAFETY: no device reads the page.
        unsafe { portal(true).1.store(4096, &[1; 8]) };
    }

    #[test]
    #[should_panic(expected = "no portal at 0x8")]
    fn a_portal_that_is_not_a_line_is_not_written() {
        // SAFETY: as above.
        unsafe { portal(true).1.store(8, &[1; 8]) };
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
