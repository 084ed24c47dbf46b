//! The lookup against a simple model: sets as lists in LRU order.

use std::collections::{BTreeSet, HashSet};

use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::{
    DataPath, Geometry, LineKey, Lookup, LookupConfig, MissCounts, Translation,
};
use proptest::prelude::*;

use crate::lookup::support::{Truth, lookup, page, page_bytes, truth};

/// A cache as lists of lines, the most recently used at the end.
struct Model {
    geometry: Geometry,
    sets: Vec<Vec<LineKey>>,
    seen: HashSet<LineKey>,
    /// The contents of a fully associative cache of the same size.
    one_set: Vec<LineKey>,
}

/// The effect of an access.
struct Expected {
    hit: bool,
    cold: bool,
    /// Whether the fully associative cache had the line.
    one_set_hit: bool,
}

impl Model {
    fn new(geometry: Geometry) -> Self {
        let sets = vec![Vec::new(); geometry.sets()];
        Self { geometry, sets, seen: HashSet::new(), one_set: Vec::new() }
    }

    fn line_of(&self, process: ProcessHandle, page: u64) -> LineKey {
        let pages = self.geometry.line_entries() as u64;
        LineKey { process, address: page / pages * pages * page_bytes() }
    }

    fn access(&mut self, name: LineKey) -> Expected {
        let number = name.address / self.geometry.line_bytes();
        let set = &mut self.sets[number as usize % self.geometry.sets()];
        let hit = set.contains(&name);
        set.retain(|&other| other != name);
        if set.len() == self.geometry.ways() {
            set.remove(0);
        }
        set.push(name);
        let one_set_hit = self.one_set.contains(&name);
        self.one_set.retain(|&other| other != name);
        if self.one_set.len() == self.geometry.lines() {
            self.one_set.remove(0);
        }
        self.one_set.push(name);
        Expected { hit, cold: self.seen.insert(name), one_set_hit }
    }

    fn invalidate(&mut self, gone: impl Fn(&LineKey) -> bool) {
        self.sets.iter_mut().for_each(|set| set.retain(|line| !gone(line)));
        self.seen.retain(|line| !gone(line));
    }

