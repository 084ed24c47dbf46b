//! Where tests let a system call fail, or this process end.
//!
//! The calls to the kernel of copies and messages that can fail go through [`call`], and the steps of their
//! protocols in shared memory through [`step`]. (Those of devices and of GPUs do not: `engine/src/fault` wraps
//! engines. Nor do those that only read a fact of the machine and have a value to fall back on.) A test with the
//! feature `faults` says which of them goes wrong (`Plan`) and walks from the first to the last. Without that
//! feature both are nothing at all.
//!
//! What gives something back (`munmap`, `close`, `munlock`, `shutdown`, deleting from an epoll set) does not
//! fail here: there is nobody who could do anything about it. Nor does the signalling of an eventfd and the
//! waking of a futex, which the kernel never refuses.

use std::io;

use rustix::io::Errno;

macro_rules! calls {
    ($($name:ident),* $(,)?) => {
        /// A kind of call to the kernel, by the kernel's name of it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the names are the kernel's")]
        pub enum Call { $($name),* }

        impl Call {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }

        impl Call {
            /// Whether it waits. How often a thread waits depends on time; one wait more or less is all that a
            /// failure comes to, wherever it is.
            pub fn is_wait(self) -> bool {
                matches!(self, Self::FutexWait | Self::FutexWaitv | Self::Poll | Self::EpollWait)
            }
        }
    };
}

calls! {
    Accept, Bind, Capget, Clone, Connect, Dup, EpollAdd, EpollCreate, EpollWait, Eventfd, EventfdRead,
    Fchmod, Fstat, Fstatfs, Ftruncate, FutexWait, FutexWaitv, Getpeername, Getrandom, GetSeals,
    Getsockopt, IoUringRegister, IoUringSetup, Listen, Madvise, Membarrier, MemfdCreate, Mincore, Mlock, Mmap,
    Mprotect, Open, PidfdOpen, Poll, ProcessVmReadv, ProcessVmWritev, Readlink, Recvmsg,
    SchedGetaffinity, SchedSetaffinity, AddSeals, Sendmsg, Socket, Socketpair, Stat, Unlink, Userfaultfd,
    UserfaultfdApi, UserfaultfdRead, UserfaultfdRegister, UserfaultfdUnregister, UserfaultfdWriteProtect,
}

/// Makes a call to the kernel, unless it is the one that is to fail.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn call<T, E: From<Errno>>(_: Call, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    make()
}

/// The same for a call of the C library that gives 0, or something else and the number of an error.
#[cfg_attr(feature = "faults", track_caller)]
#[inline(always)]
pub fn call_c(kind: Call, make: impl FnOnce() -> libc::c_int) -> io::Result<()> {
    call(kind, || match make() {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    })
}

/// A step of a protocol between processes, after which one of them may be gone.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub fn step() {}

#[cfg(feature = "faults")]
pub use armed::{Account, Plan, arm, call, disarm, each_failure, has_fired, step};

#[cfg(feature = "faults")]
mod armed {
    use std::collections::BTreeMap;
    use std::panic::Location;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{Call, Errno};

