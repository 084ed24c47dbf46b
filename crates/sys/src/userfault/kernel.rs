//! The userfaultfd of the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{EVENTS_PER_READ, MappingEvent, RegisterRangeError, UserfaultDenied, WaitOutcome};
use crate::fork::CloseOnFork;
use crate::{EventFd, fault};

/// The signal that ends the wait of a reader.
#[derive(Debug)]
pub struct StopSignal(EventFd);

impl StopSignal {
    /// Creates a signal that is not set.
    pub fn new() -> io::Result<Self> {
        EventFd::new().map(Self)
    }

    /// Sets the signal: the current wait and all later ones return.
    pub fn signal(&self) {
        self.0.signal();
    }
}

/// A userfaultfd that reports changed mappings of this process. A forked child closes it: an
/// inherited copy would keep the parent's memory monitored after the parent's reader has ended.
#[derive(Debug)]
pub struct Userfault {
    descriptor: CloseOnFork,
}

impl Userfault {
    /// Opens a userfaultfd, or returns why that is not possible.
    pub fn open() -> Result<Self, UserfaultDenied> {
        let offered = {
            let mut query = UffdioApi { api: UFFD_API, ..UffdioApi::default() };
            ioctl(create()?.as_fd(), UFFDIO_API, &mut query)
                .map_err(UserfaultDenied::from_error)?;
            query.features
        };
        if offered & FEATURE_EXACT_ADDRESS == 0 {
            return Err(UserfaultDenied::OldKernel);
        }
        if offered & REQUIRED_FEATURES != REQUIRED_FEATURES {
            return Err(UserfaultDenied::NoWriteProtection);
        }
        let descriptor = CloseOnFork::new(create()?).map_err(UserfaultDenied::from_error)?;
        let opened = Self { descriptor };
        let mut wanted = UffdioApi {
            api: UFFD_API,
            features: REQUIRED_FEATURES | (offered & FEATURE_WP_SHMEM),
            ..UffdioApi::default()
        };
        ioctl(opened.as_fd(), UFFDIO_API, &mut wanted).map_err(UserfaultDenied::from_error)?;
        Ok(opened)
    }

