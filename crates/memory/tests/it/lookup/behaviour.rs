//! The guarantees of the lookup to its callers.

use std::io::ErrorKind;

use memferry_memory::handle::{ProcessAddress, ProcessHandle};
use memferry_memory::lookup::{
    AttachError, DataPath, LineKey, LineRun, LookupConfig, LookupError, MissPolicy, TableKind,
    TooManyProcesses, TranslationBackend,
};

use crate::lookup::support::{config, lookup, page, page_bytes, truth};

const SEND: DataPath = DataPath::Send;

#[test]
fn a_miss_brings_the_whole_line() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    let missed = lookup.translate(page(process, 10), SEND).unwrap();
    assert_eq!(missed.entry(), truth(process, 10 * page_bytes()));
    assert_eq!(missed.address(), 10 * page_bytes());
    assert_eq!(missed.line().address, 8 * page_bytes());
    let rest: Vec<_> = missed.remaining().collect();
    let expected: Vec<_> = (10..16).map(|page| truth(process, page * page_bytes())).collect();
    assert_eq!(rest, expected);
    assert_eq!(missed.page(5), Some(expected[5]));
    assert_eq!(missed.page(6), None);
    assert_eq!(missed.page(usize::MAX), None);
    drop(missed);
    let found = lookup.find(page(process, 8), DataPath::Receive).unwrap().unwrap();
    assert_eq!(found.entry(), truth(process, 8 * page_bytes()));
    let counters = lookup.counters();
    assert_eq!((counters.hits.send, counters.hits.receive), (0, 1));
    assert_eq!((counters.misses.send.cold, counters.misses.receive.total()), (1, 0));
    assert_eq!((counters.fills, counters.attached, source.attached()), (1, 1, 1));
}

#[test]
fn an_address_within_a_page_leads_to_the_page() {
    let (lookup, _) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    let address = 3 * page_bytes() + 17;
    let found = lookup.translate(ProcessAddress { process, address }, SEND).unwrap();
    assert_eq!((found.address(), found.entry()), (3 * page_bytes(), truth(process, address)));
}

#[test]
fn a_find_that_finds_nothing_attaches_nothing() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    assert!(lookup.find(page(process, 1), SEND).unwrap().is_none());
    assert_eq!((source.attached(), lookup.counters().misses.send.cold), (0, 1));
}

#[test]
fn an_evicted_line_stays_attached() {
    let (lookup, source) = lookup(config(2, 1, 2));
    let process = lookup.add_process().unwrap();
    for number in 0..3 {
        lookup.translate(page(process, number), SEND).unwrap();
    }
    assert_eq!((lookup.counters().evictions, source.attached()), (1, 3));
    assert!(lookup.find(page(process, 0), SEND).unwrap().is_none());
    lookup.translate(page(process, 0), SEND).unwrap();
    assert_eq!(source.attaches(), 3, "a line in the table was attached again");
}

#[test]
fn a_line_in_use_may_leave_the_cache_and_stays_attached() {
    let settings = LookupConfig { high_water_lines: 1, sweep_every: 1, ..config(2, 1, 2) };
    let (lookup, source) = lookup(settings);
    let process = lookup.add_process().unwrap();
    // More than a thread has cells for, so that some uses are counted in the table.
    let held: Vec<_> =
        (0..100).map(|number| lookup.translate(page(process, number), SEND).unwrap()).collect();
    assert_eq!(lookup.cached_lines().len(), 2);
    for (number, translation) in held.iter().enumerate() {
        assert_eq!(translation.entry(), truth(process, number as u64 * page_bytes()));
        assert!(source.is_attached(translation.line()));
    }
    assert_eq!((lookup.counters().evictions, lookup.counters().detached), (98, 0));
    drop(held);
    lookup.translate(page(process, 100), SEND).unwrap();
    assert_eq!(source.attached(), 2, "unused lines outside of the cache are swept");
}

#[test]
fn a_translation_may_be_released_by_another_thread() {
    let (lookup, source) = lookup(config(2, 1, 2));
    let process = lookup.add_process().unwrap();
    for number in 0..100 {
        let held = lookup.translate(page(process, number), SEND).unwrap();
        std::thread::scope(|scope| scope.spawn(|| drop(held)).join().unwrap());
    }
    lookup.invalidate(process, 0, u64::MAX);
    assert_eq!(source.attached(), 0);
}

