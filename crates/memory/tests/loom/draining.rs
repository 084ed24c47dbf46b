//! Invalidation of lines: readers, and a thread that waits until the line is not in use.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use memferry_memory::lookup::cache::{FillToken, LineCache, LineMiss};

use crate::cache::{entries, line, one_slot};
use crate::model;

/// A cache with one line, the memory that the backend attached for it, and the condition that the
/// invalidating thread waits for.
struct World {
    cache: Arc<LineCache>,
    filler: Mutex<FillToken>,
    unused: Condvar,
    attached: UnsafeCell<bool>,
}

// SAFETY: the protocol under test protects the cell, and loom checks it.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<Self> {
        let (cache, mut filler) = one_slot();
        cache.fill(&mut filler, line(1, 1), &entries(line(1, 1))).unwrap();
        Arc::new(Self {
            cache,
            filler: Mutex::new(filler),
            unused: Condvar::new(),
            attached: UnsafeCell::new(true),
        })
    }

    /// Wakes the invalidating thread, as the lookup does after a release and after a miss.
    fn wake(&self) {
        drop(self.filler.lock().unwrap());
        self.unused.notify_all();
    }

    fn read(&self) -> bool {
        match self.cache.find(line(1, 1)) {
            Ok(slot) => {
                // SAFETY: the reader holds the line, so no thread detaches it; loom checks it.
                assert!(self.attached.with(|attached| unsafe { *attached }));
                if self.cache.slot(slot).release() {
                    self.wake();
                }
                true
            }
            Err(LineMiss { wake }) => {
                if wake {
                    self.wake();
                }
                false
            }
        }
    }

    /// Invalidates the line: prevents new users, then waits for the present ones, then detaches.
    fn forget(&self) {
        let mut filler = self.filler.lock().unwrap();
        self.cache.slot(0).begin_drain();
        while !self.cache.clear(&mut filler, 0) {
            filler = self.unused.wait(filler).unwrap();
        }
        drop(filler);
        // SAFETY: the slot is empty, and was not in use when it became empty; loom checks it.
        self.attached.with_mut(|attached| unsafe { *attached = false });
    }
}

fn reader(world: &Arc<World>) -> thread::JoinHandle<bool> {
    let world = world.clone();
    thread::spawn(move || world.read())
}

#[test]
fn a_line_in_use_is_never_detached_and_its_last_user_wakes_who_waits() {
    model(4, || {
        let world = World::new();
        let reader = reader(&world);
        world.forget();
        reader.join().unwrap();
        assert!(!world.read());
    });
}

#[test]
fn two_users_of_a_leaving_line_wake_who_waits() {
    model(2, || {
        let world = World::new();
        let readers = [reader(&world), reader(&world)];
        world.forget();
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

#[test]
fn a_leaving_line_takes_no_new_users() {
    model(3, || {
        let world = World::new();
        world.cache.slot(0).begin_drain();
        let reader = reader(&world);
        assert!(!world.read());
        assert!(!reader.join().unwrap());
        world.forget();
    });
}

#[test]
fn a_slot_that_was_emptied_takes_a_new_line_beside_readers_of_the_old() {
    model(3, || {
        let world = World::new();
        let reader = reader(&world);
        world.forget();
        let mut filler = world.filler.lock().unwrap();
        let next = line(2, 2);
        let filled = world.cache.fill(&mut filler, next, &entries(next));
        drop(filler);
        reader.join().unwrap();
        // A reader that missed may have prevented the fill.
        if filled.is_some() {
            assert!(world.cache.find(next).is_ok());
        }
    });
}
