//! Communicators: whether the collectives of one are executed here, and its team.
//!
//! The decision is made at the first collective of a communicator and stored as an attribute of it. The
//! attribute is not copied to duplicates, and MPI deletes it when the communicator is freed.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::bootstrap;
use crate::handles::{Handles, is_switched_off};
use crate::library::{Handle, Library};
use crate::team::HostTeam;

/// A communicator and the decision about it.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) handle: Handle,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// `None`: all its collectives are passed on. MPI forbids two collectives of one communicator at the
    /// same time; the lock keeps a program that does it anyway from corrupting memory.
    pub(crate) team: Option<Mutex<HostTeam>>,
}

/// What a call needs: the library, its handles, and a communicator with a team.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context {
    pub(crate) library: &'static Library,
    pub(crate) handles: &'static Handles,
    pub(crate) communicator: &'static Communicator,
    pub(crate) team: &'static Mutex<HostTeam>,
}

/// Incremented when a communicator is freed: its handle may become that of another one.
static FREED: AtomicU64 = AtomicU64::new(0);

/// The communicator that a thread used last.
#[derive(Clone, Copy)]
struct LastUsed {
    handle: Handle,
    freed: u64,
    communicator: *const Communicator,
}

thread_local! {
    static LAST_USED: Cell<LastUsed> =
        const { Cell::new(LastUsed { handle: 0, freed: 0, communicator: ptr::null() }) };
}

impl Context {
    /// The context of a collective. `None`: it is to be passed on, at all ranks.
    #[inline]
    pub(crate) fn of(library: &'static Library, register: Handle) -> Option<Self> {
        let handle = library.handle(register);
        let last = LAST_USED.get();
        let communicator = if last.handle == handle
            && !last.communicator.is_null()
            && last.freed == FREED.load(Ordering::Acquire)
        {
            last.communicator
        } else {
            find(library, handle)?
        };
        // SAFETY: the communicator is released by MPI's call of `delete_attribute`, which increments
        // `FREED`. MPI forbids freeing a communicator while one of its collectives runs.
        let communicator: &'static Communicator = unsafe { &*communicator };
        let team = communicator.team.as_ref()?;
        Some(Self { library, handles: Handles::get(library)?, communicator, team })
    }
}

/// Finds the decision about a communicator, or makes it together with its other ranks.
#[cold]
fn find(library: &'static Library, handle: Handle) -> Option<*const Communicator> {
    if is_switched_off() || !is_active(library) {
        return None;
    }
    let handles = Handles::get(library)?;
    if handle == handles.comm_null || handle == 0 {
        return None;
    }
    let freed = FREED.load(Ordering::Acquire);
    let keyval = keyval(library)?;
    let mut stored: *mut c_void = ptr::null_mut();
    let mut is_stored: c_int = 0;
    // SAFETY: MPI is active, and writes a pointer and a flag.
    let code = unsafe {
        let to = (&raw mut stored).cast();
        (library.functions.comm_get_attr)(handle, keyval, to, &mut is_stored)
    };
    if code != 0 {
        return None;
    }
    let communicator = match is_stored {
        0 => decide(library, handles, handle, keyval)?,
        _ => stored.cast_const().cast(),
    };
    LAST_USED.set(LastUsed { handle, freed, communicator });
    Some(communicator)
}

/// Decides about a communicator and stores the decision.
fn decide(
    library: &'static Library,
    handles: &'static Handles,
    handle: Handle,
    keyval: c_int,
) -> Option<*const Communicator> {
    let ask = |function: unsafe extern "C" fn(Handle, *mut c_int) -> c_int| {
        let mut answer: c_int = 0;
        // SAFETY: MPI is active, and the function writes one number.
        (unsafe { function(handle, &mut answer) } == 0).then_some(answer)
    };
    let functions = &library.functions;
    let is_inter = ask(functions.comm_test_inter)? != 0;
    let rank = usize::try_from(ask(functions.comm_rank)?).ok()?;
    let size = usize::try_from(ask(functions.comm_size)?).ok()?;
    let team = if is_inter || size < 2 {
        None
    } else {
        bootstrap::form_team(library, handles, handle, rank, size)
    };
    let team = team.map(Mutex::new);
    let communicator = Box::into_raw(Box::new(Communicator { handle, rank, size, team }));
    // SAFETY: MPI is active; it returns the pointer to `delete_attribute`.
    let code = unsafe { (functions.comm_set_attr)(handle, keyval, communicator.cast()) };
    if code != 0 {
        // The other ranks have a team already. Without the attribute the next collective would form
        // another one, so that the communicator is kept for this thread and leaks.
        crate::report::line("the MPI library stores no attribute of a communicator");
    }
    Some(communicator)
}

/// Whether MPI is initialized and not finalized.
fn is_active(library: &Library) -> bool {
    let (mut began, mut ended): (c_int, c_int) = (0, 0);
    // SAFETY: both may be called at any time, and write one number each.
    let codes = unsafe {
        [(library.functions.initialized)(&mut began), (library.functions.finalized)(&mut ended)]
    };
    codes == [0, 0] && began != 0 && ended == 0
}

/// The key of the attribute; `None` if MPI refuses to make one.
fn keyval(library: &Library) -> Option<c_int> {
    static KEYVAL: OnceLock<Option<c_int>> = OnceLock::new();
    *KEYVAL.get_or_init(|| {
        let mut keyval: c_int = 0;
        // SAFETY: MPI is active, and both functions have the signatures of the standard.
        let code = unsafe {
            let create = library.functions.comm_create_keyval;
            create(skip_attribute, delete_attribute, &mut keyval, ptr::null_mut())
        };
        (code == 0).then_some(keyval)
    })
}

/// A duplicate is another communicator, with a team of its own.
unsafe extern "C" fn skip_attribute(
    _communicator: Handle,
    _keyval: c_int,
    _extra: *mut c_void,
    _value: *mut c_void,
    _copy: *mut c_void,
    is_copied: *mut c_int,
) -> c_int {
    // SAFETY: MPI passes a valid flag.
    unsafe { *is_copied = 0 };
    0
}

unsafe extern "C" fn delete_attribute(
    _communicator: Handle,
    _keyval: c_int,
    value: *mut c_void,
    _extra: *mut c_void,
) -> c_int {
    FREED.fetch_add(1, Ordering::Release);
    // SAFETY: `decide` made the value of a box, MPI deletes an attribute once, and no collective of the
    // communicator runs while it is freed.
    drop(unsafe { Box::from_raw(value.cast::<Communicator>()) });
    0
}
