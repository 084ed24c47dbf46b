//! Requests: an operation over memory, with options.

use std::marker::PhantomData;
use std::sync::Arc;

use memferry_engine::completion::{Completion, CrcVariable, Notification, PendingNotification};
use memferry_engine::{MemoryKind, Opcode};

use crate::error::ValidationError;
use crate::transfer::Dependency;

/// Where the data is expected to be, as far as the caller knows.
///
/// ```
/// use memferry::{CacheHint, Ferry, Options};
///
/// let options = Options::new().cache_hint(CacheHint::Cold);
/// Ferry::new()?.copy_with(&[1u8; 64], &mut [0; 64], options)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheHint {
    /// Not known: the size decides.
    #[default]
    Unknown,
    /// The data is in the caches, or is needed there soon: the copy goes through the caches unless
    /// it is far larger.
    Hot,
    /// The data is not in the caches and is not needed there: the copy bypasses the caches.
    Cold,
}

/// Options of one transfer. `'a` is the lifetime of a borrowed notification variable.
///
/// ```
/// use memferry::{Ferry, Options};
///
/// let ferry = Ferry::new()?;
/// let first = ferry.icopy(vec![1u8; 64], vec![0u8; 64])?;
/// let second = ferry.icopy_with(vec![2u8; 64], vec![0u8; 64], Options::new().after(&first))?;
/// second.wait()?;
/// assert!(first.is_done());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Options<'a> {
    pub(crate) cache_hint: CacheHint,
    pub(crate) no_caller_assist: bool,
    notify: Option<PendingNotification>,
    /// Options that few transfers have, allocated only for those.
    rare: Option<Box<RareOptions>>,
    lifetime: PhantomData<&'a Notification>,
}

#[derive(Debug, Default)]
struct RareOptions {
    after: Vec<Arc<Completion>>,
    keep_alive: Option<Arc<Notification>>,
}

/// The predecessors of a transfer and its notification.
#[derive(Debug, Default)]
pub(crate) struct RequestExtras {
    pub(crate) after: Vec<Arc<Completion>>,
    pub(crate) notify: Option<PendingNotification>,
    pub(crate) keep_alive: Option<Arc<Notification>>,
}

impl<'a> Options<'a> {
    /// Creates default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts the transfer only when `transfer` is complete. If `transfer` fails, this one is not
    /// started and fails too. May be called several times.
    pub fn after(mut self, transfer: &impl Dependency) -> Self {
        self.rare().after.push(transfer.predecessor().0);
        self
    }

    /// Sets `variable` to `value` once all data is visible. A transfer that fails does not set it.
    pub fn notify(mut self, variable: &'a Notification, value: u64) -> Self {
        // SAFETY: `'a` outlives the transfer: the calls that take options with a lifetime tie it to
        // a scope, which does not end before its transfers are complete.
        self.notify = Some(unsafe { PendingNotification::new(variable, value) });
        self
    }

    /// [`Options::notify`] for a variable that is shared, not borrowed.
    pub fn notify_shared(mut self, variable: &Arc<Notification>, value: u64) -> Self {
        self.rare().keep_alive = Some(variable.clone());
        // SAFETY: the transfer holds its own reference until it is complete.
        self.notify = Some(unsafe { PendingNotification::new(Arc::as_ptr(variable), value) });
        self
    }

    /// Sets where the data is expected to be.
    pub fn cache_hint(mut self, temperature: CacheHint) -> Self {
        self.cache_hint = temperature;
        self
    }

    fn rare(&mut self) -> &mut RareOptions {
        self.rare.get_or_insert_default()
    }

    /// Returns whether there is nothing to wait for and nobody to notify.
    pub(crate) fn has_no_extras(&self) -> bool {
        self.rare.is_none() && self.notify.is_none()
    }

    /// Returns whether the transfer is ordered after others.
    pub(crate) fn has_predecessors(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| !rare.after.is_empty())
    }

    pub(crate) fn take_extras(&mut self) -> RequestExtras {
        let rare = self.rare.take().map_or_else(RareOptions::default, |rare| *rare);
        let RareOptions { after, keep_alive } = rare;
        RequestExtras { after, notify: self.notify.take(), keep_alive }
    }

    /// Keeps the copy off the caller's core and caches: a waiting caller sleeps instead of claiming
    /// chunks, and the copy bypasses the caches.
    pub fn no_caller_assist(mut self) -> Self {
        self.no_caller_assist = true;
        self
    }
}

/// An operation over raw memory.
///
/// ```
/// use memferry::{Ferry, Request};
///
/// let mut target = [1u8; 64];
/// // SAFETY: the array outlives the call.
/// unsafe { Ferry::new()?.run_raw(Request::fill(target.as_mut_ptr(), 7, 64)) }?;
/// assert_eq!(target, [7; 64]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Request<'a> {
    pub(crate) operation: Opcode,
    pub(crate) source: u64,
    pub(crate) target: u64,
    /// The second target of a dualcast.
    pub(crate) second: u64,
    pub(crate) length: u64,
    pub(crate) value: u8,
    pub(crate) source_memory: MemoryKind,
    pub(crate) target_memory: MemoryKind,
    /// The variable that gets the CRC, if there is one.
    pub(crate) crc_variable: Option<CrcVariable>,
    pub(crate) options: Options<'a>,
}

