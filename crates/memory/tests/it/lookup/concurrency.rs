//! Concurrent lookups, prefetches, sweeps, invalidations and replaced processes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::thread::ScopedJoinHandle;

use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::trace::replay;
use memferry_memory::lookup::{
    AttachError, DataPath, LineKey, Lookup, LookupConfig, LookupCounters, LookupError, MissPolicy,
    TableKind, Translation, TranslationBackend,
};

use crate::lookup::support::{SharedBuffer, Truth, config, lookup, page, page_bytes, truth};

const PAGES: u64 = 256;

/// Pseudo-random numbers, seeded for each thread.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn check(translation: &Translation<'_>, source: &Truth, process: ProcessHandle, number: u64) {
    assert!(source.is_attached(translation.line()), "in use and not attached");
    assert_eq!(translation.line().process, process);
    for (following, entry) in translation.remaining().enumerate() {
        assert_eq!(entry, truth(process, (number + following as u64) * page_bytes()));
    }
    assert!(source.is_attached(translation.line()), "detached while in use");
}

/// A reader thread: translates, holds some translations, prefetches.
fn use_memory(
    lookup: &Lookup<Truth>,
    source: &Truth,
    processes: &RwLock<Vec<ProcessHandle>>,
    mut dice: Dice,
    rounds: u64,
) -> u64 {
    let mut found = 0;
    for _ in 0..rounds {
        let process = processes.read().unwrap()[dice.roll(2) as usize];
        let number = dice.roll(PAGES);
        let handle = page(process, number);
        let outcome = match dice.roll(8) {
            0 => {
                lookup.prefetch(handle, DataPath::Send);
                continue;
            }
            1 => lookup.find(handle, DataPath::Send).map(|found| found.ok_or(())),
            _ => lookup.translate(handle, DataPath::Receive).map(Ok),
        };
        match outcome {
            Ok(Ok(translation)) => {
                check(&translation, source, process, number);
                // A second translation, of the same line or of another, while the first is held.
                let other = if dice.roll(2) == 0 { number } else { dice.roll(PAGES) };
                match lookup.find(page(process, other), DataPath::Send) {
                    Ok(Some(second)) => check(&second, source, process, other),
                    Ok(None) | Err(LookupError::Stale(_)) => {}
                    Err(error) => panic!("{error}"),
                }
                check(&translation, source, process, number);
                found += 1;
            }
            Ok(Err(())) => {}
            Err(LookupError::NotCached) => std::thread::yield_now(),
            Err(LookupError::Stale(stale)) => assert_eq!(stale, process),
            Err(LookupError::Invalidated) => {}
            Err(error) => panic!("{error}"),
        }
    }
    found
}

/// An invalidating thread: invalidates ranges and replaces processes.
fn take_memory(
    lookup: &Lookup<Truth>,
    source: &Truth,
    processes: &RwLock<Vec<ProcessHandle>>,
    over: &AtomicBool,
) {
    let mut dice = Dice(99);
    while !over.load(Ordering::Relaxed) {
        let slot = dice.roll(2) as usize;
        let process = processes.read().unwrap()[slot];
        if dice.roll(8) == 0 {
            // Users of the old handle get an error.
            processes.write().unwrap()[slot] = lookup.add_process().unwrap();
            lookup.remove_process(process);
            for number in 0..PAGES {
                let address = number * page_bytes();
                assert!(!source.is_attached(LineKey { process, address }));
            }
        } else {
            lookup.invalidate(
                process,
                dice.roll(PAGES) * page_bytes(),
                dice.roll(40) * page_bytes(),
            );
        }
        std::thread::yield_now();
    }
}

fn stress(settings: LookupConfig) {
    const ROUNDS: u64 = 6_000;
    let (lookup, source) = lookup(settings);
    let processes = RwLock::new(vec![lookup.add_process().unwrap(), lookup.add_process().unwrap()]);
    let over = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        let (lookup, source, processes, over) = (&lookup, &source, &processes, &over);
        let users: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn(move || use_memory(lookup, source, processes, Dice(seed), ROUNDS))
            })
            .collect();
        let taker = scope.spawn(move || take_memory(lookup, source, processes, over));
        let found: Vec<_> = users.into_iter().map(ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        taker.join().unwrap();
        found.into_iter().map(Result::unwrap).sum::<u64>()
    });
    assert!(found > 0);
    let counters = lookup.counters();
    assert!(counters.evictions > 0 && counters.detached > 0, "{counters:?}");
    drop(lookup);
    assert_eq!(source.attached(), 0);
}

