//! Calibration of a device: its bandwidths, and the cost of registering memory.

use std::sync::Arc;
use std::time::Instant;

use memferry_sys::Pages;
use memferry_sys::cuda::{CudaDriver, CudaEvent, CudaStream, DriverError, MemcpyKind};

use super::CudaProfile;
use crate::runtime::execute::{self, Operands};
use crate::{Kernel, Opcode};

impl CudaProfile {
    /// Measures in some tens of milliseconds. What cannot be measured keeps its default value.
    pub(super) fn measure(driver: &Arc<dyn CudaDriver>) -> Self {
        let driver = driver.clone();
        // On a separate thread, so that the CUDA context of the calling thread does not change.
        let measured = std::thread::Builder::new().name("memferry-rates".into()).spawn(move || {
            CudaCalibrator::new(&driver).and_then(|calibrator| calibrator.measure())
        });
        let measured = measured.ok().and_then(|thread| thread.join().ok());
        match measured {
            Some(Ok(profile)) => profile,
            Some(Err(error)) => {
                tracing::warn!(%error, "the device could not be measured");
                Self::default()
            }
            None => Self::default(),
        }
    }
}

/// The length of each measurement in bytes.
const BYTES: usize = 32 << 20;
/// A length whose cost is the start-up time.
const SMALL_BYTES: usize = 64 << 10;

/// The resources of a calibration.
struct CudaCalibrator<'a> {
    driver: &'a Arc<dyn CudaDriver>,
    streams: Vec<CudaStream>,
    event: Option<CudaEvent>,
    device: u64,
    host: Pages,
    ring: u64,
}

impl<'a> CudaCalibrator<'a> {
    const STAGING_BYTES: usize = 1 << 20;

    fn new(driver: &'a Arc<dyn CudaDriver>) -> Result<Self, DriverError> {
        driver.make_current()?;
        let no_memory = |_| DriverError { call: "mmap", code: 2 };
        let mut host = Pages::new(BYTES).map_err(no_memory)?;
        host.as_mut_slice().fill(1);
        // `Drop` frees what was allocated, also if a later call fails.
        let mut calibrator =
            Self { driver, streams: Vec::new(), event: None, device: 0, host, ring: 0 };
        for _ in 0..2 {
            calibrator.streams.push(driver.create_stream()?);
        }
        calibrator.event = Some(driver.create_event()?);
        calibrator.device = super::allocate(&**driver, 2 * BYTES)?;
        calibrator.ring = driver.allocate_pinned(Self::STAGING_BYTES)?;
        Ok(calibrator)
    }

    fn measure(&self) -> Result<CudaProfile, DriverError> {
        let (driver, host) = (self.driver, self.host.as_ptr() as usize);
        let huge = Pages::huge(BYTES).ok().map(|mut pages| {
            pages.as_mut_slice().fill(1);
            pages
        });
        let usual = CudaProfile::default();
        // The first registration of a process takes longer than later ones.
        driver.register(host, BYTES, false)?;
        // SAFETY: nothing was copied yet; below, `time` has waited for every copy.
        let unregister = |at| unsafe { driver.unregister(at) };
        unregister(host)?;
        let start = Instant::now();
        driver.register(host, SMALL_BYTES, false)?;
        unregister(host)?;
        let register_startup_ns = nanoseconds(start);
        let register_huge = huge.map_or(Ok(usual.register_huge), |huge| {
            let at = huge.as_ptr() as usize;
            let rate = self.rate(|| driver.register(at, BYTES, false))?;
            unregister(at).map(|()| rate)
        })?;
        let register = self.rate(|| driver.register(host, BYTES, false))?;
        let moved = self.time_registered(host as u64);
        // Also after an error: memory must not be freed while it is registered.
        unregister(host)?;
        let (startup_ns, to_device, from_device, both, within) = moved?;
        let gb_per_s = |bytes: usize, ns: f64| bytes as f64 / (ns - startup_ns).max(1.0);
        Ok(CudaProfile {
            startup_ns: startup_ns.max(1.0),
            host_to_device: gb_per_s(BYTES, to_device),
            device_to_host: gb_per_s(BYTES, from_device),
            host_to_host: gb_per_s(BYTES / 2, both),
            device_to_device: gb_per_s(BYTES, within),
            register_startup_ns,
            register,
            register_huge: register_huge.max(register),
            staging: self.staging_rate(),
        })
    }

