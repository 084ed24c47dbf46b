//! `copy-bandwidth`: a window of 128 copies in flight (figure 5 of the paper on asynchronous memory
//! operations), against a loop of memcpy, a parallel loop, and blocking tasks.

use std::cell::RefCell;
use std::ops::Range;

use anyhow::Context;
use memferry::sys::affinity;
use memferry::{Ferry, Request, Transfer};
use rayon::prelude::*;

use crate::Progress;
use crate::harness::{
    Budget, BufferPair, FnCandidate, Harness, Role, Samples, memcpy, min_or_nan, set,
};
use crate::results::outcome::Outcome;
use crate::results::size;
use crate::{Bench, Effort};

pub(crate) static BENCH: Bench = Bench::new(
    "copy-bandwidth",
    "A window of 128 asynchronous copies, against memcpy, rayon and tokio",
    run,
);

const WINDOW: usize = 128;
const MAX_BYTES: usize = 4 << 20;
const MEMFERRY: &str = "memferry";
const MEMCPY: &str = "memcpy";
const RAYON: &str = "rayon";

fn run(mut outcome: Outcome, effort: Effort, progress: &dyn Progress) -> anyhow::Result<Outcome> {
    let sizes = match effort {
        Effort::Brief => vec![64 << 10, MAX_BYTES],
        Effort::Quick => vec![4 << 10, 64 << 10, 1 << 20, MAX_BYTES],
        Effort::Full => (12..=22).map(|shift| 1usize << shift).collect(),
    };
    progress.start(sizes.len() as u64 + 1, &outcome.bench);
    progress.step("preparing buffers");
    let ferry = Ferry::new()?;
    // One thread per core: more threads would compete for the cores.
    let cores = affinity::allowed_cores().len();
    // tokio panics if it cannot start its threads, so this loop checks that threads can be
    // started.
    for _ in 0..2 * cores {
        std::thread::Builder::new().spawn(|| ()).context("no thread could be started")?;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().max_blocking_threads(cores).build()?;
    // The buffers hold one window of the largest copies, so no two copies in flight share a
    // byte.
    let mut pair = BufferPair::new(WINDOW * MAX_BYTES)?;
    let mut worst = f64::INFINITY;
    let mut against_rayon = Vec::new();
    for bytes in sizes {
        progress.step(&size::format(bytes as u64));
        let times = measure(&ferry, &runtime, &mut pair, bytes, effort);
        let moved = (WINDOW * bytes) as u64;
        outcome.rows.extend(times.bandwidth_rows("cold", bytes as u64, moved));
        let summary = &mut outcome.summary;
        worst = worst.min(times.ratio(MEMFERRY, MEMCPY));
        against_rayon.push(times.ratio(MEMFERRY, RAYON));
        if bytes == 64 << 10 {
            set(summary, "cold_64k_vs_memcpy", times.ratio(MEMFERRY, MEMCPY));
            set(summary, "cold_64k_vs_rayon", times.ratio(MEMFERRY, RAYON));
        }
        if bytes == MAX_BYTES {
            set(summary, "cold_4m_vs_memcpy", times.ratio(MEMFERRY, MEMCPY));
            set(summary, "cold_4m_vs_rayon", times.ratio(MEMFERRY, RAYON));
        }
    }
    set(&mut outcome.summary, "worst_vs_memcpy", worst);
    set(&mut outcome.summary, "worst_vs_rayon", min_or_nan(against_rayon));
    outcome.notes.push(
        "Each run posts 128 copies at successive places of two 512 MiB buffers and waits for \
         all of them. rayon has one thread per core, of which the caller is one; tokio runs each copy with spawn_blocking \
         on as many threads. rayon and tokio copy with memcpy; ours writes around the caches \
         where that was measured to pay."
            .into(),
    );
    Ok(outcome)
}

/// Range of the buffers for the next window. Windows are contiguous and wrap around, so the data is
/// not in a cache when its window comes again.
struct WindowCursor {
    window_bytes: usize,
    total: usize,
    next: usize,
}

impl WindowCursor {
    fn next(&mut self) -> Range<usize> {
        let start = self.next;
        self.next = (start + self.window_bytes) % self.total;
        start..start + self.window_bytes
    }
}

fn measure(
    ferry: &Ferry,
    runtime: &tokio::runtime::Runtime,
    pair: &mut BufferPair,
    bytes: usize,
    effort: Effort,
) -> Samples {
    let source = pair.source.as_slice();
    let total = source.len();
    let state = RefCell::new((
        WindowCursor { window_bytes: WINDOW * bytes, total, next: 0 },
        pair.target.as_mut_slice(),
    ));
    let state = &state;
    let on_window = move |run: &mut dyn FnMut(&[u8], &mut [u8])| {
        let (place, target) = &mut *state.borrow_mut();
        let range = place.next();
        run(&source[range.clone()], &mut target[range]);
    };
    let pieces = move |run: &mut dyn FnMut(&[u8], &mut [u8])| {
        on_window(&mut |source, target| {
            for (source, target) in source.chunks(bytes).zip(target.chunks_mut(bytes)) {
                run(source, target);
            }
        });
    };
    on_window(&mut |source, target| {
        target.fill(0);
        memferry_window(ferry, source, target, bytes);
        assert!(source == target, "a byte is wrong");
    });
    let mut candidates = [
        FnCandidate::new(MEMCPY, Role::Peer, move || {
            pieces(&mut |source, target| memcpy(target, source));
        }),
        FnCandidate::new(MEMFERRY, Role::Memferry, move || {
            on_window(&mut |s, t| memferry_window(ferry, s, t, bytes));
        }),
        FnCandidate::new(RAYON, Role::Peer, move || {
            on_window(&mut |source, target| {
                in_rayon(|| {
                    (target.par_chunks_mut(bytes).zip(source.par_chunks(bytes)))
                        .for_each(|(target, source)| memcpy(target, source));
                });
            });
        }),
        FnCandidate::new("tokio spawn_blocking", Role::Peer, move || {
            on_window(&mut |source, target| tokio_window(runtime, source, target, bytes));
        }),
    ];
    let usual = Budget::of_calls(effort);
    let budget = Budget { rounds: usual.rounds.min(11), ..usual };
    Harness::new(budget).interleave(&mut candidates)
}

/// Runs `work` in a pool of one thread for each core, of which the calling thread is one: so it pays for
/// no hand-over to the pool and back, and copies too.
fn in_rayon(work: impl FnOnce() + Send) {
    thread_local! {
        static POOL: Option<rayon::ThreadPool> = rayon::ThreadPoolBuilder::new()
            .num_threads(affinity::allowed_cores().len())
            .use_current_thread()
            .build()
            .ok();
    }
    POOL.with(|pool| match pool {
        Some(pool) => pool.install(work),
        None => work(),
    });
}

fn memferry_window(ferry: &Ferry, source: &[u8], target: &mut [u8], bytes: usize) {
    let posted: Vec<Transfer> = (source.chunks(bytes).zip(target.chunks_mut(bytes)))
        .map(|(source, target)| {
            let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), bytes);
            // SAFETY: the chunks are disjoint and borrowed until this function returns, and it
            // returns after every transfer is complete.
            unsafe { ferry.start_raw(request) }.expect("the ranges are valid")
        })
        .collect();
    for transfer in posted {
        transfer.wait().expect("memory of this process is good");
    }
}

