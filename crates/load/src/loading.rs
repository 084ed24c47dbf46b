//! A load in progress: its threads, its progress, how it ends.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memferry_copy::Ferry;
use memferry_engine::contract::DEVICE_STREAM_MARKS;
use rustix::time::{ClockId, clock_gettime};

use crate::block_reader::ReadCounters;
use crate::blocks::Block;
use crate::error::LoadError;
use crate::staged_copies::StagedCopies;
use crate::staging_ring::{SpareRing, StagingRing};
use crate::{FileSource, ReadMode};

/// How many buffers a reader thread has: one is read into while the others are copied.
pub(crate) const SLOTS_PER_THREAD: usize = 3;
const _: () = assert!(SLOTS_PER_THREAD <= DEVICE_STREAM_MARKS);

/// What a load did.
///
/// ```
/// # fn show(report: memferry::load::LoadReport) {
/// println!("{:.1} GB/s", report.bytes as f64 / report.elapsed.as_secs_f64() / 1e9);
/// println!("{} of {} bytes were in the page cache", report.cached_bytes, report.bytes);
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// The bytes that were delivered.
    pub bytes: u64,
    /// From the start of the load to its end.
    pub elapsed: Duration,
    /// The processor time of the reader threads.
    pub cpu_time: Duration,
    /// Bytes that the page cache had.
    pub cached_bytes: u64,
    /// Bytes that were read past the page cache.
    pub direct_bytes: u64,
    /// Bytes that were read through the page cache.
    pub buffered_bytes: u64,
    /// The number of reader threads.
    pub threads: usize,
    /// The size of the staging buffers; 0 if the target is host memory.
    pub staging_bytes: usize,
}

/// What the threads of a load share.
pub(crate) struct LoadState {
    pub(crate) ferry: Ferry,
    pub(crate) files: Vec<FileSource>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) mode: ReadMode,
    /// The buffers, if the target is a device.
    pub(crate) ring: Option<StagingRing>,
    pub(crate) block_bytes: usize,
    pub(crate) threads: usize,
    total: u64,
    next: AtomicUsize,
    pub(crate) delivered: AtomicU64,
    cpu_ns: AtomicU64,
    is_stopping: AtomicBool,
    counters: ReadCounters,
    outcome: Mutex<Outcome>,
    has_ended: Condvar,
}

#[derive(Default)]
struct Outcome {
    running: usize,
    error: Option<LoadError>,
    ended: Option<Instant>,
}

/// A load in progress. Dropping it cancels the load and waits for its threads.
///
/// ```no_run
/// # use std::time::Duration;
/// # fn show(mut loading: memferry::load::Loading) -> Result<(), memferry::load::LoadError> {
/// let report = loop {
///     match loading.wait_timeout(Duration::from_millis(100)) {
///         Some(report) => break report?,
///         None => println!("{} of {} bytes", loading.delivered_bytes(), loading.total_bytes()),
///     }
/// };
/// println!("{:?}", report.elapsed);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Loading {
    state: Arc<LoadState>,
    spare_ring: Arc<SpareRing>,
    threads: Vec<JoinHandle<()>>,
    started: Instant,
}

impl std::fmt::Debug for LoadState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadState")
            .field("files", &self.files.len())
            .field("blocks", &self.blocks.len())
            .field("delivered", &self.delivered)
            .finish_non_exhaustive()
    }
}

