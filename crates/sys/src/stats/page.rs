//! The page of this process: where blocks are, and what a fork does to it.
//!
//! Threads of a forked child still have references to blocks. So the child does not unmap the page: it maps
//! private memory over it, and creates a page of its own when it opens its first block.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use super::kinds::{self, ThreadCounters};
use super::layout::{
    BLOCKS_AT, Counters, DIRECTORY_AT, MAGIC, MAX_BLOCKS, MAX_TEXT_BYTES, PAGE_BYTES, Shape,
    TEXT_AT, VERSION, entry, header, text_of,
};
use super::slots::Slots;
use super::{PAGE_NAME, VARIABLE};
use crate::fork::OwnerProcess;
use crate::shared_memory::{Protection, SealedMemory};

/// The page of this process. Pages are never freed: threads of other libraries may end late.
static PAGE: AtomicPtr<Page> = AtomicPtr::new(null_mut());

/// The page is switched off, or cannot be created.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// A page of counters.
#[derive(Debug)]
pub(super) struct Page {
    base: NonNull<u8>,
    /// The descriptor stays open, so that readers find it. The program may have closed it.
    descriptor: i32,
    file: (u64, u64),
    slots: Mutex<Slots>,
}

// SAFETY: the memory is mapped for the life of the process, and is accessed by atomics alone.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

/// The page of this process; `None` if there is none.
pub(super) fn current() -> Option<&'static Page> {
    let page = PAGE.load(Ordering::Acquire);
    let page = if page.is_null() { open()? } else { page };
    // SAFETY: a page is never freed.
    Some(unsafe { &*page })
}

#[cold]
fn open() -> Option<*mut Page> {
    if IS_OFF.load(Ordering::Relaxed) {
        return None;
    }
    // Installs the handler of forks before there is a page that a child could write to.
    let _ = OwnerProcess::current();
    let created = match crate::settings::is_switched_off(VARIABLE) {
        true => None,
        false => Page::create().ok(),
    };
    let Some(page) = created else {
        IS_OFF.store(true, Ordering::Relaxed);
        return None;
    };
    let page = Box::into_raw(Box::new(page));
    match PAGE.compare_exchange(null_mut(), page, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(page),
        Err(other) => {
            // SAFETY: no other thread has seen this page.
            unsafe { Box::from_raw(page) }.discard();
            Some(other)
        }
    }
}

/// Leaves the page of the parent. Called in a child of `fork`, before it does anything else; everything here may be
/// called in a signal handler.
pub(crate) fn after_fork() {
    let page = PAGE.swap(null_mut(), Ordering::AcqRel);
    super::thread::forget_current();
    if page.is_null() {
        return;
    }
    // SAFETY: a page is never freed.
    let page = unsafe { &*page };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: replaces the mapping of the page, which consists of counters for which zero is valid; the child has
    // one thread. The descriptor is closed only if it still refers to the page.
    unsafe {
        libc::mmap(page.base.as_ptr().cast(), PAGE_BYTES, protection, flags, -1, 0);
        let mut status: libc::stat = std::mem::zeroed();
        if libc::fstat(page.descriptor, &raw mut status) == 0
            && (status.st_dev, status.st_ino) == page.file
        {
            libc::close(page.descriptor);
        }
    }
}