#[test]
fn more_threads_than_have_cells_find_lines_too() {
    for settings in [config(64, 8, 2), LookupConfig::flat()] {
        let (lookup, source) = lookup(settings);
        let process = lookup.add_process().unwrap();
        lookup.preload(process, 0, 64 * page_bytes()).unwrap();
        // Held by one thread: after its cells, uses are counted.
        let held: Vec<_> =
            (0..60).map(|_| lookup.translate(page(process, 3), SEND).unwrap()).collect();
        assert!(held.iter().all(|held| held.entry() == truth(process, 3 * page_bytes())));
        let found = lookup.find(page(process, 3), SEND).unwrap().unwrap();
        assert_eq!(found.entry(), truth(process, 3 * page_bytes()));
        drop(found);
        std::thread::scope(|scope| {
            let forgetter = scope.spawn(|| lookup.invalidate(process, 0, 64 * page_bytes()));
            while lookup.find(page(process, 3), SEND).unwrap().is_some() {}
            assert!(!forgetter.is_finished());
            assert!(source.attached() > 0, "detached while in use");
            drop(held);
            forgetter.join().unwrap();
        });
        assert_eq!(source.attached(), 0);
        let counters = lookup.counters();
        let lookups = counters.hits.send + counters.misses.send.total() + counters.retries;
        assert!(lookups >= 62, "{counters:?}");
    }
}

/// A backend whose lines are runs without a first page.
struct Runs(std::sync::Mutex<Vec<LineKey>>);

impl TranslationBackend for Runs {
    fn attach_run(&self, line: LineKey, pages: usize) -> Result<Option<LineRun>, AttachError> {
        self.0.lock().unwrap().push(line);
        let first = line.address + page_bytes() + 1;
        Ok(Some(LineRun { first, step: page_bytes(), pages: 1..pages }))
    }

    fn attach(&self, _: LineKey, _: &mut [u64]) -> Result<(), AttachError> {
        panic!("the run was attached");
    }

    fn detach(&self, _: LineKey, _: &[u64]) {
        panic!("a run is detached as a run");
    }

    fn detach_run(&self, line: LineKey, run: &LineRun) {
        assert_eq!(run.first, line.address + page_bytes() + 1);
        self.0.lock().unwrap().retain(|other| *other != line);
    }
}

#[test]
fn a_run_is_attached_as_a_whole_and_found_by_page() {
    let source = std::sync::Arc::new(Runs(std::sync::Mutex::default()));
    let lookup =
        memferry_memory::lookup::Lookup::new(config(1 << 16, 1 << 13, 2), source.clone()).unwrap();
    let process = lookup.add_process().unwrap();
    let found = lookup.translate(page(process, 77), SEND).unwrap();
    assert_eq!(found.entry(), 77 * page_bytes() + 1);
    assert_eq!(found.page(1), Some(78 * page_bytes() + 1));
    assert_eq!(found.run_length(page_bytes(), usize::MAX), (1 << 13) - 77);
    assert_eq!(found.run_length(page_bytes(), 9), 9);
    drop(found);
    let missing = lookup.translate(page(process, 0), SEND).unwrap_err();
    assert_eq!(missing, LookupError::NoMemory(0));
    assert!(lookup.footprint().table < 8 << 13, "no word for each page");
    lookup.invalidate(process, 0, 1);
    assert!(source.0.lock().unwrap().is_empty());
}

#[test]
fn a_stale_handle_fails_and_a_reused_number_sees_nothing_old() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let old = lookup.add_process().unwrap();
    lookup.translate(page(old, 1), SEND).unwrap();
    lookup.remove_process(old);
    assert_eq!(source.attached(), 0);
    let stale = LookupError::Stale(old);
    assert_eq!(lookup.translate(page(old, 1), SEND).unwrap_err(), stale);
    assert_eq!(lookup.find(page(old, 1), SEND).unwrap_err(), stale);
    let new = lookup.add_process().unwrap();
    assert_eq!(new.number(), old.number());
    assert!(lookup.find(page(new, 1), SEND).unwrap().is_none());
    let found = lookup.translate(page(new, 1), SEND).unwrap();
    assert_eq!(found.entry(), truth(new, page_bytes()));
    assert_eq!(lookup.translate(page(old, 1), SEND).unwrap_err(), stale);
    lookup.remove_process(old);
    assert_eq!(source.attached(), 1, "a stale handle removed lines");
}

