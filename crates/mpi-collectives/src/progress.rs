//! Progress of MPI while a rank waits in a collective: another rank may not come to the collective before
//! a message to this rank is delivered.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use memferry_collective::{Progress, Stop};

use crate::handles::Handles;
use crate::library::{Handle, Library};

/// Polls of which only every fourth calls MPI: most waits are shorter.
const EARLY_POLLS: u32 = 32;
/// Collectives in a row that may end without a call of MPI: a program that only calls collectives which
/// need not wait must deliver messages too.
const QUIET_COLLECTIVES: u32 = 32;
/// Polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 64;
/// How long a rank with a core of its own waits without sleep.
const AWAKE: Duration = Duration::from_millis(10);
/// Interval of calls of MPI by a rank that waits for the core of another one. MPI may yield or sleep in each call,
/// and does not notice that the collective goes on.
const CROWDED_INTERVAL: Duration = Duration::from_micros(200);
/// How long a rank sleeps at most; afterwards it moves messages on.
const MAX_SLEEP: Duration = Duration::from_micros(50);

thread_local! {
    /// A request of this thread that is never complete: a test of it moves all messages on, and changes
    /// nothing else. Two threads must not test the same request.
    static REQUEST: Cell<Option<Handle>> = const { Cell::new(None) };
}

/// Moves messages of MPI on.
#[derive(Debug)]
pub(crate) struct MpiProgress {
    library: &'static Library,
    handles: &'static Handles,
    polls: u32,
    /// Collectives since MPI was called last.
    quiet: u32,
    /// When the rank began to wait, or called MPI if there are more ranks than cores.
    since: Option<Instant>,
    is_crowded: bool,
}

impl MpiProgress {
    pub(crate) fn new(library: &'static Library, handles: &'static Handles) -> Self {
        Self { library, handles, polls: 0, quiet: 0, since: None, is_crowded: false }
    }

    /// Sets whether there are more ranks than cores.
    pub(crate) fn set_crowded(&mut self, is_crowded: bool) {
        self.is_crowded = is_crowded;
    }

    /// Begins a new collective.
    #[inline]
    pub(crate) fn restart(&mut self) {
        self.polls = 0;
        self.since = None;
        self.quiet += 1;
        if self.quiet >= QUIET_COLLECTIVES {
            self.move_messages();
        }
    }

    fn move_messages(&mut self) {
        self.quiet = 0;
        let Some(mut request) = REQUEST.get().or_else(|| self.start_request()) else { return };
        let mut is_complete: c_int = 0;
        // SAFETY: MPI is active, and the request belongs to this thread and is not complete.
        unsafe {
            (self.library.functions.test)(
                &mut request,
                &mut is_complete,
                self.handles.status_ignore,
            )
        };
    }

    /// Calls MPI at intervals. The rank sleeps in between, until the collective goes on.
    fn poll_crowded(&mut self) -> Duration {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let waited = now - since;
        if waited < CROWDED_INTERVAL {
            return CROWDED_INTERVAL - waited;
        }
        self.move_messages();
        self.since = Some(Instant::now());
        CROWDED_INTERVAL
    }

    #[cold]
    fn start_request(&self) -> Option<Handle> {
        let mut request: Handle = 0;
        // SAFETY: MPI is active, and the functions have the signatures of the standard. A handle of any
        // family fits into the variable, at its start.
        let code = unsafe {
            let start = self.library.functions.grequest_start;
            start(query_request, free_request, cancel_request, ptr::null_mut(), &mut request)
        };
        let started = (code == 0).then_some(request);
        REQUEST.set(started);
        started
    }
}

impl Progress for MpiProgress {
    fn poll(&mut self) -> Result<Duration, Stop> {
        self.polls = self.polls.saturating_add(1);
        if self.is_crowded && self.polls > EARLY_POLLS {
            return Ok(self.poll_crowded());
        }
        if self.polls > EARLY_POLLS || self.polls.is_multiple_of(4) {
            self.move_messages();
        }
        if !self.polls.is_multiple_of(POLLS_PER_CLOCK) && self.since.is_none() {
            return Ok(Duration::ZERO);
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        Ok(if since.elapsed() < AWAKE { Duration::ZERO } else { MAX_SLEEP })
    }
}

unsafe extern "C" fn query_request(_extra: *mut c_void, _status: *mut c_void) -> c_int {
    0
}

unsafe extern "C" fn free_request(_extra: *mut c_void) -> c_int {
    0
}

unsafe extern "C" fn cancel_request(_extra: *mut c_void, _is_complete: c_int) -> c_int {
    0
}
