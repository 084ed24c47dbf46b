//! The interrupts of a model: eventfds that it signals, and the ways in which interrupts fail.

use std::io;
use std::sync::{Arc, Mutex};

use memferry_sys::EventFd;
use memferry_sys::sync::lock;

use super::ioat_model::FaultSchedule;

/// The faults of a model's interrupts. Interrupts are counted over all vectors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InterruptFaults {
    /// The vectors cannot be connected.
    pub is_refused: bool,
    /// Interrupts that are not raised.
    pub lost: FaultSchedule,
    /// Interrupts are raised before their descriptor is executed.
    pub is_early: bool,
}

/// The vectors of a model.
#[derive(Debug, Default)]
pub struct ModelInterrupts(Mutex<InterruptState>);

#[derive(Debug, Default)]
struct InterruptState {
    faults: InterruptFaults,
    vectors: Vec<Arc<EventFd>>,
    requested: u64,
    raised: u64,
}

impl ModelInterrupts {
    /// Replaces the faults.
    pub fn set_faults(&self, faults: InterruptFaults) {
        lock(&self.0).faults = faults;
    }

    /// Connects vectors, as [`DmaDevice::connect_interrupts`].
    ///
    /// [`DmaDevice::connect_interrupts`]: memferry_sys::device::DmaDevice::connect_interrupts
    pub(super) fn connect(&self, count: usize) -> io::Result<Vec<Arc<EventFd>>> {
        let mut state = lock(&self.0);
        if state.faults.is_refused {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let vectors = (0..count).map(|_| EventFd::new().map(Arc::new));
        state.vectors = vectors.collect::<io::Result<_>>()?;
        Ok(state.vectors.clone())
    }

    /// Whether interrupts precede their descriptor.
    pub(super) fn is_early(&self) -> bool {
        lock(&self.0).faults.is_early
    }

    /// Raises the interrupt of a descriptor, unless it is lost; returns whether the vector is
    /// connected.
    pub(super) fn raise(&self, vector: usize) -> bool {
        let mut state = lock(&self.0);
        state.requested += 1;
        let Some(event) = state.vectors.get(vector).cloned() else { return false };
        if !state.faults.lost.matches(state.requested) {
            state.raised += 1;
            event.signal();
        }
        true
    }

    /// Raises all interrupts for no reason.
    pub fn raise_spurious(&self) {
        lock(&self.0).vectors.iter().for_each(|event| event.signal());
    }

    /// The interrupts of descriptors that were raised.
    pub fn raised(&self) -> u64 {
        lock(&self.0).raised
    }
}