#[test]
fn a_handle_of_a_process_that_never_was_fails() {
    let (lookup, _) = lookup(config(64, 8, 2));
    let nobody = ProcessHandle::new(9, 1).unwrap();
    let error = lookup.translate(page(nobody, 1), SEND).unwrap_err();
    assert_eq!(error, LookupError::Stale(nobody));
}

#[test]
fn addresses_that_no_process_has_fail() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    for address in [1 << 57, u64::MAX] {
        let error = lookup.translate(ProcessAddress { process, address }, SEND).unwrap_err();
        assert_eq!(error, LookupError::OutOfRange(address));
    }
    let last = ProcessAddress { process, address: (1 << 57) - 1 };
    assert_eq!(lookup.translate(last, SEND).unwrap().page(1), None);
    lookup.invalidate(process, u64::MAX - 5, u64::MAX);
    assert_eq!(source.attached(), 1);
    lookup.invalidate(process, 0, u64::MAX);
    assert_eq!(source.attached(), 0);
}

#[test]
fn forgotten_lines_are_attached_anew() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    for number in [0, 8, 16, 24] {
        lookup.translate(page(process, number), SEND).unwrap();
    }
    // From the last page of the second line to the first page of the third.
    lookup.invalidate(process, 15 * page_bytes(), 2 * page_bytes());
    assert_eq!((source.attached(), lookup.counters().detached), (2, 2));
    lookup.invalidate(process, 0, 0);
    assert_eq!(source.attached(), 2);
    assert!(lookup.find(page(process, 7), SEND).unwrap().is_some());
    assert!(lookup.find(page(process, 8), SEND).unwrap().is_none());
    lookup.translate(page(process, 8), SEND).unwrap();
    assert_eq!(source.attaches(), 5);
}

#[test]
fn a_refusal_reaches_the_caller_and_is_not_cached() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    source.refuse(0, true);
    let refused = AttachError::from(ErrorKind::PermissionDenied);
    let error = lookup.translate(page(process, 1), SEND).unwrap_err();
    assert_eq!(error, LookupError::Attach(refused));
    source.refuse(0, false);
    assert_eq!(
        lookup.translate(page(process, 1), SEND).unwrap().entry(),
        truth(process, page_bytes())
    );
    assert_eq!(lookup.counters().attach_errors, 1);
}

#[test]
fn a_request_that_may_not_wait_comes_again_until_it_hits() {
    let (lookup, source) = lookup(LookupConfig { policy: MissPolicy::Retry, ..config(64, 8, 2) });
    let process = lookup.add_process().unwrap();
    assert_eq!(lookup.translate(page(process, 1), SEND).unwrap_err(), LookupError::NotCached);
    let found = loop {
        match lookup.translate(page(process, 1), SEND) {
            Err(LookupError::NotCached) => std::thread::yield_now(),
            other => break other.unwrap(),
        }
    };
    assert_eq!(found.entry(), truth(process, page_bytes()));
    let counters = lookup.counters();
    assert_eq!(
        (counters.misses.send.cold, counters.misses.send.total(), counters.hits.send),
        (1, 1, 1)
    );
    assert_eq!(source.attaches(), 1);
}

#[test]
fn a_request_that_comes_again_is_served_though_all_ways_are_in_use() {
    let (lookup, source) = lookup(LookupConfig { policy: MissPolicy::Retry, ..config(2, 1, 2) });
    let process = lookup.add_process().unwrap();
    let mut held = Vec::new();
    for number in 0..5 {
        held.push(loop {
            match lookup.translate(page(process, number), SEND) {
                Err(LookupError::NotCached) => std::thread::yield_now(),
                other => break other.unwrap(),
            }
        });
    }
    for (number, translation) in held.iter().enumerate() {
        assert_eq!(translation.entry(), truth(process, number as u64 * page_bytes()));
    }
    assert_eq!(lookup.counters().misses.send.total(), 5);
    drop(held);
    lookup.invalidate(process, 0, 5 * page_bytes());
    assert_eq!(source.attached(), 0);
}