    fn cached(&self) -> BTreeSet<LineKey> {
        self.sets.iter().flatten().copied().collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Access { process: usize, page: u64, keep: bool },
    Invalidate { process: usize, page: u64, pages: u64 },
    Replace { process: usize },
    Release,
}

const PROCESSES: usize = 3;
const PAGES: u64 = 48;

fn access() -> impl Strategy<Value = Step> {
    // Some pages are accessed more often than others, so that there are hits.
    let page = prop_oneof![0..PAGES, 0..PAGES / 4];
    (0..PROCESSES, page, prop::bool::weighted(0.2)).prop_map(|(process, page, keep)| Step::Access {
        process,
        page,
        keep,
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        20 => access(),
        1 => (0..PROCESSES, 0..PAGES, 0..PAGES / 2)
            .prop_map(|(process, page, pages)| Step::Invalidate { process, page, pages }),
        1 => (0..PROCESSES).prop_map(|process| Step::Replace { process }),
        2 => Just(Step::Release),
    ]
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (0..4u32, 0..3u32, 1..=5usize).prop_map(|(sets, line_entries, ways)| {
        let line_entries = 1 << line_entries;
        Geometry::new((1 << sets) * line_entries * ways, line_entries, ways).unwrap()
    })
}

fn misses(lookup: &Lookup<Truth>) -> MissCounts {
    lookup.counters().misses.send
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_cache_holds_what_the_model_holds(
        geometry in geometry(),
        high_water_lines in 1..100usize,
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let settings = LookupConfig { high_water_lines, sweep_every: 7, ..LookupConfig::cached(geometry) };
        let (lookup, source) = lookup(settings);
        let mut processes: Vec<_> =
            (0..PROCESSES).map(|_| lookup.add_process().unwrap()).collect();
        let mut model = Model::new(geometry);
        let mut kept: Vec<Translation<'_>> = Vec::new();
        for step in steps {
            if let Step::Invalidate { .. } | Step::Replace { .. } | Step::Release = step {
                // A thread that invalidates must not hold a translation.
                kept.clear();
            }
            match step {
                Step::Access { process, page: number, keep } => {
                    let process = processes[process];
                    let before = lookup.counters();
                    let name = model.line_of(process, number);
                    let expected = model.access(name);
                    let translation = lookup.translate(page(process, number), DataPath::Send).unwrap();
                    prop_assert_eq!(translation.line(), name);
                    prop_assert_eq!(translation.entry(), truth(process, number * page_bytes()));
                    let after = lookup.counters();
                    prop_assert_eq!(after.hits.send - before.hits.send, u64::from(expected.hit));
                    let cold = after.misses.send.cold - before.misses.send.cold;
                    prop_assert_eq!(cold, u64::from(expected.cold));
                    if keep {
                        kept.push(translation);
                    }
                }
                Step::Invalidate { process, page: number, pages } => {
                    let process = processes[process];
                    lookup.invalidate(process, number * page_bytes(), pages * page_bytes());
                    let lines = geometry.line_entries() as u64;
                    let first = number / lines * lines * page_bytes();
                    let touched = first..(number + pages) * page_bytes();
                    model.invalidate(|line| {
                        pages > 0 && line.process == process && touched.contains(&line.address)
                    });
                }
                Step::Replace { process } => {
                    let old = processes[process];
                    lookup.remove_process(old);
                    model.invalidate(|line| line.process == old);
                    processes[process] = lookup.add_process().unwrap();
                    prop_assert!(lookup.translate(page(old, 0), DataPath::Send).is_err());
                }
                Step::Release => {}
            }
            prop_assert_eq!(lookup.cached_lines().into_iter().collect::<BTreeSet<_>>(), model.cached());
            for line in lookup.cached_lines() {
                prop_assert!(source.is_attached(line));
            }
            // Kept translations keep their lines attached, whether or not these are cached.
            for held in &kept {
                prop_assert!(source.is_attached(held.line()));
                prop_assert_eq!(held.entry(), truth(held.line().process, held.address()));
            }
            let counters = lookup.counters();
            prop_assert_eq!((counters.attached - counters.detached) as usize, source.attached());
        }
        drop(kept);
        drop(lookup);
        prop_assert_eq!(source.attached(), 0);
    }

    /// Uses between the same two fills have the same tick, so a conflict miss may be classified as
    /// a capacity miss, but not vice versa.
    #[test]
    fn a_conflict_is_one_that_a_single_set_would_not_have(
        geometry in geometry(),
        accesses in prop::collection::vec(access(), 1..300),
    ) {
        let (lookup, _) = lookup(LookupConfig::cached(geometry));
        let processes: Vec<_> = (0..PROCESSES).map(|_| lookup.add_process().unwrap()).collect();
        let mut model = Model::new(geometry);
        for access in accesses {
            let Step::Access { process, page: number, .. } = access else { unreachable!() };
            let process = processes[process];
            let before = misses(&lookup);
            let expected = model.access(model.line_of(process, number));
            drop(lookup.translate(page(process, number), DataPath::Send).unwrap());
            let after = misses(&lookup);
            prop_assert_eq!(after.total() - before.total(), u64::from(!expected.hit));
            let conflict = after.conflict > before.conflict;
            prop_assert!(!conflict || expected.one_set_hit);
            prop_assert!(!conflict || geometry.sets() > 1);
        }
    }

    /// Without hits every use has its own tick, and the classification is exact.
    #[test]
    fn misses_alone_are_classified_exactly(
        sets in 1..4u32,
        numbers in prop::collection::vec(0..24u64, 1..300),
    ) {
        let geometry = Geometry::new(1 << sets, 1, 1).unwrap();
        let (lookup, _) = lookup(LookupConfig::cached(geometry));
        let process = lookup.add_process().unwrap();
        let mut model = Model::new(geometry);
        for number in numbers {
            let name = model.line_of(process, number);
            if model.cached().contains(&name) {
                continue;
            }
            let before = misses(&lookup);
            let expected = model.access(name);
            drop(lookup.translate(page(process, number), DataPath::Send).unwrap());
            let after = misses(&lookup);
            let conflict = after.conflict > before.conflict;
            prop_assert_eq!(conflict, expected.one_set_hit);
            prop_assert_eq!(after.capacity > before.capacity, !conflict && !expected.cold);
        }
    }
}
