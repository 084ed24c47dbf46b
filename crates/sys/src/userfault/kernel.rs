//! The userfaultfd of the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Denied, EVENTS_PER_READ, Event, Unwatchable, Wake};
use crate::fork::ParentOnly;
use crate::{EventFd, fault};

/// What ends the wait of a reader.
#[derive(Debug)]
pub struct Stop(EventFd);

impl Stop {
    /// Not signalled.
    pub fn new() -> io::Result<Self> {
        EventFd::new().map(Self)
    }

    /// Lets the reader return, now and from now on.
    pub fn signal(&self) {
        self.0.signal();
    }
}

/// A userfaultfd of this process that tells of changed mappings. In a forked child it is closed: a
/// copy there would keep the parent's memory watched when nobody reads any more.
#[derive(Debug)]
pub struct Userfault {
    descriptor: ParentOnly,
}

impl Userfault {
    /// Opens one, or says why that is not permitted.
    pub fn open() -> Result<Self, Denied> {
        let offered = {
            let mut query = Api { api: API, ..Api::default() };
            call(create()?.as_fd(), API_CALL, &mut query).map_err(Denied::from_error)?;
            query.features
        };
        if offered & COUNTS_CHANGES == 0 {
            return Err(Denied::OldKernel);
        }
        if offered & NEEDED != NEEDED {
            return Err(Denied::NoWriteProtection);
        }
        let descriptor = ParentOnly::new(create()?).map_err(Denied::from_error)?;
        let opened = Self { descriptor };
        let mut wanted =
            Api { api: API, features: NEEDED | (offered & SHARED_MEMORY), ..Api::default() };
        call(opened.as_fd(), API_CALL, &mut wanted).map_err(Denied::from_error)?;
        Ok(opened)
    }