fn small() -> LookupConfig {
    LookupConfig { high_water_lines: 24, sweep_every: 16, queue_length: 3, ..config(32, 4, 2) }
}

#[test]
fn a_crowd_that_helps_never_uses_what_is_not_attached() {
    stress(small());
}

#[test]
fn a_crowd_that_waits_for_the_thread_never_uses_what_is_not_attached() {
    stress(LookupConfig { inline_misses: false, ..small() });
}

#[test]
fn a_crowd_that_comes_again_never_uses_what_is_not_attached() {
    stress(LookupConfig { policy: MissPolicy::Retry, ..small() });
}

/// The flat table, with ranges that are invalidated and preloaded again.
#[test]
fn a_crowd_on_the_full_table_never_uses_what_is_not_attached() {
    let (lookup, source) = lookup(LookupConfig::flat());
    let process = lookup.add_process().unwrap();
    let length = PAGES * page_bytes();
    lookup.preload(process, 0, length).unwrap();
    let found = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (lookup, source, found) = (&lookup, &source, &found);
            scope.spawn(move || {
                let mut dice = Dice(seed);
                for _ in 0..20_000 {
                    let number = dice.roll(PAGES);
                    if let Some(here) = lookup.find(page(process, number), DataPath::Send).unwrap()
                    {
                        check(&here, source, process, number);
                        found.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut dice = Dice(77);
        for _ in 0..500 {
            let address = dice.roll(PAGES) * page_bytes();
            lookup.invalidate(process, address, dice.roll(100) * page_bytes());
            lookup.preload(process, 0, length).unwrap();
        }
    });
    assert!(found.into_inner() > 0);
    assert_eq!(source.attached() as u64 * 64, PAGES);
    drop(lookup);
    assert_eq!(source.attached(), 0);
}

/// A backend whose attach calls wait until the test releases them.
#[derive(Debug, Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    waiting: AtomicU64,
    attaches: AtomicU64,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl TranslationBackend for Gate {
    fn attach(&self, _: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut open = self.open.lock().unwrap();
        while !*open {
            open = self.changed.wait(open).unwrap();
        }
        self.attaches.fetch_add(1, Ordering::SeqCst);
        entries.fill(1);
        Ok(())
    }

    fn detach(&self, _: LineKey, _: &[u64]) {}
}

fn gated_lookup(settings: LookupConfig) -> (Lookup<Arc<Gate>>, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    (Lookup::new(settings, gate.clone()).unwrap(), gate)
}

#[test]
fn misses_of_one_line_are_merged() {
    for helping in [true, false] {
        let (lookup, gate) =
            gated_lookup(LookupConfig { inline_misses: helping, ..config(64, 8, 2) });
        let process = lookup.add_process().unwrap();
        std::thread::scope(|scope| {
            for number in 0..8 {
                let lookup = &lookup;
                scope.spawn(move || {
                    assert_eq!(
                        lookup.translate(page(process, number), DataPath::Send).unwrap().entry(),
                        1
                    );
                });
            }
            until_lookups(&lookup, 8);
            gate.open();
        });
        assert_eq!(gate.attaches.load(Ordering::SeqCst), 1);
        let counters = lookup.counters();
        assert_eq!((counters.misses.send.cold, counters.retries, counters.fills), (1, 7, 1));
    }
}

/// Waits until so many lookups of the send path are counted as misses or retries.
fn until_lookups(lookup: &Lookup<Arc<Gate>>, number: u64) {
    memferry_testing::until("the lookups are counted", || {
        let counters = lookup.counters();
        counters.misses.send.total() + counters.retries >= number
    });
}

/// A lookup that is recorded and whose backend waits for a gate, and a process.
fn recorded_lookup(
    inline_misses: bool,
) -> (Lookup<Arc<Gate>>, Arc<Gate>, SharedBuffer, ProcessHandle) {
    let (mut lookup, gate) = gated_lookup(LookupConfig { inline_misses, ..config(64, 8, 2) });
    let recording = SharedBuffer::default();
    lookup.start_recording(Box::new(recording.clone())).unwrap();
    let process = lookup.add_process().unwrap();
    (lookup, gate, recording, process)
}

/// Compares a recorded run with the replay of its recording. In a replay every line is attached at
/// once, so that what had to be retried hits.
fn assert_replay_agrees(mut lookup: Lookup<Arc<Gate>>, recording: &SharedBuffer) -> LookupCounters {
    lookup.end_recording().unwrap();
    let counters = lookup.counters();
    let TableKind::Cached(geometry) = lookup.config().kind else { panic!("not a cache") };
    let replayed = replay(&recording.contents()[..], geometry).unwrap();
    assert_eq!(replayed.misses, counters.misses);
    assert_eq!(replayed.hits.send, counters.hits.send + counters.retries);
    counters
}

#[test]
fn two_threads_on_one_line_count_the_miss_that_a_replay_counts() {
    for inline_misses in [true, false] {
        let (lookup, gate, recording, process) = recorded_lookup(inline_misses);
        std::thread::scope(|scope| {
            let lookup = &lookup;
            for number in 0..2 {
                scope.spawn(move || {
                    drop(lookup.translate(page(process, number), DataPath::Send).unwrap());
                });
            }
            until_lookups(lookup, 2);
            gate.open();
        });
        let counters = assert_replay_agrees(lookup, &recording);
        assert_eq!((counters.misses.send.cold, counters.retries), (1, 1));
    }
}

#[test]
fn an_access_that_waits_for_a_posted_one_counts_no_second_miss() {
    let (lookup, gate, recording, process) = recorded_lookup(false);
    let posted = lookup.try_translate(page(process, 0), DataPath::Send).map(drop);
    assert_eq!(posted, Err(LookupError::NotCached));
    std::thread::scope(|scope| {
        let lookup = &lookup;
        scope.spawn(move || drop(lookup.translate(page(process, 1), DataPath::Send).unwrap()));
        until_lookups(lookup, 2);
        gate.open();
    });
    let counters = assert_replay_agrees(lookup, &recording);
    assert_eq!((counters.misses.send.cold, counters.retries), (1, 1));
}

#[test]
fn a_prefetched_line_that_two_accesses_wait_for_counts_one_miss() {
    let (lookup, gate, recording, process) = recorded_lookup(false);
    lookup.prefetch(page(process, 0), DataPath::Send);
    std::thread::scope(|scope| {
        let lookup = &lookup;
        for number in 0..2 {
            scope.spawn(move || {
                drop(lookup.translate(page(process, number), DataPath::Send).unwrap());
            });
        }
        until_lookups(lookup, 2);
        let again = lookup.try_translate(page(process, 2), DataPath::Send).map(drop);
        assert_eq!(again, Err(LookupError::NotCached));
        gate.open();
    });
    let counters = assert_replay_agrees(lookup, &recording);
    assert_eq!((counters.misses.send.cold, counters.retries), (1, 2));
}

#[test]
fn a_request_that_finds_no_space_in_the_queue_counts_its_miss_when_it_is_queued() {
    let settings = LookupConfig {
        policy: MissPolicy::Retry,
        inline_misses: false,
        queue_length: 1,
        ..config(64, 1, 2)
    };
    let (mut lookup, gate) = gated_lookup(settings);
    let recording = SharedBuffer::default();
    lookup.start_recording(Box::new(recording.clone())).unwrap();
    let process = lookup.add_process().unwrap();
    let request = |number| lookup.translate(page(process, number), DataPath::Send).map(drop);
    assert_eq!(request(0), Err(LookupError::NotCached));
    // The miss thread takes the first event, then the second one fills the queue.
    memferry_testing::until("the backend is called", || gate.waiting.load(Ordering::SeqCst) > 0);
    for number in [1, 2, 2, 2] {
        assert_eq!(request(number), Err(LookupError::NotCached));
    }
    assert_eq!((lookup.counters().dropped, lookup.counters().retries), (3, 3));
    gate.open();
    memferry_testing::until("all lines are attached", || {
        (0..3).all(|number| request(number).is_ok())
    });
    let counters = assert_replay_agrees(lookup, &recording);
    assert_eq!(counters.misses.send.cold, 3);
}

#[test]
fn hits_go_on_while_the_source_works() {
    let (lookup, gate) = gated_lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    gate.open();
    drop(lookup.translate(page(process, 0), DataPath::Send).unwrap());
    *gate.open.lock().unwrap() = false;
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| lookup.translate(page(process, 8), DataPath::Send).map(drop));
        while gate.waiting.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        for _ in 0..1000 {
            assert!(lookup.find(page(process, 0), DataPath::Send).unwrap().is_some());
            assert!(lookup.find(page(process, 8), DataPath::Send).unwrap().is_none());
        }
        assert!(!slow.is_finished());
        gate.open();
        slow.join().unwrap().unwrap();
    });
    assert_eq!(lookup.counters().retries, 1000);
}