impl Page {
    fn create() -> io::Result<Self> {
        use std::os::fd::{AsFd, AsRawFd};
        let text = text_of(kinds::ALL);
        debug_assert!(text.len() <= MAX_TEXT_BYTES, "the text of the kinds is too long");
        let memory = SealedMemory::new(PAGE_NAME, PAGE_BYTES)?;
        let mapping = memory.map(Protection::ReadWrite)?;
        let status = rustix::fs::fstat(&memory)?;
        let base = NonNull::new(mapping.as_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        let page = Self {
            base,
            descriptor: memory.as_fd().as_raw_fd(),
            file: (status.st_dev, status.st_ino),
            slots: Mutex::new(Slots::new(BLOCKS_AT, PAGE_BYTES)),
        };
        std::mem::forget((memory, mapping));
        page.write_bytes(TEXT_AT, text.as_bytes(), MAX_TEXT_BYTES);
        let name = fs::read("/proc/self/comm").unwrap_or_default();
        page.write_bytes(header::NAME * 8, name.trim_ascii_end(), header::NAME_WORDS * 8);
        for (word, value) in [
            (header::VERSION, VERSION),
            (header::TEXT_AT, TEXT_AT as u64),
            (header::TEXT_BYTES, text.len() as u64),
            (header::DIRECTORY_AT, DIRECTORY_AT as u64),
            (header::ENTRIES, MAX_BLOCKS as u64),
            (header::PID, std::process::id().into()),
            (header::START_TICKS, super::reader::start_ticks("self").unwrap_or(0)),
        ] {
            page.word(word).store(value, Ordering::Relaxed);
        }
        page.word(header::MAGIC).store(MAGIC, Ordering::Release);
        Ok(page)
    }

    /// Unmaps a page that no other thread has seen.
    fn discard(self) {
        // SAFETY: the mapping and the descriptor belong to this value alone.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), PAGE_BYTES);
            libc::close(self.descriptor);
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < PAGE_BYTES / 8);
        // SAFETY: the word lies inside the mapping, which is aligned and lasts as long as the process.
        unsafe { &*self.base.as_ptr().cast::<AtomicU64>().add(index) }
    }