impl LoadState {
    pub(crate) fn new(
        ferry: Ferry,
        files: Vec<FileSource>,
        blocks: Vec<Block>,
        mode: ReadMode,
        ring: Option<StagingRing>,
        (block_bytes, threads): (usize, usize),
    ) -> Self {
        let total = blocks.iter().map(Block::bytes).sum();
        Self {
            ferry,
            files,
            blocks,
            mode,
            ring,
            block_bytes,
            threads,
            total,
            next: AtomicUsize::new(0),
            delivered: AtomicU64::new(0),
            cpu_ns: AtomicU64::new(0),
            is_stopping: AtomicBool::new(false),
            counters: ReadCounters::default(),
            outcome: Mutex::default(),
            has_ended: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next block, or none if all are taken or the load is to end.
    fn claim(&self) -> Option<&Block> {
        if self.is_stopping.load(Ordering::Relaxed) {
            return None;
        }
        self.blocks.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Ends the load with an error; the first one is kept.
    fn fail(&self, error: LoadError) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.lock().error.get_or_insert(error);
    }

    /// What a reader thread does.
    fn run(&self, thread: usize) {
        let _ending = ThreadEnd(self);
        let outcome = match &self.ring {
            Some(ring) => self.run_staged(ring, thread),
            None => self.run_straight(),
        };
        if let Err(error) = outcome {
            self.fail(error);
        }
    }

    /// Reads blocks straight into host memory.
    fn run_straight(&self) -> Result<(), LoadError> {
        while let Some(block) = self.claim() {
            let file = &self.files[block.file];
            for part in &block.parts {
                // SAFETY: the contract of `Loader::start_raw`: the target is valid for writes and
                // nobody else accesses it until the load has ended. Parts of one target do not
                // overlap, and each belongs to one block, which one thread has claimed.
                let target = unsafe { std::slice::from_raw_parts_mut(part.target.0, part.length) };
                file.read_into(block.offset + part.start as u64, target, &self.counters)?;
                self.delivered.fetch_add(part.length as u64, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Reads blocks into buffers of its own and starts their copies to the device.
    fn run_staged(&self, ring: &StagingRing, thread: usize) -> Result<(), LoadError> {
        let mut copies = StagedCopies::open(&self.ferry, ring);
        let mut turn = 0;
        let mut outcome = Ok(());
        while outcome.is_ok()
            && let Some(block) = self.claim()
        {
            let slot = turn % SLOTS_PER_THREAD;
            let buffer = ring.slot(thread * SLOTS_PER_THREAD + slot);
            outcome = copies.finish(slot, self).and_then(|()| {
                self.read(block, buffer)?;
                // SAFETY: the parts lie inside the buffer, which is not written before the copies
                // of its slot are finished; the targets are valid by the contract of
                // `Loader::start_raw`, until this thread has ended.
                unsafe { copies.start(slot, &self.ferry, block, buffer) }
            });
            turn += 1;
        }
        // Also after an error: buffers and targets are in use until their copies are complete.
        for slot in 0..SLOTS_PER_THREAD {
            let finished = copies.finish(slot, self);
            outcome = outcome.and(finished);
        }
        outcome
    }

    /// Reads one block into a buffer that no copy uses.
    fn read(&self, block: &Block, buffer: *mut u8) -> Result<(), LoadError> {
        // SAFETY: the buffer has this length, belongs to this thread, and its copies are complete.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffer, self.block_bytes) };
        let file = &self.files[block.file];
        file.read_block(block.offset, block.wanted(), bytes, self.mode, &self.counters)
    }
}

/// Counts a thread as ended, also when it panics: whoever waits for the load must not hang.
struct ThreadEnd<'a>(&'a LoadState);

impl Drop for ThreadEnd<'_> {
    fn drop(&mut self) {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        let spent = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        self.0.cpu_ns.fetch_add(spent, Ordering::Relaxed);
        if std::thread::panicking() {
            // The load has failed: the other threads need not read the rest.
            self.0.is_stopping.store(true, Ordering::Relaxed);
        }
        self.0.forget_threads(1);
    }
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_owned()
}

impl Loading {
    /// Starts the threads of a load.
    pub(crate) fn start(state: LoadState, spare_ring: Arc<SpareRing>) -> Result<Self, LoadError> {
        let count = state.threads.min(state.blocks.len());
        state.lock().running = count;
        if count == 0 {
            state.lock().ended = Some(Instant::now());
        }
        let (state, started) = (Arc::new(state), Instant::now());
        let mut loading = Self { state, spare_ring, threads: Vec::new(), started };
        for number in 0..count {
            let state = loading.state.clone();
            match memferry_sys::thread::spawn("memferry-load", move || state.run(number)) {
                Ok(thread) => loading.threads.push(thread),
                // The threads that run do all of the work.
                Err(_) if number > 0 => {
                    loading.state.forget_threads(count - number);
                    break;
                }
                Err(error) => {
                    loading.state.forget_threads(count);
                    return Err(LoadError::Thread(error));
                }
            }
        }
        Ok(loading)
    }

    /// How many bytes are to be delivered.
    pub fn total_bytes(&self) -> u64 {
        self.state.total
    }

    /// How many bytes have been delivered.
    pub fn delivered_bytes(&self) -> u64 {
        self.state.delivered.load(Ordering::Relaxed)
    }

    /// Lets the load end soon, with [`LoadError::Cancelled`] unless it is complete by then.
    pub fn cancel(&self) {
        self.state.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Waits until the load has ended.
    pub fn wait(mut self) -> Result<LoadReport, LoadError> {
        let mut outcome = self.state.lock();
        while outcome.ended.is_none() {
            outcome = self.state.has_ended.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
        drop(outcome);
        self.finish()
    }

    /// Waits until the load has ended, or for a time. After the end it returns the outcome once.
    pub fn wait_timeout(&mut self, timeout: Duration) -> Option<Result<LoadReport, LoadError>> {
        let outcome = self.state.lock();
        let wait = self
            .state
            .has_ended
            .wait_timeout_while(outcome, timeout, |outcome| outcome.ended.is_none());
        let (outcome, _) = wait.unwrap_or_else(PoisonError::into_inner);
        let has_ended = outcome.ended.is_some();
        drop(outcome);
        has_ended.then(|| self.finish())
    }

    /// Joins the threads, which have ended or will end soon, and makes the report.
    fn finish(&mut self) -> Result<LoadReport, LoadError> {
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join() {
                self.state.fail(LoadError::Panicked(panic_message(&*panic)));
            }
        }
        let mut outcome = self.state.lock();
        if let Some(error) = outcome.error.take() {
            return Err(error);
        }
        if self.delivered_bytes() != self.total_bytes() {
            return Err(LoadError::Cancelled);
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.state.counters;
        Ok(LoadReport {
            bytes: self.total_bytes(),
            elapsed: outcome.ended.map_or(Duration::ZERO, |at| at - self.started),
            cpu_time: Duration::from_nanos(load(&self.state.cpu_ns)),
            cached_bytes: load(&counters.cached),
            direct_bytes: load(&counters.direct.bytes),
            buffered_bytes: load(&counters.buffered.bytes),
            threads: self.state.threads.min(self.state.blocks.len()),
            staging_bytes: self.state.ring.as_ref().map_or(0, StagingRing::bytes),
        })
    }
}

impl LoadState {
    /// Counts threads that have ended, or that could not be started.
    fn forget_threads(&self, count: usize) {
        let mut outcome = self.lock();
        outcome.running -= count;
        if outcome.running == 0 {
            outcome.ended.get_or_insert_with(Instant::now);
            self.has_ended.notify_all();
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.cancel();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // No thread has the state any more: the ring is free for the next load.
        if let Some(ring) = Arc::get_mut(&mut self.state).and_then(|state| state.ring.take()) {
            self.spare_ring.put_back(ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{Part, TargetAddress};

    #[test]
    fn a_reader_that_panics_is_an_error_that_says_so() {
        let part = Part { start: 0, length: 1, target: TargetAddress(std::ptr::null_mut()) };
        // A block of a file that does not exist.
        let block = || Block { file: 7, offset: 0, parts: vec![part] };
        let (ferry, sizes) = (Ferry::new().unwrap(), (1 << 20, 2));
        let blocks = vec![block(), block()];
        let state = LoadState::new(ferry, Vec::new(), blocks, ReadMode::Auto, None, sizes);
        let loading = Loading::start(state, Arc::default()).unwrap();
        let error = loading.wait().unwrap_err();
        assert!(matches!(&error, LoadError::Panicked(_)), "{error:?}");
        assert!(error.to_string().starts_with("a reader thread panicked: index out of bounds"));
    }
}