#[test]
fn requests_beyond_the_queue_are_dropped_and_counted() {
    let (lookup, gate) = gated_lookup(LookupConfig { queue_length: 2, ..config(64, 1, 2) });
    let process = lookup.add_process().unwrap();
    lookup.prefetch(page(process, 0), DataPath::Send);
    while gate.waiting.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    // The thread handles one event, two are queued, and a repeated one is merged.
    for number in [1, 2, 2, 3, 4] {
        lookup.prefetch(page(process, number), DataPath::Send);
    }
    assert_eq!(lookup.counters().dropped, 2);
    gate.open();
    while lookup.counters().attached < 3 {
        std::thread::yield_now();
    }
    assert_eq!(gate.attaches.load(Ordering::SeqCst), 3);
}

#[test]
fn a_full_queue_makes_callers_wait_and_loses_none_of_them() {
    for helping in [true, false] {
        let (lookup, gate) = gated_lookup(LookupConfig {
            inline_misses: helping,
            queue_length: 1,
            ..config(64, 1, 2)
        });
        let process = lookup.add_process().unwrap();
        std::thread::scope(|scope| {
            for number in 0..12 {
                let lookup = &lookup;
                scope.spawn(move || {
                    drop(lookup.translate(page(process, number), DataPath::Send).unwrap());
                });
            }
            // Callers that handle misses take their events out of the queue. Otherwise the others wait
            // for space until the first event is handled.
            until_lookups(&lookup, if helping { 12 } else { 1 });
            gate.open();
        });
        assert_eq!(gate.attaches.load(Ordering::SeqCst), 12);
        assert_eq!(lookup.counters().misses.send.cold, 12);
    }
}

