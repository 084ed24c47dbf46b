//! Classification of misses in cases with known results.

use memferry_memory::lookup::{DataPath, LookupConfig, MissCounts};

use crate::lookup::support::{config, lookup, page, page_bytes};

/// The misses of accesses to these pages.
fn misses(settings: LookupConfig, pages: impl IntoIterator<Item = u64>) -> MissCounts {
    let (lookup, _) = lookup(settings);
    let process = lookup.add_process().unwrap();
    for number in pages {
        drop(lookup.translate(page(process, number), DataPath::Receive).unwrap());
    }
    lookup.counters().misses.receive
}

#[test]
fn lines_that_fight_for_one_set_conflict() {
    let fight = [0, 4].into_iter().cycle().take(20);
    let found = misses(config(4, 1, 1), fight);
    assert_eq!(found, MissCounts { cold: 2, capacity: 0, conflict: 18 });
}

#[test]
fn lines_that_fit_into_the_ways_do_not_conflict() {
    let friends = [0, 4].into_iter().cycle().take(20);
    let found = misses(config(8, 1, 2), friends);
    assert_eq!(found, MissCounts { cold: 2, capacity: 0, conflict: 0 });
}

#[test]
fn more_lines_than_fit_are_a_matter_of_capacity() {
    let rounds = (0..8).cycle().take(80);
    let found = misses(config(4, 1, 1), rounds);
    assert_eq!(found, MissCounts { cold: 8, capacity: 72, conflict: 0 });
}

#[test]
fn a_single_set_has_no_conflicts() {
    // A scattered order, with uses between fills.
    let uneven = (0..400u64).map(|step| (step * step + step / 7) % 11);
    let found = misses(config(4, 1, 4), uneven);
    assert_eq!(found.conflict, 0);
    assert!(found.capacity > 0);
}

#[test]
fn large_caches_are_judged_by_a_sample() {
    // Two lines of a tenth of the sets conflict; far fewer lines are used than the cache has.
    let lines = 1 << 13;
    let fighters = (0..lines / 10).flat_map(|set| [set * 10 % lines, set * 10 % lines + lines]);
    let found = misses(config(lines as usize, 1, 1), fighters.clone().chain(fighters));
    assert_eq!(found.capacity, 0);
    assert!(found.conflict > 0);
    let rounds = (0..2 * lines).chain(0..2 * lines);
    let found = misses(config(lines as usize, 1, 1), rounds);
    assert_eq!(found, MissCounts { cold: 2 * lines, capacity: 2 * lines, conflict: 0 });
}

#[test]
fn a_detached_line_is_not_seen_for_the_first_time_and_a_forgotten_one_is() {
    let settings = LookupConfig { high_water_lines: 4, sweep_every: 1, ..config(2, 1, 2) };
    let (lookup, source) = lookup(settings);
    let process = lookup.add_process().unwrap();
    for number in 0..20 {
        drop(lookup.translate(page(process, number), DataPath::Receive).unwrap());
    }
    assert!(source.attached() < 10);
    drop(lookup.translate(page(process, 0), DataPath::Receive).unwrap());
    assert_eq!(lookup.counters().misses.receive, MissCounts { cold: 20, capacity: 1, conflict: 0 });
    lookup.invalidate(process, 0, page_bytes());
    drop(lookup.translate(page(process, 0), DataPath::Receive).unwrap());
    assert_eq!(lookup.counters().misses.receive.cold, 21);
}
