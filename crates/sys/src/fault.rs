//! Fault injection: tests make a system call fail, kill the process, or stop a thread.
//!
//! System calls of copies and messages that can fail go through [`call`], and the steps of their
//! protocols in shared memory through [`step`]. Exceptions are calls of devices and GPUs
//! (`engine/src/fault` wraps engines instead) and calls that only read a property of the machine
//! and have a default. A test with the feature `faults` selects the fault (`FaultPlan`) and
//! iterates from the first to the last. Without the feature, both functions compile to nothing.
//!
//! Calls that release something (`munmap`, `close`, `munlock`, `shutdown`, removal from an epoll
//! set) are not made to fail, because no caller could react. Signalling an eventfd and waking a
//! futex are not either, because the kernel never refuses them.

use std::io;

use rustix::io::Errno;

macro_rules! calls {
    ($($name:ident),* $(,)?) => {
        /// A kind of system call, by the kernel's name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the names are the kernel's")]
        pub enum Call { $($name),* }

        impl Call {
            /// All kinds.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }

        impl Call {
            /// Whether the call waits. The number of waits depends on timing, and a failed wait
            /// always has the same effect: one wait more or fewer.
            pub fn is_wait(self) -> bool {
                matches!(self, Self::FutexWait | Self::FutexWaitv | Self::Poll | Self::EpollWait)
            }
        }
    };
}

calls! {
    Accept, Bind, Capget, Clone, Connect, Dup, EpollAdd, EpollCreate, EpollWait, Eventfd, EventfdRead,
    Fchmod, Fstat, Fstatfs, Ftruncate, FutexWait, FutexWaitv, GetLock, Getpeername, Getrandom, GetSeals,
    Getsockopt, IoUringRegister, IoUringSetup, Listen, Madvise, Membarrier, MemfdCreate, Mincore, Mlock, Mmap,
    Mprotect, Open, PidfdOpen, Poll, ProcessVmReadv, ProcessVmWritev, Readlink, Recvmsg,
    SchedGetaffinity, SchedSetaffinity, AddSeals, Sendmsg, SetLock, Socket, Socketpair, Stat, Unlink, Userfaultfd,
    UserfaultfdApi, UserfaultfdRead, UserfaultfdRegister, UserfaultfdUnregister, UserfaultfdWriteProtect,
}

/// Makes a system call.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn call<T, E: From<Errno>>(_: Call, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    make()
}

/// As [`call`], for a C function that returns 0, or another value and an error number.
#[cfg_attr(feature = "faults", track_caller)]
#[inline(always)]
pub fn call_c(kind: Call, make: impl FnOnce() -> libc::c_int) -> io::Result<()> {
    call(kind, || match make() {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    })
}

/// Marks a step of a protocol between processes, after which a test may kill the process.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn step() {}

#[cfg(feature = "faults")]
pub use armed::{
    FaultCounts, FaultPlan, arm, call, disarm, for_each_failure, has_fired, ignore, is_holding,
    step,
};

#[cfg(feature = "faults")]
mod armed {
    use std::collections::BTreeMap;
    use std::panic::Location;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{Call, Errno};