#[test]
fn a_process_that_is_removed_while_its_memory_is_attached_leaves_nothing() {
    for helping in [true, false] {
        let (lookup, gate) =
            gated_lookup(LookupConfig { inline_misses: helping, ..config(64, 8, 2) });
        let process = lookup.add_process().unwrap();
        std::thread::scope(|scope| {
            let user = scope.spawn(|| lookup.translate(page(process, 0), DataPath::Send).map(drop));
            while gate.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            let remover = scope.spawn(|| lookup.remove_process(process));
            while lookup.find(page(process, 0), DataPath::Send).is_ok() {
                std::thread::yield_now();
            }
            gate.open();
            assert!(user.join().unwrap().is_err());
            remover.join().unwrap();
        });
        let counters = lookup.counters();
        assert_eq!((counters.attached, counters.detached), (1, 1));
        assert!(lookup.cached_lines().is_empty());
    }
}

#[test]
fn forgetting_waits_for_users_and_refuses_new_ones() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    let held = lookup.translate(page(process, 0), DataPath::Send).unwrap();
    std::thread::scope(|scope| {
        let forgetter = scope.spawn(|| lookup.invalidate(process, 0, page_bytes()));
        // Until the invalidation has begun, other threads still find the line.
        let refused = loop {
            match lookup.translate(page(process, 0), DataPath::Send) {
                Ok(found) => drop(found),
                Err(error) => break error,
            }
        };
        assert_eq!(refused, LookupError::Invalidated);
        assert!(!forgetter.is_finished());
        check(&held, &source, process, 0);
        drop(held);
        forgetter.join().unwrap();
    });
    assert_eq!(source.attached(), 0);
    assert!(lookup.translate(page(process, 0), DataPath::Send).is_ok());
}

#[test]
fn a_panicking_source_fails_its_callers_and_nobody_else() {
    struct PanickingBackend;
    impl TranslationBackend for PanickingBackend {
        fn attach(&self, line: LineKey, entries: &mut [u64]) -> Result<(), AttachError> {
            assert!(line.address == 0, "injected panic");
            entries.fill(1);
            Ok(())
        }
        fn detach(&self, _: LineKey, _: &[u64]) {
            panic!("injected panic");
        }
    }
    for helping in [true, false] {
        let lookup = Lookup::new(
            LookupConfig { inline_misses: helping, ..config(64, 8, 2) },
            PanickingBackend,
        )
        .unwrap();
        let process = lookup.add_process().unwrap();
        let error = lookup.translate(page(process, 8), DataPath::Send).unwrap_err();
        assert_eq!(error, LookupError::Attach(std::io::ErrorKind::Other.into()));
        drop(lookup.translate(page(process, 0), DataPath::Send).unwrap());
        lookup.invalidate(process, 0, 1);
        drop(lookup.translate(page(process, 0), DataPath::Send).unwrap());
    }
}
