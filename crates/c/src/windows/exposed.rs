//! A window of this process: memory of the C program that the peer of a link may access.
//!
//! Threads that wait for a value share the window; the thread that withdraws it needs it
//! exclusively and makes the others return, because the memory may be freed afterwards.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use memferry::message::window::RawMemory;
use memferry::message::{Error, Rights, ValidationError, Window, WindowHandle};

use crate::code::{ADMA_EBUSY, ADMA_EINVAL, ADMA_ESTALE, ADMA_ETIMEDOUT, CallError};
use crate::links::OpenLink;
use crate::memory;
use crate::window_calls::{ADMA_READ, ADMA_WRITE};

/// Both rights together.
const READ_WRITE: c_int = ADMA_READ | ADMA_WRITE;

/// Interval at which a wait checks whether the window is being withdrawn.
const WITHDRAW_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A window of this process.
#[derive(Debug)]
pub(crate) struct ExposedWindow {
    link: Arc<OpenLink>,
    handle: WindowHandle,
    /// `None` once it is withdrawn.
    window: RwLock<Option<Window<RawMemory>>>,
    /// It is being withdrawn: no new wait for its values may start.
    is_ending: AtomicBool,
}

impl ExposedWindow {
    /// Exposes memory to the peer of a link.
    ///
    /// # Safety
    /// The memory must be valid for reads and writes until the window is withdrawn.
    pub(super) unsafe fn new(
        link: Arc<OpenLink>,
        address: *mut u8,
        length: usize,
        rights: c_int,
    ) -> Result<Self, CallError> {
        memory::check(address, length)?;
        let rights = match rights {
            ADMA_READ => Rights::READ,
            ADMA_WRITE => Rights::WRITE,
            READ_WRITE => Rights::READ_WRITE,
            other => {
                let text = format!("{other} is not ADMA_READ, ADMA_WRITE, or both with | between");
                return Err(CallError::new(ADMA_EINVAL, text));
            }
        };
        // SAFETY: passed on.
        let window = unsafe { link.core().expose_raw(address, length, rights) }?;
        let handle = window.handle();
        let (window, is_ending) = (RwLock::new(Some(window)), AtomicBool::new(false));
        Ok(Self { link, handle, window, is_ending })
    }

    pub(super) fn is_of(&self, link: &Arc<OpenLink>) -> bool {
        Arc::ptr_eq(&self.link, link)
    }

    pub(super) fn link(&self) -> &OpenLink {
        &self.link
    }

    /// The handle by which the peer attaches it.
    pub(super) fn handle(&self) -> WindowHandle {
        self.handle
    }

    /// Its length in bytes.
    pub(super) fn length(&self) -> Result<u64, CallError> {
        let window = self.window.read().unwrap_or_else(PoisonError::into_inner);
        window.as_ref().map(|window| window.len() as u64).ok_or_else(withdrawn)
    }

    /// Whether the peer is in the middle of an access.
    pub(super) fn is_accessed(&self) -> bool {
        let window = self.window.read().unwrap_or_else(PoisonError::into_inner);
        window.as_ref().is_some_and(Window::is_accessed)
    }

    /// Withdraws the window: when this returns, the peer does not access it any more, unless the
    /// result is busy.
    pub(super) fn withdraw(&self) -> Result<(), CallError> {
        self.is_ending.store(true, Ordering::Release);
        let mut place = self.window.write().unwrap_or_else(PoisonError::into_inner);
        match place.take().ok_or_else(withdrawn)?.withdraw() {
            Ok(_memory) => Ok(()),
            Err(held) => {
                let failure = CallError::new(ADMA_EBUSY, held.to_string());
                *place = Some(held.window);
                Err(failure)
            }
        }
    }

    /// Waits until a variable is at least `at_least`, and returns its value.
    pub(crate) fn wait_value(
        &self,
        offset: u64,
        at_least: u64,
        timeout: Option<Duration>,
    ) -> Result<u64, CallError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let look =
                left.map_or(WITHDRAW_CHECK_INTERVAL, |left| left.min(WITHDRAW_CHECK_INTERVAL));
            if let Some(value) = self.wait_slice(offset, at_least, look)? {
                return Ok(value);
            }
            if left.is_some_and(|left| left <= look) {
                let text = format!("the variable at {offset} did not become {at_least} in time");
                return Err(CallError::new(ADMA_ETIMEDOUT, text));
            }
        }
    }

    /// One bounded wait, during which the window cannot be withdrawn.
    fn wait_slice(
        &self,
        offset: u64,
        at_least: u64,
        time: Duration,
    ) -> Result<Option<u64>, CallError> {
        let window = self.window.read().unwrap_or_else(PoisonError::into_inner);
        let is_ending = || self.is_ending.load(Ordering::Acquire);
        let window = window.as_ref().filter(|_| !is_ending()).ok_or_else(withdrawn)?;
        let offset = variable_at(window, offset)?;
        let is_it = |value| value >= at_least || is_ending();
        match window.wait(offset, Some(time), is_it)? {
            Some(value) if value >= at_least => Ok(Some(value)),
            _ if is_ending() => Err(withdrawn()),
            _ => Ok(None),
        }
    }
}

/// Validates the offset of a variable.
fn variable_at(window: &Window<RawMemory>, offset: u64) -> Result<usize, CallError> {
    let window_bytes = window.len() as u64;
    if offset.checked_add(8).is_none_or(|end| end > window_bytes) {
        let outside = ValidationError::OutsideWindow { offset, bytes: 8, window_bytes };
        return Err(Error::from(outside).into());
    }
    // Inside the window, so it fits.
    let inside = offset as usize;
    if !window.as_ptr().wrapping_add(inside).cast::<u64>().is_aligned() {
        return Err(Error::from(ValidationError::MisalignedVariable(offset)).into());
    }
    Ok(inside)
}

fn withdrawn() -> CallError {
    CallError::new(ADMA_ESTALE, "the window was withdrawn")
}
