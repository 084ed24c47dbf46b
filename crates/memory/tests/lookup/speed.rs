//! What a hit costs. Nothing is asserted: the numbers are for reading.
//!
//! ```text
//! cargo test -p memferry-memory --release --test lookup -- --ignored --nocapture speed
//! ```
#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::{Lookup, Route, Settings};

use memferry_sys::clock::thread_cpu_ns;

use crate::support::{Truth, lookup, page, page_bytes, settings};

const HITS: u64 = 20_000_000;

/// Nanoseconds of one hit with its release, for a thread that goes over some pages.
/// The processor's time, because others may run on it meanwhile.
fn hit_ns(lookup: &Lookup<Truth>, process: ProcessHandle, first: u64, pages: u64) -> f64 {
    let handles: Vec<_> = (first..first + pages).map(|number| page(process, number)).collect();
    let rounds = HITS / pages;
    let begun_ns = thread_cpu_ns();
    for _ in 0..rounds {
        for handle in &handles {
            black_box(lookup.translate(black_box(*handle), Route::Send).unwrap().entry());
        }
    }
    (thread_cpu_ns() - begun_ns) as f64 / (rounds * pages) as f64
}

/// Nanoseconds of two locked additions to one word, of which no hit can have fewer.
fn floor_ns() -> f64 {
    let word = AtomicU64::new(0);
    let begun_ns = thread_cpu_ns();
    for _ in 0..HITS {
        black_box(&word).fetch_add(1, Ordering::Acquire);
        black_box(&word).fetch_sub(1, Ordering::Release);
    }
    (thread_cpu_ns() - begun_ns) as f64 / HITS as f64
}

fn print_costs(what: &str, settings: Settings) {
    let (lookup, _) = lookup(settings);
    let process = lookup.add_process().unwrap();
    lookup.prepare(process, 0, 4096 * page_bytes()).unwrap();
    for number in 0..4096 {
        lookup.translate(page(process, number), Route::Send).unwrap();
    }
    println!("{what}: one page            {:5.1} ns", hit_ns(&lookup, process, 0, 1));
    println!("{what}: 4096 pages in turn  {:5.1} ns", hit_ns(&lookup, process, 0, 4096));
    for (how, distance) in [("own lines", 1024), ("the same line", 0)] {
        let costs = std::thread::scope(|scope| {
            let other = scope.spawn(|| hit_ns(&lookup, process, distance, 1));
            (hit_ns(&lookup, process, 0, 1), other.join().unwrap())
        });
        println!("{what}: two threads, {how}: {:5.1} and {:5.1} ns", costs.0, costs.1);
    }
}

#[test]
#[ignore = "a measurement"]
fn speed_of_a_hit() {
    println!("two locked additions:                      {:5.1} ns", floor_ns());
    print_costs("cache (16384, 64, 4)", settings(16 << 10, 64, 4));
    print_costs("cache (16384, 8, 8) ", settings(16 << 10, 8, 8));
    print_costs("full table          ", Settings::full());
}

#[test]
#[ignore = "a measurement"]
fn speed_of_a_miss() {
    const MISSES: u64 = 200_000;
    for (what, helping) in [("miss thread", false), ("helping", true)] {
        for entries in [256, 16 << 10] {
            let (lookup, _) = lookup(Settings { helping, ..settings(entries, 1, 4) });
            let process = lookup.add_process().unwrap();
            let lines = 2 * entries as u64;
            lookup.prepare(process, 0, lines * page_bytes()).unwrap();
            let begun = Instant::now();
            for miss in 0..MISSES {
                drop(lookup.translate(page(process, miss % lines), Route::Send).unwrap());
            }
            let each_ns = begun.elapsed().as_secs_f64() * 1e9 / MISSES as f64;
            let counters = lookup.counters();
            println!(
                "{what}, {entries} lines: {each_ns:.0} ns a miss of a line in the table; delay {} ns, \
                 processing {} ns (medians)",
                counters.delay_ns.median(),
                counters.processing_ns.median()
            );
        }
    }
}
