//! `copy-bandwidth`: a window of 128 copies in flight (figure 5 of the paper on asynchronous
//! memory operations), against a loop of memcpy, a parallel loop, and blocking tasks.

use std::cell::RefCell;
use std::ops::Range;

use anyhow::Context;
use memferry::sys::affinity;
use memferry::{Ferry, Request, Transfer};
use rayon::prelude::*;

use super::measure::{Contestant, Pair, Patience, Times, contest, memcpy, set};
use super::{Bench, Effort};
use crate::outcome::Outcome;
use crate::show::Progress;
use crate::size;

pub(super) struct CopyBandwidth;

const WINDOW: usize = 128;
const LARGEST: usize = 4 << 20;
const OURS: &str = "memferry";
const RAYON: &str = "rayon";

impl Bench for CopyBandwidth {
    fn name(&self) -> &'static str {
        "copy-bandwidth"
    }

    fn about(&self) -> &'static str {
        "A window of 128 asynchronous copies, against memcpy, rayon and tokio"
    }

    fn run(&self, effort: Effort, progress: &Progress) -> anyhow::Result<Outcome> {
        let sizes = match effort {
            Effort::Brief => vec![64 << 10, LARGEST],
            Effort::Quick => vec![4 << 10, 64 << 10, 1 << 20, LARGEST],
            Effort::Full => (12..=22).map(|shift| 1usize << shift).collect(),
        };
        progress.start(sizes.len() as u64 + 1, self.name());
        progress.step("preparing buffers");
        let ferry = Ferry::new()?;
        // As many threads as cores: more would only get in each other's way.
        let cores = affinity::allowed_cores().len();
        // The runtime panics where it cannot start its threads: ask the system first.
        for _ in 0..2 * cores {
            std::thread::Builder::new().spawn(|| ()).context("no thread could be started")?;
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().max_blocking_threads(cores).build()?;
        // As large as a window of the largest copies: no two copies in flight share a byte.
        let mut pair = Pair::new(WINDOW * LARGEST)?;
        let mut outcome = Outcome::new(self.name());
        let mut worst = f64::INFINITY;
        for bytes in sizes {
            progress.step(&size::format(bytes as u64));
            let times = measure(&ferry, &runtime, &mut pair, bytes, effort);
            let moved = (WINDOW * bytes) as u64;
            outcome.rows.extend(times.bandwidth_rows("cold", bytes as u64, moved));
            let summary = &mut outcome.summary;
            worst = worst.min(times.speedup(OURS));
            if bytes == 64 << 10 {
                set(summary, "cold_64k_vs_memcpy", times.speedup(OURS));
                set(summary, "cold_64k_vs_rayon", times.speedup_over(OURS, RAYON));
            }
            if bytes == LARGEST {
                set(summary, "cold_4m_vs_memcpy", times.speedup(OURS));
                set(summary, "cold_4m_vs_rayon", times.speedup_over(OURS, RAYON));
            }
        }
        set(&mut outcome.summary, "worst_vs_memcpy", worst);
        outcome.notes.push(
            "Each run posts 128 copies at successive places of two 512 MiB buffers and waits for \
             all of them. rayon has one thread per core; tokio runs each copy with spawn_blocking \
             on as many threads. rayon and tokio copy with memcpy; ours writes around the caches \
             where that was measured to pay."
                .into(),
        );
        Ok(outcome)
    }
}

/// Which part of the buffers the next window uses: successive ones, so that nothing is in a cache.
struct Place {
    window_bytes: usize,
    total: usize,
    next: usize,
}

impl Place {
    fn next(&mut self) -> Range<usize> {
        let start = self.next;
        self.next = (start + self.window_bytes) % self.total;
        start..start + self.window_bytes
    }
}

fn measure(
    ferry: &Ferry,
    runtime: &tokio::runtime::Runtime,
    pair: &mut Pair,
    bytes: usize,
    effort: Effort,
) -> Times {
    let source = pair.source.as_slice();
    let total = source.len();
    let state = RefCell::new((
        Place { window_bytes: WINDOW * bytes, total, next: 0 },
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
        our_window(ferry, source, target, bytes);
        assert!(source == target, "a byte is wrong");
    });
    let contestants = vec![
        Contestant::new("memcpy", move || pieces(&mut |source, target| memcpy(target, source))),
        Contestant::new(OURS, move || on_window(&mut |s, t| our_window(ferry, s, t, bytes))),
        Contestant::new(RAYON, move || {
            on_window(&mut |source, target| {
                (target.par_chunks_mut(bytes).zip(source.par_chunks(bytes)))
                    .for_each(|(target, source)| memcpy(target, source));
            });
        }),
        Contestant::new("tokio spawn_blocking", move || {
            on_window(&mut |source, target| tokio_window(runtime, source, target, bytes));
        }),
    ];
    let usual = Patience::of(effort);
    contest(contestants, Patience { rounds: usual.rounds.min(11), ..usual })
}

fn our_window(ferry: &Ferry, source: &[u8], target: &mut [u8], bytes: usize) {
    let posted: Vec<Transfer> = (source.chunks(bytes).zip(target.chunks_mut(bytes)))
        .map(|(source, target)| {
            let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), bytes);
            // SAFETY: the pieces are disjoint, borrowed until this function returns, and it
            // returns after every transfer is over.
            unsafe { ferry.start(request) }.expect("the ranges are valid")
        })
        .collect();
    for transfer in posted {
        transfer.wait().expect("memory of this process is good");
    }
}

/// Addresses of one copy that may cross to a blocking thread.
struct Piece(*const u8, *mut u8, usize);

// SAFETY: the ranges behind the addresses are disjoint plain bytes.
unsafe impl Send for Piece {}

impl Piece {
    fn copy(self) {
        let Self(source, target, bytes) = self;
        // SAFETY: `tokio_window` borrows both ranges and does not return before every piece is
        // copied; no two pieces share a byte.
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
        .map(|(source, target)| Piece(source.as_ptr(), target.as_mut_ptr(), bytes))
        .collect();
    runtime.block_on(async {
        let copy = |piece: Piece| tokio::task::spawn_blocking(move || piece.copy());
        let tasks: Vec<_> = pieces.into_iter().map(copy).collect();
        for task in tasks {
            task.await.expect("a copy does not panic");
        }
    });
}