    /// Watches a range of whole pages. Watching again what is watched changes nothing.
    pub fn watch(&self, start: usize, length: usize) -> Result<(), Unwatchable> {
        let range = Range { start: start as u64, length: length as u64 };
        let mut register = Register { range, mode: FOR_WRITE_PROTECTION, calls: 0 };
        call(self.as_fd(), REGISTER_CALL, &mut register).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EBUSY) => Unwatchable::Taken,
                Some(libc::ENOMEM) if crate::residency::is_mapped(start, length) => {
                    Unwatchable::NoRoom
                }
                Some(libc::ENOMEM) => Unwatchable::NotMapped,
                _ => Unwatchable::Kind,
            }
        })
    }

    /// Stops watching a range. A failure leaves it watched, which costs those who unmap it a little
    /// time and does no harm.
    pub fn unwatch(&self, start: usize, length: usize) {
        let mut range = Range { start: start as u64, length: length as u64 };
        let _ = call(self.as_fd(), UNREGISTER_CALL, &mut range);
    }

    /// Ends all watching for good: whoever waits until an event is read goes on, and nothing can be
    /// watched any more. For a reader that cannot go on; needs no new descriptor, since `stop` takes the
    /// place of this one.
    pub fn retire(&self, stop: &Stop) {
        if !self.descriptor.is_ours() {
            return;
        }
        let (own, other) = (self.as_fd().as_raw_fd(), stop.0.as_fd().as_raw_fd());
        // SAFETY: both are open, and this one stays so: its number stands for the other file now. The
        // last reference to the userfaultfd is gone with it.
        while unsafe { libc::dup3(other, own, libc::O_CLOEXEC) } == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }

    /// Whether some thread is between changing the mapping of watched memory and having its event
    /// read. When this says no, every change made before has been read.
    pub fn is_changing(&self) -> bool {
        // The kernel refuses to work on memory that is changing before it looks at what it is
        // asked to do, and an empty range is nothing to do.
        let mut nothing = WriteProtect::default();
        call(self.as_fd(), WRITE_PROTECT_CALL, &mut nothing)
            .is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN))
    }

    /// Sleeps until there are events to read or `stop` is signalled, at most `timeout_ns`,
    /// and says which it was.
    pub fn wait(&self, stop: &Stop, timeout_ns: Option<u32>) -> Wake {
        let mut both = [
            PollFd::from_borrowed_fd(stop.0.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN),
        ];
        let timeout = timeout_ns
            .map(|ns| Timespec { tv_sec: i64::from(ns / NS), tv_nsec: i64::from(ns % NS) });
        match fault::call(fault::Call::Poll, || poll(&mut both, timeout.as_ref())) {
            Ok(0) => Wake::TimeOut,
            Ok(_) if !both[0].revents().is_empty() => Wake::Stopped,
            _ => Wake::Events,
        }
    }

    /// Reads up to [`EVENTS_PER_READ`] events without waiting, hands each to `each`, and returns how
    /// many there were. Allocates nothing.
    pub fn read(&self, mut each: impl FnMut(Event)) -> usize {
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
            // The kind is the first byte, whatever the order of bytes in a word.
            match message[0].to_ne_bytes()[0] {
                MOVED => each(Event::Moved { from: a, to: b, length: c }),
                DISCARDED => each(Event::Discarded { start: a, end: b }),
                UNMAPPED => each(Event::Unmapped { start: a, end: b }),
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

/// Keeps every signal that can be kept from the calling thread, so that no handler of the
/// application, which may unmap memory, runs on the thread that reads events.
pub fn keep_signals_away() {
    // SAFETY: the set is a local variable that `sigfillset` fills before it is used.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

// What the kernel's interface consists of.

const API: u64 = 0xAA;
const API_CALL: libc::c_ulong = 0xC018_AA3F;
const REGISTER_CALL: libc::c_ulong = 0xC020_AA00;
const UNREGISTER_CALL: libc::c_ulong = 0x8010_AA01;
const WRITE_PROTECT_CALL: libc::c_ulong = 0xC018_AA06;
/// Only faults of user code would ever be delivered, which is what anybody may ask for.
const USER_MODE_ONLY: libc::c_int = 1;
const FOR_WRITE_PROTECTION: u64 = 1 << 1;
/// Write-protection and the events of remap, remove and unmap. Never those of fork: they need a
/// capability and stop every fork until they are read.
const NEEDED: u64 = 1 | 1 << 2 | 1 << 3 | 1 << 6;
/// Write-protection, and so events, of shared memory and huge pages.
const SHARED_MEMORY: u64 = 1 << 12;
/// Exact addresses came with Linux 5.18. Before 5.15 the kernel did not count changes that happen
/// at the same time, and [`Userfault::is_changing`] could say no too early.
const COUNTS_CHANGES: u64 = 1 << 11;
const MOVED: u8 = 0x14;
const DISCARDED: u8 = 0x15;
const UNMAPPED: u8 = 0x16;
const MESSAGE_WORDS: usize = 4;
const NS: u32 = 1_000_000_000;

#[derive(Default)]
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    calls: u64,
}

#[derive(Default)]
#[repr(C)]
struct Range {
    start: u64,
    length: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    calls: u64,
}

#[derive(Default)]
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// The size of an argument is a part of a call's number.
const fn argument_bytes(number: libc::c_ulong) -> usize {
    (number >> 16) as usize & 0x3FFF
}
const _: () = assert!(size_of::<Api>() == argument_bytes(API_CALL));
const _: () = assert!(size_of::<Register>() == argument_bytes(REGISTER_CALL));
const _: () = assert!(size_of::<Range>() == argument_bytes(UNREGISTER_CALL));
const _: () = assert!(size_of::<WriteProtect>() == argument_bytes(WRITE_PROTECT_CALL));

fn call<T>(descriptor: BorrowedFd<'_>, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: every number used here belongs to the type it is called with, as asserted above, and
    // none of the calls changes the bytes of any mapping.
    let control = || unsafe { libc::ioctl(descriptor.as_raw_fd(), number as _, argument) };
    let kind = match number {
        API_CALL => fault::Call::UserfaultfdApi,
        REGISTER_CALL => fault::Call::UserfaultfdRegister,
        UNREGISTER_CALL => fault::Call::UserfaultfdUnregister,
        _ => fault::Call::UserfaultfdWriteProtect,
    };
    fault::call_c(kind, control)
}

fn create() -> Result<OwnedFd, Denied> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: the call takes flags only.
    let create = || unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let descriptor = fault::call(fault::Call::Userfaultfd, || match create() {
        descriptor @ 0.. => Ok(descriptor as libc::c_int),
        _ => Err(io::Error::last_os_error()),
    });
    // SAFETY: the kernel just made this descriptor for us.
    descriptor.map(|made| unsafe { OwnedFd::from_raw_fd(made) }).map_err(Denied::from_error)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pages;
    use crate::pages::page_bytes;

    /// What is read while `change` runs on another thread, until it has returned.
    fn events_of(userfault: &Userfault, change: impl FnOnce() + Send) -> Vec<Event> {
        let stop = Stop::new().unwrap();
        let mut events = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                change();
                stop.signal();
            });
            while userfault.wait(&stop, None) != Wake::Stopped {
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
        userfault.watch(start, 4 * page_bytes()).unwrap();
        let discard = || {
            // SAFETY: nobody looks at these pages.
            unsafe { libc::madvise(start as *mut _, page_bytes(), libc::MADV_DONTNEED) };
        };
        let discarded = Event::Discarded { start, end: start + page_bytes() };
        assert_eq!(events_of(&userfault, discard), [discarded]);
        assert_eq!(events_of(&userfault, || drop(pages)), [Event::Unmapped { start, end }]);
        assert!(!userfault.is_changing());
    }

    #[test]
    fn a_change_whose_event_is_not_read_yet_is_seen() {
        let Some(userfault) = opened() else { return };
        let pages = Pages::new(page_bytes()).unwrap();
        userfault.watch(pages.as_ptr() as usize, page_bytes()).unwrap();
        assert!(!userfault.is_changing());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(pages));
            assert_eq!(userfault.wait(&Stop::new().unwrap(), None), Wake::Events);
            assert!(userfault.is_changing());
            assert_eq!(userfault.read(|_| ()), 1);
        });
        assert!(!userfault.is_changing());
    }

    #[test]
    fn memory_that_is_watched_no_more_is_unmapped_without_an_event() {
        let Some(userfault) = opened() else { return };
        let pages = Pages::new(page_bytes()).unwrap();
        userfault.watch(pages.as_ptr() as usize, page_bytes()).unwrap();
        userfault.unwatch(pages.as_ptr() as usize, page_bytes());
        assert_eq!(events_of(&userfault, || drop(pages)), []);
    }

    #[test]
    fn a_range_with_nothing_in_it_cannot_be_watched() {
        let Some(userfault) = opened() else { return };
        assert!(userfault.watch(page_bytes(), page_bytes()).is_err());
    }
}
