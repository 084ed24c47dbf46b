//! Lines that are forgotten: readers beside the one who waits until nobody uses the line.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use memferry_memory::lookup::cache::{Cache, Filler, Missed};

use crate::cache::{entries, line, one_slot};
use crate::model;

/// A cache with one line, what the source attached for it, and who waits for it.
struct World {
    cache: Arc<Cache>,
    filler: Mutex<Filler>,
    unused: Condvar,
    attached: UnsafeCell<bool>,
}

// SAFETY: the cell is shared through the protocol under test, and loom watches it.
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

    /// As the lookup does it for translations that end and for attempts in vain.
    fn wake(&self) {
        drop(self.filler.lock().unwrap());
        self.unused.notify_all();
    }

    fn read(&self) -> bool {
        match self.cache.find(line(1, 1)) {
            Ok(slot) => {
                // SAFETY: the line is held, so nobody detaches it; loom watches it.
                assert!(self.attached.with(|attached| unsafe { *attached }));
                if self.cache.slot(slot).release() {
                    self.wake();
                }
                true
            }
            Err(Missed { wake }) => {
                if wake {
                    self.wake();
                }
                false
            }
        }
    }

    /// Forgets the line: no new users, then waits for the old ones, then detaches.
    fn forget(&self) {
        let mut filler = self.filler.lock().unwrap();
        self.cache.slot(0).leave();
        while !self.cache.empty(&mut filler, 0) {
            filler = self.unused.wait(filler).unwrap();
        }
        drop(filler);
        // SAFETY: the slot is empty and was unused when it became so; loom watches it.
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
        world.cache.slot(0).leave();
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
        // A reader that came in vain may have been in the way of the fill.
        if filled.is_some() {
            assert!(world.cache.find(next).is_ok());
        }
    });
}
