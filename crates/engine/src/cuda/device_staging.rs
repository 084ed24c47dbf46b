//! Memory of the device that copies between host memory pass through: a ring of bytes, allocated in
//! any length and freed in about the same order.

use std::collections::VecDeque;
use std::sync::Arc;

use memferry_sys::clock;
use memferry_sys::cuda::CudaDriver;

use super::allocate;
use super::host_staging::StagingAlloc;

/// The time in nanoseconds after which a failed allocation is retried.
const RETRY_AFTER_NS: u64 = 1_000_000_000;

/// The ring. Its memory is allocated at the first use, and freed on drop.
#[derive(Debug)]
pub(super) struct DeviceStagingRing {
    driver: Arc<dyn CudaDriver>,
    bytes: u64,
    base: Option<u64>,
    /// The allocated ranges as offset and length, the oldest first. They are freed from the front,
    /// or from the back if they were not used.
    allocated: VecDeque<(u64, u64)>,
    /// The time of the last failed allocation.
    refused_ns: Option<u64>,
}

impl DeviceStagingRing {
    pub(super) fn new(driver: Arc<dyn CudaDriver>, bytes: u64) -> Self {
        Self { driver, bytes, base: None, allocated: VecDeque::new(), refused_ns: None }
    }

    /// Allocates a range of this length.
    pub(super) fn allocate(&mut self, length: u64) -> StagingAlloc {
        let now = clock::now_ns();
        let is_refused = self.refused_ns.is_some_and(|at| now < at + RETRY_AFTER_NS);
        if self.base.is_none() && !is_refused {
            match allocate(&*self.driver, self.bytes as usize) {
                Ok(base) => self.base = Some(base),
                Err(error) => {
                    tracing::warn!(%error, "no device memory for the staging ring");
                    self.refused_ns = Some(now);
                }
            }
        }
        let Some(base) = self.base else { return StagingAlloc::Unavailable };
        let Some(offset) = self.find_space(length) else { return StagingAlloc::Busy };
        self.allocated.push_back((offset, length));
        StagingAlloc::Buffer(base + offset)
    }

    /// An offset with space after the newest range, or at the start of the ring.
    fn find_space(&self, length: u64) -> Option<u64> {
        let (Some(&(first, _)), Some(&(last, last_length))) =
            (self.allocated.front(), self.allocated.back())
        else {
            return (length <= self.bytes).then_some(0);
        };
        let end = last + last_length;
        if last < first {
            return (end + length <= first).then_some(end);
        }
        if end + length <= self.bytes {
            return Some(end);
        }
        (length <= first).then_some(0)
    }

    /// Frees a range.
    pub(super) fn free(&mut self, address: u64) {
        let offset = address - self.base.unwrap_or_default();
        // A range that is freed out of order keeps its entry until its neighbours are freed.
        if let Some(range) =
            self.allocated.iter_mut().find(|(at, length)| *at == offset && *length > 0)
        {
            range.1 = 0;
        }
        while self.allocated.front().is_some_and(|(_, length)| *length == 0) {
            self.allocated.pop_front();
        }
        while self.allocated.back().is_some_and(|(_, length)| *length == 0) {
            self.allocated.pop_back();
        }
    }
}

impl Drop for DeviceStagingRing {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            // SAFETY: it is from `allocate`, and users of ranges waited for the device.
            unsafe { self.driver.free(base) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::cuda_model::CudaModel;

    fn staging_ring(bytes: u64) -> (DeviceStagingRing, u64) {
        let mut ring = DeviceStagingRing::new(CudaModel::new(), bytes);
        let StagingAlloc::Buffer(base) = ring.allocate(1) else {
            panic!("an empty ring has space")
        };
        ring.free(base);
        (ring, base)
    }

    #[test]
    fn pieces_are_given_out_one_behind_the_other_and_around_the_end() {
        let (mut ring, base) = staging_ring(100);
        assert_eq!(ring.allocate(40), StagingAlloc::Buffer(base));
        assert_eq!(ring.allocate(40), StagingAlloc::Buffer(base + 40));
        assert_eq!(ring.allocate(40), StagingAlloc::Busy);
        ring.free(base);
        assert_eq!(ring.allocate(41), StagingAlloc::Busy, "it would overlap the second");
        assert_eq!(ring.allocate(40), StagingAlloc::Buffer(base));
        assert_eq!(ring.allocate(1), StagingAlloc::Busy);
        ring.free(base + 40);
        assert_eq!(ring.allocate(60), StagingAlloc::Buffer(base + 40));
    }

    #[test]
    fn pieces_never_overlap_in_whatever_order_they_come_back() {
        let (mut ring, base) = staging_ring(1000);
        let (mut live, mut seed) = (Vec::<(u64, u64)>::new(), 1u64);
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let length = 1 + (seed >> 33) % 400;
            if seed >> 63 == 0
                && let StagingAlloc::Buffer(at) = ring.allocate(length)
            {
                assert!(at >= base && at + length <= base + 1000);
                assert!(live.iter().all(|(other, n)| at + length <= *other || other + n <= at));
                live.push((at, length));
            } else if !live.is_empty() {
                let (at, _) = live.remove((seed >> 40) as usize % live.len());
                ring.free(at);
            }
        }
        live.drain(..).for_each(|(at, _)| ring.free(at));
        assert_eq!(ring.allocate(1000), StagingAlloc::Buffer(base));
    }

    #[test]
    fn more_than_there_is_is_never_given() {
        let (mut ring, _) = staging_ring(100);
        assert_eq!(ring.allocate(101), StagingAlloc::Busy);
    }
}
