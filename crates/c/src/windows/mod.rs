//! The windows that this process has exposed or attached, by number.
//!
//! As with links, a call takes what it needs out of the table and releases its lock before it does
//! anything that may block. A forked child starts with an empty table.

mod attached;
mod exposed;
mod number;

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};

use memferry::message::{Error, WindowHandle};
use memferry_sys::sync::lock;

use crate::code::{ADMA_EINVAL, CallError};
use crate::links::OpenLink;
use attached::AttachedWindow;
use exposed::ExposedWindow;
pub(crate) use number::FIRST as FIRST_WINDOW;

/// Maximum number of remembered windows that were released without a call of the program.
const MAX_RELEASED: usize = 4096;

/// All windows.
#[derive(Debug)]
pub(crate) struct WindowRegistry {
    table: RwLock<HashMap<i64, WindowEntry>>,
    /// The newest windows of closed links that were released before the program withdrew them
    /// again.
    released: Mutex<VecDeque<i64>>,
    /// Smaller numbers are those of the process that forked this one.
    first_own: i64,
}

#[derive(Debug, Clone)]
enum WindowEntry {
    Exposed(Arc<ExposedWindow>),
    Attached(Arc<AttachedWindow>),
}

impl WindowRegistry {
    /// An empty registry, in a process that may have been forked.
    pub(crate) fn new() -> Self {
        let (table, released) = (RwLock::default(), Mutex::default());
        Self { table, released, first_own: number::next() }
    }

    /// Exposes memory to the peer of a link; returns the number of the window and its handle.
    ///
    /// # Safety
    /// The memory must be valid for reads and writes until the window is withdrawn.
    pub(crate) unsafe fn expose(
        &self,
        link: Arc<OpenLink>,
        address: *mut u8,
        length: usize,
        rights: c_int,
    ) -> Result<(i64, WindowHandle), CallError> {
        // SAFETY: passed on.
        let exposed = unsafe { ExposedWindow::new(link, address, length, rights) }?;
        let handle = exposed.handle();
        // Without a number it is dropped and so withdrawn: its handle was not published.
        Ok((self.insert(WindowEntry::Exposed(Arc::new(exposed)))?, handle))
    }

    /// Attaches a window of the peer of a link and returns its number.
    pub(crate) fn attach(&self, link: Arc<OpenLink>, handle: [u8; 16]) -> Result<i64, CallError> {
        self.insert(WindowEntry::Attached(Arc::new(AttachedWindow::new(link, handle)?)))
    }

    /// A window of this process.
    pub(crate) fn exposed(&self, number: i64) -> Result<Arc<ExposedWindow>, CallError> {
        match self.find(number)? {
            WindowEntry::Exposed(exposed) => Ok(exposed),
            WindowEntry::Attached(_) => Err(other_kind(number, "of the peer: it is attached here")),
        }
    }

    /// A window of another process.
    #[inline]
    pub(crate) fn attached(&self, number: i64) -> Result<Arc<AttachedWindow>, CallError> {
        match self.find(number)? {
            WindowEntry::Attached(attached) => Ok(attached),
            WindowEntry::Exposed(_) => {
                Err(other_kind(number, "of this process: the peer puts to it and gets"))
            }
        }
    }

    /// The length in bytes of a window of either kind.
    pub(crate) fn length(&self, number: i64) -> Result<u64, CallError> {
        match self.find(number)? {
            WindowEntry::Attached(attached) => Ok(attached.length()),
            WindowEntry::Exposed(exposed) => exposed.length(),
        }
    }

    /// Withdraws a window of this process. If the peer is in the middle of an access, the window
    /// stays in the table, to be withdrawn again.
    pub(crate) fn withdraw(&self, number: i64) -> Result<(), CallError> {
        if self.take_released(number) {
            return Ok(());
        }
        self.exposed(number)?.withdraw()?;
        self.write().remove(&number);
        Ok(())
    }

    /// Whether a window was busy when its link was closed, and was released since: reported once.
    fn take_released(&self, number: i64) -> bool {
        let mut released = lock(&self.released);
        let found = released.iter().position(|known| *known == number);
        found.and_then(|index| released.remove(index)).is_some()
    }

    /// Withdraws the windows of a closed link that are no longer accessed. Returns whether none is
    /// left.
    pub(crate) fn release(&self, link: &Arc<OpenLink>) -> bool {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let exposed = table.iter().filter_map(|(number, entry)| match entry {
            WindowEntry::Exposed(window) if window.is_of(link) => Some((*number, window.clone())),
            _ => None,
        });
        let exposed: Vec<_> = exposed.collect();
        drop(table);
        let mut is_any_left = false;
        for (number, window) in exposed {
            // If another thread withdraws it at the same time, that one reports it.
            if window.is_accessed() || window.withdraw().is_err() {
                is_any_left = true;
                continue;
            }
            self.write().remove(&number);
            let mut released = lock(&self.released);
            released.push_back(number);
            if released.len() > MAX_RELEASED {
                released.pop_front();
            }
        }
        !is_any_left
    }

    /// Detaches a window of another process.
    pub(crate) fn detach(&self, number: i64) -> Result<(), CallError> {
        self.attached(number)?;
        self.write().remove(&number);
        Ok(())
    }

    /// Withdraws and detaches the windows of a closed link. Fails if the peer is in the middle of
    /// an access to one of them, which stays in the table.
    pub(crate) fn close_windows_of(&self, link: &Arc<OpenLink>) -> Result<(), CallError> {
        let mut exposed = Vec::new();
        self.write().retain(|number, entry| match entry {
            WindowEntry::Exposed(window) => {
                if window.is_of(link) {
                    exposed.push(*number);
                }
                true
            }
            WindowEntry::Attached(window) => !window.is_of(link),
        });
        let mut outcome = Ok(());
        for number in exposed {
            if let Err(failure) = self.withdraw(number)
                && failure.code == crate::code::ADMA_EBUSY
            {
                let text = format!("window {number} of this link: {}", failure.text);
                outcome = Err(CallError::new(failure.code, text));
            }
        }
        outcome
    }

    fn find(&self, number: i64) -> Result<WindowEntry, CallError> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.get(&number).cloned().ok_or_else(|| number::explain(number, self.first_own))
    }

    /// Numbers a window, unless its link was closed meanwhile: the closing thread walks the table
    /// after that, and may have done so already.
    fn insert(&self, entry: WindowEntry) -> Result<i64, CallError> {
        let mut table = self.write();
        if entry.link().is_closed() {
            return Err(Error::Closed.into());
        }
        let number = number::take()?;
        table.insert(number, entry);
        Ok(number)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<i64, WindowEntry>> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WindowEntry {
    fn link(&self) -> &OpenLink {
        match self {
            Self::Exposed(exposed) => exposed.link(),
            Self::Attached(attached) => attached.link(),
        }
    }
}

#[cold]
fn other_kind(number: i64, what: &str) -> CallError {
    CallError::new(ADMA_EINVAL, format!("window {number} is one {what}"))
}
