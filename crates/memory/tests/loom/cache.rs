//! Readers of the line cache, with concurrent fills and evictions.

use loom::sync::Arc;
use loom::thread;
use memferry_memory::handle::ProcessHandle;
use memferry_memory::lookup::cache::{FillToken, LineCache, tag_of};
use memferry_memory::lookup::hazard::HazardCell;
use memferry_memory::lookup::{Geometry, LineKey};
use memferry_sys::fence::AsymmetricFence;

use crate::model;

/// A cache of one line, so that all operations use one slot.
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

/// The word of a line, different for every line.
pub(crate) fn word(name: LineKey) -> u64 {
    name.address << 16 | u64::from(name.process.number()) << 4 | 1
}

fn fill(cache: &LineCache, filler: &mut FillToken, name: LineKey) {
    cache.fill(filler, name, word(name));
}

/// Looks up a line with a new cell and, if it is cached, checks its word. Returns whether it is
/// cached.
fn read(cache: &LineCache, name: LineKey) -> bool {
    let (cell, fence) = (HazardCell::new(), AsymmetricFence::new());
    let found = cache.find(tag_of(name), &cell, fence);
    match found {
        Ok(found) => {
            assert_eq!(found, word(name), "another line");
            assert_eq!(cell.get(), found, "its use is published");
            cell.clear(fence);
        }
        Err(_) => assert!(cell.is_empty(), "a miss leaves nothing in use"),
    }
    found.is_ok()
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
        fill(&cache, &mut filler, name);
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
        fill(&cache, &mut filler, line(2, 3));
        reader.join().unwrap();
        assert_eq!((read(&cache, line(1, 1)), read(&cache, line(2, 3))), (false, true));
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
        fill(&cache, &mut filler, line(2, 2));
        fill(&cache, &mut filler, line(1, 1));
        reader.join().unwrap();
        assert!(read(&cache, line(1, 1)));
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
        fill(&cache, &mut filler, line(2, 2));
        for reader in readers {
            reader.join().unwrap();
        }
        assert!(read(&cache, line(2, 2)));
    });
}

#[test]
fn readers_of_one_set_leave_an_order_of_all_ways() {
    model(3, || {
        let (cache, mut filler) = LineCache::new(Geometry::new(2, 1, 2).unwrap());
        let cache = Arc::new(cache);
        let name = |number: u64| LineKey { address: number << 20, ..line(1, 0) };
        for number in [1, 2] {
            fill(&cache, &mut filler, name(number));
        }
        let reader = {
            let cache = cache.clone();
            thread::spawn(move || assert!(read(&cache, name(1))))
        };
        assert!(read(&cache, name(2)));
        reader.join().unwrap();
        // Both lines can still be replaced, one after the other.
        let mut victims = [3, 4].map(|number| {
            let victim = cache.fill(&mut filler, name(number), word(name(number)));
            victim.unwrap().0.address >> 20
        });
        victims.sort_unstable();
        assert_eq!(victims, [1, 2]);
    });
}
