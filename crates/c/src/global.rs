//! The globals of the process: one ferry with its GPU memory (`LibraryState`), opened by the first
//! call that needs it and closed by `adma_fini`, and the links.
//!
//! A call holds the lock for reading for as long as it uses the ferry; opening and closing hold it
//! for writing. So closing waits for every running call, and no call ever sees a partly closed
//! ferry. A forked child can use neither its parent's ferry, whose channel threads do not exist in
//! the child, nor its locks, which one of those threads may have held: the child never accesses
//! either and creates its own. The same holds for links.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use memferry::{BuildError, Cookie, CudaEngine, EngineSelection, Ferry, FerryBuilder, Request};
use memferry_sys::fork::PerProcess;

use crate::code::{ADMA_EALREADY, CallError};
use crate::links::Links;
use crate::open::LibraryState;
use crate::teams::Teams;
use crate::windows::FIRST_WINDOW;

/// Runs `call` with the library, which is opened first if it is not open.
pub(crate) fn with<R>(call: impl FnOnce(&LibraryState) -> R) -> Result<R, BuildError> {
    let process = ProcessGlobals::current();
    loop {
        if let Some(open) = &process.read().library {
            return Ok(call(open));
        }
        // Another thread may close it before the next check; then it is opened again.
        process.open()?;
    }
}

/// Runs `call` with the library if it is open.
pub(crate) fn with_open<R>(call: impl FnOnce(&LibraryState) -> R) -> Option<R> {
    ProcessGlobals::current().read().library.as_ref().map(call)
}

/// Opens the library unless it is open.
pub(crate) fn open() -> Result<(), BuildError> {
    ProcessGlobals::current().open()
}

/// Opens the library with a GPU.
pub(crate) fn use_gpu(ordinal: usize) -> Result<(), CallError> {
    ProcessGlobals::current().use_gpu(ordinal)
}

/// Waits for all running calls and all copies in flight, and closes the library.
pub(crate) fn close() {
    ProcessGlobals::current().close();
}

/// The links of this process.
pub(crate) fn links() -> &'static Links {
    &ProcessGlobals::current().links
}

/// The teams of this process.
pub(crate) fn teams() -> &'static Teams {
    &ProcessGlobals::current().teams
}

/// Whether a descriptor is that of a link or listener from before a fork.
pub(crate) fn is_from_before_fork(descriptor: c_int) -> bool {
    let ancestors =
        std::iter::successors(ProcessGlobals::current().parent, |process| process.parent);
    ancestors.into_iter().any(|process| process.links.is_from_before_fork(descriptor))
}

/// Whether a cookie that the ferry does not know is from before a fork.
pub(crate) fn is_from_parent(cookie: i64) -> bool {
    let process = ProcessGlobals::current();
    process.parent.is_some() && (0..process.first_cookie.load(Ordering::Relaxed)).contains(&cookie)
}

/// Blocking copies below this size are a plain `memmove`, for which no ferry is needed. Zero while
/// none is open, so that the first call opens it and reports what is wrong, and with a GPU, whose
/// memory no processor can move.
#[inline]
pub(crate) fn plain_below() -> usize {
    PLAIN_BELOW.load(Ordering::Relaxed)
}

/// Maximum number of ferries: their cookies stay below the numbers of windows and the cookies of
/// links.
const MAX_FERRIES: u64 = (1 << 15) - 2;

static PLAIN_BELOW: AtomicUsize = AtomicUsize::new(0);

/// The state of this process; a forked child creates its own.
#[derive(Debug)]
struct ProcessGlobals {
    /// The state of the process that forked this one, if it used the library.
    parent: Option<&'static Self>,
    /// The first cookie of this process. Cookies increase from ferry to ferry, and a child
    /// continues where its parent was, so smaller ones are the parent's.
    first_cookie: AtomicI64,
    state: RwLock<GlobalState>,
    links: Links,
    teams: Teams,
}

#[derive(Debug, Default)]
struct GlobalState {
    library: Option<LibraryState>,
    /// The GPU that `adma_use_gpu` named; otherwise the environment decides.
    gpu: Option<usize>,
}

impl ProcessGlobals {
    /// The state of this process. That of a parent is not accessed and never dropped: the threads that a drop would
    /// wait for do not exist in a child.
    #[inline]
    fn current() -> &'static Self {
        static CURRENT: PerProcess<ProcessGlobals> = PerProcess::new();
        CURRENT.get_or_make(|parent| Self {
            parent,
            first_cookie: AtomicI64::new(i64::MAX),
            state: RwLock::default(),
            links: Links::new(parent.is_some()),
            teams: Teams::default(),
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, GlobalState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, GlobalState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Result<(), BuildError> {
        let mut state = self.write();
        if state.library.is_none() {
            state.library = Some(self.build(state.gpu)?);
        }
        Ok(())
    }

    fn use_gpu(&self, ordinal: usize) -> Result<(), CallError> {
        let mut state = self.write();
        let Some(open) = &state.library else {
            state.library = Some(self.build(Some(ordinal))?);
            state.gpu = Some(ordinal);
            return Ok(());
        };
        if open.gpu().is_some_and(|gpu| gpu.info().ordinal == ordinal) {
            return Ok(());
        }
        let text = format!(
            "the library is open already, without GPU {ordinal}: call adma_use_gpu before all \
             other calls, or adma_fini first"
        );
        Err(CallError::new(ADMA_EALREADY, text))
    }

    fn build(&self, gpu: Option<usize>) -> Result<LibraryState, BuildError> {
        let settings = FerryBuilder::new();
        let settings = match gpu {
            Some(ordinal) => settings.gpu(EngineSelection::device(ordinal)),
            None => settings,
        };
        let opened = settings.build()?;
        let first = first_cookie(&opened);
        // Windows and the cookies of links are above those of copies, and must stay so.
        if first >= FIRST_WINDOW {
            return Err(BuildError::TooMany(MAX_FERRIES));
        }
        self.first_cookie.fetch_min(first, Ordering::Relaxed);
        let profile = &opened.plan_context().profile;
        let plain_below = match opened.engine_as::<CudaEngine>() {
            Some(_) => 0,
            None => profile.split_bytes.min(profile.stream_bytes),
        };
        PLAIN_BELOW.store(plain_below, Ordering::Relaxed);
        Ok(LibraryState::new(opened))
    }

    fn close(&self) {
        let mut state = self.write();
        PLAIN_BELOW.store(0, Ordering::Relaxed);
        // Dropped with the lock held: other callers wait until everything is closed.
        state.library = None;
    }
}

/// The cookie of an empty copy: the smallest of a new ferry.
fn first_cookie(ferry: &Ferry) -> i64 {
    // SAFETY: a request of length zero touches no memory.
    let cookie = unsafe { ferry.start_cookie_raw(Request::copy(ptr::null(), ptr::null_mut(), 0)) };
    cookie.map_or(i64::MAX, Cookie::to_raw)
}