    /// Starts monitoring a range of whole pages. Has no effect on pages that are monitored already.
    pub fn register(&self, start: usize, length: usize) -> Result<(), RegisterRangeError> {
        let range = UffdioRange { start: start as u64, length: length as u64 };
        let mut register = UffdioRegister { range, mode: REGISTER_MODE_WP, ioctls: 0 };
        ioctl(self.as_fd(), UFFDIO_REGISTER, &mut register).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EBUSY) => RegisterRangeError::AlreadyRegistered,
                Some(libc::ENOMEM) if crate::residency::is_mapped(start, length) => {
                    RegisterRangeError::NoMemory
                }
                Some(libc::ENOMEM) => RegisterRangeError::NotMapped,
                _ => RegisterRangeError::UnsupportedMapping,
            }
        })
    }

    /// Stops monitoring a range. After a failure the range stays monitored, which only slows down
    /// threads that unmap it.
    pub fn unregister(&self, start: usize, length: usize) {
        let mut range = UffdioRange { start: start as u64, length: length as u64 };
        let _ = ioctl(self.as_fd(), UFFDIO_UNREGISTER, &mut range);
    }

    /// Stops all monitoring permanently: threads that wait until an event is read continue, and
    /// later registrations fail. For a reader that cannot continue. Needs no new descriptor,
    /// because a duplicate of `stop` replaces this one.
    pub fn retire(&self, stop: &StopSignal) {
        if !self.descriptor.is_owner_process() {
            return;
        }
        let (own, other) = (self.as_fd().as_raw_fd(), stop.0.as_fd().as_raw_fd());
        // SAFETY: both descriptors are open, and this one stays open: its number then refers to the
        // other file. This closes the last reference to the userfaultfd.
        while unsafe { libc::dup3(other, own, libc::O_CLOEXEC) } == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }

    /// Whether a thread has changed the mapping of monitored memory and its event has not been
    /// read. If this returns false, the events of all earlier changes have been read.
    pub fn has_pending_changes(&self) -> bool {
        // The kernel checks for pending changes before it validates the range, and returns
        // `EAGAIN`; an empty range has no other effect.
        let mut empty = UffdioWriteProtect::default();
        ioctl(self.as_fd(), UFFDIO_WRITEPROTECT, &mut empty)
            .is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN))
    }

    /// Sleeps until an event is available or `stop` is signalled, for at most `timeout_ns`, and
    /// returns which.
    pub fn wait(&self, stop: &StopSignal, timeout_ns: Option<u32>) -> WaitOutcome {
        let mut both = [
            PollFd::from_borrowed_fd(stop.0.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN),
        ];
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: i64::from(ns / NS_PER_S),
            tv_nsec: i64::from(ns % NS_PER_S),
        });
        match fault::call(fault::Call::Poll, || poll(&mut both, timeout.as_ref())) {
            Ok(0) => WaitOutcome::TimedOut,
            Ok(_) if !both[0].revents().is_empty() => WaitOutcome::Stopped,
            _ => WaitOutcome::Events,
        }
    }

    /// Reads up to [`EVENTS_PER_READ`] events without waiting, passes each to `each`, and returns
    /// how many there were. Does not allocate.
    pub fn read(&self, mut each: impl FnMut(MappingEvent)) -> usize {
        let mut messages = [0u64; EVENTS_PER_READ * MESSAGE_WORDS];
        // SAFETY: the kernel writes at most the bytes of the array, and any bytes are valid words.
        let mut read = || unsafe {
            let bytes = size_of_val(&messages);
            libc::read(self.as_fd().as_raw_fd(), messages.as_mut_ptr().cast(), bytes)
        };
        let read = fault::call(fault::Call::UserfaultfdRead, || {
            usize::try_from(read()).map_err(|_| io::Error::last_os_error())
        });
        let count = read.unwrap_or(0) / (MESSAGE_WORDS * 8);
        for message in messages.chunks_exact(MESSAGE_WORDS).take(count) {
            let [a, b, c] = [message[1] as usize, message[2] as usize, message[3] as usize];
            // The kind is the first byte of the message, in any byte order.
            match message[0].to_ne_bytes()[0] {
                EVENT_REMAP => each(MappingEvent::Remap { from: a, to: b, length: c }),
                EVENT_REMOVE => each(MappingEvent::Remove { start: a, end: b }),
                EVENT_UNMAP => each(MappingEvent::Unmap { start: a, end: b }),
                _ => {}
            }
        }
        count
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Blocks all signals on the calling thread, so that no handler of the application, which may unmap
/// memory, runs on the thread that reads events.
pub fn block_all_signals() {
    // SAFETY: the set is a local variable that `sigfillset` fills before it is used.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

// The kernel's interface.

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xC018_AA06;
/// Restricts fault handling to user mode, which needs no privilege.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const REGISTER_MODE_WP: u64 = 1 << 1;
/// Write-protection, and the events of remap, remove and unmap. Not those of fork: they need a
/// capability and block every fork until they are read.
const REQUIRED_FEATURES: u64 = 1 | 1 << 2 | 1 << 3 | 1 << 6;
/// Write-protection, and thereby events, of shared memory and huge pages.
const FEATURE_WP_SHMEM: u64 = 1 << 12;
/// Exact addresses came with Linux 5.18. Before 5.15 the kernel did not count concurrent changes,
/// and [`Userfault::has_pending_changes`] could return false too early.
const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
const MESSAGE_WORDS: usize = 4;
const NS_PER_S: u32 = 1_000_000_000;

#[derive(Default)]
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[derive(Default)]
#[repr(C)]
struct UffdioRange {
    start: u64,
    length: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

#[derive(Default)]
#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

/// The size of the argument, which is a part of an ioctl number.
const fn argument_bytes(number: libc::c_ulong) -> usize {
    (number >> 16) as usize & 0x3FFF
}
const _: () = assert!(size_of::<UffdioApi>() == argument_bytes(UFFDIO_API));
const _: () = assert!(size_of::<UffdioRegister>() == argument_bytes(UFFDIO_REGISTER));
const _: () = assert!(size_of::<UffdioRange>() == argument_bytes(UFFDIO_UNREGISTER));
const _: () = assert!(size_of::<UffdioWriteProtect>() == argument_bytes(UFFDIO_WRITEPROTECT));

fn ioctl<T>(descriptor: BorrowedFd<'_>, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: every number used here belongs to the type it is called with, as asserted above, and
    // none of the calls changes a byte of any mapping.
    let control = || unsafe { libc::ioctl(descriptor.as_raw_fd(), number as _, argument) };
    let kind = match number {
        UFFDIO_API => fault::Call::UserfaultfdApi,
        UFFDIO_REGISTER => fault::Call::UserfaultfdRegister,
        UFFDIO_UNREGISTER => fault::Call::UserfaultfdUnregister,
        _ => fault::Call::UserfaultfdWriteProtect,
    };
    fault::call_c(kind, control)
}

fn create() -> Result<OwnedFd, UserfaultDenied> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
    // SAFETY: the call takes flags only.
    let create = || unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let descriptor = fault::call(fault::Call::Userfaultfd, || match create() {
        descriptor @ 0.. => Ok(descriptor as libc::c_int),
        _ => Err(io::Error::last_os_error()),
    });
    // SAFETY: the kernel has created this descriptor for this call, and no other code owns it.
    descriptor
        .map(|made| unsafe { OwnedFd::from_raw_fd(made) })
        .map_err(UserfaultDenied::from_error)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;
    use crate::pages::page_bytes;

    /// Collects the events that are read while `change` runs on another thread.
    fn events_of(userfault: &Userfault, change: impl FnOnce() + Send) -> Vec<MappingEvent> {
        let stop = StopSignal::new().unwrap();
        let mut events = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                change();
                stop.signal();
            });
            while userfault.wait(&stop, None) != WaitOutcome::Stopped {
                userfault.read(|event| events.push(event));
            }
        });
        events
    }

    fn opened() -> Option<Userfault> {
        let skip =
            |denied| memferry_testing::skip(memferry_testing::Requirement::Userfaultfd, denied);
        Userfault::open().map_err(skip).ok()
    }

    #[test]
    fn unmapping_and_discarding_are_told_before_they_return() {
        let Some(userfault) = opened() else { return };
        let pages = Pages::new(4 * page_bytes()).unwrap();
        let start = pages.as_ptr() as usize;
        let end = start + 4 * page_bytes();
        userfault.register(start, 4 * page_bytes()).unwrap();
        let discard = || {
            // SAFETY: no code accesses these pages.
            unsafe { libc::madvise(start as *mut _, page_bytes(), libc::MADV_DONTNEED) };
        };
        let discarded = MappingEvent::Remove { start, end: start + page_bytes() };
        assert_eq!(events_of(&userfault, discard), [discarded]);
        assert_eq!(events_of(&userfault, || drop(pages)), [MappingEvent::Unmap { start, end }]);
        assert!(!userfault.has_pending_changes());
    }

    #[test]
    fn a_change_whose_event_is_not_read_yet_is_seen() {
        let Some(userfault) = opened() else { return };
        let pages = Pages::new(page_bytes()).unwrap();
        userfault.register(pages.as_ptr() as usize, page_bytes()).unwrap();
        assert!(!userfault.has_pending_changes());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(pages));
            assert_eq!(userfault.wait(&StopSignal::new().unwrap(), None), WaitOutcome::Events);
            assert!(userfault.has_pending_changes());
            assert_eq!(userfault.read(|_| ()), 1);
        });
        assert!(!userfault.has_pending_changes());
    }

    #[test]
    fn memory_that_is_watched_no_more_is_unmapped_without_an_event() {
        let Some(userfault) = opened() else { return };
        let pages = Pages::new(page_bytes()).unwrap();
        userfault.register(pages.as_ptr() as usize, page_bytes()).unwrap();
        userfault.unregister(pages.as_ptr() as usize, page_bytes());
        assert_eq!(events_of(&userfault, || drop(pages)), []);
    }

    #[test]
    fn a_range_with_nothing_in_it_cannot_be_watched() {
        let Some(userfault) = opened() else { return };
        assert!(userfault.register(page_bytes(), page_bytes()).is_err());
    }
}
