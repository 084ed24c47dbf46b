//! Why lines missed, in cases that can be worked out by hand.

use memferry_memory::lookup::{Misses, Route, Settings};

use crate::support::{lookup, page, page_bytes, settings};

/// The misses of a run over pages.
fn misses(settings: Settings, pages: impl IntoIterator<Item = u64>) -> Misses {
    let (lookup, _) = lookup(settings);
    let process = lookup.add_process().unwrap();
    for number in pages {
        drop(lookup.translate(page(process, number), Route::Receive).unwrap());
    }
    lookup.counters().misses.receive
}

#[test]
fn lines_that_fight_for_one_set_conflict() {
    let fight = [0, 4].into_iter().cycle().take(20);
    let found = misses(settings(4, 1, 1), fight);
    assert_eq!(found, Misses { cold: 2, capacity: 0, conflict: 18 });
}

#[test]
fn lines_that_fit_into_the_ways_do_not_conflict() {
    let friends = [0, 4].into_iter().cycle().take(20);
    let found = misses(settings(8, 1, 2), friends);
    assert_eq!(found, Misses { cold: 2, capacity: 0, conflict: 0 });
}

#[test]
fn more_lines_than_fit_are_a_matter_of_capacity() {
    let rounds = (0..8).cycle().take(80);
    let found = misses(settings(4, 1, 1), rounds);
    assert_eq!(found, Misses { cold: 8, capacity: 72, conflict: 0 });
}

#[test]
fn a_single_set_has_no_conflicts() {
    // In an order that is as uneven as it gets, with uses between fills.
    let uneven = (0..400u64).map(|step| (step * step + step / 7) % 11);
    let found = misses(settings(4, 1, 4), uneven);
    assert_eq!(found.conflict, 0);
    assert!(found.capacity > 0);
}

#[test]
fn large_caches_are_judged_by_a_sample() {
    // Two lines of each of a tenth of the sets fight; far fewer are used than there is room for.
    let lines = 1 << 13;
    let fighters = (0..lines / 10).flat_map(|set| [set * 10 % lines, set * 10 % lines + lines]);
    let found = misses(settings(lines as usize, 1, 1), fighters.clone().chain(fighters));
    assert_eq!(found.capacity, 0);
    assert!(found.conflict > 0);
    let rounds = (0..2 * lines).chain(0..2 * lines);
    let found = misses(settings(lines as usize, 1, 1), rounds);
    assert_eq!(found, Misses { cold: 2 * lines, capacity: 2 * lines, conflict: 0 });
}

#[test]
fn a_detached_line_is_not_seen_for_the_first_time_and_a_forgotten_one_is() {
    let settings = Settings { high_water_lines: 4, sweep_every: 1, ..settings(2, 1, 2) };
    let (lookup, source) = lookup(settings);
    let process = lookup.add_process().unwrap();
    for number in 0..20 {
        drop(lookup.translate(page(process, number), Route::Receive).unwrap());
    }
    assert!(source.attached() < 10);
    drop(lookup.translate(page(process, 0), Route::Receive).unwrap());
    assert_eq!(lookup.counters().misses.receive, Misses { cold: 20, capacity: 1, conflict: 0 });
    lookup.forget(process, 0, page_bytes());
    drop(lookup.translate(page(process, 0), Route::Receive).unwrap());
    assert_eq!(lookup.counters().misses.receive.cold, 21);
}
