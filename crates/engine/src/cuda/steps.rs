//! What beginning a piece is made of: registrations, copies with an event behind them, expectations,
//! and what is done without the device.

use memferry_memory::pinning::{Access, PageRange, PinError};
use memferry_sys::cuda::{Driver, DriverError, Event, Stream, Way, code};
use memferry_sys::sync::spin_hint;
use memferry_sys::{clock, residency};

use super::channel::{Begun, PIECE_BYTES, Unregistered, Worker, failed};
use super::flight::{Flight, Step};
use crate::contract::{Direction, ExecutionError, Holding};
use crate::{Kernel, execute};

impl Worker {
    /// Carries out what a processor can, here and now.
    pub(super) fn run_here(&mut self, most: u64) -> Begun {
        let length = self.left().min(most);
        let (source, target) = self.addresses();
        let Some(open) = self.open.back() else { return Begun::Nothing };
        let (operation, value) = (open.descriptor.operation(), open.descriptor.fill_value());
        // SAFETY: the memory is vouched for until the descriptor is reported, and it is ordinary.
        let difference =
            unsafe { execute::run(operation, Kernel::Cached, source, target, length, value) };
        self.over(length, Ok(difference))
    }

    /// The driver's own way with memory that is not registered, where there is no ring.
    pub(super) fn copy_now(&mut self, way: Way) -> Begun {
        let ((source, target), length) = (self.addresses(), self.left());
        // SAFETY: the memory is vouched for until the descriptor is reported.
        let copied = unsafe { copy_in_parts(&*self.device.driver, way, source, target, length) };
        let result = copied.map(|()| None).map_err(|error| self.failure(error));
        self.over(length, result)
    }

    /// Memory that is not there.
    pub(super) fn missing(&mut self, address: u64) -> Begun {
        self.over(u64::MAX, Err(ExecutionError::BadMemory { address, done_bytes: 0 }))
    }

    /// The driver does not take registered memory for what it is: do without.
    pub(super) fn distrust(&mut self) -> Begun {
        match self.open.back_mut() {
            Some(open) if !open.distrusts_registrations => {
                open.distrusts_registrations = true;
                self.begin_piece()
            }
            _ => self.over(u64::MAX, Err(failed("the driver refuses the addresses"))),
        }
    }

    /// The addresses at which the next piece begins.
    pub(super) fn addresses(&self) -> (u64, u64) {
        self.open.back().map_or((0, 0), |open| {
            let (descriptor, at) = (&open.descriptor, open.window.start);
            (descriptor.source().wrapping_add(at), descriptor.target().wrapping_add(at))
        })
    }

    /// How much is left of what was claimed.
    pub(super) fn left(&self) -> u64 {
        self.open.back().map_or(0, |open| open.window.end - open.window.start)
    }

    /// Finds what keeps one side of the next piece registered, or registers it where that is allowed; says
    /// how long the piece is.
    pub(super) fn hold(
        &mut self,
        side: usize,
        address: u64,
        most: u64,
        access: Access,
    ) -> Result<(Holding, u64), Unregistered> {
        let left = self.left().min(most).min(PIECE_BYTES);
        let Some(open) = self.open.back_mut().filter(|open| !open.distrusts_registrations) else {
            return Err(unregistered(address, left));
        };
        let registry = &self.device.registry;
        let holding = match registry.find(address, access) {
            Some(holding) => holding,
            None if open.descriptor.is_passing() => return Err(unregistered(address, left)),
            None if registry.may_acquire(address, left) => {
                let length = left.min(open.growth[side]);
                open.growth[side] = (2 * open.growth[side]).min(PIECE_BYTES);
                let acquired = registry.acquire(address, length, access);
                Holding::Lease(acquired.map_err(|error| match error {
                    PinError::BadMemory { range } => {
                        Unregistered::Missing { address: address.max(range.start() as u64) }
                    }
                    _ => unregistered(address, left),
                })?)
            }
            // The driver refuses the copy if it is not of one piece: then it is done without.
            None if registry.is_theirs(address, left) => return Ok((Holding::Theirs, left)),
            None => return Err(unregistered(address, left)),
        };
        let end = match &holding {
            Holding::Region(piece) => piece.end() as u64,
            Holding::Lease(lease) => {
                let registered = lease.range().end() as u64;
                self.device.registrar.piece_end(address).unwrap_or(address).min(registered)
            }
            Holding::Theirs => address + left,
        };
        if end <= address {
            Err(unregistered(address, left))
        } else {
            Ok((holding, left.min(end - address)))
        }
    }

