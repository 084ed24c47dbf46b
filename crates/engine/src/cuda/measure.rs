//! Measuring a device: what it moves, and what it takes to make memory ready for it.

use std::sync::Arc;
use std::time::Instant;

use memferry_sys::Pages;
use memferry_sys::cuda::{Driver, DriverError, Event, Stream, Way};

use super::Rates;
use crate::execute;
use crate::{Kernel, Operation};

impl Rates {
    /// Measures, in some tens of milliseconds. What cannot be measured keeps its usual value.
    pub(super) fn measure(driver: &Arc<dyn Driver>) -> Self {
        let driver = driver.clone();
        // On a thread of its own, whose context is nobody else's.
        let measured = std::thread::Builder::new()
            .name("memferry-rates".into())
            .spawn(move || Bench::new(&driver).and_then(|bench| bench.measure()));
        let measured = measured.ok().and_then(|thread| thread.join().ok());
        match measured {
            Some(Ok(rates)) => rates,
            Some(Err(error)) => {
                tracing::warn!(%error, "the device could not be measured");
                Self::default()
            }
            None => Self::default(),
        }
    }
}

/// How much memory each measurement moves.
const BYTES: usize = 32 << 20;
/// So little that what it takes is the start.
const LITTLE_BYTES: usize = 64 << 10;

/// What measuring takes.
struct Bench<'a> {
    driver: &'a Arc<dyn Driver>,
    streams: Vec<Stream>,
    event: Option<Event>,
    device: u64,
    host: Pages,
    ring: u64,
}

impl<'a> Bench<'a> {
    const RING_BYTES: usize = 1 << 20;

    fn new(driver: &'a Arc<dyn Driver>) -> Result<Self, DriverError> {
        driver.enter()?;
        let no_memory = |_| DriverError { call: "mmap", code: 2 };
        let mut host = Pages::new(BYTES).map_err(no_memory)?;
        host.as_mut_slice().fill(1);
        // What was taken goes with this, also if the rest is refused.
        let mut bench = Self { driver, streams: Vec::new(), event: None, device: 0, host, ring: 0 };
        for _ in 0..2 {
            bench.streams.push(driver.create_stream()?);
        }
        bench.event = Some(driver.create_event()?);
        bench.device = super::allocate(&**driver, 2 * BYTES)?;
        bench.ring = driver.allocate_pinned(Self::RING_BYTES)?;
        Ok(bench)
    }

    fn measure(&self) -> Result<Rates, DriverError> {
        let (driver, host) = (self.driver, self.host.as_ptr() as usize);
        let huge = Pages::huge(BYTES).ok().map(|mut pages| {
            pages.as_mut_slice().fill(1);
            pages
        });
        let usual = Rates::default();
        // The first registration of a process takes longer than later ones.
        driver.register(host, BYTES, false)?;
        // SAFETY: nothing was copied yet; below, `time` has waited for every copy.
        let unregister = |at| unsafe { driver.unregister(at) };
        unregister(host)?;
        let start = Instant::now();
        driver.register(host, LITTLE_BYTES, false)?;
        unregister(host)?;
        let register_startup_ns = nanoseconds(start);
        let register_huge = huge.map_or(Ok(usual.register_huge), |huge| {
            let at = huge.as_ptr() as usize;
            let rate = self.rate(|| driver.register(at, BYTES, false))?;
            unregister(at).map(|()| rate)
        })?;
        let register = self.rate(|| driver.register(host, BYTES, false))?;
        let moved = self.move_registered(host as u64);
        // Whatever came of it: memory must not go while it is registered.
        unregister(host)?;
        let (startup_ns, inward, outward, both, within) = moved?;
        let gb_per_s = |bytes: usize, ns: f64| bytes as f64 / (ns - startup_ns).max(1.0);
        Ok(Rates {
            startup_ns: startup_ns.max(1.0),
            inward: gb_per_s(BYTES, inward),
            outward: gb_per_s(BYTES, outward),
            through: gb_per_s(BYTES / 2, both),
            within: gb_per_s(BYTES, within),
            register_startup_ns,
            register,
            register_huge: register_huge.max(register),
            stage: self.stage(),
        })
    }

    /// How long the device takes for a small copy, in, out, for half of each at once, and within.
    fn move_registered(&self, outside: u64) -> Result<(f64, f64, f64, f64, f64), DriverError> {
        let (driver, inside) = (self.driver, self.device);
        let (inward_stream, outward_stream) = (self.streams[0], self.streams[1]);
        // SAFETY: all memory is this measurement's own and stays until the device is through with
        // it: `rate` waits. Registered memory is used as one piece, or the ring as such.
        unsafe {
            let small = || driver.copy(Way::In, self.ring, inside, 4096, inward_stream);
            self.time(small)?;
            let startup_ns = self.best(3, small)?;
            let inward =
                self.best(3, || driver.copy(Way::In, outside, inside, BYTES, inward_stream));
            let outward =
                self.best(3, || driver.copy(Way::Out, inside, outside, BYTES, outward_stream));
            let both = self.best(3, || {
                let half = BYTES / 2;
                driver.copy(Way::In, outside, inside + BYTES as u64, half, inward_stream)?;
                driver.copy(Way::Out, inside, outside + half as u64, half, outward_stream)
            });
            let within = self.best(3, || {
                driver.copy(Way::Within, inside, inside + BYTES as u64, BYTES, inward_stream)
            });
            Ok((startup_ns, inward?, outward?, both?, within?))
        }
    }

    /// How fast this thread copies memory that is in no cache into the ring.
    fn stage(&self) -> f64 {
        let start = Instant::now();
        for at in (0..BYTES).step_by(Self::RING_BYTES) {
            let source = self.host.as_ptr() as u64 + at as u64;
            let length = Self::RING_BYTES as u64;
            // SAFETY: both are this measurement's own, and of this size.
            unsafe {
                execute::run(Operation::Copy, Kernel::Cached, source, self.ring, length, 0);
            }
        }
        BYTES as f64 / nanoseconds(start)
    }

    fn rate(&self, work: impl Fn() -> Result<(), DriverError>) -> Result<f64, DriverError> {
        let start = Instant::now();
        work()?;
        Ok(BYTES as f64 / nanoseconds(start))
    }

    /// The shortest of some times.
    fn best(
        &self,
        times: usize,
        work: impl Fn() -> Result<(), DriverError>,
    ) -> Result<f64, DriverError> {
        let mut best = f64::INFINITY;
        for _ in 0..times {
            best = best.min(self.time(&work)?);
        }
        Ok(best)
    }

    /// How long the device takes for what is put into the streams.
    fn time(&self, work: impl Fn() -> Result<(), DriverError>) -> Result<f64, DriverError> {
        let start = Instant::now();
        let outcome = work();
        let event = self.event.ok_or(DriverError { call: "measure", code: 2 })?;
        for &stream in &self.streams {
            self.driver.record(event, stream)?;
            while !self.driver.is_reached(event)? {
                std::hint::spin_loop();
            }
        }
        outcome.map(|()| nanoseconds(start))
    }
}

fn nanoseconds(start: Instant) -> f64 {
    start.elapsed().as_nanos().max(1) as f64
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        for &stream in &self.streams {
            self.driver.drain(stream);
            self.driver.destroy_stream(stream);
        }
        if let Some(event) = self.event {
            self.driver.destroy_event(event);
        }
        // SAFETY: from the matching calls, if they were made; the streams are drained.
        unsafe {
            if self.device != 0 {
                self.driver.free(self.device);
            }
            if self.ring != 0 {
                self.driver.free_pinned(self.ring);
            }
        }
    }
}