    /// Writes text to a place of `space` bytes; what does not fit is left out.
    fn write_bytes(&self, at: usize, bytes: &[u8], space: usize) {
        for place in 0..space / 8 {
            let mut word = [0; 8];
            let rest = bytes.get(place * 8..).unwrap_or_default();
            let length = rest.len().min(8);
            word[..length].copy_from_slice(&rest[..length]);
            self.word(at / 8 + place).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }

    /// The page is one for the process, so models do not know of its mutex.
    fn lock_slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a place for a block; returns the number of its entry and its memory. `None` if the page is full.
    pub(super) fn allocate<C: Counters>(&self, id: u64, name: &str) -> Option<(usize, NonNull<C>)> {
        let mut slots = self.lock_slots();
        let number = slots.take(size_of::<C>()).or_else(|| {
            self.free_ended_threads(&mut slots, None);
            slots.take(size_of::<C>())
        });
        if number.is_none() {
            self.count_block_without_place();
        }
        Some(self.fill_entry(&slots, number?, id, name))
    }

    /// The same for the block of the calling thread. Nothing tells the page when the thread ends: the block is freed
    /// when another one needs its place, or when many threads have opened one.
    pub(super) fn allocate_thread(
        &self,
        thread: u64,
        name: &str,
    ) -> Option<NonNull<ThreadCounters>> {
        let mut slots = self.lock_slots();
        let bytes = size_of::<ThreadCounters>();
        if slots.are_threads_due() {
            self.free_ended_threads(&mut slots, Some(thread));
        }
        let number = slots.take(bytes).or_else(|| {
            self.free_ended_threads(&mut slots, Some(thread));
            slots.take(bytes)
        });
        let Some(number) = number else {
            self.count_block_without_place();
            return None;
        };
        slots.set_thread(number);
        Some(self.fill_entry(&slots, number, thread, name).1)
    }

    fn count_block_without_place(&self) {
        let lost = self.word(header::BLOCKS_WITHOUT_PLACE);
        lost.store(lost.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Frees the blocks of threads that have ended. `opening` is the calling thread if it has no block: one with its
    /// number is that of a thread that has ended.
    fn free_ended_threads(&self, slots: &mut Slots, opening: Option<u64>) {
        for number in 0..slots.used() {
            if !slots.is_thread(number) {
                continue;
            }
            let thread = self.entry_word(number, entry::ID).load(Ordering::Relaxed);
            if opening == Some(thread) || has_ended(thread) {
                self.free_locked::<ThreadCounters>(slots, number);
            }
        }
        slots.end_sweep();
    }

    /// Zeroes the block of an entry, and publishes the entry.
    fn fill_entry<C: Counters>(
        &self,
        slots: &Slots,
        number: usize,
        id: u64,
        name: &str,
    ) -> (usize, NonNull<C>) {
        let (bytes, at) = (size_of::<C>(), slots.at(number));
        (0..bytes / 8).for_each(|word| self.word(at / 8 + word).store(0, Ordering::Relaxed));
        self.entry_word(number, entry::AT).store(at as u64, Ordering::Relaxed);
        self.entry_word(number, entry::WORDS_OF_BLOCK).store(bytes as u64 / 8, Ordering::Relaxed);
        self.publish::<C>(number, id, name);
        // SAFETY: the block lies inside the mapping.
        (number, unsafe { self.base.add(at) }.cast())
    }

    /// Writes the words of an entry that say what its block is.
    fn publish<C: Counters>(&self, number: usize, id: u64, name: &str) {
        static USES: AtomicU64 = AtomicU64::new(1);
        self.entry_word(number, entry::ID).store(id, Ordering::Relaxed);
        let name_at = (DIRECTORY_AT / 8 + number * entry::WORDS + entry::NAME) * 8;
        self.write_bytes(name_at, name.as_bytes(), entry::NAME_WORDS * 8);
        let uses = USES.fetch_add(1, Ordering::Relaxed);
        self.entry_word(number, entry::KIND)
            .store((uses << 32) | C::KIND as u64, Ordering::Release);
    }

    /// Frees a block, and adds its counters to those of blocks that are gone.
    pub(super) fn free<C: Counters>(&self, number: usize) {
        self.free_locked::<C>(&mut self.lock_slots(), number);
    }

    fn free_locked<C: Counters>(&self, slots: &mut Slots, number: usize) {
        let from = slots.at(number) / 8;
        match slots.ended(C::KIND) {
            Some(ended) => {
                self.add_block::<C>(from, slots.at(ended) / 8);
                self.entry_word(number, entry::KIND).store(0, Ordering::Release);
                slots.free(number);
            }
            // The first block of its kind that ends has the sums from now on, so a full page loses none.
            None => {
                self.entry_word(number, entry::KIND).store(0, Ordering::Release);
                self.zero_gauges::<C>(from);
                slots.set_ended(C::KIND, number);
                self.publish::<C>(number, entry::ENDED, "ended");
            }
        }
    }

    /// Adds the counters of one block to those of another. The gauges of a block that is gone are nothing.
    fn add_block<C: Counters>(&self, from: usize, to: usize) {
        for (place, shape) in words_of::<C>() {
            if shape != Shape::Gauge {
                let (sum, value) = (self.word(to + place), self.word(from + place));
                let value = value.load(Ordering::Relaxed);
                sum.store(sum.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
            }
        }
    }

    fn zero_gauges<C: Counters>(&self, at: usize) {
        let gauges = words_of::<C>().filter(|(_, shape)| *shape == Shape::Gauge);
        gauges.for_each(|(place, _)| self.word(at + place).store(0, Ordering::Relaxed));
    }

    fn entry_word(&self, number: usize, word: usize) -> &AtomicU64 {
        self.word(DIRECTORY_AT / 8 + number * entry::WORDS + word)
    }
}

/// The places of the words of a block, with their shapes.
fn words_of<C: Counters>() -> impl Iterator<Item = (usize, Shape)> {
    let shapes = C::FIELDS.iter().flat_map(|field| (0..field.shape.words()).map(|_| field.shape));
    shapes.enumerate()
}

/// Whether no thread of this process has the number. Another one may have got the number of a thread that has ended.
fn has_ended(thread: u64) -> bool {
    let (process, thread) = (std::process::id() as libc::pid_t, thread as libc::pid_t);
    // SAFETY: signal 0 is none: the call checks that the thread exists.
    let outcome = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) };
    outcome == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}