    /// What is to go wrong.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Plan {
        /// Nothing: calls and steps are counted.
        Count,
        /// The `nth` call of this kind, the first being 1, gives this error instead of being made.
        Fail {
            /// Which kind of call.
            call: Call,
            /// Which of them.
            nth: u64,
            /// With which error.
            error: i32,
            /// So do all that follow: a limit that is reached.
            lasts: bool,
        },
        /// The process is killed before the `nth` call or step of any kind that does not only wait.
        Die {
            /// Which of them, the first being 1.
            nth: u64,
        },
    }

    /// What was counted since a plan was made.
    #[derive(Debug, Clone, Default)]
    pub struct Account {
        /// Calls of each kind.
        pub calls: BTreeMap<Call, u64>,
        /// Calls and steps, all together, without those that only wait.
        pub total: u64,
        /// Where the fault was, if there was one: the place in the code.
        pub fired: Option<&'static Location<'static>>,
    }

    struct State {
        plan: Plan,
        account: Account,
    }

    static ARMED: AtomicBool = AtomicBool::new(false);
    static STATE: Mutex<Option<State>> = Mutex::new(None);

    /// Makes a plan for each place at which calls of these kinds can fail. `round` carries one out and says
    /// whether anything failed: if not, there is no such place any more. `lasting`: with limits that are reached,
    /// too. `MEMFERRY_FAULTS=some`: not with every error.
    pub fn each_failure(calls: &[Call], lasting: bool, mut round: impl FnMut(Plan) -> bool) {
        const ALL: [i32; 5] = [libc::EMFILE, libc::EINTR, libc::ENOMEM, libc::EPERM, libc::EAGAIN];
        /// Nobody interrupts every call.
        const LASTING: [i32; 3] = [libc::EMFILE, libc::ENOMEM, libc::EPERM];
        /// How many waits fail: see [`Call::is_wait`].
        const MOST_WAITS: u64 = 16;
        let (once, lasting): (&[i32], &[i32]) = match std::env::var("MEMFERRY_FAULTS").as_deref() {
            Ok("some") => (&ALL[..2], &[]),
            _ if lasting => (&ALL, &LASTING),
            _ => (&ALL, &[]),
        };
        let once = once.iter().map(|&error| (error, false));
        let errors: Vec<_> = once.chain(lasting.iter().map(|&error| (error, true))).collect();
        for &call in calls {
            for &(error, lasts) in &errors {
                let is_place = |nth: &u64| *nth <= MOST_WAITS || !call.is_wait();
                let plan = |nth| Plan::Fail { call, nth, error, lasts };
                let _ = (1..).take_while(is_place).map(plan).all(&mut round);
            }
        }
    }

    /// Counts from now on, and lets go wrong what the plan says.
    pub fn arm(plan: Plan) {
        let state = State { plan, account: Account::default() };
        *STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(state);
        ARMED.store(true, Ordering::SeqCst);
    }

    /// Whether anything has failed since a plan was made.
    pub fn has_fired() -> bool {
        let state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.as_ref().is_some_and(|state| state.account.fired.is_some())
    }

    /// Nothing goes wrong any more. Returns what was counted.
    pub fn disarm() -> Account {
        ARMED.store(false, Ordering::SeqCst);
        let state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        state.map(|state| state.account).unwrap_or_default()
    }

    /// Makes a call to the kernel, unless it is the one that is to fail.
    #[track_caller]
    pub fn call<T, E: From<Errno>>(
        kind: Call,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match at(Some(kind), Location::caller()) {
            Some(error) => Err(error.into()),
            None => make(),
        }
    }

    /// A step of a protocol between processes, after which one of them may be gone.
    #[track_caller]
    pub fn step() {
        let _ = at(None, Location::caller());
    }

    fn at(kind: Option<Call>, place: &'static Location<'static>) -> Option<Errno> {
        if !ARMED.load(Ordering::SeqCst) {
            return None;
        }
        let mut state = STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let State { plan, account } = state.as_mut()?;
        // How often somebody waits depends on time: no step of a protocol.
        let is_step = kind.is_none_or(|kind| !kind.is_wait());
        account.total += u64::from(is_step);
        let count = kind.map(|kind| {
            let count = account.calls.entry(kind).or_default();
            *count += 1;
            *count
        });
        let fault = match *plan {
            Plan::Count => None,
            Plan::Fail { call, nth, error, lasts } => {
                let is_it = count == Some(nth) || lasts && count > Some(nth);
                (kind == Some(call) && is_it).then(|| Errno::from_raw_os_error(error))
            }
            Plan::Die { nth } => {
                if is_step && account.total == nth {
                    let _ = rustix::process::kill_process(
                        rustix::process::getpid(),
                        rustix::process::Signal::KILL,
                    );
                }
                None
            }
        };
        if fault.is_some() {
            account.fired.get_or_insert(place);
        }
        fault
    }
}