    /// Puts a copy and an event behind it into a stream.
    ///
    /// # Safety
    /// As for [`Driver::copy`](memferry_sys::cuda::Driver::copy).
    pub(super) unsafe fn copy(
        &mut self,
        way: Way,
        source: u64,
        target: u64,
        length: u64,
        stream: Stream,
    ) -> Result<Event, DriverError> {
        // SAFETY: passed on.
        unsafe { self.device.driver.copy(way, source, target, length as usize, stream) }?;
        self.mark(stream)
    }

    /// Puts an event into a stream. Without one nobody would know when what is in the stream is
    /// over: then this waits until it is, and fails.
    pub(super) fn mark(&mut self, stream: Stream) -> Result<Event, DriverError> {
        let driver = &self.device.driver;
        let event = match self.events.pop().map_or_else(|| driver.create_event(), Ok) {
            Ok(event) => event,
            Err(error) => {
                driver.drain(stream);
                return Err(error);
            }
        };
        match driver.record(event, stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                driver.drain(stream);
                self.events.push(event);
                Err(error)
            }
        }
    }

    /// Waits until the device has come to an event, by asking again and again.
    pub(super) fn wait_for(&self, event: Event) -> Result<(), DriverError> {
        while !self.device.driver.is_reached(event)? {
            spin_hint();
        }
        Ok(())
    }

    /// When a stream should be through with so many more bytes.
    pub(super) fn expect(&mut self, stream: usize, direction: Direction, length: u64) -> u64 {
        let (rates, line) = (&self.device.rates, self.device.rates.cost(direction));
        let busy = &mut self.busy_until_ns[stream];
        let begins = (*busy).max(clock::now_ns() + rates.startup_ns as u64);
        *busy = begins + (line.ns_per_byte * length as f64) as u64;
        *busy
    }

    /// A piece was handed to the device, or was not taken.
    pub(super) fn begun(
        &mut self,
        length: u64,
        step: Result<Step, DriverError>,
        expected_ns: u64,
        holdings: [Option<Holding>; 2],
    ) -> Begun {
        let step = step.unwrap_or_else(|error| Step::Over(Err(self.failure(error))));
        let Some(open) = self.open.back_mut() else { return Begun::Nothing };
        let (sequence, piece) = (open.sequence, open.begin(length));
        self.flights.push_back(Flight { sequence, piece, step, expected_ns, holdings });
        Begun::Yes
    }

    /// A piece of at most `most` bytes is over before the device has seen it.
    pub(super) fn over(&mut self, most: u64, result: Result<Option<u64>, ExecutionError>) -> Begun {
        let length = self.left().min(most);
        let Some(open) = self.open.back_mut() else { return Begun::Nothing };
        let (sequence, piece) = (open.sequence, open.begin(length));
        let (step, holdings) = (Step::Over(result), [None, None]);
        self.flights.push_back(Flight { sequence, piece, step, expected_ns: 0, holdings });
        Begun::Yes
    }

    /// What a driver said, as the error of a piece.
    pub(super) fn failure(&self, error: DriverError) -> ExecutionError {
        self.device.heard(error);
        failed(error.meaning())
    }
}

/// Copies at once, in halves where the driver refuses the whole: memory across the edge of what is
/// registered. What is refused to the last byte is not there.
///
/// # Safety
/// As for [`Driver::copy_now`].
unsafe fn copy_in_parts(
    driver: &dyn Driver,
    way: Way,
    source: u64,
    target: u64,
    length: u64,
) -> Result<(), DriverError> {
    // SAFETY: passed on.
    match unsafe { driver.copy_now(way, source, target, length as usize) } {
        Err(error) if error.code == code::INVALID_VALUE && length > 1 => {
            let half = length / 2;
            // SAFETY: passed on, for both parts.
            unsafe {
                copy_in_parts(driver, way, source, target, half)?;
                copy_in_parts(driver, way, source + half, target + half, length - half)
            }
        }
        copied => copied,
    }
}

/// Why memory is not registered, where no pinner said it. This channel's processor copies it next: what
/// is not there must be an error, and not the end of the process.
fn unregistered(address: u64, length: u64) -> Unregistered {
    let is_there = PageRange::covering(address as usize, length as usize)
        .is_ok_and(|range| residency::is_mapped(range.start(), range.bytes()));
    if is_there { Unregistered::Refused } else { Unregistered::Missing { address } }
}
