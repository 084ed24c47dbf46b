//! Statics that a forked child can use.
//!
//! A fork copies all memory, but only the thread that forks. What another thread was doing to a static stays half
//! done in the child for ever: its initialiser has begun, its lock is held. A child that needs it would hang. The
//! other thread may be one of ours that the application does not know, such as one that accepts connections.
//!
//! So a static of this library is one of these:
//!
//! | what it is | type | in a child |
//! |---|---|---|
//! | a fact that is computed once: the processor, a profile, a library that is loaded | [`ForkSafe`] | the parent's if it was complete, else computed anew |
//! | a lock, or a list of what belongs to the process: quarantine, probes, the globals of C | [`PerProcess`] | a new one |
//! | a counter, a flag | an atomic | the parent's |
//! | a value of one thread | a thread-local | that of the thread that forked |
//!
//! `OnceLock`, `LazyLock`, `Once`, `Mutex`, `RwLock` and `Condvar` are not for statics; a test of this module enforces
//! that. Exceptions: programs and tests; `mpi-collectives`, because MPI forbids its calls in a child; and three
//! statics of `python`, of which two are locked only with the interpreter, which a fork holds, and the third is locked
//! on our threads too, which only try its lock. The C library resets its own locks in a child, those of its heap
//! among them. Locks inside objects need no rule: a child asks the [`OwnerProcess`] of an object first.
//!
//! No handler of the fork waits for other threads: one of them may wait for the thread that forks. Instead the child
//! leaves behind what is not complete. That leaks it, once.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::OwnerProcess;
use crate::fault::step;

/// A static of which each process makes its own, when it first needs it.
///
/// ```
/// use std::sync::Mutex;
///
/// use memferry_sys::fork::PerProcess;
///
/// static OPEN: PerProcess<Mutex<Vec<u32>>> = PerProcess::new();
/// OPEN.lock().push(7);
/// assert_eq!(OPEN.lock().len(), 1); // in a child: 0, and never locked by a thread of the parent
/// ```
#[derive(Debug)]
pub struct PerProcess<T: 'static> {
    /// Null, or from a box that is never freed: a child may still use its parent's value.
    current: AtomicPtr<OwnedValue<T>>,
}

#[derive(Debug)]
struct OwnedValue<T> {
    owner: OwnerProcess,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Creates the static without a value.
    pub const fn new() -> Self {
        Self { current: AtomicPtr::new(null_mut()) }
    }

    /// The value of this process, or of the last ancestor that had one.
    #[inline]
    fn latest(&self) -> Option<&'static OwnedValue<T>> {
        // SAFETY: it is null or came from a box; nothing that was published is ever freed.
        unsafe { self.current.load(Ordering::Acquire).as_ref() }
    }

    /// The value of this process, if it has made one.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        self.latest().filter(|latest| latest.owner.is_current()).map(|latest| &latest.value)
    }

    /// The value of this process. `make` gets that of the last ancestor that had one: its locks may be held for ever.
    /// If several threads make one, the first remains.
    #[inline]
    pub fn get_or_make(&self, make: impl FnOnce(Option<&'static T>) -> T) -> &'static T {
        match self.get() {
            Some(value) => value,
            None => self.make(make),
        }
    }

    #[cold]
    fn make(&self, make: impl FnOnce(Option<&'static T>) -> T) -> &'static T {
        // First: the child of a fork during `make` must not take the value for its own.
        let owner = OwnerProcess::current();
        let inherited = self.current.load(Ordering::Acquire);
        // SAFETY: as in `latest`.
        if let Some(known) = unsafe { inherited.as_ref() }.filter(|known| known.owner == owner) {
            return &known.value;
        }
        // SAFETY: as in `latest`.
        let value = make(unsafe { inherited.as_ref() }.map(|inherited| &inherited.value));
        let ours = Box::into_raw(Box::new(OwnedValue { owner, value }));
        match self.current.compare_exchange(inherited, ours, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it comes from a box, and being published it is never freed.
            Ok(_) => unsafe { &(*ours).value },
            Err(winner) => {
                // SAFETY: it comes from a box and was not published, so no other thread has it.
                drop(unsafe { Box::from_raw(ours) });
                // SAFETY: only pointers from boxes are published, and they stay.
                unsafe { &(*winner).value }
            }
        }
    }
}

impl<T: Default + Send> PerProcess<Mutex<T>> {
    /// Locks the value of this process. Ignores poisoning, as [`crate::sync::lock`].
    pub fn lock(&self) -> MutexGuard<'static, T> {
        let mutex = self.get_or_make(|_| Mutex::default());
        let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        step();
        guard
    }
}

impl<T: Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A static that is computed once, on first use. A child inherits it if it is complete; if a thread of the parent was
/// computing it at the fork, the child computes it anew.
///
/// ```
/// use memferry_sys::fork::ForkSafe;
///
/// static CORES: ForkSafe<usize> = ForkSafe::new();
/// assert_eq!(CORES.get_or_init(|| 4), &4);
/// assert_eq!(CORES.get_or_init(|| 5), &4);
/// ```
#[derive(Debug)]
pub struct ForkSafe<T: 'static>(PerProcess<OnceLock<T>>);

impl<T: Send + Sync> ForkSafe<T> {
    /// Creates the static without a value.
    pub const fn new() -> Self {
        Self(PerProcess::new())
    }

    /// The value, if it is complete.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        self.0.latest()?.value.get()
    }

    /// The value; computes it first if there is none. Other threads of this process wait meanwhile.
    #[inline]
    pub fn get_or_init(&self, compute: impl FnOnce() -> T) -> &'static T {
        match self.get() {
            Some(value) => value,
            None => self.init(compute),
        }
    }

    #[cold]
    fn init(&self, compute: impl FnOnce() -> T) -> &'static T {
        self.0.get_or_make(|_| OnceLock::new()).get_or_init(|| {
            step();
            let value = compute();
            step();
            value
        })
    }

    /// Sets the value; returns it if there is one already.
    pub fn set(&self, value: T) -> Result<(), T> {
        match self.get() {
            Some(_) => Err(value),
            None => self.0.get_or_make(|_| OnceLock::new()).set(value),
        }
    }
}

