//! What is asked: an operation over memory, with wishes.

use std::marker::PhantomData;
use std::sync::Arc;

use memferry_engine::completion::{Completion, Notification, Notify};
use memferry_engine::{MemoryKind, Operation};

use crate::error::ValidationError;
use crate::transfer::Ordered;

/// Where the data is expected to be, as far as the caller knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Temperature {
    /// Not known: the size decides.
    #[default]
    Unknown,
    /// In the caches, or wanted there soon: go through the caches unless the copy is far larger.
    Hot,
    /// Neither in the caches nor wanted there: go around them.
    Cold,
}

/// Wishes for one transfer. `'a` is how long a notification variable must live.
#[derive(Debug, Default)]
pub struct Options<'a> {
    pub(crate) temperature: Temperature,
    pub(crate) spare_caller: bool,
    /// What few transfers have, out of the way of those that do not.
    extras: Option<Box<Extras>>,
    lifetime: PhantomData<&'a Notification>,
}

/// What a transfer waits for and whom it tells.
#[derive(Debug, Default)]
pub(crate) struct Extras {
    pub(crate) after: Vec<Arc<Completion>>,
    pub(crate) notify: Option<Notify>,
    pub(crate) kept: Option<Arc<Notification>>,
}

impl<'a> Options<'a> {
    /// No wishes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begin only when `transfer` is over. If it does not end well, this one is not begun and ends
    /// with an error. May be given several times.
    pub fn after(mut self, transfer: &impl Ordered) -> Self {
        self.extras().after.push(transfer.predecessor().0);
        self
    }

    /// Set `variable` to `value` once all data is visible. A transfer that fails sets nothing.
    pub fn notify(mut self, variable: &'a Notification, value: u64) -> Self {
        // SAFETY: `'a` outlives the transfer: the calls that take options with a lifetime tie it
        // to a scope, which does not end before its transfers.
        self.extras().notify = Some(unsafe { Notify::new(variable, value) });
        self
    }

    /// As [`Options::notify`], for a variable that is shared rather than borrowed.
    pub fn notify_shared(mut self, variable: &Arc<Notification>, value: u64) -> Self {
        self.extras().kept = Some(variable.clone());
        // SAFETY: the transfer keeps its own reference until it is over.
        self.extras().notify = Some(unsafe { Notify::new(Arc::as_ptr(variable), value) });
        self
    }

    /// Where the data is expected to be.
    pub fn temperature(mut self, temperature: Temperature) -> Self {
        self.temperature = temperature;
        self
    }

    fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    pub(crate) fn take_extras(&mut self) -> Extras {
        self.extras.take().map_or_else(Extras::default, |extras| *extras)
    }

    /// Leave the caller's core and its caches alone: a waiting caller sleeps instead of helping,
    /// and the data goes around the caches.
    pub fn spare_caller(mut self) -> Self {
        self.spare_caller = true;
        self
    }
}

/// An operation over raw memory.
#[derive(Debug)]
pub struct Request<'a> {
    pub(crate) operation: Operation,
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u64,
    pub(crate) value: u8,
    pub(crate) source_memory: MemoryKind,
    pub(crate) target_memory: MemoryKind,
    pub(crate) options: Options<'a>,
}

impl<'a> Request<'a> {
    fn new(operation: Operation, source: u64, target: u64, length: usize) -> Self {
        Self {
            operation,
            source,
            target,
            length: length as u64,
            value: 0,
            source_memory: MemoryKind::Host,
            target_memory: MemoryKind::Host,
            options: Options::new(),
        }
    }

    /// Copies `length` bytes; the ranges may overlap.
    pub fn copy(source: *const u8, target: *mut u8, length: usize) -> Self {
        Self::new(Operation::Copy, source as u64, target as u64, length)
    }

    /// Sets `length` bytes to `value`.
    pub fn fill(target: *mut u8, value: u8, length: usize) -> Self {
        Self { value, ..Self::new(Operation::Fill, target as u64, target as u64, length) }
    }

    /// Finds the first difference in `length` bytes.
    pub fn compare(left: *const u8, right: *const u8, length: usize) -> Self {
        Self::new(Operation::Compare, left as u64, right as u64, length)
    }

    /// Says where source and target are; ordinary memory unless said otherwise.
    pub fn memory(mut self, source: MemoryKind, target: MemoryKind) -> Self {
        (self.source_memory, self.target_memory) = (source, target);
        self
    }

    /// Adds wishes.
    pub fn with(mut self, options: Options<'a>) -> Self {
        self.options = options;
        self
    }

    /// Nothing to be told at the end but that it is over.
    pub(crate) fn is_simple(&self) -> bool {
        self.operation != Operation::Compare
            && self.options.extras.is_none()
            && !tracing::enabled!(tracing::Level::TRACE)
    }

    /// A simple request over ordinary memory that leaves everything to the planner.
    #[inline]
    pub(crate) fn is_without_wishes(&self) -> bool {
        let Options { temperature, spare_caller, .. } = self.options;
        temperature == Temperature::Unknown
            && !spare_caller
            && self.is_host_only()
            && self.is_simple()
    }

    /// Whether a processor can carry it out.
    pub(crate) fn is_host_only(&self) -> bool {
        self.source_memory == MemoryKind::Host && self.target_memory == MemoryKind::Host
    }

    /// Whether source and target share a byte.
    pub(crate) fn overlaps(&self) -> bool {
        self.source_memory == self.target_memory
            && self.source < self.target + self.length
            && self.target < self.source + self.length
    }

    /// Checks the ranges, and turns a copy between overlapping ones into a move.
    pub(crate) fn validate(&mut self) -> Result<(), ValidationError> {
        if self.length == 0 {
            return Ok(());
        }
        check_range("source", self.source, self.length)?;
        check_range("target", self.target, self.length)?;
        if self.operation == Operation::Copy && self.overlaps() {
            self.operation = Operation::Move;
        }
        Ok(())
    }
}

/// Checks a range that has bytes.
#[inline]
pub(crate) fn check_range(
    side: &'static str,
    address: u64,
    length: u64,
) -> Result<(), ValidationError> {
    if address == 0 {
        return Err(ValidationError::Null { side });
    }
    if address.checked_add(length).is_none() {
        return Err(ValidationError::Wraps { side, address, length });
    }
    Ok(())
}