#[test]
fn a_refusal_waits_for_the_request_that_comes_again() {
    let (lookup, source) = lookup(LookupConfig { policy: MissPolicy::Retry, ..config(64, 8, 2) });
    let process = lookup.add_process().unwrap();
    source.refuse(0, true);
    let error = loop {
        match lookup.translate(page(process, 1), SEND) {
            Err(LookupError::NotCached) => std::thread::yield_now(),
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(error, LookupError::Attach(ErrorKind::PermissionDenied.into()));
}

#[test]
fn a_requested_line_is_attached_by_itself_and_counts_when_it_is_needed() {
    let (lookup, source) = lookup(config(64, 8, 2));
    let process = lookup.add_process().unwrap();
    lookup.prefetch(page(process, 1), DataPath::Receive);
    while source.attached() == 0 || lookup.counters().attached == 0 {
        std::thread::yield_now();
    }
    assert_eq!(lookup.counters().misses.receive.total(), 0);
    let found = lookup.find_or_prefetch(page(process, 1), DataPath::Receive).unwrap();
    assert_eq!(found.entry(), truth(process, page_bytes()));
    lookup.prefetch(page(process, 1), DataPath::Receive);
    let counters = lookup.counters();
    assert_eq!((counters.prefetches.receive, counters.misses.receive.cold), (1, 1));
    assert_eq!((counters.fills, source.attaches()), (1, 1));
}

#[test]
fn sweeps_detach_what_was_not_used_for_longest() {
    let settings = LookupConfig { high_water_lines: 40, sweep_every: 1000, ..config(8, 1, 8) };
    let (lookup, source) = lookup(settings);
    let process = lookup.add_process().unwrap();
    for number in 0..40 {
        lookup.translate(page(process, number), SEND).unwrap();
    }
    assert_eq!(lookup.counters().detached, 0);
    // Used again after its eviction from the cache, and in use during the sweep.
    lookup.translate(page(process, 0), SEND).unwrap();
    let held = lookup.translate(page(process, 1), SEND).unwrap();
    lookup.translate(page(process, 40), SEND).unwrap();
    assert_eq!((lookup.counters().detached, source.attached()), (11, 30));
    for number in [0, 1].into_iter().chain(13..=40) {
        let name = page(process, number);
        let line = memferry_memory::lookup::LineKey { process, address: name.address };
        assert!(source.is_attached(line), "{number}");
    }
    drop(held);
}

#[test]
fn lines_in_the_cache_survive_a_sweep() {
    let settings = LookupConfig { high_water_lines: 2, sweep_every: 1, ..config(8, 1, 8) };
    let (lookup, source) = lookup(settings);
    let process = lookup.add_process().unwrap();
    for number in 0..20 {
        lookup.translate(page(process, number), SEND).unwrap();
        assert_eq!(lookup.cached_lines().len() as u64, (number + 1).min(8));
    }
    assert_eq!(source.attached(), 8);
}

#[test]
fn prepared_memory_is_found_without_the_source() {
    for settings in [config(64, 8, 2), LookupConfig::flat()] {
        let (lookup, source) = lookup(settings);
        let process = lookup.add_process().unwrap();
        lookup.preload(process, 5 * page_bytes(), 200 * page_bytes()).unwrap();
        let attaches = source.attaches();
        for number in 5..205 {
            let found = lookup.translate(page(process, number), SEND).unwrap();
            assert_eq!(found.entry(), truth(process, number * page_bytes()));
        }
        lookup.preload(process, 5 * page_bytes(), 200 * page_bytes()).unwrap();
        assert_eq!(source.attaches(), attaches);
        drop(lookup);
        assert_eq!(source.attached(), 0);
    }
}

#[test]
fn the_full_table_finds_what_was_prepared_and_nothing_else() {
    let (lookup, source) = lookup(LookupConfig::flat());
    assert_eq!(lookup.config().kind, TableKind::Flat);
    let process = lookup.add_process().unwrap();
    let other = lookup.add_process().unwrap();
    lookup.preload(process, 0, 64 * page_bytes()).unwrap();
    lookup.preload(process, 256 * page_bytes(), 128 * page_bytes()).unwrap();
    assert!(lookup.find(page(process, 64), SEND).unwrap().is_none());
    let error = lookup.translate(page(other, 0), SEND).unwrap_err();
    assert_eq!(error, LookupError::NotPreloaded(0));
    assert!(lookup.footprint().entries >= 192 * 8);
    // Memory between and around the preloaded ranges.
    lookup.preload(process, 0, 512 * page_bytes()).unwrap();
    assert_eq!(source.attaches(), 8);
    assert_eq!(lookup.footprint().entries, 512 * 8);
    for number in 0..512 {
        let found = lookup.find(page(process, number), SEND).unwrap().unwrap();
        assert_eq!(found.entry(), truth(process, number * page_bytes()));
    }
    lookup.invalidate(process, 0, 64 * page_bytes());
    assert!(lookup.find(page(process, 0), SEND).unwrap().is_none());
    lookup.remove_process(process);
    assert_eq!(source.attached(), 0);
    let error = lookup.translate(page(process, 300), SEND).unwrap_err();
    assert_eq!(error, LookupError::Stale(process));
    assert_eq!(lookup.preload(process, 0, 1), Err(LookupError::Stale(process)));
}

#[test]
fn the_full_table_uses_its_room_again() {
    let (lookup, _) = lookup(LookupConfig::flat());
    let mut memory = None;
    for _ in 0..10 {
        let process = lookup.add_process().unwrap();
        lookup.preload(process, 1 << 40, 640 * page_bytes()).unwrap();
        assert!(
            lookup.find(page(process, (1 << 40) / page_bytes() + 639), SEND).unwrap().is_some()
        );
        lookup.remove_process(process);
        assert_eq!(*memory.get_or_insert(lookup.footprint().entries), lookup.footprint().entries);
    }
}

#[test]
fn a_refusal_leaves_the_full_table_as_it_was() {
    let (lookup, source) = lookup(LookupConfig::flat());
    let process = lookup.add_process().unwrap();
    source.refuse(128 * page_bytes(), true);
    let error = lookup.preload(process, 0, 256 * page_bytes()).unwrap_err();
    assert_eq!(error, LookupError::Attach(ErrorKind::PermissionDenied.into()));
    assert_eq!(source.attached(), 0);
    assert!(lookup.find(page(process, 0), SEND).unwrap().is_none());
}

#[test]
fn a_leaked_translation_does_not_keep_the_lookup_from_ending() {
    for settings in [config(64, 8, 2), LookupConfig::flat()] {
        let (lookup, source) = lookup(settings);
        let process = lookup.add_process().unwrap();
        lookup.preload(process, 0, 1).unwrap();
        std::mem::forget(lookup.translate(page(process, 0), SEND).unwrap());
        drop(lookup);
        assert_eq!(source.attached(), 0);
    }
}

#[test]
fn there_is_a_limit_to_processes_and_none_to_their_succession() {
    let (lookup, _) = lookup(config(64, 8, 2));
    let all: Vec<_> = (0..=u16::MAX).map(|_| lookup.add_process().unwrap()).collect();
    assert_eq!(lookup.add_process(), Err(TooManyProcesses));
    lookup.remove_process(all[77]);
    assert_eq!(lookup.add_process().unwrap().number(), 77);
}

#[test]
fn settings_that_cannot_work_are_refused() {
    for (queue_length, sweep_every) in [(0, 1), (1, 0)] {
        let settings = LookupConfig { queue_length, sweep_every, ..config(64, 8, 2) };
        let error = memferry_memory::lookup::Lookup::new(
            settings,
            crate::lookup::support::Truth::default(),
        );
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn memory_is_told_by_component() {
    let (lookup, _) = lookup(config(16 << 10, 64, 4));
    let process = lookup.add_process().unwrap();
    let before = lookup.footprint();
    assert_eq!((before.entries, before.tags, before.order), (128 << 10, 8 << 10, 512));
    for line in 0..1000 {
        lookup.translate(page(process, line * 64), SEND).unwrap();
    }
    let after = lookup.footprint();
    assert_eq!(after.cache_total(), before.cache_total(), "the cache grew");
    assert!(after.table - before.table > 1000 * 64 * 8);
}
