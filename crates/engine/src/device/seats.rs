//! The channels of a device, of which there are only so many.

use std::sync::{Arc, Mutex};

use memferry_sys::sync::lock;

/// Numbers that are taken and given back.
#[derive(Debug, Clone)]
pub(crate) struct Seats(Arc<Mutex<Vec<usize>>>);

/// A number that was taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    number: usize,
    seats: Seats,
}

impl Seats {
    /// The numbers from 0 on.
    pub(crate) fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new((0..count).rev().collect())))
    }

    /// Takes one, if there is one left.
    pub(crate) fn take(&self) -> Option<Seat> {
        let number = lock(&self.0).pop()?;
        Some(Seat { number, seats: self.clone() })
    }
}

impl Seat {
    pub(crate) fn number(&self) -> usize {
        self.number
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        lock(&self.seats.0).push(self.number);
    }
}
