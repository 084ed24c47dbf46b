//! Lines that leave the cache while they are in use: no line in use is detached, and its last user
//! wakes the thread that waits for it.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use memferry_memory::lookup::LineKey;
use memferry_memory::lookup::cache::{FillToken, LineCache, LineMiss, tag_of};
use memferry_memory::lookup::hazard::{Drains, HazardCell};
use memferry_sys::fence::AsymmetricFence;

use crate::cache::{line, one_slot, word};
use crate::model;

const READERS: usize = 2;

/// A cache with one slot, the memory that the backend attached for a line, the cells of all readers,
/// and the condition that the invalidating thread waits for.
struct World {
    cache: Arc<LineCache>,
    filler: Mutex<FillToken>,
    unused: Condvar,
    fence: AsymmetricFence,
    drains: Drains,
    cells: [HazardCell; READERS],
    attached: UnsafeCell<bool>,
}

// SAFETY: the protocol under test protects the cell, and loom checks it.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<Self> {
        let (cache, mut filler) = one_slot();
        cache.fill(&mut filler, line(1, 1), word(line(1, 1)));
        Arc::new(Self {
            cache,
            filler: Mutex::new(filler),
            unused: Condvar::new(),
            fence: AsymmetricFence::new(),
            drains: Drains::new(),
            cells: std::array::from_fn(|_| HazardCell::new()),
            attached: UnsafeCell::new(true),
        })
    }

    /// Wakes the invalidating thread, if it waits, as the lookup does after a release.
    fn after_release(&self) {
        if self.drains.is_awaited() {
            drop(self.filler.lock().unwrap());
            self.unused.notify_all();
        }
    }

    fn release(&self, cell: &HazardCell) {
        cell.clear(self.fence);
        self.after_release();
    }

    fn read_attached(&self) {
        // SAFETY: the reader uses the line, so no thread detaches it; loom checks it.
        assert!(self.attached.with(|attached| unsafe { *attached }));
    }

    fn read(&self, reader: usize) -> bool {
        let cell = &self.cells[reader];
        match self.cache.find(tag_of(line(1, 1)), cell, self.fence) {
            Ok(found) => {
                assert_eq!(found, word(line(1, 1)));
                self.read_attached();
                self.release(cell);
                true
            }
            Err(LineMiss { released }) => {
                if released {
                    self.after_release();
                }
                false
            }
        }
    }

    /// Finds the line under the lock, as a reader that missed does.
    fn read_locked(&self, reader: usize) {
        let filler = self.filler.lock().unwrap();
        let cell = &self.cells[reader];
        let Some(found) = self.cache.line_of(line(1, 1)) else { return };
        cell.publish_locked(found);
        drop(filler);
        self.read_attached();
        self.release(cell);
    }

    fn is_in_use(&self, name: LineKey) -> bool {
        self.cells.iter().any(|cell| cell.get() == word(name))
    }

    /// Invalidates the line: takes it out of the cache, then waits for its users, then detaches.
    fn forget(&self) {
        let mut filler = self.filler.lock().unwrap();
        self.cache.remove(&mut filler, line(1, 1));
        self.drains.begin(self.fence);
        while self.is_in_use(line(1, 1)) {
            filler = self.unused.wait(filler).unwrap();
        }
        self.drains.end();
        drop(filler);
        // SAFETY: the line is out of the cache and not in use; loom checks it.
        self.attached.with_mut(|attached| unsafe { *attached = false });
    }

    /// Detaches the line if it was evicted and is not in use, as a sweep does.
    fn sweep(&self) -> bool {
        let filler = self.filler.lock().unwrap();
        self.drains.begin(self.fence);
        let is_idle = self.cache.line_of(line(1, 1)).is_none() && !self.is_in_use(line(1, 1));
        self.drains.end();
        drop(filler);
        if is_idle {
            // SAFETY: as in `forget`.
            self.attached.with_mut(|attached| unsafe { *attached = false });
        }
        is_idle
    }
}

fn reader(world: &Arc<World>, number: usize) -> thread::JoinHandle<bool> {
    let world = world.clone();
    thread::spawn(move || world.read(number))
}

#[test]
fn a_line_in_use_is_never_detached_and_its_last_user_wakes_who_waits() {
    model(4, || {
        let world = World::new();
        let reader = reader(&world, 0);
        world.forget();
        reader.join().unwrap();
        assert!(!world.read(1));
    });
}

#[test]
fn two_users_of_a_leaving_line_wake_who_waits() {
    model(2, || {
        let world = World::new();
        let readers = [reader(&world, 0), reader(&world, 1)];
        world.forget();
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

#[test]
fn a_use_found_under_the_lock_keeps_the_line_attached() {
    model(3, || {
        let world = World::new();
        let reader = {
            let world = world.clone();
            thread::spawn(move || world.read_locked(0))
        };
        world.forget();
        reader.join().unwrap();
    });
}

#[test]
fn a_cell_that_is_used_again_loses_no_use() {
    model(3, || {
        let world = World::new();
        let reader = {
            let world = world.clone();
            thread::spawn(move || {
                world.read(0);
                world.read(0);
            })
        };
        world.forget();
        reader.join().unwrap();
    });
}

#[test]
fn a_line_that_was_evicted_in_use_is_not_swept_until_it_is_released() {
    model(3, || {
        let world = World::new();
        let reader = reader(&world, 0);
        {
            let mut filler = world.filler.lock().unwrap();
            let victim = world.cache.fill(&mut filler, line(2, 2), word(line(2, 2)));
            assert_eq!(victim.unwrap().0, line(1, 1));
        }
        world.sweep();
        reader.join().unwrap();
        assert!(!world.read(1));
    });
}

#[test]
fn a_slot_that_was_emptied_takes_a_new_line_beside_readers_of_the_old() {
    model(3, || {
        let world = World::new();
        let reader = reader(&world, 0);
        world.forget();
        let mut filler = world.filler.lock().unwrap();
        assert!(world.cache.fill(&mut filler, line(2, 2), word(line(2, 2))).is_none());
        drop(filler);
        reader.join().unwrap();
        assert_eq!(world.cache.line_of(line(2, 2)), Some(word(line(2, 2))));
    });
}