    /// The times of a small copy, of copies in, out, and half of each at once, and inside the
    /// device, in nanoseconds.
    fn time_registered(&self, host: u64) -> Result<(f64, f64, f64, f64, f64), DriverError> {
        let (driver, device) = (self.driver, self.device);
        let (to_device_stream, from_device_stream) = (self.streams[0], self.streams[1]);
        // SAFETY: all memory is this measurement's own and lives until the device has finished:
        // `time` waits. Registered memory is used as one registration, or the staging buffer as
        // such.
        unsafe {
            let small =
                || driver.copy(MemcpyKind::HostToDevice, self.ring, device, 4096, to_device_stream);
            self.time(small)?;
            let startup_ns = self.best(3, small)?;
            let to_device = self.best(3, || {
                driver.copy(MemcpyKind::HostToDevice, host, device, BYTES, to_device_stream)
            });
            let from_device = self.best(3, || {
                driver.copy(MemcpyKind::DeviceToHost, device, host, BYTES, from_device_stream)
            });
            let both = self.best(3, || {
                let half = BYTES / 2;
                driver.copy(
                    MemcpyKind::HostToDevice,
                    host,
                    device + BYTES as u64,
                    half,
                    to_device_stream,
                )?;
                driver.copy(
                    MemcpyKind::DeviceToHost,
                    device,
                    host + half as u64,
                    half,
                    from_device_stream,
                )
            });
            let within = self.best(3, || {
                driver.copy(
                    MemcpyKind::DeviceToDevice,
                    device,
                    device + BYTES as u64,
                    BYTES,
                    to_device_stream,
                )
            });
            Ok((startup_ns, to_device?, from_device?, both?, within?))
        }
    }

    /// The bandwidth in GB/s of copies by this thread from uncached memory into the staging buffer.
    fn staging_rate(&self) -> f64 {
        let start = Instant::now();
        for at in (0..BYTES).step_by(Self::STAGING_BYTES) {
            let source = self.host.as_ptr() as u64 + at as u64;
            let length = Self::STAGING_BYTES as u64;
            // SAFETY: both are this measurement's own, and of this size.
            unsafe {
                execute::run(
                    Opcode::Copy,
                    Kernel::Cached,
                    Operands::new(source, self.ring),
                    length,
                    0,
                );
            }
        }
        BYTES as f64 / nanoseconds(start)
    }

    fn rate(&self, work: impl Fn() -> Result<(), DriverError>) -> Result<f64, DriverError> {
        let start = Instant::now();
        work()?;
        Ok(BYTES as f64 / nanoseconds(start))
    }

    /// The shortest of `times` runs, in nanoseconds.
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

    /// The time of the device for what `work` enqueues, in nanoseconds.
    fn time(&self, work: impl Fn() -> Result<(), DriverError>) -> Result<f64, DriverError> {
        let start = Instant::now();
        let outcome = work();
        let event = self.event.ok_or(DriverError { call: "measure", code: 2 })?;
        for &stream in &self.streams {
            self.driver.record_event(event, stream)?;
            while !self.driver.is_complete(event)? {
                std::hint::spin_loop();
            }
        }
        outcome.map(|()| nanoseconds(start))
    }
}

fn nanoseconds(start: Instant) -> f64 {
    start.elapsed().as_nanos().max(1) as f64
}

impl Drop for CudaCalibrator<'_> {
    fn drop(&mut self) {
        for &stream in &self.streams {
            self.driver.synchronize(stream);
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
