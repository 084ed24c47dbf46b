//! Memory to copy between, and copies that devices make of it while the caller only waits.

use std::sync::Arc;

use anyhow::ensure;
use memferry::engine::Engine;
use memferry::engine::cpu::ProfileSource;
use memferry::{Ferry, Gpu, Notification, Options, PciDevices, Request};
use memferry_sys::Pages;

/// How far apart the two sides of a copy lie in their pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placing {
    /// The series of this placing.
    pub(super) series: &'static str,
    /// Where the target begins in its first page. The source begins at the start of one.
    pub(super) target_at: usize,
}

/// Both sides begin with a page.
pub(super) const ALIGNED: Placing = Placing { series: "memferry, page-aligned", target_at: 0 };
/// Half a page apart.
pub(super) const HALF_APART: Placing = Placing { series: "memferry, 2 KiB apart", target_at: 2048 };
/// A cache line apart.
pub(super) const LINE_APART: Placing = Placing { series: "memferry, 64 B apart", target_at: 64 };
/// The target begins with an odd address.
pub(super) const ODD: Placing = Placing { series: "memferry, odd target", target_at: 1 };

/// Descriptors that a channel holds: enough for the largest copy. The caller does what a full channel
/// does not take, and is not to do anything here.
const CAPACITY: usize = 1 << 14;

/// A source with a pattern, a target, and a ferry over one engine between them.
pub(super) struct Shore {
    // Before the memory: its end is the end of everything that is under way.
    pub(super) ferry: Ferry,
    source: Pages,
    target: Pages,
}

impl Shore {
    /// For copies of up to so many bytes, by one channel of an engine and nobody else.
    pub(super) fn new(engine: Arc<dyn Engine>, most_bytes: usize) -> anyhow::Result<Self> {
        // Not measured: nothing here is decided by the speed of the processor.
        let ferry = Ferry::builder()
            .profile(ProfileSource::BuiltIn)
            .engine(engine, 1)
            .gpu(Gpu::Off)
            .ioat(PciDevices::Off)
            .nic(PciDevices::Off)
            .capacity(CAPACITY)
            .inline_bytes(0)
            .build()?;
        let mut source = Pages::new(most_bytes)?;
        for (at, byte) in source.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[6] | 1;
        }
        let most_shift = 4096;
        Ok(Self { ferry, source, target: Pages::new(most_bytes + most_shift)? })
    }

    /// Copies, waits without helping, and looks whether the bytes are there.
    pub(super) fn copy(&mut self, bytes: usize, placing: Placing) -> anyhow::Result<()> {
        self.seen(bytes, placing, |shore| shore.start(bytes, placing, Options::new()))
    }

    /// The same with a notification behind the data.
    pub(super) fn copy_with_notice(&mut self, bytes: usize) -> anyhow::Result<()> {
        self.seen(bytes, ALIGNED, |shore| shore.copy_unseen(bytes, true))
    }

    /// A copy without the look, which takes longer than the copy.
    pub(super) fn copy_unseen(&mut self, bytes: usize, is_notified: bool) -> anyhow::Result<()> {
        let variable = Notification::new(0);
        let options = match is_notified {
            true => Options::new().notify(&variable, 7),
            false => Options::new(),
        };
        self.start(bytes, ALIGNED, options)?;
        let is_told = variable.load() == 7;
        ensure!(is_told == is_notified, "a copy of {bytes} bytes ended without its notification");
        Ok(())
    }

    /// Looks whether the bytes are there after a copy.
    fn seen(
        &mut self,
        bytes: usize,
        placing: Placing,
        copy: impl FnOnce(&mut Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // The source has no zeros: what was not copied is seen.
        let range = placing.target_at..placing.target_at + bytes;
        self.target.as_mut_slice()[range.clone()].fill(0);
        copy(self)?;
        let (source, target) = (&self.source.as_slice()[..bytes], self.target.as_slice());
        ensure!(*source == target[range], "a copy of {bytes} bytes came out wrong");
        Ok(())
    }

    fn start(&mut self, bytes: usize, to: Placing, options: Options<'_>) -> anyhow::Result<()> {
        let target = &mut self.target.as_mut_slice()[to.target_at..to.target_at + bytes];
        let request = Request::copy(self.source.as_ptr(), target.as_mut_ptr(), bytes);
        // SAFETY: both sides are this value's own, and the end is awaited here.
        unsafe { self.ferry.start(request.with(options.spare_caller())) }?.wait()?;
        Ok(())
    }

    /// Delivers packets from buffers of their own, as a network's driver has them, into one target.
    pub(super) fn deliver(&mut self, packets: &Packets, count: usize) -> anyhow::Result<()> {
        let pieces: Vec<_> = (0..count).map(|number| packets.packet(number)).collect();
        let target = &mut self.target.as_mut_slice()[..count * Packets::BYTES];
        target.fill(0);
        let variable = Notification::new(0);
        // By the card, though the caller waits.
        let options = Options::new().notify(&variable, 9).spare_caller();
        self.ferry.deliver(&pieces, target, options)?;
        ensure!(variable.load() == 9, "{count} packets were delivered without a notification");
        ensure!(*target == pieces.concat(), "{count} packets were not delivered well");
        Ok(())
    }
}

/// Packets in a ring of buffers.
pub(super) struct Packets(Pages);

impl Packets {
    /// What fits into a frame of a usual network, without its headers.
    pub(super) const BYTES: usize = 1460;
    const BUFFER_BYTES: usize = 2048;
    /// Where a packet begins in its buffer: behind its headers.
    const HEADERS: usize = 64;

    pub(super) fn new(most: usize) -> anyhow::Result<Self> {
        let mut buffers = Pages::new(most * Self::BUFFER_BYTES)?;
        for (at, byte) in buffers.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u64).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()[6] | 1;
        }
        Ok(Self(buffers))
    }

    fn packet(&self, number: usize) -> &[u8] {
        let start = number * Self::BUFFER_BYTES + Self::HEADERS;
        &self.0.as_slice()[start..start + Self::BYTES]
    }
}

#[cfg(test)]
mod tests {
    use memferry::engine::polled::PolledEngine;

    use super::*;

    #[test]
    fn any_engine_serves_every_kind_of_copy() {
        let mut shore = Shore::new(Arc::new(PolledEngine::new()), 1 << 16).unwrap();
        for placing in [ALIGNED, HALF_APART, LINE_APART, ODD] {
            for bytes in [1, 4096, 1 << 16] {
                shore.copy(bytes, placing).unwrap();
            }
        }
        shore.copy_with_notice(1 << 16).unwrap();
        shore.deliver(&Packets::new(40).unwrap(), 40).unwrap();
    }
}