impl<T: Send + Sync> Default for ForkSafe<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Forks; the child returns whether it found everything right. A child that hangs is ended.
    fn in_child(run: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child uses its stack and the heap, whose locks `fork` resets, and exits by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; the signal ends a child that hangs.
            unsafe {
                libc::alarm(60);
                libc::_exit(i32::from(!run()));
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child created above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn a_child_computes_what_a_thread_of_its_parent_was_computing() {
        static VALUE: ForkSafe<u32> = ForkSafe::new();
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            *VALUE.get_or_init(|| {
                begun.send(()).unwrap();
                may_go_on.recv().unwrap();
                1
            })
        });
        has_begun.recv().unwrap();
        assert!(in_child(|| VALUE.get().is_none() && *VALUE.get_or_init(|| 2) == 2));
        go_on.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), 1);
        assert_eq!(VALUE.set(3), Err(3));
        assert!(in_child(|| *VALUE.get_or_init(|| 2) == 1), "what is complete is inherited");
    }

    /// The crates whose code runs in programs of others.
    const CRATES: [&str; 12] = [
        "sys",
        "memory",
        "engine",
        "copy",
        "message",
        "collective",
        "load",
        "memferry",
        "c",
        "fabric",
        "python",
        "preload",
    ];

    const EXCEPTIONS: [&str; 4] = [
        "sys/src/fault.rs: STATE",
        "python/src/release.rs: QUEUE",
        "python/src/copies.rs: FERRIES",
        "python/src/copies.rs: DRIVERS",
    ];

    /// The statics of a source file that a fork can leave half made or locked, without those of its tests.
    fn unsafe_statics(source: &str) -> impl Iterator<Item = &str> {
        const TYPES: [&str; 6] = ["OnceLock", "LazyLock", "Once", "Mutex", "RwLock", "Condvar"];
        let code = source.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
        let code = code.take_while(|line| !line.starts_with("#[cfg(all(test"));
        code.filter_map(|line| {
            let (_, rest) = line.split_once("static ")?;
            let (name, kind) = rest.split_once(": ")?;
            let kind = kind.split(['<', ' ', ';']).next()?.rsplit("::").next()?;
            TYPES.contains(&kind).then_some(name)
        })
    }

    #[test]
    fn no_static_can_be_left_half_made_or_locked_by_a_fork() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut folders: Vec<_> = CRATES.iter().map(|name| crates.join(name).join("src")).collect();
        let (mut found, mut files) = (Vec::new(), 0);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(crates).unwrap().display().to_string();
                if path.is_dir() {
                    folders.extend((!name.ends_with("/tests")).then_some(path));
                } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
                    let source = std::fs::read_to_string(&path).unwrap();
                    found.extend(unsafe_statics(&source).map(|one| format!("{name}: {one}")));
                    files += 1;
                }
            }
        }
        found.retain(|one| !EXCEPTIONS.contains(&one.as_str()));
        assert!(files > 500, "there are more sources: {files}");
        assert!(found.is_empty(), "use `ForkSafe` or `PerProcess`: {found:?}");
        assert_eq!(unsafe_statics("    static A: std::sync::OnceLock<u8> = x;").next(), Some("A"));
    }

    #[test]
    fn a_child_finds_no_lock_that_a_thread_of_its_parent_holds() {
        static LIST: PerProcess<Mutex<Vec<u32>>> = PerProcess::new();
        // The forking thread stands for another thread that holds the lock: in the child it stays locked.
        let mut guard = LIST.lock();
        guard.push(1);
        assert!(in_child(|| {
            LIST.lock().push(2);
            *LIST.lock() == [2] && in_child(|| LIST.lock().is_empty())
        }));
        assert_eq!(*guard, [1]);
    }
}
