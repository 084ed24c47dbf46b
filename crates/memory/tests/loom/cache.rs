//! Readers of the line cache, with concurrent fills and evictions.

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::thread;
use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::cache::{FillToken, LineCache};
use memferry_memory::lookup::{Geometry, LineKey};

use crate::model;

/// A cache of one line of two entries, so that all operations use one slot.
pub(crate) fn one_slot() -> (Arc<LineCache>, FillToken) {
    let (cache, filler) = LineCache::new(Geometry::new(2, 2, 1).unwrap());
    (Arc::new(cache), filler)
}

/// The key of a line, by the numbers of its process and of the line.
pub(crate) fn line(process: u16, number: u64) -> LineKey {
    let line_bytes = Geometry::new(2, 2, 1).unwrap().line_bytes();
    let process = ProcessHandle::new(process, 1).unwrap();
    LineKey { process, address: number * line_bytes }
}

/// The entries of a line, different for every line.
pub(crate) fn entries(name: LineKey) -> [u64; 2] {
    let first = name.address << 16 | u64::from(name.process.number()) << 4;
    [first + 1, first + 2]
}

fn fill(cache: &LineCache, filler: &mut FillToken, name: LineKey) -> bool {
    cache.fill(filler, name, &entries(name)).is_some()
}

/// Looks up a line and, if it is cached, checks its entries. Returns whether it is cached.
fn read(cache: &LineCache, name: LineKey) -> bool {
    let Ok(slot) = cache.find(name) else { return false };
    for _ in 0..2 {
        let found = cache.entries(slot).iter().map(|entry| entry.load(Ordering::Relaxed));
        assert!(found.eq(entries(name)), "entries of another line");
    }
    assert!(!cache.slot(slot).release(), "nobody waits");
    true
}

#[test]
fn a_reader_beside_a_fill_sees_all_of_the_line_or_nothing() {
    model(4, || {
        let (cache, mut filler) = one_slot();
        let name = line(1, 1);
        let reader = {
            let cache = cache.clone();
            thread::spawn(move || read(&cache, name))
        };
        assert!(fill(&cache, &mut filler, name), "nobody holds an empty slot");
        reader.join().unwrap();
        assert!(read(&cache, name));
    });
}

#[test]
fn a_reader_beside_an_eviction_never_sees_another_line() {
    model(4, || {
        let (cache, mut filler) = one_slot();
        fill(&cache, &mut filler, line(1, 1));
        let reader = {
            let cache = cache.clone();
            thread::spawn(move || (read(&cache, line(1, 1)), read(&cache, line(2, 3))))
        };
        // The fill fails if the line is in use.
        let filled = fill(&cache, &mut filler, line(2, 3));
        let (_, new) = reader.join().unwrap();
        assert!(filled || !new);
        assert_eq!((read(&cache, line(1, 1)), read(&cache, line(2, 3))), (!filled, filled));
    });
}

/// Halves of two tags must not form a third tag: the same address in another process.
#[test]
fn a_tag_that_is_being_changed_is_nobodys() {
    model(4, || {
        let (cache, mut filler) = one_slot();
        fill(&cache, &mut filler, line(1, 1));
        let reader = {
            let cache = cache.clone();
            thread::spawn(move || {
                assert!(!read(&cache, line(1, 2)), "never filled");
                assert!(!read(&cache, line(2, 1)), "never filled");
            })
        };
        fill(&cache, &mut filler, line(2, 2));
        reader.join().unwrap();
    });
}

#[test]
fn a_line_that_comes_back_is_the_same_line() {
    model(3, || {
        let (cache, mut filler) = one_slot();
        fill(&cache, &mut filler, line(1, 1));
        let reader = {
            let cache = cache.clone();
            thread::spawn(move || read(&cache, line(1, 1)))
        };
        if fill(&cache, &mut filler, line(2, 2)) {
            fill(&cache, &mut filler, line(1, 1));
        }
        reader.join().unwrap();
    });
}

#[test]
fn two_readers_and_an_evictor_agree() {
    model(2, || {
        let (cache, mut filler) = one_slot();
        fill(&cache, &mut filler, line(1, 1));
        let readers: Vec<_> = [line(1, 1), line(2, 2)]
            .map(|name| {
                let cache = cache.clone();
                thread::spawn(move || read(&cache, name))
            })
            .into();
        let filled = fill(&cache, &mut filler, line(2, 2));
        for reader in readers {
            reader.join().unwrap();
        }
        // A lookup that missed has left no reference.
        assert!(filled || fill(&cache, &mut filler, line(2, 2)));
        assert!(read(&cache, line(2, 2)));
    });
}

#[test]
fn a_held_line_is_passed_over_until_it_is_released() {
    model(4, || {
        let (cache, mut filler) = one_slot();
        fill(&cache, &mut filler, line(1, 1));
        let slot = cache.find(line(1, 1)).unwrap();
        let holder = {
            let cache = cache.clone();
            thread::spawn(move || {
                let first = cache.entries(slot)[0].load(Ordering::Relaxed);
                assert_eq!(first, entries(line(1, 1))[0]);
                assert!(!cache.slot(slot).release());
            })
        };
        let filled = fill(&cache, &mut filler, line(2, 2));
        holder.join().unwrap();
        assert!(filled || fill(&cache, &mut filler, line(2, 2)));
    });
}

#[test]
fn readers_of_one_set_leave_an_order_of_all_ways() {
    model(3, || {
        let (cache, mut filler) = LineCache::new(Geometry::new(2, 1, 2).unwrap());
        let cache = Arc::new(cache);
        let name = |number| LineKey { address: number << 20, ..line(1, 0) };
        for number in [1, 2] {
            assert!(cache.fill(&mut filler, name(number), &[number]).is_some());
        }
        let reader = {
            let cache = cache.clone();
            thread::spawn(move || cache.slot(cache.find(name(1)).unwrap()).release())
        };
        assert!(!cache.slot(cache.find(name(2)).unwrap()).release());
        assert!(!reader.join().unwrap());
        // Both lines can still be replaced, one after the other.
        let mut victims = [3, 4].map(|number| {
            let filled = cache.fill(&mut filler, name(number), &[number]).unwrap();
            filled.victim.unwrap().0.address >> 20
        });
        victims.sort_unstable();
        assert_eq!(victims, [1, 2]);
    });
}