    /// The fault to inject.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum FaultPlan {
        /// None: calls and steps are only counted.
        Count,
        /// The `nth` call of a kind, counted from 1, returns an error and is not made.
        Fail {
            /// The kind of call.
            call: Call,
            /// The number of the call, from 1.
            nth: u64,
            /// The error number.
            error: i32,
            /// Whether all later calls of the kind fail too, as at a limit.
            is_persistent: bool,
        },
        /// The process is killed before the `nth` call or step of any kind, waits excluded.
        Kill {
            /// The number of the call or step, from 1.
            nth: u64,
        },
        /// The thread that comes to the `nth` call or step of any kind, waits excluded, stays there until
        /// [`disarm`].
        Hold {
            /// The number of the call or step, from 1.
            nth: u64,
        },
    }

    /// Counts since [`arm`].
    #[derive(Debug, Clone, Default)]
    pub struct FaultCounts {
        /// Calls by kind.
        pub calls: BTreeMap<Call, u64>,
        /// All calls and steps, waits excluded.
        pub total: u64,
        /// The source location of the fault, if one was injected.
        pub fired_at: Option<&'static Location<'static>>,
    }

    struct FaultState {
        plan: FaultPlan,
        counts: FaultCounts,
    }

    static ARMED: AtomicBool = AtomicBool::new(false);
    static IS_HOLDING: AtomicBool = AtomicBool::new(false);
    static STATE: Mutex<Option<FaultState>> = Mutex::new(None);

    /// Calls `round` with a plan for each call of these kinds that can fail. `round` executes the
    /// plan and returns whether a fault was injected; if not, the iteration continues with the next
    /// error. `lasting` adds plans in which all later calls fail too. `MEMFERRY_FAULTS=some`
    /// reduces the set of errors.
    pub fn for_each_failure(
        calls: &[Call],
        lasting: bool,
        mut round: impl FnMut(FaultPlan) -> bool,
    ) {
        const ALL: [i32; 5] = [libc::EMFILE, libc::EINTR, libc::ENOMEM, libc::EPERM, libc::EAGAIN];
        /// `EINTR` and `EAGAIN` are not lasting conditions.
        const LASTING: [i32; 3] = [libc::EMFILE, libc::ENOMEM, libc::EPERM];
        /// Maximum number of plans for a call that waits: see [`Call::is_wait`].
        const MAX_WAITS: u64 = 16;
        let (once, lasting): (&[i32], &[i32]) = match std::env::var("MEMFERRY_FAULTS").as_deref() {
            Ok("some") => (&ALL[..2], &[]),
            _ if lasting => (&ALL, &LASTING),
            _ => (&ALL, &[]),
        };
        let once = once.iter().map(|&error| (error, false));
        let errors: Vec<_> = once.chain(lasting.iter().map(|&error| (error, true))).collect();
        for &call in calls {
            for &(error, is_persistent) in &errors {
                let is_covered = |nth: &u64| *nth <= MAX_WAITS || !call.is_wait();
                let plan = |nth| FaultPlan::Fail { call, nth, error, is_persistent };
                let _ = (1..).take_while(is_covered).map(plan).all(&mut round);
            }
        }
    }

    /// Starts counting and injects the fault of `plan`.
    pub fn arm(plan: FaultPlan) {
        let state = FaultState { plan, counts: FaultCounts::default() };
        *STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(state);
        ARMED.store(true, Ordering::SeqCst);
    }

    /// Whether a fault has been injected since [`arm`].
    pub fn has_fired() -> bool {
        let state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.as_ref().is_some_and(|state| state.counts.fired_at.is_some())
    }

    /// Whether a thread has come to the call or step at which it stays.
    pub fn is_holding() -> bool {
        IS_HOLDING.load(Ordering::SeqCst)
    }

    /// Stops counting and injecting without a lock: for a forked child, where a lock of this module may be held.
    pub fn ignore() {
        ARMED.store(false, Ordering::SeqCst);
    }

    /// Stops counting and injecting. Returns the counts.
    pub fn disarm() -> FaultCounts {
        ignore();
        IS_HOLDING.store(false, Ordering::SeqCst);
        let state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        state.map(|state| state.counts).unwrap_or_default()
    }

    /// Makes a system call, unless the plan makes it fail.
    #[track_caller]
    pub fn call<T, E: From<Errno>>(
        kind: Call,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match check(Some(kind), Location::caller()) {
            Some(error) => Err(error.into()),
            None => make(),
        }
    }

    /// Marks a step of a protocol between processes, after which a test may kill the process.
    #[track_caller]
    pub fn step() {
        let _ = check(None, Location::caller());
    }

    fn check(kind: Option<Call>, location: &'static Location<'static>) -> Option<Errno> {
        if !ARMED.load(Ordering::SeqCst) {
            return None;
        }
        let mut state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let FaultState { plan, counts } = state.as_mut()?;
        // The number of waits depends on timing, so a wait is no step of a protocol.
        let is_step = kind.is_none_or(|kind| !kind.is_wait());
        counts.total += u64::from(is_step);
        let count = kind.map(|kind| {
            let count = counts.calls.entry(kind).or_default();
            *count += 1;
            *count
        });
        let fault = match *plan {
            FaultPlan::Count => None,
            FaultPlan::Fail { call, nth, error, is_persistent } => {
                let is_selected = count == Some(nth) || is_persistent && count > Some(nth);
                (kind == Some(call) && is_selected).then(|| Errno::from_raw_os_error(error))
            }
            FaultPlan::Kill { nth } => {
                if is_step && counts.total == nth {
                    let _ = rustix::process::kill_process(
                        rustix::process::getpid(),
                        rustix::process::Signal::KILL,
                    );
                }
                None
            }
            FaultPlan::Hold { nth } => {
                if is_step && counts.total == nth {
                    IS_HOLDING.store(true, Ordering::SeqCst);
                    drop(state);
                    while IS_HOLDING.load(Ordering::SeqCst) {
                        std::thread::yield_now();
                    }
                    return None;
                }
                None
            }
        };
        if fault.is_some() {
            counts.fired_at.get_or_insert(location);
        }
        fault
    }
}