impl<'a> Request<'a> {
    fn new(operation: Opcode, source: u64, target: u64, length: usize) -> Self {
        Self {
            operation,
            source,
            target,
            second: 0,
            length: length as u64,
            value: 0,
            source_memory: MemoryKind::Host,
            target_memory: MemoryKind::Host,
            crc_variable: None,
            options: Options::new(),
        }
    }

    /// Creates a copy of `length` bytes; the ranges may overlap.
    pub fn copy(source: *const u8, target: *mut u8, length: usize) -> Self {
        Self::new(Opcode::Copy, source as u64, target as u64, length)
    }

    /// Creates a fill of `length` bytes with `value`.
    pub fn fill(target: *mut u8, value: u8, length: usize) -> Self {
        Self { value, ..Self::new(Opcode::Fill, target as u64, target as u64, length) }
    }

    /// Creates a compare that finds the first difference in `length` bytes.
    pub fn compare(left: *const u8, right: *const u8, length: usize) -> Self {
        Self::new(Opcode::Compare, left as u64, right as u64, length)
    }

    /// Creates the computation of the CRC-32C of `length` bytes.
    pub fn crc(source: *const u8, length: usize) -> Self {
        Self::new(Opcode::Crc, source as u64, source as u64, length)
    }

    /// Creates a copy of `length` bytes with the CRC-32C of its data; the ranges must not overlap.
    pub fn copy_crc(source: *const u8, target: *mut u8, length: usize) -> Self {
        Self::new(Opcode::CopyCrc, source as u64, target as u64, length)
    }

    /// Creates a copy of `length` bytes to two targets; none of the three ranges may overlap another.
    pub fn dualcast(source: *const u8, first: *mut u8, second: *mut u8, length: usize) -> Self {
        let copy = Self::new(Opcode::Dualcast, source as u64, first as u64, length);
        Self { second: second as u64, ..copy }
    }

    /// Writes the CRC-32C to a variable before the transfer is complete, for callers that keep only
    /// a cookie. A transfer that fails does not write it. The variable must stay valid for as long
    /// as the memory of the request, and nothing else may access it.
    pub fn crc_to(mut self, variable: *mut u32) -> Self {
        self.crc_variable = CrcVariable::new(variable);
        self
    }

    /// Sets the kind of memory of source and target; the default is host memory.
    pub fn memory(mut self, source: MemoryKind, target: MemoryKind) -> Self {
        (self.source_memory, self.target_memory) = (source, target);
        self
    }

    /// Sets the options.
    pub fn with(mut self, options: Options<'a>) -> Self {
        self.options = options;
        self
    }

    /// Returns whether the request has no predecessor, no notification, no result and no trace
    /// span, only a completion.
    pub(crate) fn is_simple(&self) -> bool {
        matches!(self.operation, Opcode::Copy | Opcode::Move | Opcode::Fill)
            && self.options.has_no_extras()
            && !tracing::enabled!(tracing::Level::TRACE)
    }

    /// Returns whether this is a simple request over host memory with default options.
    #[inline]
    pub(crate) fn has_default_options(&self) -> bool {
        let Options { cache_hint: temperature, no_caller_assist: spare_caller, .. } = self.options;
        temperature == CacheHint::Unknown
            && !spare_caller
            && self.is_host_only()
            && self.is_simple()
    }

    /// Returns whether a processor can execute the request.
    pub(crate) fn is_host_only(&self) -> bool {
        self.source_memory == MemoryKind::Host && self.target_memory == MemoryKind::Host
    }

    /// Returns whether source and target overlap.
    pub(crate) fn overlaps(&self) -> bool {
        self.source_memory == self.target_memory && overlap(self.source, self.target, self.length)
    }

    /// Returns whether the caller can compute the CRC of this request without a completion.
    pub(crate) fn is_plain_crc(&self) -> bool {
        self.operation.has_crc()
            && self.length > 0
            && self.options.has_no_extras()
            && !tracing::enabled!(tracing::Level::TRACE)
    }

    /// Checks the ranges, and turns a copy between overlapping ranges into a move.
    pub(crate) fn validate(&mut self) -> Result<(), ValidationError> {
        if self.length == 0 {
            return Ok(());
        }
        check_range("source", self.source, self.length)?;
        check_range("target", self.target, self.length)?;
        match self.operation {
            Opcode::Copy if self.overlaps() => self.operation = Opcode::Move,
            Opcode::CopyCrc if self.overlaps() => {
                return Err(ValidationError::RangesOverlap { side: "source", other: "target" });
            }
            Opcode::Dualcast => self.check_dualcast()?,
            _ => {}
        }
        Ok(())
    }

    fn check_dualcast(&self) -> Result<(), ValidationError> {
        let Self { source, target, second, length, .. } = *self;
        check_range("second target", second, length)?;
        let refused = |side, other| Err(ValidationError::RangesOverlap { side, other });
        let shares_source = self.source_memory == self.target_memory;
        match () {
            () if shares_source && overlap(source, target, length) => refused("source", "target"),
            () if shares_source && overlap(source, second, length) => {
                refused("source", "second target")
            }
            () if overlap(target, second, length) => refused("target", "second target"),
            () => Ok(()),
        }
    }
}

/// Returns whether two ranges of equal length overlap.
#[inline]
pub(crate) fn overlap(source: u64, target: u64, length: u64) -> bool {
    source < target.saturating_add(length) && target < source.saturating_add(length)
}

/// Checks a range that has at least one byte.
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