/// Addresses and length of one copy, for a blocking thread.
struct CopySpan(*const u8, *mut u8, usize);

// SAFETY: the ranges at these addresses are disjoint plain bytes.
unsafe impl Send for CopySpan {}

impl CopySpan {
    fn copy(self) {
        let Self(source, target, bytes) = self;
        // SAFETY: `tokio_window` borrows both ranges and does not return before every chunk is
        // copied; no two chunks share a byte.
        let (source, target) = unsafe {
            (
                std::slice::from_raw_parts(source, bytes),
                std::slice::from_raw_parts_mut(target, bytes),
            )
        };
        memcpy(target, source);
    }
}

fn tokio_window(runtime: &tokio::runtime::Runtime, source: &[u8], target: &mut [u8], bytes: usize) {
    let pieces: Vec<_> = (source.chunks(bytes).zip(target.chunks_mut(bytes)))
        .map(|(source, target)| CopySpan(source.as_ptr(), target.as_mut_ptr(), bytes))
        .collect();
    runtime.block_on(async {
        let copy = |piece: CopySpan| tokio::task::spawn_blocking(move || piece.copy());
        let tasks: Vec<_> = pieces.into_iter().map(copy).collect();
        for task in tasks {
            task.await.expect("a copy does not panic");
        }
    });
}
